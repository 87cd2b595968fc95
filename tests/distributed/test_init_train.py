"""Models built under `zero.Init`, then loaded, changed and trained: as if they had been built in the ordinary way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import utils, zero
from tests.distributed.test_init_build import Applied, Block, Root, _by_function
from tests.distributed.zero_support import agree, check, config, engine_for, own, same
from tests.harness import ranks
from tests.models import Batch


class Vectors(nn.Module):
    """`Applied`, on vectors instead of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(4, 6))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.exit = nn.Linear(6, 4, bias=False)
        self.exit.weight = self.entry
        self.apply(_by_function)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.entry
        for block in self.blocks:
            x = block(x)
        return self.exit(x) * self.scale


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_training_equals_that_of_a_normal_build(precision: str) -> None:
    """Masters begin with all digits of the float32 weights, as the reference does."""
    check(own(Vectors, 4, 4, precision=precision, optimizer="adamw", accumulation=2), stages=(0, 1, 2, 3), sharded=True)


@ranks(1, 3)
def test_training_on_other_numbers_of_ranks() -> None:
    check(own(Vectors, 4, 4, optimizer="adamw"), stages=(3,), sharded=True)


@pytest.mark.slow
@ranks(2, 4)
def test_training_in_all_ways() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        for accumulation in (1, 3):
            recipe = own(Vectors, 4, 4, precision=precision, accumulation=accumulation, clip=0.1)
            check(recipe, stages=(0, 1, 2, 3), sharded=True)


@ranks(2)
def test_buffers_and_weights_are_those_of_the_first_rank() -> None:
    for stage in (0, 3):
        torch.manual_seed(dist.get_rank())
        with zero.Init():
            model: Any = Vectors()
            model.register_buffer("drawn", torch.randn(3))
        assert not agree([model.drawn])
        with engine_for(model, stage), zero.GatheredParameters(model.parameters()):
            assert agree(model.parameters())
            assert agree(model.buffers())


@ranks(2)
def test_initialize_inside_the_block() -> None:
    torch.manual_seed(5)
    normal = Vectors()
    torch.manual_seed(5)
    with zero.Init(config_dict_or_path=config(3)):
        model = Vectors()
        engine, *_ = shardwise.initialize(model=model, config=config(3))
    with engine:
        x = torch.randn(2, 4)
        assert torch.equal(engine(x), normal(x))


# ---- loading


def load_as_libraries_do(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """As `from_pretrained` of transformers at stage 3: leaf by leaf, on the first rank, through `_load_from_state_dict`."""
    missing: list[str] = []

    def load(module: nn.Module, prefix: str) -> None:
        names = dict(module.named_parameters(prefix=prefix[:-1], recurse=False))
        if names and any(name in state for name in names):
            found = [parameter for name, parameter in names.items() if name in state]
            with zero.GatheredParameters(found, modifier_rank=0):
                if dist.get_rank() == 0:
                    module._load_from_state_dict(state, prefix, {}, True, missing, [], [])
        for name, child in module.named_children():
            load(child, f"{prefix}{name}.")

    load(model, "")
    return [name for name, _ in model.named_parameters() if name not in state]


def checkpoint(seed: int, build: Callable[[], nn.Module] = Root) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.detach().clone() for name, value in build().state_dict().items()}


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_that_lacks_a_key(precision: str) -> None:
    """The rest is loaded, the missing parameter is initialised, ties hold, and training starts from exactly these values."""
    state = checkpoint(11)
    del state["blocks.1.first.weight"]
    if dist.get_rank():  # only the first rank has read the file
        state = {name: torch.full_like(value, float("nan")) for name, value in state.items()}
    torch.manual_seed(7)
    with zero.Init():
        model = Applied()
    missing = load_as_libraries_do(model, state)
    assert missing == ["blocks.1.first.weight"]
    torch.manual_seed(13 + dist.get_rank())
    with zero.GatheredParameters([dict(model.named_parameters())[name] for name in missing], modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.normal_(model.blocks[1].first.weight, std=0.3)
    model.head.weight = model.embed.weight
    expected = checkpoint(11)
    torch.manual_seed(13)
    expected["blocks.1.first.weight"] = torch.empty(6, 6).normal_(std=0.3)
    assert matches(model, expected)
    for stage in (0, 1, 3):
        with engine_for(model, stage, precision) as engine:
            masters = {name: utils.safe_get_full_fp32_param(parameter) for name, parameter in model.named_parameters()}
            assert all(same(value, expected[name]) for name, value in masters.items() if name != "after")
            loss = F.cross_entropy(engine(torch.tensor([[1, 2, 3]])).float().flatten(0, 1), torch.tensor([2, 3, 4]))
            engine.backward(loss)
        break  # an engine has changed nothing, but one is enough to see that the masters are whole


def matches(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    with zero.GatheredParameters(model.parameters()):
        mine = dict(model.named_parameters(remove_duplicate=False))
        return agree(mine.values()) and all(same(value, expected[name]) for name, value in mine.items())


@ranks(2)
def test_everything_through_one_context() -> None:
    state = checkpoint(11)
    with zero.Init():
        model = Root()
    with zero.GatheredParameters(model.state_dict(keep_vars=True).values(), modifier_rank=0):
        if dist.get_rank() == 0:
            model.load_state_dict(state)
    assert matches(model, state)
    with zero.GatheredParameters(model.parameters(), modifier_rank=1):
        if dist.get_rank() == 1:
            model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert matches(model, {name: value + 1 for name, value in state.items()})


@ranks(2)
def test_buffers_of_a_context_follow_the_modifier_too() -> None:
    with zero.Init():
        model = Root()
    with zero.GatheredParameters(model.state_dict(keep_vars=True).values(), modifier_rank=1):
        if dist.get_rank() == 1:
            model.frequencies.fill_(4.0)
            model.blocks[2].table[1] = 9.0
            model.before.data.fill_(2.0)
    assert model.frequencies.tolist() == [4.0] * 3
    assert model.blocks[2].table[1] == 9.0
    assert matches(model, {**gathered(model), "before": torch.full((3, 6), 2.0)})


def gathered(model: nn.Module) -> dict[str, Tensor]:
    with zero.GatheredParameters(model.parameters()):
        return {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}


@ranks(2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_larger_vocabulary_keeps_the_old_rows(inside: bool) -> None:
    """As libraries resize embeddings: a new module, made inside or outside of a block, the old rows copied, the head tied."""
    torch.manual_seed(7)
    with zero.Init():
        model: Any = Root()
    before = gathered(model)
    old = model.embed
    torch.manual_seed(21 + dist.get_rank())
    with zero.Init(enabled=inside):
        new = nn.Embedding(17, 6)
    with zero.GatheredParameters([old.weight, new.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            new.weight.data[:11] = old.weight.data
            new.weight.data[11:] = old.weight.data.mean(0)
    model.embed = new
    model.head.weight = new.weight
    model.head.out_features = 17
    after = gathered(model) if inside else None
    with engine_for(model, 3) as engine:
        after = after or gathered(model)
        assert agree(after.values())
        assert same(after["embed.weight"][:11], before["embed.weight"])
        assert torch.equal(after["embed.weight"][11:], before["embed.weight"].mean(0).expand(6, 6))
        assert model.head.weight is model.embed.weight
        assert all(same(after[name], before[name]) for name in before if name not in ("embed.weight", "head.weight"))
        assert engine(torch.tensor([[16, 3, 0]])).shape == (1, 3, 17)


@ranks(2)
def test_two_engines_one_after_the_other() -> None:
    """A model built under `Init` goes through an engine, back to plain, and into another engine at another stage."""
    torch.manual_seed(7)
    with zero.Init():
        model = Vectors()
    x = torch.randn(2, 4)
    torch.manual_seed(7)
    expected = Vectors()(x)
    for stage in (3, 0, 2, 3, 1):
        with engine_for(model, stage) as engine:
            assert torch.equal(engine(x), expected)
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        assert torch.equal(model(x), expected)


@ranks(2)
def test_a_frozen_part_shared_by_two_models() -> None:
    """Both models were built under `Init`; they are trained one after the other."""
    with zero.Init():
        first, second = Vectors(), Vectors()
        second.blocks = first.blocks
    first.blocks.requires_grad_(False)
    x = torch.randn(2, 4)
    before = gathered(first)
    for model in (first, second):
        with engine_for(model, 3) as engine:
            engine.backward(engine(x).square().mean())
            engine.step()
    after = gathered(second)
    assert all(same(before[name], value) for name, value in after.items() if name.startswith("blocks"))


def _batch_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"].float())


@ranks(2)
def test_what_was_never_in_a_block_may_join() -> None:
    """Half of the model is built in the ordinary way."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            with zero.Init(enabled=dist.is_initialized()):
                self.two = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    torch.manual_seed(3)
    model = Joined()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    with engine_for(model, 3) as engine:
        assert torch.equal(engine(x), plain(x))
