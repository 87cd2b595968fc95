"""What the engine refuses, and how it says so: the parameter or argument by name, what was expected, and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import Engine, utils, zero
from shardwise.errors import ConfigError, OptimizerError, ParameterError, ShardwiseError, UsageError

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def start(net: nn.Module | None = None, stage: int = 1, **changes: Any) -> Engine:
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **changes}
    return shardwise.initialize(model=net or model(), optimizer=sgd, config=config)[0]


def is_helpful(error: pytest.ExceptionInfo[ShardwiseError]) -> None:
    """One line or a few, with something to do about it, and nothing of torch's own."""
    text = str(error.value)
    assert text.endswith(".")
    assert len(text.splitlines()) <= 6
    assert "Traceback" not in text


# ---- the inputs


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_inputs_that_are_not_of_the_16_bit_type_of_the_weights(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with start(**{precision: {"enabled": True}}) as engine:
        with pytest.raises(
            UsageError, match=rf"the weights are {dtype} and inputs are not.*found torch.float32 .*cast"
        ) as error:
            engine(torch.randn(2, 4))
        is_helpful(error)
        engine(torch.randn(2, 4).to(dtype))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(torch.randn(2, 5).to(dtype))


# ---- the loss


@pytest.mark.parametrize("stage", range(4))
def test_losses_that_cannot_be_differentiated(stage: int) -> None:
    with start(stage=stage) as engine:
        x = torch.randn(2, 4)
        with torch.no_grad():
            detached = engine(x).sum()
        for loss, found in (
            (engine(x), r"shape \(2, 2\), requires_grad True"),
            (engine(x).sum(0), r"shape \(2,\)"),
            (engine(x).sum().reshape(1), r"shape \(1,\)"),
            (detached, r"requires_grad False"),
            (engine(x).sum().detach(), r"requires_grad False"),
            (torch.tensor(1.0), r"requires_grad False"),
            (1.0, "float"),
            (None, "NoneType"),
        ):
            with pytest.raises(
                UsageError, match=rf"this loss cannot be differentiated: expected a 0-d tensor.*{found}"
            ) as error:
                engine.backward(loss)  # pyright: ignore[reportArgumentType]
            is_helpful(error)
        engine.backward(engine(x).sum())
        engine.step()
        assert engine.was_step_applied()
        assert engine.global_steps == 1


def test_training_without_an_optimizer() -> None:
    engine, optimizer, loader, scheduler = shardwise.initialize(model=model(), config=CONFIG)
    with engine:
        assert (optimizer, loader, scheduler) == (None, None, None)
        assert engine.optimizer is None
        assert engine.get_lr() == []
        loss = engine(torch.randn(2, 4)).sum()
        for call in (lambda: engine.backward(loss), engine.step):
            with pytest.raises(UsageError, match=r"without an optimizer.*pass optimizer= or an optimizer section") as error:
                call()
            is_helpful(error)


def test_a_model_whose_parameters_are_all_frozen_can_be_served() -> None:
    net = model().requires_grad_(False)
    with shardwise.initialize(model=net, optimizer=None, config={**CONFIG, "optimizer": {"type": "Adam", "params": {}}})[
        0
    ] as engine:
        assert engine.optimizer is None
        assert engine(torch.ones(1, 4)).shape == (1, 2)


# ---- the model


@pytest.mark.parametrize("wrong", [None, "gpt2", 3, [nn.Linear(2, 2)], nn.Linear, {"weight": torch.ones(2)}])
def test_models_that_are_none(wrong: Any) -> None:
    with pytest.raises(ParameterError, match=r"initialize needs a model: expected model=<torch\.nn\.Module>, found") as error:
        shardwise.initialize(model=wrong, optimizer=sgd, config=CONFIG)
    is_helpful(error)


def test_parameters_without_values() -> None:
    with torch.device("meta"):
        net = model()
    with pytest.raises(ParameterError, match=r"parameter '0\.weight' is on the meta device.*zero\.Init.*to_empty") as error:
        start(net)
    is_helpful(error)


def test_a_model_without_parameters() -> None:
    with shardwise.initialize(model=nn.Tanh(), config=CONFIG)[0] as engine:
        assert_same(engine(torch.ones(2)), torch.ones(2).tanh())


def assert_same(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("stage", range(4))
def test_two_engines_on_one_model(stage: int) -> None:
    """Refused while the first lives; fine after it was destroyed."""
    net = model()
    with start(net, stage):
        with pytest.raises(ParameterError, match=r"parameter '0\.weight' belongs to another engine.*destroy\(\)") as error:
            start(net, 3 - stage)
        is_helpful(error)
        shared = nn.Sequential(net[0], nn.Linear(4, 1))  # pyright: ignore[reportIndexIssue]
        with pytest.raises(ParameterError, match=r"parameter '0\.weight' belongs to another engine"):
            start(shared)
    with start(net, 3 - stage) as engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


def test_an_initialize_that_fails_leaves_the_model_alone() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(OptimizerError):
        shardwise.initialize(model=net, optimizer=torch.optim.LBFGS(net.parameters()), config=CONFIG)
    with pytest.raises(ConfigError):
        shardwise.initialize(model=net, optimizer=sgd, config={**CONFIG, "gradient_clipp1ng": 1.0})
    for name, value in net.state_dict().items():
        assert_same(value, before[name])
    assert not any(vars(module)[key] for module in net.modules() for key in vars(module) if key.endswith("_hooks"))
    with start(net) as engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


def test_an_initialize_that_fails_late_leaves_no_hooks() -> None:
    """When parameters lie in buffers already: at the optimizer's state, and at the user's function for a schedule."""
    narrow = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}}

    def refuse(optimizer: torch.optim.Optimizer) -> Any:
        raise LookupError("no schedule today")

    late: list[tuple[type[Exception], dict[str, Any]]] = [
        (OptimizerError, {"optimizer": torch.optim.NAdam, "config": {**CONFIG, **narrow}}),
        (LookupError, {"optimizer": sgd, "config": CONFIG, "lr_scheduler": refuse}),
    ]
    for error, arguments in late:
        net = model()
        with pytest.raises(error):
            shardwise.initialize(model=net, **arguments)
        assert not any(vars(module)[key] for module in net.modules() for key in vars(module) if key.endswith("_hooks"))
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
        with start(net.float()) as engine:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()


class Overlapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        base = torch.randn(10)
        self.first = Parameter(base[:6])
        self.second = Parameter(base[4:] if kind == "part" else self.first.data if kind == "same" else base[6:])


def test_parameters_that_share_memory_without_being_the_same() -> None:
    for kind in ("part", "same"):
        with pytest.raises(ParameterError, match="'first' and 'second' are different objects that share memory") as error:
            start(Overlapping(kind))
        is_helpful(error)
        assert "assign the same nn.Parameter to both" in str(error.value)
    with start(Overlapping("beside")):
        pass


# ---- the optimizer


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("LBFGS", "builds one search direction from dot products over all parameters"),
        ("Adafactor", "row and column means of whole matrices"),
        ("Muon", "orthogonalises whole matrices"),
        ("SparseAdam", "sparse gradients"),
    ],
)
def test_optimizers_that_need_whole_tensors(kind: str, reason: str) -> None:
    """However they are given; the reason is said, and what can be used instead."""
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    cls = getattr(torch.optim, kind)
    net = model()
    matrices = [parameter for parameter in net.parameters() if parameter.dim() == 2]
    ways: list[dict[str, Any]] = [
        {"optimizer": cls(matrices)},
        {"optimizer": cls, "model_parameters": matrices},
        {"optimizer": cls, "model_parameters": iter(matrices)},
        {"model_parameters": matrices, "config": {**CONFIG, "optimizer": {"type": kind, "params": {}}}},
    ]
    for way in ways:
        with pytest.raises((OptimizerError, ConfigError), match=reason if "config" not in way else kind) as error:
            shardwise.initialize(**{"model": net, "config": CONFIG, **way})
        if "config" not in way:
            is_helpful(error)


class MeanSgd(torch.optim.SGD):
    """Looks at the whole tensor: subtracts the mean of each gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad -= parameter.grad.mean()
        return super().step(closure)


def test_optimizers_of_the_user_are_tried_out() -> None:
    net = model()
    with pytest.raises(
        OptimizerError, match="MeanSgd cannot work on sharded parameters: updating a tensor in two parts"
    ) as error:
        shardwise.initialize(model=net, optimizer=MeanSgd(net.parameters(), lr=0.1), config=CONFIG)
    is_helpful(error)


def test_optimizers_that_are_none_or_of_another_model() -> None:
    net, other = model(), model()
    with pytest.raises(OptimizerError, match=r"parameters that the model does not have.*shapes \(4, 4\) in group 0"):
        shardwise.initialize(model=net, optimizer=sgd(other.parameters()), config=CONFIG)
    with pytest.raises(OptimizerError, match="parameters that the model does not have"):
        shardwise.initialize(model=net, optimizer=sgd, model_parameters=other.parameters(), config=CONFIG)
    for wrong in ("adam", 3, object()):
        with pytest.raises(OptimizerError, match="the optimizer cannot be used: expected a torch"):
            shardwise.initialize(model=net, optimizer=wrong, config=CONFIG)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptimizerError, match="did not make one"):
        shardwise.initialize(model=net, optimizer=lambda parameters: None, config=CONFIG)  # pyright: ignore
    with start(net) as engine, pytest.raises(OptimizerError, match="already belongs to an engine"):
        shardwise.initialize(model=other, optimizer=engine.optimizer, config=CONFIG)


class NoLength:
    """A dataset with an index and without a length, as torch.utils.data.Dataset is by itself."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(4)


SAMPLES = torch.utils.data.TensorDataset(torch.zeros(8, 4))
WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], type[ShardwiseError], str]] = {
    "data: number": ({"training_data": 5}, UsageError, r"training_data=\.\.\.\).*a dataset.*found int 5\. pass a torch"),
    "data: path": ({"training_data": "train.csv"}, UsageError, r"found str 'train\.csv'\. pass a torch"),
    "data: loader": ({"training_data": torch.utils.data.DataLoader(SAMPLES)}, UsageError, r"DataLoader\. pass its dataset"),
    "data: splits": ({"training_data": {"train": SAMPLES}}, UsageError, r"found dict\. pass one of its values"),
    "data: class": ({"training_data": NoLength}, UsageError, r"found the class NoLength\. pass an object"),
    "data: length": ({"training_data": NoLength()}, UsageError, r"found NoLength without __len__\. give its class a __len__"),
    "collate": (
        {"training_data": SAMPLES, "collate_fn": [1]},
        UsageError,
        r"collate_fn=.*a function.*found list\. leave it out",
    ),
    "parameters: number": ({"model_parameters": 5}, ParameterError, r"model_parameters=.*found int 5\. pass model\.parameters"),
    "parameters: text": ({"model_parameters": "all"}, ParameterError, r"found str 'all'\. pass model\.parameters"),
    "parameters: module": ({"model_parameters": model()}, ParameterError, r"found Sequential\. pass model\.parameters"),
    "parameters: tensor": (
        {"model_parameters": Parameter(torch.zeros(2))},
        ParameterError,
        r"found Parameter\. put it in a list",
    ),
    "parameters: group": ({"model_parameters": {"params": []}}, ParameterError, r"found dict\. put it in a list"),
    "parameters: items": ({"model_parameters": [3]}, ParameterError, r"found int 3 among them\. pass model\.parameters"),
    "parameters: set": ({"model_parameters": {3}}, OptimizerError, r"expected parameters, found int\. pass model"),
    "schedule": ({"lr_scheduler": 3}, OptimizerError, r"scheduler cannot be used.*found int\. pass lr_scheduler=lambda"),
    "optimizer": (
        {"optimizer": "adam"},
        OptimizerError,
        r"optimizer cannot be used.*found str\. name an optimizer in the config",
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_of_a_wrong_kind(case: str) -> None:
    """Whether or not batch sizes are given, and whether or not there is anything to train."""
    given, kind, match = WRONG_ARGUMENTS[case]
    frozen = model().requires_grad_(False)
    for net, config in ((model(), CONFIG), (model(), {}), (frozen, CONFIG)):
        with pytest.raises(kind, match=match) as error:
            shardwise.initialize(**{"model": net, "optimizer": sgd, "config": config, **given})
        is_helpful(error)
    with start(net=model()):
        pass


def test_arguments_of_every_right_kind() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(SAMPLES)

    for data in (SAMPLES, list(SAMPLES), torch.zeros(8, 4), Stream()):
        engine, _, loader, _ = shardwise.initialize(
            model=model(), optimizer=sgd, config=CONFIG, training_data=data, collate_fn=len
        )
        with engine:
            assert list(loader) == [2, 2, 2, 2]
    for choose in (lambda net: net.parameters(), lambda net: list(net.named_parameters()), lambda net: (net[0].weight,)):
        net = model()
        with shardwise.initialize(model=net, optimizer=sgd, config=CONFIG, model_parameters=choose(net))[0] as engine:
            assert engine.optimizer is not None


def test_groups_cannot_be_added_later() -> None:
    with start() as engine:
        assert engine.optimizer is not None
        with pytest.raises(UsageError, match="parameter groups cannot be added"):
            engine.optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})


# ---- the rest of the call


def test_configurations_that_are_none() -> None:
    for config, match in (
        ({**CONFIG, "zero_optimization": {"stage": 7}}, r"zero_optimization\.stage"),
        ("no/such/file.json", "no/such/file.json"),
        ("{not json", "JSON"),
        ([1, 2], "."),
    ):
        with pytest.raises(ConfigError, match=match):
            shardwise.initialize(model=model(), optimizer=sgd, config=config)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="both config and config_params"):
        shardwise.initialize(model=model(), optimizer=sgd, config=CONFIG, config_params=dict(CONFIG))
    with pytest.raises(UsageError, match=r"mpu=\.\.\.\) is not available yet"):
        shardwise.initialize(model=model(), optimizer=sgd, config=CONFIG, mpu=object())


def test_configurations_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    class Arguments:
        deepspeed_config = str(path)

    forms: list[dict[str, Any]] = [
        {"config": CONFIG},
        {"config": str(path)},
        {"config": path},
        {"config": json.dumps(CONFIG)},
        {"config_params": CONFIG},
        {"args": Arguments()},
    ]
    for form in forms:
        with shardwise.initialize(model=model(), optimizer=sgd, **form)[0] as engine:
            assert engine.zero_optimization_stage() == 1
            assert engine.train_micro_batch_size_per_gpu() == 2
            assert dict(engine.config) == CONFIG
            if form == {"config": CONFIG}:
                assert engine.config is CONFIG


@pytest.mark.parametrize("stage", [0, 3])
def test_schedulers_that_cannot_be_used(stage: int) -> None:
    net, other = model(), model()
    foreign = torch.optim.lr_scheduler.StepLR(sgd(other.parameters()), 1)
    for wrong, match in ((foreign, "another optimizer"), (3, "cannot be used"), (lambda optimizer: None, "cannot be used")):
        with pytest.raises(OptimizerError, match=match):
            shardwise.initialize(
                model=net, optimizer=sgd, lr_scheduler=wrong, config={**CONFIG, "zero_optimization": {"stage": stage}}
            )


def test_access_to_parameters_that_belong_to_nobody() -> None:
    loose = Parameter(torch.ones(3))
    for read in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_fp32_param):
        assert read(loose) is None
    assert utils.safe_get_full_optimizer_state(loose, "exp_avg") is None
    with pytest.raises(ParameterError, match="belongs to no engine"):
        utils.safe_set_full_fp32_param(loose, torch.ones(3))
    with zero.GatheredParameters([loose]):
        pass


def test_leaf_modules_and_units_that_do_not_exist() -> None:
    net = model()
    with pytest.raises(ParameterError, match="Sequential has no module of class Linaer"):
        utils.set_z3_leaf_modules(net, ["Linaer"])
    assert utils.set_z3_leaf_modules(net, ["Linaer"], raise_if_not_found=False) == []
    for key, value in (("units", ["Linaer"]), ("leaf_module", {"classes": ["Linaer"]})):
        with pytest.raises(ParameterError, match=r"names 'Linaer', which matches no module.*nearest: Linear"):
            shardwise.initialize(model=net, optimizer=sgd, config={**CONFIG, "zero_optimization": {"stage": 3, key: value}})


def test_import_is_cheap() -> None:
    """Neither the configuration's nor the console's library is loaded, and nothing is compiled."""
    code = "import sys, shardwise; print(*(name for name in ('pydantic', 'rich', 'torch._dynamo') if name in sys.modules))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    assert result.stdout.split() == []
