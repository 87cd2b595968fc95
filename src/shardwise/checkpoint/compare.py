"""What differs between two checkpoints, of whatever formats.

Owns the comparison, in a few megabytes of memory. Refuses to know how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.checkpoint import plain
from shardwise.checkpoint.contents import Facts, Key, Kind, Source, Spec
from shardwise.checkpoint.datafile import Progress
from shardwise.checkpoint.streaming import Converted, chunks

__all__ = ["Difference", "FactDifference", "TensorDifference", "bytes_to_compare", "diff"]

KINDS: tuple[Kind, ...] = ("weight", "buffer", "optimizer")
"""What is compared unless told otherwise: not the states of random generators, of which each rank has its own."""

_SIZE = 1 << 20  # bytes of each side that are in memory at a time
_SMALLEST = 2.0**-1074  # of the numbers above zero
_FACTS = ("counters", "groups", "steps", "numbers", "loss_scale", "schedule", "loader", "extra", "ties", "excluded")
_COUNTED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # compared as they are, not as float64


@dataclass
class TensorDifference:
    """A tensor that both have, with other values or in another dtype.

    Args:
        key: its name in the first.
        one, other: what it is in each.
        differing: elements that are not equal; NaN is equal to NaN.
        largest: the largest absolute difference; infinite where one is and the other is not, or one is NaN.
        relative: the largest difference over the larger of the two absolute values.
    """

    key: Key
    one: Spec
    other: Spec
    differing: int = 0
    largest: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class FactDifference:
    """A plain value that is not the same in both. Absent ones are None."""

    name: str
    one: Any
    other: Any


@dataclass
class Difference:
    """What differs.

    Args:
        only_one, only_other: tensors that the other side does not have.
        shapes: tensors of different shape (or of which one is complex): name, what the first has, what the second has.
        values: tensors of one shape with other values or in another dtype.
        facts: plain values.
        compared: tensors whose values were compared.
    """

    only_one: list[Key] = field(default_factory=list[Key])
    only_other: list[Key] = field(default_factory=list[Key])
    shapes: list[tuple[Key, Spec, Spec]] = field(default_factory=list[tuple[Key, Spec, Spec]])
    values: list[TensorDifference] = field(default_factory=list[TensorDifference])
    facts: list[FactDifference] = field(default_factory=list[FactDifference])
    compared: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_one or self.only_other or self.shapes or self.values or self.facts)


def diff(one: Source, other: Source, *, kinds: Collection[Kind] = KINDS, progress: Progress | None = None) -> Difference:
    """Compare two checkpoints. Names of tied weights are one.

    Args:
        one, other: the checkpoints.
        kinds: of tensors. Plain values (counters, options of the optimizer, ...) are compared if "optimizer" is among them, and
            where both have some.
        progress: told of bytes of the first as they are compared.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found = Difference()
    pairs = _pairs(one, other, kinds, found)
    found.compared = len(pairs)
    compared = _compare(one, other, pairs, progress)
    found.values = [each for each in compared if each.differing or each.one.dtype != each.other.dtype]
    if "optimizer" in kinds:
        found.facts = list(_compare_facts(one.facts, other.facts))
    return found


def bytes_to_compare(one: Source, other: Source, *, kinds: Collection[Kind] = KINDS) -> int:
    """How many bytes `diff` will report to `progress`."""
    pairs = _pairs(one, other, kinds, Difference())
    dtypes = _common_dtypes(one, other, pairs)
    return sum(Spec(one.specs[key].shape, dtypes.get(key, one.specs[key].dtype)).nbytes for key in pairs)


def _pairs(one: Source, other: Source, kinds: Collection[Kind], found: Difference) -> dict[Key, Key]:
    """Tensors to compare, by their names on both sides; notes what cannot be."""
    pairs: dict[Key, Key] = {}
    for key, spec in one.specs.items():
        if key.kind not in kinds:
            continue
        match = _find(key, one.facts, other)
        if match is None:
            found.only_one.append(key)
        elif other.specs[match].shape != spec.shape or other.specs[match].dtype.is_complex != spec.dtype.is_complex:
            found.shapes.append((key, spec, other.specs[match]))
        else:
            pairs[key] = match
    for key in other.specs:
        if key.kind in kinds and _find(key, other.facts, one) is None:
            found.only_other.append(key)
    return pairs


def _find(key: Key, facts: Facts, there: Source) -> Key | None:
    """The tensor of the other side.

    A tied weight may have its values under another of its names there, and some formats do not tell weights from buffers.
    """
    names = [key.name, there.facts.ties.get(key.name), *(alias for alias, name in facts.ties.items() if name == key.name)]
    kinds: tuple[Kind, ...] = (key.kind, "weight", "buffer") if key.kind in ("weight", "buffer") else (key.kind,)
    candidates = (Key(kind, name, key.state) for kind in kinds for name in names if name is not None)
    return next((candidate for candidate in candidates if candidate in there.specs), None)


def _common_dtypes(one: Source, other: Source, pairs: Mapping[Key, Key]) -> dict[Key, torch.dtype]:
    """The dtype in which tensors are compared that have different ones, by name in the first."""
    found: dict[Key, torch.dtype] = {}
    for key, match in pairs.items():
        mine, theirs = one.specs[key].dtype, other.specs[match].dtype
        if mine != theirs:
            found[key] = torch.complex128 if mine.is_complex else torch.float64
            if mine.is_floating_point and theirs.is_floating_point and mine.itemsize <= 4 and theirs.itemsize <= 4:
                found[key] = torch.float32
    return found


def _compare(one: Source, other: Source, pairs: Mapping[Key, Key], progress: Progress | None) -> Iterator[TensorDifference]:
    dtypes = _common_dtypes(one, other, pairs)
    mine = chunks(Converted(one, dtypes), pairs, _SIZE)
    theirs = chunks(Converted(other, {pairs[key]: dtype for key, dtype in dtypes.items()}), pairs.values(), _SIZE)
    found = {key: TensorDifference(key, one.specs[key], other.specs[match]) for key, match in pairs.items()}
    for lefts, rights in zip(mine, theirs, strict=True):  # cut alike, as dtypes are the same
        for left, right in zip(lefts, rights, strict=True):
            _add(found[left.key], left.values, right.values)
            if progress:
                progress(left.values.nbytes)
    yield from found.values()


def _add(found: TensorDifference, left: Tensor, right: Tensor) -> None:
    """Take some elements into account."""
    if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return
    x, y = left.double(), right.double()
    gap = (x - y).abs_()
    count = int(torch.count_nonzero(gap if left.dtype not in _COUNTED else left != right))
    scale = torch.maximum(x.abs(), y.abs())
    if not gap.isfinite().all():
        alike = (x == y) | (x.isnan() & y.isnan())
        count = len(x) - int(torch.count_nonzero(alike))
        gap = torch.where(alike, 0.0, torch.where(gap.isnan(), torch.inf, gap))
        scale = torch.where(alike, 1.0, scale.nan_to_num(1.0, 1.0))
    found.differing += count
    found.largest = max(found.largest, gap.max().item())
    found.relative = max(found.relative, gap.div_(scale.clamp_min_(_SMALLEST)).max().item())


def _compare_facts(one: Facts, other: Facts) -> Iterator[FactDifference]:
    for name in _FACTS:
        left, right = getattr(one, name), getattr(other, name)
        if left and right:
            mine, theirs = dict(_leaves(left, name)), dict(_leaves(right, name))
            for path in dict.fromkeys((*mine, *theirs)):
                if path not in mine or path not in theirs or _text(mine[path]) != _text(theirs[path]):
                    yield FactDifference(path, mine.get(path), theirs.get(path))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values inside dicts and lists, each with the way to it."""
    if isinstance(value, dict) and value:
        for key, item in cast("dict[Any, Any]", value).items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list) and value and not all(isinstance(item, str) for item in cast("list[Any]", value)):
        for number, item in enumerate(cast("list[Any]", value)):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def _text(value: Any) -> str:
    return json.dumps(plain.to_json(value, "a fact"), sort_keys=True)
