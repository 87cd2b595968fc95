"""Loading parts of a checkpoint, or into something that differs from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.datafile import BLOCK
from shardwise.errors import CheckpointError, UsageError
from tests.distributed.checkpoint_support import BATCH, build_rich, grouped, open_engine, same, state_of, train_on
from tests.distributed.scenario_support import settings, warnings_logged
from tests.harness import ranks, run_on_ranks

STAGES = (0, 1, 2, 3)


def weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.partition(" ")[0] in ("weight", "live", "buffer")}


def rest(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in weights(state)}


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_only_weights_refresh_masters_and_leave_the_rest(stage: int, tmp_path: Path) -> None:
    with open_engine(stage, "bf16") as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path, client_state={"x": 1})
    with open_engine(stage, "bf16") as engine:
        train_on(engine, 1, first=7)
        before = state_of(engine)
        assert engine.load_checkpoint(tmp_path, load_module_only=True)[1] == {"x": 1}
        after = state_of(engine)
        same(weights(after), weights(saved))
        same(rest(after), rest(before))


@ranks(2)
def test_without_optimizer_states_or_schedule(tmp_path: Path) -> None:
    with open_engine(2) as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path)
    with open_engine(2) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
        after = state_of(engine)
        assert not [name for name in after if name.startswith("exp_avg")]
        same(weights(after), weights(saved))
        assert after["counters"] == saved["counters"]
        assert after["schedule"] != saved["schedule"]
    with open_engine(2) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert state_of(engine)["schedule"] == saved["schedule"]


class Renamed(nn.Module):
    """Of the three layers, one is called otherwise, one is gone, one has come."""

    def __init__(self, old: bool, width: int = 4) -> None:
        super().__init__()
        self.kept = nn.Linear(width, width)
        if old:
            self.gone = nn.Linear(width, width)
        else:
            self.come = nn.Linear(width, width, bias=False)
        self.register_buffer("mark", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.kept(x)
        return self.gone(x) if hasattr(self, "gone") else self.come(x)


def start_renamed(old: bool, width: int = 4) -> Any:
    torch.manual_seed(old)
    config = settings(3, micro=2, optimizer={"type": "Adam"})
    return shardwise.initialize(model=Renamed(old, width), config=config)[0]


@ranks(2)
def test_a_model_with_other_parameters(tmp_path: Path) -> None:
    with start_renamed(old=True) as engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        kept = shardwise.utils.safe_get_full_fp32_param(engine.module.kept.weight)
        moment = shardwise.utils.safe_get_full_optimizer_state(engine.module.kept.weight, "exp_avg")
        engine.save_checkpoint(tmp_path)
    with start_renamed(old=False) as engine:
        come = shardwise.utils.safe_get_full_fp32_param(engine.module.come.weight)
        told = (
            r"is not of this model \(1 and 2: were they renamed\?\): found missing in the checkpoint: come.weight; "
            r"not in the model: gone.weight, gone.bias. pass load_module_strict=False"
        )
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(tmp_path)
        with warnings_logged() as lines:
            engine.load_checkpoint(tmp_path, load_module_strict=False)
        if dist.get_rank() == 0:
            assert "not in the checkpoint, left as it is: come.weight; not in the model, not loaded: gone.weight" in lines[0]
        assert torch.equal(shardwise.utils.safe_get_full_fp32_param(engine.module.kept.weight), kept)
        assert torch.equal(shardwise.utils.safe_get_full_fp32_param(engine.module.come.weight), come)
        assert torch.equal(shardwise.utils.safe_get_full_optimizer_state(engine.module.kept.weight, "exp_avg"), moment)
        assert shardwise.utils.safe_get_full_optimizer_state(engine.module.come.weight, "exp_avg") is None
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    with start_renamed(old=True, width=5) as engine:
        with pytest.raises(CheckpointError, match=r"'kept.weight' has another shape .*: expected \(5, 5\), .* found \(4, 4\)"):
            engine.load_checkpoint(tmp_path, load_module_strict=False)
        engine.backward(engine(torch.ones(2, 5)).sum())  # nothing was touched
        engine.step()


@ranks(2)
def test_the_users_own_function_loads(tmp_path: Path) -> None:
    def load(src: dict[str, Tensor], dst: nn.Module) -> None:
        with torch.no_grad():
            dst.kept.weight.copy_(src["gone.weight"])

    with start_renamed(old=True) as engine:
        gone = shardwise.utils.safe_get_full_fp32_param(engine.module.gone.weight)
        engine.save_checkpoint(tmp_path)
    with start_renamed(old=False) as engine:
        engine.load_checkpoint(tmp_path, custom_load_fn=load)
        assert torch.equal(shardwise.utils.safe_get_full_fp32_param(engine.module.kept.weight), gone)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_may_train_later_and_the_reverse(stage: int, tmp_path: Path) -> None:
    model = build_rich()
    with open_engine(stage, "bf16", model=model) as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path)
    model = build_rich()
    model.frozen.requires_grad_(True)
    model.blocks[0].requires_grad_(False)
    with open_engine(stage, "bf16", model=model) as engine:
        engine.load_checkpoint(tmp_path)
        after = state_of(engine)
        same(
            {name: after[name] for name in weights(saved)}, weights(saved) | {name: after[name] for name in lost(saved, after)}
        )
        assert "exp_avg frozen.weight" not in after
        train_on(engine, 1, first=2)
        assert "exp_avg frozen.weight" in state_of(engine)


def lost(saved: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Masters of weights that rest in 16 bits now: their values are rounded."""
    found = [name for name in saved if name.startswith("weight blocks.0")]
    for name in found:
        assert torch.equal(after[name], saved[name].bfloat16().float()), name
    return found


@ranks(2)
def test_frozen_weights_can_be_left_out(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        train_on(engine, 1)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with open_engine(0) as engine:
        with warnings_logged() as lines:
            engine.load_checkpoint(tmp_path)
        same(state_of(engine), saved)  # they are as they were built
        if dist.get_rank() == 0:
            assert "left out when it was saved, left as they are: table, frozen.weight, frozen.bias" in lines[-1]
    index = (tmp_path / "global_step1" / "index.json").read_text()
    assert '"frozen.weight":{' not in index


@ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")])
def test_another_precision(saved: str, loaded: str, tmp_path: Path) -> None:
    """Masters and moments are float32 in all of them, and carry over bit for bit."""
    with open_engine(3, saved) as engine:
        train_on(engine, 2)
        before = state_of(engine)
        engine.save_checkpoint(tmp_path)
    with open_engine(1, loaded) as engine:
        engine.load_checkpoint(tmp_path)
        after = state_of(engine)
        trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
        for name, value in before.items():
            kind, _, of = name.partition(" ")
            if kind in ("weight", "exp_avg", "exp_avg_sq") and of in trained:
                assert torch.equal(after[name], value), name
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(loaded, torch.float32)
        assert torch.equal(
            after["live head.weight" if "live head.weight" in after else "live embed.weight"].float(),
            before["weight embed.weight"].to(dtype).float(),
        )
        train_on(engine, 1, first=2)


@ranks(2)
def test_other_parameter_groups(tmp_path: Path) -> None:
    model = build_rich()
    with open_engine(3, model=model) as engine:
        engine.optimizer.param_groups[1]["lr"] = 0.5
        train_on(engine, 1)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path)
    model = build_rich()
    matrices, others = grouped(model)
    three = [{"params": others["params"]}, {"params": matrices["params"][:2]}, {"params": matrices["params"][2:]}]
    config = settings(2, micro=BATCH // 2, gradient_clipping=0.5)
    with shardwise.initialize(
        model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=9.0), model_parameters=three, config=config
    )[0] as engine:
        engine.load_checkpoint(tmp_path)
        after = state_of(engine)
        for name, value in saved.items():
            if isinstance(value, Tensor):
                assert torch.equal(after[name], value), name
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        assert decays == [pytest.approx(0.01), 0.1, 0.1]
        assert after["rates"] == [saved["rates"][1], saved["rates"][0], saved["rates"][0]]
    one = [{"params": [*others["params"], *matrices["params"]]}]
    with shardwise.initialize(
        model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=9.0), model_parameters=one, config=config
    )[0] as engine:
        with warnings_logged() as lines:
            engine.load_checkpoint(tmp_path)
        assert engine.get_lr() == [9.0]
        if dist.get_rank() == 0:
            assert "parameter group 0 keeps its options, as its parameters were in groups with different ones" in lines[-1]


@ranks(2)
def test_another_optimizer_is_refused_unless_its_state_is_left(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        train_on(engine, 1)
        engine.save_checkpoint(tmp_path)
    with open_engine(3, optimizer=torch.optim.SGD) as engine:
        with pytest.raises(
            CheckpointError, match=r"is of another optimizer: expected SGD, found Adam.*load_optimizer_states=False"
        ):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        train_on(engine, 1)


@ranks(2)
@pytest.mark.parametrize(
    "kind", ["NAdam", "SGD", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ASGD", "RMSprop", "Rprop", "Lion"))]
)
def test_other_optimizers_go_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Those of torch that are driven piece by piece keep numbers and 0-d tensors besides their moments."""

    def start(stage: int) -> Any:
        model = build_rich()
        for parameter in (model.turn,):
            parameter.requires_grad_(False)  # not all of them take complex numbers
        params = {"lr": 0.01, **({"momentum": 0.9} if kind == "SGD" else {})}
        config = settings(stage, micro=BATCH // 2, optimizer={"type": kind, "params": params})
        return shardwise.initialize(model=model, config=config)[0]

    with start(3) as engine:
        train_on(engine, 2)
        engine.save_checkpoint(tmp_path)
        train_on(engine, 2, first=2)
        expected = state_of(engine)
    with start(2) as engine:
        engine.load_checkpoint(tmp_path)
        train_on(engine, 2, first=2)
        same(state_of(engine), expected)


@ranks(2)
def test_dropout_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    def losses(engine: Any) -> list[float]:
        return [engine(torch.ones(2, 50)).sum().item() for _ in range(3)]

    def start() -> Any:
        model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5))
        return shardwise.initialize(model=model, config=settings(3, optimizer={"type": "SGD"}))[0]

    torch.manual_seed(dist.get_rank())
    with start() as engine:
        engine.save_checkpoint(tmp_path)
        expected = losses(engine)
    torch.manual_seed(100)
    with start() as engine:
        engine.load_checkpoint(tmp_path)
        assert losses(engine) == expected
        assert len(set(expected)) == 3


@ranks(1, 2)
def test_the_loader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    data = [(torch.full((4,), float(number)), number) for number in range(30)]

    def start() -> Any:
        return shardwise.initialize(
            model=nn.Linear(4, 4), training_data=data, config=settings(2, micro=3, optimizer={"type": "SGD"})
        )[0]

    def rest_of(engine: Any) -> list[list[int]]:
        return [numbers.tolist() for _, numbers in engine.training_dataloader]

    with start() as engine:
        rest_of(engine)  # a whole epoch
        batches = iter(engine.training_dataloader)
        next(batches), next(batches)
        engine.save_checkpoint(tmp_path)
        expected = [numbers.tolist() for _, numbers in batches]
    with start() as engine:
        engine.load_checkpoint(tmp_path)
        assert rest_of(engine) == expected
        assert len(expected) == 30 // (3 * dist.get_world_size()) - 2


def save_wide(directory: Path) -> None:
    with shardwise.initialize(model=Wide(), config=settings(3, micro=2, optimizer={"type": "Adam"}))[0] as engine:
        engine.backward(engine(torch.ones(2, 512)).sum())
        engine.step()
        engine.save_checkpoint(directory)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def load_wide(stage: int, directory: Path) -> int:
    with shardwise.initialize(model=Wide(), config=settings(stage, micro=2, optimizer={"type": "Adam"}))[0] as engine:
        engine.load_checkpoint(directory)
        return engine.counters()["bytes"]["checkpoint read"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_reads_only_what_it_needs(world: int, tmp_path: Path) -> None:
    """Its share of weights and of both moments, and the blocks around the ends of each of the stretches these lie in."""
    run_on_ranks(2, save_wide, tmp_path)
    read = run_on_ranks(world, load_wide, 3, tmp_path)
    whole = 3 * 4 * 512 * 512 * 4
    stretches = 2 * 3 * 5  # per file: for each unit, weights and two moments
    for nbytes in read:
        assert whole // world <= nbytes <= whole // world + 2 * stretches * BLOCK // 2, (nbytes, whole // world)
    if world == 2:
        for nbytes in read:
            assert nbytes <= whole // 2 + 20_000 + 2 * BLOCK


@ranks(2)
def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir(exist_ok=True)
    with open_engine(1, checkpoint={"keep_last": 2}) as engine:
        for step in range(4):
            train_on(engine, 1, first=step)
            engine.save_checkpoint(tmp_path)
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "global_step4", "latest", "notes"]
        engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)  # what `latest` names stays
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["aside", "global_step4", "latest", "notes"]
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step4")


@ranks(2)
def test_the_same_tag_again_replaces(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        for step in range(2):
            train_on(engine, 1, first=step)
            engine.save_checkpoint(tmp_path, tag="here")
        engine.load_checkpoint(tmp_path, tag="here")
        assert engine.global_steps == 2
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "latest"]


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "precision"), [(3, "bf16"), *(pytest.param(stage, "fp32", marks=pytest.mark.slow) for stage in STAGES)]
)
def test_whole_weights_for_others(stage: int, precision: str, tmp_path: Path) -> None:
    with open_engine(stage, precision) as engine:
        train_on(engine, 1)
        state = state_of(engine)
        whole = engine.module_state_dict()
        assert engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) is None or dist.get_rank() == 0
        engine.save_16bit_model(tmp_path)
        engine.save_16bit_model(tmp_path, "model.safetensors")
        if dist.get_rank():
            assert whole is None
            return
        assert list(whole) == list(build_rich().state_dict())
        assert whole["head.weight"] is whole["embed.weight"]
        for name, value in whole.items():
            kind = "buffer" if f"buffer {name}" in state else "live"
            assert torch.equal(value, state[f"{kind} {name.replace('head', 'embed')}"]), name
        loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        build_rich().load_state_dict(loaded)  # copying casts
        assert loaded.keys() == whole.keys()


@ranks(1)
def test_after_an_unfinished_window_and_after_the_end(tmp_path: Path) -> None:
    with open_engine(2, accumulation=2) as engine:
        train_on(engine, 1)  # half a window
        with warnings_logged() as lines:
            engine.save_checkpoint(tmp_path)
        assert "gradients of an accumulation window that is not complete are not part of a checkpoint" in lines
        train_on(engine, 1)
        assert engine.global_steps == 1
        engine.load_checkpoint(tmp_path)
        assert not engine.is_gradient_accumulation_boundary()
        train_on(engine, 2)
        assert engine.global_steps == 1
    with pytest.raises(UsageError, match="destroyed"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="destroyed"):
        engine.load_checkpoint(tmp_path)
