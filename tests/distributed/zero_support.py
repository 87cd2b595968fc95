"""What the tests of sharded parameters share: models of their own in the recipes of `tests.reference`, and quick engines.

Refuses to know what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.engine import Engine, trainer_of
from tests.models import Batch, Case
from tests.reference import Recipe, Record, Way, compare_all, compare_bits, train_sharded

__all__ = [
    "Own",
    "agree",
    "check",
    "config",
    "engine_for",
    "everywhere",
    "own",
    "problems_of",
    "raises",
    "same",
    "units_of",
    "vectors",
]

STAGES = (0, 1, 2, 3)


# ---- recipes


@dataclass(frozen=True)
class Own(Recipe):
    """A recipe of a model that only one test has.

    Args:
        made: the model and its data, in place of a registered case.
    """

    made: Case | None = None

    @property
    def model(self) -> Case:
        """What is trained."""
        assert self.made is not None
        return self.made


def vectors(inputs: int, outputs: int) -> Callable[[int, torch.Generator, int], Batch]:
    """Batches of random vectors, as the registered cases have them."""

    def batch(samples: int, generator: torch.Generator, step: int) -> Batch:
        x, y = (torch.randn(samples, size, generator=generator) for size in (inputs, outputs))
        return {"x": x, "y": y, "step": step}

    return batch


def squares(model: Any, batch: Batch) -> Tensor:
    """Mean squared error of the model's output."""
    return F.mse_loss(model(batch["x"]).float(), batch["y"].float())


def own(
    build: Callable[[], nn.Module],
    inputs: int,
    outputs: int,
    *,
    loss: Callable[[Any, Batch], Tensor] = squares,
    **recipe: Any,
) -> Own:
    """A recipe for the ranks of this process group."""
    made = Case(build.__name__, build, vectors(inputs, outputs), loss)
    return Own(build.__name__, dist.get_world_size(), made=made, **recipe)


def check(*recipes: Own, stages: tuple[int, ...] = STAGES, sharded: bool = False, **overrides: Any) -> None:
    """Train each recipe at each stage; fail with every difference from the reference, and from each other in bits.

    Args:
        recipes: what to train.
        stages: at which ZeRO stages.
        sharded: build the models under `zero.Init`.
        overrides: top-level configuration keys.
    """
    ways = [Way(stage, sharded_init=sharded, overrides=overrides) for stage in stages]
    problems = [problem for recipe in recipes for problem in problems_of(recipe, ways)]
    assert not problems, f"{len(problems)} differences\n" + "\n".join(problems[:30])


def problems_of(recipe: Own, ways: Sequence[Way]) -> list[str]:
    """What is wrong with a recipe, seen from this rank."""
    records: dict[int, Record] = {}
    problems: list[str] = []
    for way in ways:
        records[way.stage] = train_sharded(recipe, way)
        # Two ranks sum in one order; stages that sum micro-batches and ranks in the same order agree in bits.
        twin = way.stage - 1
        if twin in records and recipe.world == 2 and (recipe.accumulation == 1 or way.stage in (1, 3)):
            found = compare_bits(records[twin], records[way.stage])
            problems += [f"{recipe.case}: stages {twin} and {way.stage} differ in bits: {item}" for item in found]
    labelled = {f"{recipe.case} {recipe.precision} stage {stage}": record for stage, record in records.items()}
    return problems + compare_all(labelled, recipe)


# ---- engines


def config(stage: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    """A configuration with SGD, in which even the smallest parameter is released."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    elif precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": 4}
    return made


@contextmanager
def engine_for(model: nn.Module, stage: int, precision: str = "fp32", **changes: Any) -> Iterator[Any]:
    """An engine that is destroyed at the end. `changes` are top-level configuration keys, or `initialize`'s `optimizer`."""
    optimizer = changes.pop("optimizer", None)
    made = config(stage, precision)
    made["zero_optimization"].update(changes.pop("zero_optimization", {}))
    if optimizer is not None and not isinstance(optimizer, dict):
        made.pop("optimizer")
        engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config={**made, **changes})
    else:
        if optimizer is not None:
            changes["optimizer"] = optimizer
        engine, *_ = shardwise.initialize(model=model, config={**made, **changes})
    with engine:
        yield engine


def units_of(engine: Engine) -> list[str]:
    """Names of the modules that are gathered as one."""
    return [unit.name for unit in trainer_of(engine).parts.runtime.units]


# ---- comparisons


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.numel() == 0 or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agree(tensors: Iterable[Tensor]) -> bool:
    """Whether all ranks hold the same tensors in every bit."""
    mine = [(str(t.dtype), tuple(t.shape), _bytes(t).tolist()) for t in tensors]
    return all(other == mine for other in everywhere(mine))


@contextmanager
def raises(kind: type[BaseException], match: str | None = None) -> Iterator[Any]:
    """As `pytest.raises`, on every rank: a rank that raises alone would leave the others waiting in the next collective."""
    with pytest.raises(kind, match=match) as info:
        yield info
