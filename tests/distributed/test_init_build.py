"""`zero.Init`: what is built inside is, bit for bit, what a normal build makes, and never whole on any rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import shardwise
from shardwise import zero
from shardwise.errors import ConfigError, ParameterError, UsageError
from shardwise.zero import ReleasedParameter
from tests.distributed.zero_support import agree, config, same
from tests.harness import ranks
from tests.models import CASES

# ---- models whose construction does something


def _by_function(module: nn.Module) -> None:
    """As libraries initialise: one function that `apply` calls with every module."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, mean=0.1, std=0.02)
        if module.bias is not None:
            module.bias.data.fill_(0.5)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
        module.weight.data[0].zero_()
    elif isinstance(module, nn.LayerNorm):
        with torch.no_grad():
            module.weight.add_(torch.rand(module.weight.shape))
            module.bias[0] = 3.0


class Block(nn.Module):
    """A parameter of its own between two children."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.rand(width))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(width) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.first(self.norm(x))) * self.gain * self.table.to(x.dtype)


class Root(nn.Module):
    """Parameters registered on the root before, between and after its children, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3, 6))
        self.embed = nn.Embedding(11, 6)
        self.between = nn.Parameter(torch.randn(()))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.after = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(0, 6, 2) / 6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.between + self.before.sum(0) + self.after
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Applied(Root):
    """Initialised anew by the constructor itself, at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(_by_function)
        for block in self.blocks:
            nn.init.trunc_normal_(block.first.weight, std=0.02)
            nn.init.uniform_(block.gain)
        nn.init.orthogonal_(self.before)
        self.between.data = torch.tensor(2.5)


def applied_from_outside() -> nn.Module:
    model = Root()
    model.apply(_by_function)
    for name, parameter in model.named_parameters():
        if name.endswith("first.weight"):
            nn.init.kaiming_uniform_(parameter, a=5**0.5)
            nn.init.xavier_normal_(parameter)
    return model


class Copying(nn.Module):
    """A module that starts as a copy of another: operations on parameters of several modules at once."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.third = Block(), Block(), Block()
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        with torch.no_grad():
            for mine, theirs, other in zip(
                self.third.parameters(), self.online.parameters(), self.target.parameters(), strict=True
            ):
                mine.copy_(0.5 * theirs + 0.25 * other)
                mine.lerp_(theirs, 0.125)
                torch.add(mine, other, out=mine)


class Collected(nn.Module):
    """Views of many modules' weights held at once, read and written later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))
        views = [parameter.data for parameter in self.parameters()]
        for number, view in enumerate(views):
            view.normal_(mean=float(number))
        rows = [block.weight.detach().view(-1)[:3] for block in self.blocks]
        rows[0].mul_(2.0)
        self.total = nn.Parameter(torch.stack(rows).sum(0))
        flat = parameters_to_vector(self.blocks.parameters())
        vector_to_parameters(flat.flip(0), self.blocks.parameters())


class Loading(nn.Module):
    """The constructor loads weights into its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = Block(), Block()
        self.goal.load_state_dict({name: value.clone() + 1 for name, value in self.source.state_dict().items()})


def containers() -> nn.Module:
    named = OrderedDict(one=nn.Linear(3, 3), two=nn.ReLU(), three=nn.Linear(3, 2))
    return nn.ModuleDict(
        {
            "sequence": nn.Sequential(named),
            "lists": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList()]),
            "listed": nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(0, 3))]),
            "named": nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(3, 1).t())}),
            "lstm": nn.LSTM(3, 2, bidirectional=True),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )


class Replaced(nn.Module):
    """Modules and parameters that are replaced, shared and deleted while the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first
        self.head = nn.Linear(6, 2)
        self.head = nn.Linear(6, 3)
        self.gone = Block()
        del self.gone
        self.first.gain = nn.Parameter(torch.full((6,), 2.0))
        self.first.first.weight = nn.Parameter(self.first.first.weight.t().contiguous() * 2)
        self.first.first.bias.requires_grad_(False)


def cloned() -> nn.Module:
    """Copies of a module, as torch's own transformer makes them."""
    block = Block()
    return nn.ModuleList([block, copy.deepcopy(block), *(copy.deepcopy(nn.Sequential(Block(), block)) for _ in range(2))])


def torch_transformer() -> nn.Module:
    return nn.Transformer(6, 2, 2, 1, 7, batch_first=True)


def computed() -> nn.Module:
    """Weights that are computed from parameters."""
    layers = nn.ModuleList([weight_norm(nn.Linear(3, 3)), spectral_norm(nn.Linear(3, 3)), orthogonal(nn.Linear(3, 3))])
    return nn.Sequential(Block(), layers)


def low_precision() -> nn.Module:
    model = Root()
    model.blocks.bfloat16()
    model.head.to(torch.float64)
    return model


def half_by_default() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Root()
    finally:
        torch.set_default_dtype(torch.float32)


OWN: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (
        *(Root, Applied, applied_from_outside, Copying, Collected, Loading, containers, Replaced, cloned),
        *(torch_transformer, computed, low_precision, half_by_default),
    )
}


def differences(build: Callable[[], nn.Module]) -> list[str]:
    """How a model built inside differs from one built in the ordinary way."""
    torch.manual_seed(7)
    normal = build()
    drawn = torch.rand(())
    torch.manual_seed(7)
    with zero.Init():
        sharded = build()
    problems = [] if same(torch.rand(()), drawn) else ["another number of random numbers was drawn"]
    if {name for name, _ in sharded.named_modules()} != {name for name, _ in normal.named_modules()}:
        problems.append("other modules")
    left, right = (dict(model.named_parameters(remove_duplicate=False)) for model in (sharded, normal))
    if list(left) != list(right):
        return [f"parameters {list(left)}, expected {list(right)}"]
    for name, parameter in left.items():
        other = right[name]
        if (parameter.shape, parameter.dtype, parameter.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            problems.append(f"{name} shows {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}")
        if dist.get_world_size() > 1 and parameter.numel() > 1 and torch.equal(parameter.detach(), other.detach()):
            problems.append(f"{name} is whole outside of the block")
    ties = [[one is two for one in model.values() for two in model.values()] for model in (left, right)]
    if ties[0] != ties[1]:
        problems.append("other parameters are shared")
    with zero.GatheredParameters(sharded.state_dict(keep_vars=True).values()):
        problems += [f"{name} has other bits" for name in left if not same(left[name], right[name])]
        state, expected = sharded.state_dict(), normal.state_dict()
        problems += [f"state {name} differs" for name in expected if not same(state[name], expected[name])]
    buffers = dict(sharded.named_buffers())
    problems += [f"buffer {name} differs" for name, buffer in normal.named_buffers() if not same(buffers[name], buffer)]
    return problems


@ranks(2)
@pytest.mark.parametrize("name", OWN)
def test_bit_equal_to_a_normal_build(name: str) -> None:
    assert differences(OWN[name]) == []


PECULIAR = ("encoder_layers", "parametrized", "tied_across", "non_contiguous", "frozen_integers", "mixed_dtypes", "recurrent")


@ranks(2)
def test_peculiar_models_are_bit_equal_to_a_normal_build() -> None:
    assert {name: found for name in PECULIAR if (found := differences(CASES[name].build))} == {}


@pytest.mark.slow
@ranks(2, 4)
def test_all_peculiar_models_are_bit_equal_to_a_normal_build() -> None:
    assert {name: found for name, case in CASES.items() if (found := differences(case.build))} == {}


@ranks(1, 3)
def test_on_any_number_of_ranks() -> None:
    assert {name: found for name in ("Root", "Applied", "Copying", "Replaced") if (found := differences(OWN[name]))} == {}


@ranks(2)
def test_ranks_that_draw_other_numbers_get_those_of_the_first() -> None:
    torch.manual_seed(7)
    normal = Applied()
    torch.manual_seed(7 + dist.get_rank())
    with zero.Init():
        model = Applied()
    with zero.GatheredParameters(model.parameters()):
        assert agree(model.parameters())
        assert all(same(one, other) for one, other in zip(model.parameters(), normal.parameters(), strict=True))


# ---- what rests where


def live_bytes() -> int:
    """Memory of all tensors of this process; what other tests have left is the same before and after."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter):
            storage = item.untyped_storage()
            with contextlib.suppress(RuntimeError):  # one that only pretends to have memory
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


WIDTH, LAYERS = 64, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


@ranks(2, 3)
def test_at_most_one_module_is_whole_at_any_time(world_size: int) -> None:
    before, peaks = 0, []

    def look(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            peaks.append(live_bytes() - before)

    hook = register_module_module_registration_hook(lambda *_: peaks.append(live_bytes() - before))
    try:
        with zero.Init():
            before = live_bytes()  # with what the ranks talk through
            model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            model.apply(look)
    finally:
        hook.remove()
    resting = LAYERS * LAYER_BYTES / world_size
    assert len(peaks) >= 2 * LAYERS
    assert max(peaks) <= 1.05 * (resting + 2 * LAYER_BYTES), "the layer itself, and the copy of it that is cut"
    # A thread of gloo lets go of the last operation's tensors a moment after it was waited for.
    limit = time.monotonic() + 5.0
    while live_bytes() - before > 1.05 * resting and time.monotonic() < limit:
        time.sleep(0.001)
    assert live_bytes() - before <= 1.05 * resting
    del model


@ranks(2)
def test_a_model_that_nobody_keeps_is_freed() -> None:
    before = live_bytes()
    with zero.Init():
        model = Applied()
        model.head = nn.Linear(6, 11)
    watched = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    assert live_bytes() == before
    assert [reference() for reference in watched] == [None] * len(watched)


@ranks(2)
def test_parameters_may_outlive_the_module_that_was_built_around_them() -> None:
    torch.manual_seed(3)
    expected = nn.Linear(4, 3).weight
    torch.manual_seed(3)
    with zero.Init():
        model = nn.Module()
        model.register_parameter("kept", nn.Sequential(nn.Linear(4, 3))[0].weight)
        gc.collect()
    with zero.GatheredParameters(model.parameters()):
        assert same(model.kept, expected)


# ---- the block


@ranks(2)
def test_after_the_block_nothing_is_different() -> None:
    with zero.Init():
        pass
    with pytest.raises(RuntimeError, match="on purpose"), zero.Init():
        Root()
        raise RuntimeError("on purpose")
    torch.manual_seed(7)
    model = Root()
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert differences(Root) == []


@ranks(2)
def test_a_model_whose_construction_failed_does_no_harm() -> None:
    kept: list[nn.Module] = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)
            self.first = nn.Linear(3, 3)
            self.own = nn.Parameter(torch.randn(3))
            self.second = nn.Linear(3, 0.5)  # pyright: ignore[reportArgumentType]

    with pytest.raises(TypeError), zero.Init():
        Failing()
    with zero.GatheredParameters(kept[0].parameters()):
        assert not any(parameter.isnan().any() for parameter in kept[0].parameters())
    assert type(kept[0].own) is nn.Parameter


@ranks(2)
def test_blocks_inside_blocks() -> None:
    """A library that builds under `Init` by itself, called from a script that does so too."""

    def inner(enabled: bool) -> nn.Module:
        with zero.Init(enabled=enabled):
            model = Root()
            model.spare = nn.Parameter(torch.randn(3))
        assert isinstance(model.spare, ReleasedParameter) is enabled
        return model

    def build(enabled: bool) -> Any:
        with zero.Init(enabled=enabled):
            made = nn.ModuleList([Block(), inner(enabled), Block()])
            made.apply(_by_function)
            nn.init.uniform_(made[1].blocks[0].gain)
        return made

    torch.manual_seed(7)
    normal = build(False)
    torch.manual_seed(7)
    model = build(True)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    with zero.GatheredParameters(model.parameters()):
        assert all(same(one, other) for one, other in zip(model.parameters(), normal.parameters(), strict=True))

    def within_disabled() -> nn.Module:
        with zero.Init(enabled=False):
            return Block()

    assert differences(within_disabled) == []
    torch.manual_seed(7)
    with zero.Init(enabled=False), zero.Init():
        model = Block()
    assert model.first.weight.isnan().all()


@ranks(2)
def test_one_block_after_the_other_extends_a_model() -> None:
    def build() -> nn.Module:
        with zero.Init():
            model = Root()
        with zero.Init():
            model.extra = Block()
            model.blocks.append(Block())
            model.apply(_by_function)
        return model

    torch.manual_seed(7)
    model = build()
    torch.manual_seed(7)
    normal = Root()
    normal.extra = Block()
    normal.blocks.append(Block())
    normal.apply(_by_function)
    with zero.GatheredParameters(model.parameters()):
        assert [n for (n, p), q in zip(model.named_parameters(), normal.parameters(), strict=True) if not same(p, q)] == []


@ranks(2)
def test_parameters_that_share_memory_are_refused_as_in_a_normal_build() -> None:
    """Weights tied through `.data` are two parameters on the same bytes."""
    for enabled in (False, True):
        with zero.Init(enabled=enabled):
            model: Any = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
            model[1].weight.data = model[0].weight.data
        with pytest.raises(ParameterError, match="share memory"):
            shardwise.initialize(model=model, config=config(3))


@ranks(2)
def test_a_context_can_be_entered_again() -> None:
    context = zero.Init()
    for _ in range(2):
        with context:
            model = Block()
        assert model.first.weight.isnan().all()


# ---- switches


@ranks(2)
def test_when_it_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps(config(2)))
    dist.barrier()
    contexts = [
        zero.Init(enabled=False),
        zero.Init(enabled=False, config_dict_or_path=config(3)),
        *(zero.Init(config_dict_or_path=config(stage)) for stage in (0, 1, 2)),
        zero.Init(config=config(1)),
        zero.Init(config_dict_or_path=str(file)),
        zero.Init(config_dict_or_path=json.dumps(config(0))),
        zero.Init(config_dict_or_path={}),
        zero.Init(module=Root(), config_dict_or_path=config(2)),
    ]
    for context in contexts:
        with context:
            model = Root()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


@ranks(2)
def test_when_it_shards() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    for context in (
        zero.Init(),
        zero.Init(config_dict_or_path=auto),
        zero.Init(config_dict_or_path=json.dumps(auto)),
        zero.Init(config=config(3), dtype=torch.bfloat16, remote_device="none", pin_memory=True, mem_efficient_linear=False),
    ):
        with context:
            model = Root()
        assert all(parameter.isnan().all() for parameter in model.parameters())


@ranks(2)
def test_a_finished_module() -> None:
    torch.manual_seed(7)
    normal = Root()
    torch.manual_seed(7 + dist.get_rank())
    model = Root()
    parameters = list(model.parameters())
    zero.Init(module=model, config_dict_or_path=config(3))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.isnan().all() for parameter in parameters)
    zero.Init(module=model)  # again, on what is sharded already
    with zero.GatheredParameters(parameters):
        assert all(same(one, other) for one, other in zip(parameters, normal.parameters(), strict=True))


@ranks(2)
def test_wrong_arguments_are_refused_by_name() -> None:
    for device in ("cpu", "nvme"):
        with pytest.raises(UsageError, match=f"remote_device.*not available yet.*{device}"):
            zero.Init(remote_device=device)
    with pytest.raises(ConfigError, match="stge"):
        zero.Init(config_dict_or_path={"zero_optimization": {"stge": 3}})
    with pytest.raises(ConfigError, match=r"missing\.json"):
        zero.Init(config_dict_or_path="/nowhere/missing.json")
    with pytest.raises(ParameterError, match="str"):
        zero.Init(module="model")  # pyright: ignore[reportArgumentType]


@ranks(2)
def test_parameters_without_values_are_left_to_initialize() -> None:
    """Meta parameters and lazy ones have no values to cut."""
    with zero.Init():
        model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3), nn.LazyLinear(4))
    assert model[0].weight.is_meta
    assert model[1].weight.isnan().all()
    assert nn.parameter.is_lazy(model[2].weight)


@ranks(2)
def test_meta_parameters_are_given_memory_inside() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = Root()
        model.to_empty(device="cpu")
        model.apply(_by_function)
        for block in model.blocks:
            nn.init.ones_(block.gain)
            block.table.copy_(torch.arange(6))
        for parameter in (model.before, model.between, model.after):
            nn.init.zeros_(parameter)
        model.frequencies.zero_()
        for norm in (block.norm for block in model.blocks):
            norm.reset_parameters()
        return model

    assert differences(build) == []


@ranks(2)
def test_the_state_dict_has_every_key_and_values_are_not_there() -> None:
    with zero.Init():
        model = Root()
    state, expected = model.state_dict(), Root().state_dict()
    assert list(state) == list(expected)
    assert [tuple(value.shape) for value in state.values()] == [tuple(value.shape) for value in expected.values()]
    assert state["embed.weight"].isnan().all()
    assert same(state["frequencies"], expected["frequencies"])
    assert "Embedding(11, 6)" in repr(model)


@ranks(2)
def test_outside_the_block_writing_is_refused() -> None:
    with zero.Init():
        model: Any = Root()
    with pytest.raises(ParameterError, match="GatheredParameters"):
        model.apply(_by_function)
    with pytest.raises(ParameterError, match="GatheredParameters"):
        model.bfloat16()
    with pytest.raises((ParameterError, RuntimeError), match="GatheredParameters"):
        model.load_state_dict(Root().state_dict())
    with pytest.raises(ParameterError, match="GatheredParameters"):
        copy.deepcopy(model)
