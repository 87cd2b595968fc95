"""A small model with units, its data, and the few calls that the scenario tests repeat.

Owns what several of them share. Refuses to know any one situation. Batches are made for the whole job and cut by rank, so that
plain PyTorch over the whole batch is what the ranks together must reproduce.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import Engine, zero

__all__ = [
    "STAGES",
    "Net",
    "adamw",
    "as_values",
    "assert_close",
    "assert_equal",
    "build",
    "clip",
    "end_process",
    "everywhere",
    "full",
    "part",
    "reference",
    "samples",
    "settings",
    "sgd",
    "squares",
    "start",
    "train",
    "warnings_logged",
]

STAGES = (0, 1, 2, 3)
RELATIVE, ABSOLUTE = 1e-5, 1e-6

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Two blocks (units of their own), and a parameter and a layer that belong to the root."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.gain = Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(make: Callable[[], nn.Module] = Net) -> Any:
    """The model with the same initial weights on every call and rank."""
    torch.manual_seed(1234)
    return make()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # With an eps this large, rounding noise in gradients near zero is not blown up to the size of the learning rate.
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, weight_decay=0.1)


def settings(stage: int, *, micro: int = 2, accumulation: int = 1, precision: str = "fp32", **extra: Any) -> dict[str, Any]:
    """A configuration in which even the smallest parameter is released, so that this is seen to work."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **extra.pop("zero", {})},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, **extra.pop("fp16", {})}
    return {**config, **extra}


def start(
    model: nn.Module, stage: int, optimizer: Callable[[Any], torch.optim.Optimizer] | None = sgd, **changes: Any
) -> Engine:
    """An engine that trains all of the model's parameters."""
    return shardwise.initialize(model=model, optimizer=optimizer, config=settings(stage, **changes))[0]


def samples(count: int, step: int = 0, width: int = 5) -> Batch:
    """Inputs and targets of the whole job at one step."""
    source = torch.Generator().manual_seed(100 + step)
    return torch.randn(count, width, generator=source), torch.randn(count, 3, generator=source)


def part(batch: Sequence[Tensor], micro: int, number: int = 0, rank: int | None = None) -> Any:
    """One rank's micro-batch: the `number`-th one of `micro` samples."""
    rank = dist.get_rank() if rank is None else rank
    first = (number * dist.get_world_size() + rank) * micro
    return tuple(tensor[first : first + micro] for tensor in batch)


def squares(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """Mean over the batch, in float32 whatever the model computes in."""
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def train(engine: Engine, steps: int, *, micro: int = 2, first: int = 0) -> None:
    """Ordinary steps of one micro-batch."""
    for step in range(first, first + steps):
        engine.backward(squares(engine, part(samples(micro * dist.get_world_size(), step), micro)))
        engine.step()


def reference(
    model: nn.Module, steps: int, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, *, batch: int = 4, first: int = 0
) -> dict[str, Tensor]:
    """What `train` must arrive at: plain PyTorch over the whole batch, on the given model."""
    updates = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for step in range(first, first + steps):
        updates.zero_grad()
        squares(model, samples(batch, step)).backward()
        updates.step()
    return full(model)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's whole weights, plain or sharded. Collective if sharded."""
    module = model.module if isinstance(model, Engine) else model
    with zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def clip(model: nn.Module, limit: float) -> float:
    """torch's own clipping; returns the norm before it."""
    return float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), limit))


def assert_close(actual: Any, expected: Any, what: Any = "") -> None:
    """Equal within the tolerances of float32 parity. Tensors, or mappings of them."""
    torch.testing.assert_close(actual, expected, rtol=RELATIVE, atol=ABSOLUTE, msg=lambda text: f"{what}: {text}")


def assert_equal(actual: Any, expected: Any, what: Any = "") -> None:
    """Equal in every bit."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def everywhere(value: Any) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def as_values(state: Mapping[Any, Any]) -> list[Any]:
    """Copies of all values of an optimizer's state, in order."""
    return [
        value.detach().clone() if isinstance(value, Tensor) else value for each in state.values() for value in each.values()
    ]


def end_process() -> None:
    """What was in flight when the ranks parted never ends, and gloo waits for it at the end of a group. All was checked."""
    os._exit(0)


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What Shardwise logs on this rank from warnings up."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
