"""How fast the optimizer step is, against a copy: what memory allows.

    python -m bench.optimizer

A step reads and writes every number of its state once, and there is nothing to gain beyond that. Each row is one way to take
the same step: its time, the bytes it has to move at least, and these bytes per second next to those of a plain copy.

Owns the ways and their clock. Refuses to know engines and ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.optim import LossScale, Piece, Shard, StepPath, StepSettings, plan_groups

__all__ = ["main"]

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FP32_BYTES = 28  # weight, two moments: read and written; gradient: read
MIXED_BYTES = 30  # the same with a master weight, and the 16-bit weight written


@dataclass(frozen=True)
class Way:
    """One way to take a step.

    Args:
        title: in the table.
        make: gives the function that takes one step over so many elements.
        bytes_per_element: what it has to move at least; None to leave it out.
    """

    title: str
    make: Callable[[int], Callable[[], None]]
    bytes_per_element: int


def _shardwise(kind: str, weight: torch.dtype | None, clip: float) -> Callable[[int], Callable[[], None]]:
    def make(elements: int) -> Callable[[], None]:
        parameter = Parameter(torch.empty(0))
        options = {"lr": 1e-3} if kind == "Lion" else OPTIONS
        plan = plan_groups(None, None, [("weight", parameter)], _section(kind, options))
        assert plan is not None
        shard = Shard(
            group=0,
            master=torch.randn(elements),
            weight=None if weight is None else torch.zeros(elements, dtype=weight),
            pieces=(Piece("weight", 0, 0, elements, elements),),
        )
        gradient = torch.randn(elements)
        path = StepPath([shard], plan.driver([shard]), StepSettings(clip=clip), _alone, _alone, LossScale.constant())

        def step() -> None:
            shard.grad = gradient
            path.run(plan.param_groups, 1.0, [True])

        return step

    return make


def _section(kind: str, options: Mapping[str, object]) -> object:
    from shardwise.config import load_config

    return load_config({"train_batch_size": 1, "optimizer": {"type": kind, "params": options}}, world_size=1).optimizer


def _alone(tensor: Tensor, name: str) -> Tensor:
    return tensor


def _torch(**how: bool) -> Callable[[int], Callable[[], None]]:
    def make(elements: int) -> Callable[[], None]:
        parameter = Parameter(torch.randn(elements))
        parameter.grad = torch.randn(elements)
        return torch.optim.AdamW([parameter], **OPTIONS, **how).step  # pyright: ignore[reportArgumentType]

    return make


def _compiled(elements: int) -> Callable[[], None]:
    """The update as one pointwise function, compiled; the norm apart, as it has to be known first."""

    def update(p: Tensor, g: Tensor, mean: Tensor, square: Tensor, rate: Tensor, correction: Tensor) -> None:
        mean.mul_(0.9).add_(g, alpha=0.1)
        square.mul_(0.999).addcmul_(g, g, value=0.001)
        p.mul_(1 - 1e-5).sub_(rate * mean / (square.sqrt() / correction + 1e-8))

    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the first step is to show what compiling takes
    compiled = torch.compile(update)
    tensors = [torch.randn(elements), torch.randn(elements), torch.zeros(elements), torch.zeros(elements)]
    numbers = [torch.tensor(1e-3), torch.tensor(1.0)]
    return lambda: compiled(*tensors, *numbers)


WAYS = (
    Way("torch AdamW, foreach (its default)", _torch(foreach=True), FP32_BYTES),
    Way("torch AdamW, fused", _torch(fused=True), FP32_BYTES),
    Way("one function, torch.compile", _compiled, FP32_BYTES),
    Way("Shardwise AdamW fp32, with norm and clipping", _shardwise("AdamW", None, 1.0), FP32_BYTES + 4),
    Way("Shardwise AdamW bf16 weights, with norm and clipping", _shardwise("AdamW", torch.bfloat16, 1.0), MIXED_BYTES + 4),
    Way("Shardwise Lion fp32, with norm and clipping", _shardwise("Lion", None, 1.0), 20 + 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=14_700_000, help="numbers in the shard (default: half of a 29 M model)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps; the median counts (default: 9)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which needs a C++ compiler")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    source, target = torch.randn(asked.elements), torch.empty(asked.elements)
    copied, _ = _time(lambda: target.copy_(source), asked.repeats)
    copy_rate = 8 * asked.elements / copied
    print(f"{asked.elements / 1e6:.1f} million elements, one thread, median of {asked.repeats}")
    print(f"{'':54}{'first':>9}{'step':>9}{'bytes':>7}{'GB/s':>7}{'of a copy':>11}")
    print(f"{'copy':54}{'':>9}{copied * 1e3:>6.0f} ms{8:>7}{copy_rate / 1e9:>7.1f}{'100%':>11}")
    for way in WAYS:
        if asked.no_compile and way.make is _compiled:
            continue
        seconds, first = _time(way.make(asked.elements), asked.repeats)
        rate = way.bytes_per_element * asked.elements / seconds
        print(
            f"{way.title:54}{first * 1e3:>6.0f} ms{seconds * 1e3:>6.0f} ms{way.bytes_per_element:>7}"
            f"{rate / 1e9:>7.1f}{rate / copy_rate:>11.0%}"
        )
    return 0


def _time(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and first time in seconds."""
    times: list[float] = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]), times[0]


if __name__ == "__main__":
    raise SystemExit(main())
