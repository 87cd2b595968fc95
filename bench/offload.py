"""The step of an offloaded optimizer: 16-bit gradient in, float32 masters and moments updated, 16-bit weight out.

    python -m bench.offload
    python -m bench.offload --disk /path/on/a/fast/disk

Rows take turns, so that ratios hold on a machine that others use too. DeepSpeed's CPUAdam takes part where it is installed and
can be compiled; it works on float32 numbers, so that its row has the casts around it, as in its own offload.

Owns the ways and their clock. Refuses to know engines and ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.optimizer import OPTIONS
from shardwise.config import load_config
from shardwise.optim import LossScale, Paging, Piece, Shard, StepPath, StepSettings, plan_groups
from shardwise.tiers import DiskSettings, DiskTier, HostTier

__all__ = ["main"]

BYTES = (
    30  # gradient read (2), master and two moments read and written (24), weight written (2), and gradient read for the norm
)
PAGE = 16 << 20

Step = Callable[[], Any]


def _shardwise(elements: int, paging: Paging | None) -> Step:
    section = load_config({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": OPTIONS}}, world_size=1).optimizer
    plan = plan_groups(None, None, [("weight", Parameter(torch.empty(0)))], section)
    assert plan is not None
    shard = Shard(
        group=0,
        master=torch.randn(elements),
        weight=torch.zeros(elements, dtype=torch.bfloat16),
        pieces=(Piece("weight", 0, 0, elements, elements),),
    )
    gradient = torch.randn(elements).bfloat16()
    settings = StepSettings(clip=1.0)
    path = StepPath([shard], plan.driver([shard], paging), settings, _alone, _alone, LossScale.constant())

    def step() -> None:
        shard.grad = gradient
        path.run(plan.param_groups, 1.0, [True])

    return step


def _alone(tensor: Tensor, name: str) -> Tensor:
    return tensor


def _with_casts(elements: int, make: Callable[[Parameter], torch.optim.Optimizer]) -> Step:
    """An optimizer of float32 numbers between 16-bit gradients and weights, with torch's clipping."""
    master = Parameter(torch.randn(elements))
    weight, gradient = torch.zeros(elements, dtype=torch.bfloat16), torch.randn(elements).bfloat16()
    master.grad = torch.zeros(elements)
    optimizer = make(master)

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(gradient)
        torch.nn.utils.clip_grad_norm_([master], 1.0)
        optimizer.step()
        weight.copy_(master.detach())

    return step


def _deepspeed(parameter: Parameter) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    return DeepSpeedCPUAdam([parameter], **OPTIONS)


def _ways(elements: int, disk: Path | None) -> dict[str, Step]:
    ways: dict[str, Step] = {
        "torch AdamW fused, and the casts": _with_casts(
            elements, lambda parameter: torch.optim.AdamW([parameter], **OPTIONS, fused=True)
        )
    }
    try:
        ways["DeepSpeed CPUAdam, and the casts"] = _with_casts(elements, _deepspeed)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being compiled
        print(f"DeepSpeed's CPUAdam takes no part: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    ways["Shardwise, state on the device"] = _shardwise(elements, None)
    ways["Shardwise, state in host memory"] = _shardwise(elements, Paging(HostTier, PAGE))
    if disk is not None:
        settings = DiskSettings(buffer_size=PAGE)
        ways[f"Shardwise, state on disk, {settings.buffer_count * PAGE >> 20} MiB of buffers"] = _shardwise(
            elements, Paging(lambda: DiskTier(disk, settings), PAGE)
        )
    return ways


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.offload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=16_000_000, help="numbers in the shard (default: 16 million)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each way, taking turns; the median counts (default: 7)")
    parser.add_argument("--disk", type=Path, help="a folder on a fast disk; without it the disk takes no part")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways = _ways(asked.elements, asked.disk)
    source, target = torch.randn(asked.elements), torch.empty(asked.elements)
    ways = {"copy": lambda: target.copy_(source), **ways}
    times: dict[str, list[float]] = {title: [] for title in ways}
    for number in range(asked.rounds + 2):
        for title, step in ways.items():
            begin = time.perf_counter()
            step()
            if number >= 2:
                times[title].append(time.perf_counter() - begin)
    copied = statistics.median(times["copy"])
    print(f"{asked.elements / 1e6:.1f} million elements, bf16 gradients and weights, one thread, median of {asked.rounds}")
    print(f"{'':56}{'step':>9}{'GB/s':>7}{'of a copy':>11}{'of CPUAdam':>12}")
    peer = times.get("DeepSpeed CPUAdam, and the casts")
    for title, found in times.items():
        seconds = statistics.median(found)
        rate = (8 if title == "copy" else BYTES) * asked.elements / seconds
        against = f"{seconds / statistics.median(peer):>12.2f}" if peer and title != "copy" else f"{'':>12}"
        share = rate / (8 * asked.elements / copied)
        print(f"{title:56}{seconds * 1e3:>6.0f} ms{rate / 1e9:>7.1f}{share:>11.0%}{against}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
