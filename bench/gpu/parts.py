"""What one process of `bench.gpu.check` does: train one system, or copy memory, and write what it saw.

Owns clocks and memory counters on the device. Refuses to know what the numbers are compared with.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.cases import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape
from bench.gpt import GPT

__all__ = ["Job", "perform"]


@dataclass(frozen=True)
class Job:
    """One measurement.

    Args:
        shape: size of the GPT.
        context: tokens of a sequence.
        batch: sequences of all ranks together.
        steps: measured steps.
        warm_up: steps before.
        device: type of the device.
        precision: "fp32" or "bf16".
        system: "plain", "fsdp2", "shardwise" or "copy".
        stage: ZeRO stage of Shardwise.
        world: ranks, all on the first device.
    """

    shape: Shape
    context: int
    batch: int
    steps: int
    warm_up: int
    device: str
    precision: str = "fp32"
    system: str = "plain"
    stage: int = 0
    world: int = 1

    @property
    def title(self) -> str:
        """In words."""
        if self.system == "shardwise":
            ranks = "" if self.world == 1 else f", {self.world} ranks over gloo"
            return f"Shardwise stage {self.stage}{ranks}"
        return {"plain": "plain PyTorch", "fsdp2": "FSDP2", "copy": "copy on the device"}[self.system]

    def of(self, system: str, stage: int = 0, *, world: int = 1) -> Job:
        """The same for another system."""
        return replace(self, system=system, stage=stage, world=world)

    def as_text(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Job:
        """What `as_text` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


Trainer = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], None]]
"""Forward and backward, which gives the loss; and the update."""


def perform(job: Job, folder: Path) -> None:
    """Do a job as the rank that the environment says, and write `RANK.json`."""
    rank = int(os.environ["RANK"])
    found = _copy(job) if job.system == "copy" else _train(job, rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _train(job: Job, rank: int, folder: Path) -> dict[str, Any]:
    device = torch.device(job.device)
    if job.system != "plain":
        backend = "gloo" if job.world > 1 else dist.get_default_backend_for_device(job.device)
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=job.world)
    torch.manual_seed(0)
    with device:
        model = GPT(job.shape, job.context)
    _reset_peak(device)
    compute, update = {"plain": _plain, "fsdp2": _fsdp2, "shardwise": _shardwise}[job.system](job, model)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(job.shape.vocabulary, (2, job.batch, job.context + 1), generator=generator)
    mine = text[:, rank * job.batch // job.world : (rank + 1) * job.batch // job.world].to(device)
    losses: list[float] = []
    steps: list[float] = []
    updates: list[float] = []
    for number in range(job.warm_up + job.steps):
        begin = _now(device)
        batch = mine[number % len(mine)]
        loss = compute(batch[:, :-1], batch[:, 1:])
        middle = _now(device)
        update()
        end = _now(device)
        losses.append(float(loss))
        if number >= job.warm_up:
            steps.append(end - begin)
            updates.append(end - middle)
    found = {
        "losses": losses,
        "step_s": statistics.median(steps),
        "update_s": statistics.median(updates),
        "peak": _peak(device),
    }
    if job.system != "plain":
        dist.destroy_process_group()
    return found


def _loop(job: Job, model: nn.Module) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def compute(text: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(text, targets)
        loss.backward()
        return loss.detach()

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return compute, update


def _plain(job: Job, model: nn.Module) -> Trainer:
    return _loop(job, model)


def _fsdp2(job: Job, model: nn.Module) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(job.device, (job.world,))}
    if job.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(job, model)


def _shardwise(job: Job, model: nn.Module) -> Trainer:
    import shardwise

    config = {
        "train_micro_batch_size_per_gpu": job.batch // job.world,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": job.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": job.stage},
    }
    engine, *_ = shardwise.initialize(model=model, config=config)

    def compute(text: Tensor, targets: Tensor) -> Tensor:
        loss = engine(text, targets)
        engine.backward(loss)
        return loss.detach()

    return compute, engine.step


def _copy(job: Job) -> dict[str, Any]:
    """Bytes read and written per second by a copy that is much larger than any cache."""
    device = torch.device(job.device)
    size = 1 << (22 if device.type == "cpu" else 30)
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    times: list[float] = []
    for _ in range(8):
        begin = _now(device)
        target.copy_(source)
        times.append(_now(device) - begin)
    return {"bytes_per_s": 2 * source.nbytes / statistics.median(times[2:])}


def _now(device: torch.device) -> float:
    """Seconds, after all work on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def _peak(device: torch.device) -> int | None:
    """Most bytes that tensors held at once; None where the device does not count them."""
    return int(torch.accelerator.max_memory_allocated()) if device.type != "cpu" else None
