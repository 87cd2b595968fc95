"""Graphs that outlive the weights they were recorded with: an error at every stage, never a wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import utils
from shardwise.zero import GatheredParameters
from tests.distributed.zero_support import engine_for, same
from tests.harness import ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Any:
    torch.manual_seed(8)
    return Model()


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_is_not_continued_after_a_step(stage: int) -> None:
    for precision in ("fp32", "bf16"):
        model = build()
        with engine_for(model, stage, precision) as engine:
            x = torch.ones(2, 4, dtype=model.head.weight.dtype)
            old = engine(x).square().mean()
            retained = engine(x).square().mean()
            engine.backward(retained, retain_graph=True)
            engine.step()
            for loss in (old, retained):
                with pytest.raises(RuntimeError, match=r"changed between the forward and the backward|modified by an inplace"):
                    engine.backward(loss)
            with pytest.raises(RuntimeError):
                old.backward()
            engine.zero_grad()
            engine.backward(engine(x).square().mean())
            engine.step()
            assert engine.was_step_applied()


@ranks(2)
def test_training_goes_on_undisturbed_afterwards() -> None:
    for stage in (0, 3):
        twins = [build(), build()]
        weights = []
        for number, model in enumerate(twins):
            with engine_for(model, stage) as engine:
                old = engine(torch.ones(2, 4)).square().mean()
                step(engine)
                if number:
                    with pytest.raises(RuntimeError):
                        engine.backward(old)
                    engine.zero_grad()
                del old
                step(engine)
                step(engine)
                with GatheredParameters(model.parameters()):
                    weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(same(one, other) for one, other in zip(*weights, strict=True)), stage


@ranks(2)
def test_a_graph_lives_through_everything_that_changes_no_weight() -> None:
    """Evaluations, other forwards, gathered reads, skipped steps, backwards of other losses."""
    outcomes = []
    for stage in (0, 1, 2, 3):
        for disturbed in (False, True):
            model = build()
            with engine_for(model, stage, gradient_accumulation_steps=2) as engine:
                loss = engine(torch.ones(2, 4)).square().mean()
                if disturbed:
                    with torch.no_grad():
                        engine(torch.zeros(1, 4))
                    engine(torch.zeros(1, 4))
                    with GatheredParameters(model.parameters()):
                        pass
                    with engine.inference() as plain:
                        plain(torch.zeros(1, 4))
                    assert utils.safe_get_full_fp32_param(model.head.weight) is not None
                    engine.step()  # not a boundary
                engine.backward(loss)
                engine.set_gradient_accumulation_boundary(True)
                engine.step()
                with GatheredParameters(model.parameters()):
                    outcomes.append([parameter.detach().clone() for parameter in model.parameters()])
    for other in outcomes[1:]:
        assert all(torch.allclose(one, two, rtol=1e-5, atol=1e-6) for one, two in zip(outcomes[0], other, strict=True))


@ranks(2)
def test_a_graph_that_is_partly_older() -> None:
    """Hidden states kept from one step to the next, as recurrent training does when `detach` is forgotten."""
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            hidden = model.blocks[1](model.blocks[0](torch.ones(2, 4)))
            step(engine)
            with pytest.raises(RuntimeError):
                engine.backward(engine(hidden).square().mean())
            engine.zero_grad()
            engine.backward(engine(hidden.detach()).square().mean())
            engine.step()
            assert engine.was_step_applied()


@ranks(2)
def test_a_skipped_step_changes_no_weight() -> None:
    for stage in (0, 3):
        model = build()
        with engine_for(model, stage) as engine:
            loss = engine(torch.ones(2, 4)).square().mean()
            engine.backward(engine(torch.full((2, 4), float("inf"))).square().mean() * float("nan"))
            engine.step()
            assert not engine.was_step_applied()
            engine.backward(loss)
            engine.step()
            assert engine.was_step_applied()


class Spoiling(nn.Module):
    """A block that writes into what autograd has saved, as torch forbids."""

    class Block(nn.Module):
        def __init__(self, spoil: bool) -> None:
            super().__init__()
            self.layer, self.spoil = nn.Linear(4, 4), spoil

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.layer(x))  # saves its result
            if self.spoil:
                y.mul_(2.0)
            return y

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(spoil) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2)
def test_torchs_own_check_of_writes_is_kept() -> None:
    """Plain PyTorch says that a tensor needed for backward was modified. Wrong gradients instead would be worse."""
    for stage in (0, 1, 2, 3):
        with engine_for(Spoiling(True), stage) as engine, pytest.raises(RuntimeError, match="modified by an inplace"):
            step(engine)
        with engine_for(Spoiling(False), stage) as engine:
            step(engine)


@ranks(2)
def test_a_part_that_stays_resident_is_checked_as_well() -> None:
    """Below the persistence threshold parameters are updated in place."""
    for threshold in (4, 1000):
        model = build()
        with engine_for(model, 3, zero_optimization={"stage3_param_persistence_threshold": threshold}) as engine:
            old = engine(torch.ones(2, 4)).square().mean()
            step(engine)
            with pytest.raises(RuntimeError):
                engine.backward(old)


class Gains(nn.Module):
    """Small parameters only in the path that is left, large ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[1](self.blocks[0](x)).mean(), (x.clone().requires_grad_() * self.gain).square().sum()


@ranks(2)
def test_resident_parameters_beside_released_ones() -> None:
    for stage in (1, 3):
        with engine_for(Gains(), stage, zero_optimization={"stage3_param_persistence_threshold": 4}) as engine:
            large, small = engine(torch.ones(2, 4))
            other_large, other_small = engine(torch.ones(2, 4))
            engine.backward(other_large + other_small)
            engine.step()
            with pytest.raises(RuntimeError):
                engine.backward(small)
            with pytest.raises(RuntimeError):
                engine.backward(large)
