"""Parameters used in unusual ways at stage 3: by other modules, by parts of the model on their own, computed from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.nn.utils.parametrizations import weight_norm as normed

from shardwise import zero
from shardwise.errors import ParameterError
from shardwise.zero import GatheredParameters
from tests.distributed.zero_support import check, engine_for, own, same, units_of
from tests.harness import ranks
from tests.models import Batch


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Borrowing(nn.Module):
    """Blocks that use a weight which the root owns, passed in or kept as a plain attribute in a list."""

    class Block(nn.Module):
        def __init__(self, shared: list[nn.Linear]) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)
            self.borrowed = shared  # a list hides it from torch

        def forward(self, x: Tensor, gain: Tensor) -> Tensor:
            x = torch.tanh(self.own(x)) * gain
            return x + F.linear(x, self.borrowed[0].weight, self.borrowed[0].bias)

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4))
        self.blocks = nn.ModuleList(self.Block([self.lender]) for _ in range(2))
        zero.register_external_parameter(self, self.lender.weight)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x, self.gain)
        return x


class Crosswise(nn.Module):
    """Each block uses weights of the other, before and after its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.others: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            other: Any = self.others[0]
            x = x @ other.layer.weight
            x = torch.tanh(self.layer(x))
            return x + other.layer.bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.blocks[0].others.append(self.blocks[1])
        self.blocks[1].others.append(self.blocks[0])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


class Penalised(nn.Module):
    """The loss reads weights outside of every forward that owns them: weight decay by hand, a tied regulariser."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for each in self.blocks:
            y = each(y)
        penalty = sum((p.float().square().sum() for p in self.parameters()), torch.zeros(()))
        return self.head(y), penalty


class Normed(nn.Module):
    """Weights computed from parameters in several ways, in units and in the root."""

    class Scaled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5 + 0.1 * weight.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(orthogonal(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2))
        self.middle = nn.Linear(4, 4)
        parametrize.register_parametrization(self.middle, "weight", self.Scaled())
        parametrize.register_parametrization(self.middle, "bias", self.Scaled())
        self.out = normed(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        with parametrize.cached():
            return self.out(self.middle(x) + self.middle(-x))


class OldWeightNorm(nn.Module):
    """The older `weight_norm`, which sets a plain attribute before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(self._layer(), nn.Tanh()) for _ in range(2))

    @staticmethod
    def _layer() -> nn.Module:
        return weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


class Functional(nn.Module):
    """Every operation on weights is written out, with views, slices, chunks and stacks of them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Parameter(torch.randn(3 * 4, 4) / 2)
            self.table = nn.Parameter(torch.randn(4, 2, 2) / 2)
            self.bias = nn.ParameterList([torch.randn(4) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.packed.chunk(3)
            x = torch.tanh(F.linear(x, first, self.bias[0]))
            x = x + torch.einsum("bi,ij->bj", x, second.t()) * torch.stack(list(self.bias)).mean(0)
            x = x @ torch.block_diag(*self.table[:2]) + x @ third.view(2, 2, 4).flatten(0, 1)
            weight = self.table[2]
            return x + (x.view(-1, 2, 2) @ weight).flatten(1) * self.packed[0, 0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


class Methods(nn.Module):
    """Some modules are never called: their other methods are."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
            self.gain = nn.Parameter(torch.rand(4))

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x))

        def decode(self, x: Tensor) -> Tensor:
            return self.down(x) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [each.encode(x) for each in self.blocks]
        for each, value in zip(self.blocks, hidden, strict=True):
            x = x + each.decode(value)
        return self.head(x)


def _penalised_loss(model: Any, batch: Batch) -> Tensor:
    output, penalty = model(batch["x"])
    return F.mse_loss(output.float(), batch["y"].float()) + 0.01 * penalty


@ranks(2)
@pytest.mark.parametrize("build", [Borrowing, Crosswise, Functional, Methods, Normed])
def test_weights_used_outside_of_their_module(build: Callable[[], nn.Module]) -> None:
    check(own(build, 4, 4, optimizer="adamw", accumulation=2), stages=(1, 3))


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("build", [Borrowing, Crosswise, Functional, Methods, Normed])
def test_weights_used_outside_of_their_module_in_all_ways(build: Callable[[], nn.Module]) -> None:
    for accumulation in (1, 3):
        check(own(build, 4, 4, accumulation=accumulation, clip=0.1), stages=(0, 1, 2, 3))


def spectral() -> nn.Module:
    """Each forward advances an estimate that is kept in buffers, so the number of forwards has to be that of the reference."""
    blocks = [nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(4, 4))


@ranks(2)
def test_weights_computed_with_the_help_of_buffers() -> None:
    check(own(spectral, 4, 4), stages=(1, 3))


@ranks(2)
def test_weights_in_the_loss() -> None:
    check(own(Penalised, 4, 4, loss=_penalised_loss), stages=(0, 3))


class Showing(nn.Module):
    """Returns weights of its own, of a block and of the root, whole and in part, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        weights = [block[0].weight for block in self.blocks]
        return {"output": self.head(x), "seen": (weights, self.head.weight[1:], self.head.bias)}


def _showing_loss(model: Any, batch: Batch) -> Tensor:
    found = model(batch["x"])
    weights, rows, bias = found["seen"]
    penalty = sum((each.float().square().sum() for each in (*weights, rows, bias)), start=torch.zeros(()))
    return F.mse_loss(found["output"].float(), batch["y"].float()) + 0.01 * penalty


@ranks(2)
def test_weights_that_the_model_returns() -> None:
    check(own(Showing, 4, 4, loss=_showing_loss), stages=(0, 1, 2, 3))
    check(own(Showing, 4, 4, loss=_showing_loss, accumulation=2, precision="bf16"), stages=(2, 3))


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_older_weight_norm() -> None:
    check(own(OldWeightNorm, 4, 4), stages=(1, 3))


@ranks(1, 3)
def test_on_other_numbers_of_ranks() -> None:
    check(own(Crosswise, 4, 4), own(Functional, 4, 4), stages=(3,))


# ---- parts on their own


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.gain = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for each in self.blocks:
            x = each(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)) * self.gain


def encoder() -> Encoder:
    torch.manual_seed(4)
    return Encoder()


@ranks(2)
def test_a_method_of_the_model_without_gradients() -> None:
    x = torch.randn(3, 4)
    for stage in (0, 1, 2, 3):
        model, expected = encoder(), encoder()
        with engine_for(model, stage) as engine:
            for _ in range(2):
                with torch.no_grad():
                    assert torch.equal(model.encode(x), expected.encode(x))
                    assert torch.equal(engine.encode(x), expected.encode(x))
                    assert torch.equal(model.blocks[1](x), expected.blocks[1](x))
                    assert torch.equal(model.embed(x), expected.embed(x))
                    assert torch.equal(model.head(model.blocks[0](x)), expected.head(expected.blocks[0](x)))
                    assert torch.equal(engine(x), expected(x))


@ranks(2)
def test_training_through_a_method_of_the_model() -> None:
    """Contrastive training, for one, calls an encoder twice and never the model."""
    x = torch.randn(3, 4)
    results = []
    for stage in (0, 1, 2, 3):
        model, expected = encoder(), encoder()
        rule = torch.optim.SGD(expected.parameters(), lr=0.1)
        with engine_for(model, stage) as engine:
            for _ in range(3):
                for side, update in ((expected, None), (model, engine)):
                    loss = (side.encode(x) - side.encode(x + 1)).square().mean() + side.blocks[0](x).mean()
                    if update is None:
                        loss.backward()
                        rule.step()
                        rule.zero_grad()
                    else:
                        update.backward(loss)
                        update.step()
                        mine = loss
            assert mine.isfinite(), stage
            with GatheredParameters(model.parameters()):
                for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"stage {stage} {name}")
                results.append([p.detach().clone() for p in model.parameters()])
    assert all(same(one, other) for one, other in zip(results[2], results[3], strict=True))


@ranks(2)
def test_a_model_in_the_plain_call_is_the_engine() -> None:
    """`model(x)`, instead of `engine(x)`, is the same thing."""
    x = torch.randn(3, 4)
    outcomes = []
    for call_model in (False, True):
        model = encoder()
        with engine_for(model, 3) as engine:
            for _ in range(2):
                output = model(x) if call_model else engine(x)
                engine.backward(output.square().mean())
                engine.step()
            with GatheredParameters(model.parameters()):
                outcomes.append([p.detach().clone() for p in model.parameters()])
    assert all(same(one, other) for one, other in zip(*outcomes, strict=True))


@ranks(2)
def test_a_root_parameter_of_a_part_outside_of_any_call() -> None:
    """Nobody runs, so nobody may be made to communicate: a read is NaN, as everywhere."""
    model = encoder()
    with engine_for(model, 3):
        assert F.linear(torch.ones(1, 4), model.head.weight).isnan().all()


# ---- units


@ranks(2)
def test_units_named_by_the_user() -> None:
    for units in (["torch.nn.modules.linear.Linear"], ["blocks"], ["Encoder"]):
        check(own(Encoder, 4, 4), stages=(3,), zero_optimization=_with_units(units))
    model = encoder()
    with engine_for(model, 3, zero_optimization={"units": ["blocks.1", "head"]}) as engine:
        assert units_of(engine) == ["<root>", "blocks.1", "head"]
    with (
        pytest.raises(ParameterError, match=r"zero_optimization\.units names 'Blok'"),
        engine_for(encoder(), 3, zero_optimization={"units": ["Blok"]}),
    ):
        raise AssertionError("was made")


@pytest.mark.slow
@ranks(2, 4)
def test_more_units_named_by_the_user() -> None:
    for units in (["Linear"], ["blocks.*"], ["Sequential", "head"], ["blocks.[0]", "Linear"]):
        check(own(Encoder, 4, 4, accumulation=2), stages=(3,), zero_optimization=_with_units(units))


def _with_units(units: list[str]) -> dict[str, Any]:
    return {"stage": 3, "stage3_param_persistence_threshold": 0, "units": units}


@ranks(2)
def test_units_by_hugging_faces_attribute() -> None:
    class Marked(Encoder):
        _no_split_modules = ["Sequential"]  # noqa: RUF012 - as in transformers

    torch.manual_seed(4)
    model = Marked()
    with engine_for(model, 3) as engine:
        assert units_of(engine) == ["<root>", "blocks.0", "blocks.1"]
        assert torch.equal(engine(torch.ones(1, 4)), encoder()(torch.ones(1, 4)))


@ranks(2)
def test_small_parameters_stay() -> None:
    model = encoder()
    threshold = {"stage3_param_persistence_threshold": 4}
    with engine_for(model, 3, zero_optimization=threshold) as engine:
        small = [name for name, p in model.named_parameters() if not p.isnan().any()]
        assert small == [name for name, p in model.named_parameters() if p.numel() <= 4]
        engine.backward(engine(torch.ones(1, 4)).square().mean())
        engine.step()
        with torch.no_grad():
            engine(torch.ones(1, 4))
        assert [name for name, p in model.named_parameters() if not p.isnan().any()] == small
    check(own(Encoder, 4, 4), stages=(3,), zero_optimization={"stage": 3, **threshold})


@ranks(2)
def test_external_parameters_are_registered_for_nothing() -> None:
    model = encoder()
    zero.register_external_parameter(model, model.head.weight)
    zero.unregister_external_parameter(model, model.head.weight)
    for arguments in ((model, torch.ones(2)), (model.gain, model.gain), (None, model.gain)):
        with pytest.raises(ParameterError, match="external parameter"):
            zero.register_external_parameter(*arguments)
