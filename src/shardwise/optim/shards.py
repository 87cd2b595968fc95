"""What the optimizer sees of a model: flat tensors, and which part of which parameter lies where in them.

Owns the data and its invariants. Refuses to know who filled the gradients and where the other parts are. A complex parameter
comes as pairs of real numbers: it has twice its number of elements here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import LayoutError, explain

__all__ = ["Piece", "Run", "Shard", "compute_dtype", "find_runs", "state_bytes"]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies inside a shard.

    Args:
        name: the parameter's name in the model.
        index: its number, unique in the engine and equal on all ranks.
        start, stop: the part is elements `[start, stop)` of the shard's tensors; never empty.
        numel: number of elements of the whole parameter.
        offset: the part begins at this element of the flattened parameter. Only needed to cut full-size state.
    """

    name: str
    index: int
    start: int
    stop: int
    numel: int
    offset: int = 0


@dataclass(eq=False)
class Shard:
    """One contiguous stretch of parameters that this rank updates.

    Args:
        group: index into the optimizer's `param_groups`.
        master: 1-D; the values that the update rule works on. May be the live weights themselves.
        weight: 1-D, as long as `master`; the low-precision weights that follow the master. None when master is the weight.
        grad: 1-D, as long as `master`; the sum over data ranks and micro-batches, still multiplied by the loss scale, zero in
            the padding. None stands for all zeros. The step that applies it may overwrite it.
        pieces: in order, without overlap; what they leave out is padding.
        counted: the part of `grad` that this rank accounts for in norms; replicas of a shard count different parts.
        state: 1-D tensors as long as `master`, filled by built-in rules on first use.
        steps: how many updates each piece has had.
    """

    group: int
    master: Tensor
    weight: Tensor | None = None
    grad: Tensor | None = None
    pieces: tuple[Piece, ...] = ()
    counted: slice = field(default_factory=lambda: slice(None))
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    steps: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.steps = self.steps or [0] * len(self.pieces)
        edges = [edge for piece in self.pieces for edge in (piece.start, piece.stop)]
        if self.master.dim() != 1 or edges != sorted(edges) or not all(p.start < p.stop for p in self.pieces):
            raise LayoutError(
                explain(
                    "a shard is not a 1-D stretch of pieces in order",
                    found=f"shape {tuple(self.master.shape)}, pieces {[(p.name, p.start, p.stop) for p in self.pieces]}",
                )
            )
        if edges and not 0 <= edges[0] <= edges[-1] <= len(self.master):
            raise LayoutError(explain("pieces lie outside their shard", found=f"{edges[0]}..{edges[-1]} of {len(self.master)}"))

    def counted_range(self) -> tuple[int, int]:
        """`counted` as plain numbers."""
        start, stop, _ = self.counted.indices(len(self.master))
        return start, max(start, stop)


class Run(NamedTuple):
    """Elements `[start, stop)` of a shard that get the same update: all in use, all after `step` earlier updates."""

    start: int
    stop: int
    step: int


def find_runs(shard: Shard, used: Sequence[bool]) -> list[Run]:
    """The stretches of a shard that a step updates, as few as possible; padding between two pieces joins them.

    Args:
        shard: where to look.
        used: by parameter index, whether any rank delivered a gradient for it.
    """
    steps = shard.steps
    if not shard.pieces:
        return []
    flags = [used[piece.index] for piece in shard.pieces]
    if all(flags) and min(steps) == max(steps):
        return [Run(0, len(shard.master), steps[0])]
    return list(_merge(shard, flags))


def _merge(shard: Shard, flags: list[bool]) -> Iterator[Run]:
    current: Run | None = None
    for piece, step, flag in zip(shard.pieces, shard.steps, flags, strict=True):
        if current and flag and step == current.step:
            current = Run(current.start, piece.stop, step)
            continue
        if current:
            yield current
        current = Run(piece.start, piece.stop, step) if flag else None
    if current:
        yield current


def count_steps(shard: Shard, used: Sequence[bool]) -> None:
    """Account for one update of the pieces in use."""
    shard.steps = [step + used[piece.index] for step, piece in zip(shard.steps, shard.pieces, strict=True)]


def compute_dtype(shard: Shard) -> torch.dtype:
    """The dtype an update is computed in: double for double masters, else float32, whatever the dtype at rest."""
    return torch.float64 if shard.master.dtype == torch.float64 else torch.float32


def state_bytes(shards: Sequence[Shard]) -> int:
    """Bytes of flat optimizer state that these shards hold."""
    return sum(tensor.nbytes for shard in shards for tensor in shard.state.values())
