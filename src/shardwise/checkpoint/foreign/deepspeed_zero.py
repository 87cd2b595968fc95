"""Where each parameter is in the flat groups of DeepSpeed's ZeRO stages.

Stages 1 and 2 put the parameters of an optimizer group end to end, pad the whole to a multiple of the number of ranks, and give
each rank one contiguous part. Stage 3 cuts each parameter into equal parts, one for each rank, the last ones padded, and each
rank puts its parts end to end in sub-groups. Optimizer states have the layout of the master weights.

Owns that arithmetic. Refuses to know files and what else is in them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Protocol

from shardwise.checkpoint.contents import Spec
from shardwise.checkpoint.foreign.files import damaged
from shardwise.checkpoint.foreign.pieces import Piece
from shardwise.checkpoint.foreign.stored import StridedTensor

__all__ = ["FlatLayout", "GroupedLayout", "Optimized", "PartitionedLayout", "Place", "Shards", "collect"]

# Elements per rank that a group may be longer than its parameters. DeepSpeed pads to 2 elements per rank.
_PADDING = 1024

Place = tuple[Spec, list[Piece]]
"""A tensor, and what it is put together from."""

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""Shapes of the parameters by name, in order, for each flat group."""


@dataclass
class Optimized:
    """What the optimizer's part of a checkpoint holds, by parameter.

    Args:
        weights: the masters.
        states: tensors of optimizer state, by parameter and name of the state.
        others: optimizer state that is not such a tensor, by parameter, as it was found; parameters may share it.
        groups: options of the optimizer's groups, as they were found, and their parameters.
        left_out: what was there but could not be used.
    """

    weights: dict[str, Place] = field(default_factory=dict[str, Place])
    states: dict[tuple[str, str], Place] = field(default_factory=dict[tuple[str, str], Place])
    others: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    groups: list[tuple[Mapping[str, Any], list[str]]] = field(default_factory=list[tuple[Mapping[str, Any], list[str]]])
    left_out: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Shards:
    """What the files of the optimizer hold.

    Args:
        where: the directory, for errors.
        masters: by rank and flat group.
        states: by rank and flat group: names and tensors or numbers.
    """

    where: str
    masters: list[list[StridedTensor]]
    states: list[list[dict[str, Any]]]


class FlatLayout(Protocol):
    """Finds parameters in flat groups."""

    def group(self, name: str) -> int:
        """The flat group of a parameter."""
        ...

    def pieces(self, name: str, flat: Sequence[Sequence[StridedTensor | None]]) -> list[Piece]:
        """The pieces of a parameter in tensors that are laid out alike, by rank and flat group."""
        ...


class GroupedLayout:
    """Stages 1 and 2.

    Args:
        shapes: of the parameters.
        shards: the masters, which must have a place for all of them.
        paddings: elements after each parameter, by group; or nothing.

    Raises:
        CheckpointError: they have not.
    """

    def __init__(self, shapes: Shapes, shards: Shards, paddings: Sequence[Sequence[int]] = ()) -> None:
        self._spots: dict[str, tuple[int, int, int]] = {}
        # Only the last ranks are shorter, by the padding that is not stored.
        self._sizes = [tensor.spec.length for tensor in shards.masters[0]]
        world = len(shards.masters)
        for number, group in enumerate(shapes):
            gaps = list(paddings[number]) if paddings else [0] * len(group)
            if len(gaps) != len(group) or number >= len(self._sizes):
                raise damaged(shards.where, f"{len(gaps)} places in group {number}", f"{len(group)} parameters")
            end = 0
            for (name, shape), gap in zip(group.items(), gaps, strict=True):
                self._spots[name] = (number, end, prod(shape))
                end += prod(shape) + gap
            held = sum(rank[number].spec.length for rank in shards.masters)
            if not end - sum(gaps[-1:]) <= held <= end + _PADDING * world:
                raise damaged(shards.where, f"{held} elements in group {number}", f"{end}, and padding")

    def group(self, name: str) -> int:
        """The flat group of a parameter."""
        return self._spots[name][0]

    def pieces(self, name: str, flat: Sequence[Sequence[StridedTensor | None]]) -> list[Piece]:
        """The pieces of a parameter in tensors that are laid out alike, by rank and flat group."""
        group, offset, length = self._spots[name]
        size = self._sizes[group]
        first = offset // size if size else 0
        chain = [(rank * size, flat[rank][group]) for rank in range(first, len(flat))]
        return _stretch(chain, offset, length, 0)


class PartitionedLayout:
    """Stage 3.

    Args:
        shapes: of the parameters.
        shards: the masters, which must have a place for all of them.

    Raises:
        CheckpointError: they have not.
    """

    def __init__(self, shapes: Shapes, shards: Shards) -> None:
        self._world = len(shards.masters)
        self._spots: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in (item for group in shapes for item in group.items()):
            self._spots[name] = (end, prod(shape))
            end += self.part(prod(shape))
        for rank, tensors in enumerate(shards.masters):
            lengths = [tensor.spec.length for tensor in tensors]
            if sum(lengths) != end:
                raise damaged(shards.where, f"{sum(lengths)} elements on rank {rank}", f"{end}")
        self._starts = list(accumulate((tensor.spec.length for tensor in shards.masters[0]), initial=0))[:-1]

    def part(self, length: int) -> int:
        """Elements of a parameter that each rank has."""
        return -(-length // self._world)

    def group(self, name: str) -> int:
        """The flat group in which a parameter begins."""
        return bisect_right(self._starts, self._spots[name][0]) - 1

    def pieces(self, name: str, flat: Sequence[Sequence[StridedTensor | None]]) -> list[Piece]:
        """The pieces of a parameter in tensors that are laid out alike, by rank and flat group."""
        offset, length = self._spots[name]
        part, first = self.part(length), self.group(name)
        pieces: list[Piece] = []
        for rank, tensors in enumerate(flat):
            chain = list(zip(self._starts[first:], tensors[first:], strict=True))
            pieces += _stretch(chain, offset, min(part, length - rank * part), rank * part)
        return pieces


def _stretch(chain: Sequence[tuple[int, StridedTensor | None]], low: int, length: int, at: int) -> list[Piece]:
    """The pieces of elements `[low, low + length)` of tensors that begin at given positions; the first becomes element `at`."""
    pieces: list[Piece] = []
    for number, (position, tensor) in enumerate(chain):
        if position >= low + length:
            break
        if tensor is None:
            continue
        limit = position + tensor.spec.length
        if number + 1 < len(chain):
            limit = min(limit, chain[number + 1][0])
        start, stop = max(low, position), min(low + length, limit)
        if start < stop:
            pieces.append(Piece(at + start - low, stop - start, tensor, start - position))
    return pieces


def collect(shapes: Shapes, shards: Shards, layout: FlatLayout) -> Optimized:
    """Masters and optimizer state of all parameters. Groups are left to the caller."""
    found = Optimized()
    names = {state for rank in shards.states for group in rank for state, value in group.items() if _flat(value)}
    states = {state: [[_flat(group.get(state)) for group in rank] for rank in shards.states] for state in sorted(names)}
    others = [{key: value for key, value in group.items() if key not in states} for group in shards.states[0]]
    unfit: set[str] = set()
    for name, shape in (item for group in shapes for item in group.items()):
        number = layout.group(name)
        masters = [rank[number] for rank in shards.masters]
        found.weights[name] = (Spec(shape, masters[0].spec.dtype), layout.pieces(name, shards.masters))
        found.others[name] = others[number]
        for state, flat in states.items():
            held = [rank[number] for rank in flat]
            first = next((tensor for tensor in held if tensor is not None), None)
            if first is None:
                continue  # no step was taken
            if any(tensor is None or tensor.spec.length < own.spec.length for tensor, own in zip(held, masters, strict=True)):
                unfit.add(state)
                continue
            found.states[name, state] = (Spec(shape, first.spec.dtype), layout.pieces(name, flat))
    found.left_out += [f"optimizer state {state}, which is not laid out as the weights" for state in sorted(unfit)]
    return found


def _flat(value: Any) -> StridedTensor | None:
    return value if isinstance(value, StridedTensor) and len(value.spec.shape) == 1 else None
