"""Modules declared as leaf: their inside may run differently on different ranks, and training equals that of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import utils
from shardwise.errors import ParameterError
from shardwise.zero import GatheredParameters
from tests.distributed.zero_support import check, engine_for, own, problems_of, same
from tests.harness import ranks
from tests.reference import Way


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each sample goes to the expert that its router prefers; an expert without samples is not called."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(4, number)
        self.experts = nn.ModuleList(Expert() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return outputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.moe = Experts()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.tanh(self.moe(self.norm(x))))


class Mixture(nn.Module):
    """Mixtures of experts in repeated blocks; optionally recomputed in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def mixture_recomputed() -> nn.Module:
    return Mixture(reentrant=False)


def marked() -> nn.Module:
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, [Experts]) == [block.moe for block in model.blocks]
    return model


def marked_by_name() -> nn.Module:
    model = Mixture()
    utils.set_z3_leaf_modules(model, ["Experts"])
    return model


def marked_one_by_one() -> nn.Module:
    model: Any = Mixture()
    for block in model.blocks:
        utils.set_z3_leaf_module(block.moe, True)
    return model


def _zero(**leaf: list[str]) -> dict[str, Any]:
    return {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": leaf}


@ranks(2)
@pytest.mark.parametrize("build", [marked, marked_by_name, marked_one_by_one])
def test_declared_by_calls(build: Callable[[], nn.Module]) -> None:
    check(own(build, 4, 4, optimizer="adamw"), stages=(2, 3))


WAYS = (
    {"classes": [f"{__name__}.Experts"]},
    {"names": ["blocks.0.moe", "blocks.1.moe"]},
    {"name_suffixes": ["moe"]},
    {"classes": ["Mixture"]},
)
MORE_WAYS = (
    {"classes": ["Experts"]},
    {"name_suffixes": [".moe"], "classes": ["Experts"], "names": ["blocks.1.moe"]},
    {"classes": ["Block"]},
    {"names": ["blocks"]},
)


@ranks(2)
@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.slow)], ids=["ways", "more"])
def test_declared_by_configuration(ways: tuple[dict[str, list[str]], ...]) -> None:
    for leaf in ways:
        problems = problems_of(own(Mixture, 4, 4), [Way(3, overrides={"zero_optimization": _zero(**leaf)})])
        assert problems == [], leaf


@ranks(2)
def test_accumulation_and_clipping() -> None:
    check(own(marked, 4, 4, optimizer="adamw", accumulation=3, clip=0.1), stages=(1, 3))


@pytest.mark.slow
@ranks(2, 4)
def test_every_stage_and_precision() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        check(own(marked, 4, 4, optimizer="adamw", precision=precision, accumulation=2), stages=(0, 1, 2, 3))


@ranks(1, 3)
def test_other_numbers_of_ranks() -> None:
    check(own(marked, 4, 4, accumulation=2), stages=(3,))


@ranks(2)
def test_recomputed_in_backward() -> None:
    leaf = _zero(classes=["Experts"])
    problems = problems_of(own(mixture_recomputed, 4, 4), [Way(3, overrides={"zero_optimization": leaf})])
    assert problems == []


class Uneven(nn.Module):
    """The number of calls depends on the data, as does whether there is any."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.ModuleDict({"one": Expert(), "two": Expert()})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            rows = []
            for row in x:
                calls = int(row.detach().sum() * 3) % 3
                for _ in range(calls):
                    row = row + self.leaf["one" if calls == 1 else "two"](row)
                rows.append(row)
            x = torch.stack(rows)
        return x


@ranks(2)
def test_numbers_of_calls_that_depend_on_the_data() -> None:
    ways = [Way(stage, overrides={"zero_optimization": {**_zero(names=["leaf"]), "stage": stage}}) for stage in (1, 3)]
    assert problems_of(own(Uneven, 4, 4, accumulation=2, optimizer="adamw"), ways) == []


class ByRank(nn.Module):
    """Rank 0 runs one expert once, rank 1 another one three times; the root's head is called as often."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, who: int) -> Tensor:
        for _ in range(1 if who == 0 else 3):
            x = self.head(torch.tanh(self.experts[who](x)))
        return x


@ranks(2)
def test_ranks_that_run_different_experts() -> None:
    """Each side's gradient is the mean with zeros for the missing one."""
    data = [torch.randn(2, 4, generator=torch.Generator().manual_seed(who)) for who in range(2)]
    torch.manual_seed(2)
    plain = ByRank()
    rule = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for _ in range(3):
        for who in range(2):
            (plain(data[who], who).square().mean() / 2).backward()
        rule.step()
        rule.zero_grad()
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}}
    outcomes = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(2)
        model = ByRank()
        utils.set_z3_leaf_modules(model, [ByRank])
        with engine_for(model, stage, optimizer=optimizer) as engine:
            for _ in range(3):
                engine.backward(engine(data[dist.get_rank()], dist.get_rank()).square().mean())
                engine.step()
            with GatheredParameters(model.parameters()):
                for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6, msg=f"stage {stage} {name}")
                outcomes.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(same(one, other) for one, other in zip(outcomes[2], outcomes[3], strict=True))


@ranks(2)
def test_a_leaf_that_one_rank_leaves_out() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, extra: bool) -> Tensor:
            for block in self.blocks:
                normed = block.norm(x)
                x = x + block.mix(block.moe(normed) if extra else normed)
            return x

    data = [torch.randn(2, 4, generator=torch.Generator().manual_seed(who)) for who in range(2)]
    torch.manual_seed(2)
    plain = Gated()
    for who in range(2):
        (plain(data[who], who == 1).square().mean() / 2).backward()
    for stage in (1, 3):
        torch.manual_seed(2)
        model = Gated()
        utils.set_z3_leaf_modules(model, ["Block"])
        with engine_for(model, stage) as engine:
            engine.backward(engine(data[dist.get_rank()], dist.get_rank() == 1).square().mean())
            for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
                found = utils.safe_get_full_grad(mine)
                assert (found is None) is (right.grad is None), name
                if found is not None:
                    torch.testing.assert_close(found, right.grad, rtol=1e-5, atol=1e-6, msg=f"stage {stage} {name}")
            engine.step()


@ranks(2)
def test_evaluation_may_diverge_as_well() -> None:
    for stage in (0, 3):
        torch.manual_seed(2)
        model = marked()
        torch.manual_seed(2)
        expected = Mixture()
        with engine_for(model, stage) as engine:
            engine.eval()
            for number in range(4):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
                with torch.no_grad():
                    assert torch.equal(engine(x), expected(x))


# ---- the calls themselves


def test_the_calls_tell_what_they_did() -> None:
    model: Any = Mixture()
    first, second = model.blocks[0].moe, model.blocks[1].moe
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, [Experts]) == [first, second]
    assert utils.get_z3_leaf_modules(model) == [first, second]
    assert utils.z3_leaf_module(first)
    assert not utils.z3_leaf_module(model)
    utils.set_z3_leaf_module(first, False)
    assert utils.get_z3_leaf_modules(model) == [second]
    assert utils.unset_z3_leaf_modules(model, ["Experts"]) == [first, second]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules(model, ["Block", Expert]) == [
        module for module in model.modules() if isinstance(module, (Block, Expert))
    ]


def test_subclasses_are_meant_too() -> None:
    class Special(Experts):
        pass

    model = nn.ModuleList([Special(), Experts()])
    assert utils.set_z3_leaf_modules(model, [Experts]) == [model[0], model[1]]
    utils.unset_z3_leaf_modules(model, [Experts])
    assert utils.set_z3_leaf_modules(model, ["Special"]) == [model[0]]


def test_classes_that_do_not_occur_are_told() -> None:
    model = Mixture()
    with pytest.raises(ParameterError, match="no module of class Conv1d, Nothing"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d, Experts, "Nothing"])
    assert utils.get_z3_leaf_modules(model) == [], "nothing was marked"
    assert utils.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []
    with pytest.raises(ParameterError, match="no such module"):
        utils.unset_z3_leaf_modules(model, [nn.Conv1d])
    assert utils.unset_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []


@ranks(2)
def test_names_in_the_configuration_that_match_nothing_are_told() -> None:
    for leaf, name in (
        ({"classes": ["Expertz"]}, "Expertz"),
        ({"names": ["blocks.7.moe"]}, r"blocks\.7\.moe"),
        ({"name_suffixes": ["nowhere"]}, "nowhere"),
    ):
        with (
            pytest.raises(ParameterError, match=rf"zero_optimization\.leaf_module.*{name}"),
            engine_for(Mixture(), 3, zero_optimization={"leaf_module": leaf}),
        ):
            raise AssertionError("was made")
