"""The ways to train that `bench.step` compares: plain PyTorch, its DDP and FSDP2, and Shardwise at each stage.

Owns how each is set up, all around the same model, data and optimizer. Refuses to know clocks and processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

__all__ = ["VARIANTS", "Task", "Variant", "build"]

LEARNING_RATE = 1e-3

Step = Callable[[], Tensor]
"""Trains one step on this rank's part of the batch and returns its loss."""


@dataclass(frozen=True)
class Task:
    """What every variant does: a GPT of this size, this many sequences per rank."""

    ranks: int
    layers: int
    width: int
    context: int
    batch: int


@dataclass(frozen=True)
class Variant:
    """One way to train. `alone`: in a single process that takes the whole batch and all threads."""

    name: str
    setup: Callable[[nn.Module, Tensor, Tensor], Step]
    alone: bool = False


def build(variant: Variant, task: Task, rank: int) -> Step:
    """The step function of one rank: equal weights everywhere, and data that differs between ranks as in a real run."""
    torch.manual_seed(0)
    model = _example_model(task)
    text = torch.randint(256, (task.ranks * task.batch, task.context + 1))
    mine = text if variant.alone else text[rank * task.batch : (rank + 1) * task.batch]
    return variant.setup(model, mine[:, :-1], mine[:, 1:])


def _example_model(task: Task) -> nn.Module:
    path = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(task.layers, task.width, task.width // 64, task.context)


def _plain_loop(model: nn.Module, text: Tensor, targets: Tensor) -> Step:
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor:
        loss = model(text, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _ddp(model: nn.Module, text: Tensor, targets: Tensor) -> Step:
    return _plain_loop(nn.parallel.DistributedDataParallel(model), text, targets)


def _fsdp2(model: nn.Module, text: Tensor, targets: Tensor) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(model, text, targets)


def _shardwise(stage: int, model: nn.Module, text: Tensor, targets: Tensor) -> Step:
    import shardwise

    config = {
        "train_micro_batch_size_per_gpu": len(text),
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
    }
    engine, *_ = shardwise.initialize(model=model, config=config)

    def step() -> Tensor:
        loss = engine(text, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


VARIANTS = (
    Variant("PyTorch, one process", _plain_loop, alone=True),
    Variant("PyTorch DDP", _ddp),
    Variant("PyTorch FSDP2", _fsdp2),
    *(Variant(f"Shardwise stage {stage}", partial(_shardwise, stage)) for stage in range(4)),
)
