"""A model with every kind of state that a checkpoint must hold, and runs of it that are interrupted or not.

Owns what the checkpoint tests share. Batches are made for the whole job and cut by rank, so that the same steps can be taken on
any number of ranks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import Engine, zero
from tests.distributed.scenario_support import settings

__all__ = ["BATCH", "Rich", "die_in_write", "go_on", "open_engine", "state_of", "train_on"]

BATCH = 12
"""Samples of a step; divisible by 1, 2, 3 and 4 ranks."""


class Rich(nn.Module):
    """Weights that are tied, frozen, scalar, empty, complex, integer, transposed; buffers that change, or are not saved."""

    def __init__(self, width: int = 5, words: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.temperature = Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.table = Parameter(torch.arange(6, dtype=torch.int64), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.turn = Parameter(torch.randn(width, dtype=torch.complex64))
        self.across = Parameter(torch.randn(3, width).t())
        self.nothing = Parameter(torch.empty(0, 3))
        self.unused = Parameter(torch.randn(2, 2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * self.temperature + self.table[:1].to(self.temperature.dtype)
        x = self.frozen(x)
        for block in self.blocks:
            x = x + block(x)
        x = x + (x * self.turn).abs().to(x.dtype) + (x @ self.across).sum(-1, keepdim=True) * 0.1
        if self.training:
            self.seen += 1
            self.mean.mul_(0.5).add_(0.25)
        return self.head(x) + self.nothing.sum()


def build_rich(**sizes: int) -> Rich:
    torch.manual_seed(77)
    return Rich(**sizes)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "lr": 0.02},
    ]


def open_engine(stage: int, precision: str = "fp32", model: nn.Module | None = None, **changes: Any) -> Engine:
    """An engine with two groups, AdamW and a schedule; its weights differ from those that were saved unless they are loaded."""
    model = build_rich() if model is None else model
    changes.setdefault("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}})
    optimizer = changes.pop("optimizer", torch.optim.AdamW)
    config = settings(stage, micro=BATCH // dist.get_world_size(), precision=precision, gradient_clipping=0.5, **changes)
    groups = changes.pop("groups", grouped(model))
    return shardwise.initialize(
        model=model, optimizer=lambda params: optimizer(params, lr=0.05), model_parameters=groups, config=config
    )[0]


def train_on(engine: Engine, steps: int, *, first: int = 0) -> list[float]:
    """Some steps; returns the losses of the whole batch."""
    losses = []
    for step in range(first, first + steps):
        source = torch.Generator().manual_seed(500 + step)
        words = torch.randint(0, 7, (BATCH, 4), generator=source)
        size, rank = BATCH // dist.get_world_size(), dist.get_rank()
        mine = words[rank * size : (rank + 1) * size]
        logits = engine(mine)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), mine.roll(1, 1).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything that must survive, whole and by name. Collective."""
    module, found = engine.module, {}
    for name, parameter in module.named_parameters():
        master = shardwise.utils.safe_get_full_fp32_param(parameter)
        found[f"weight {name}"] = master
        if parameter.requires_grad:
            for state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                value = shardwise.utils.safe_get_full_optimizer_state(parameter, state)
                if value is not None:
                    found[f"{state} {name}"] = value
    with zero.GatheredParameters(list(module.parameters())):
        found.update({f"live {name}": parameter.detach().clone() for name, parameter in module.named_parameters()})
    found.update({f"buffer {name}": value.clone() for name, value in module.named_buffers() if name != "scratch"})
    found["counters"] = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
    found["rates"] = engine.get_lr()
    found["scale"] = engine.loss_scale
    found["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    return found


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    """Assert that two states are equal, bit for bit unless a tolerance is given."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, value in one.items():
        if not isinstance(value, Tensor):
            assert value == other[name], f"{name}: {value} is not {other[name]}"
        elif tolerance and value.is_floating_point():
            torch.testing.assert_close(
                value, other[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        elif not tolerance or not value.is_complex():
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def go_on(stage: int, directory: Path) -> None:
    """Body for ranks: load what was saved after 3 steps, and take 3 more."""
    before, expected = torch.load(directory / "expected.pt")
    with open_engine(stage) as engine:
        engine.load_checkpoint(directory)
        same(state_of(engine), before)
        train_on(engine, 3, first=3)
        same(state_of(engine), expected, tolerance=1e-6)


def die_in_write() -> None:
    """Have this process killed when it is about to sync a file."""
    from shardwise.checkpoint import datafile

    def dies(*args: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    datafile.os.fsync = dies  # this process ends here
