"""Passing all of a checkpoint through a few megabytes of memory, and in other dtypes than it is stored in.

Owns the cutting of tensors into what fits, and the conversion. Refuses to know where values come from and go to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from shardwise.checkpoint.contents import DTYPES, Facts, Key, Part, Source, Spec, real_dtype
from shardwise.checkpoint.datafile import Progress
from shardwise.errors import CheckpointError, explain

__all__ = ["CHUNK", "Converted", "chunks", "compute_dtypes", "float_dtypes"]

CHUNK = 1 << 23
"""Bytes of values that are in memory at a time."""

_ALIGN = 16  # bytes at whose multiples values begin in memory; no dtype is wider

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def chunks(source: Source, keys: Iterable[Key], size: int = CHUNK) -> Iterator[list[Part]]:
    """All values of some tensors, one after the other: neighbours together, large tensors in slices.

    Args:
        source: where they are.
        keys: which, in which order.
        size: bytes at a time.

    Yields:
        parts with their values, which the next ones overwrite.
    """
    wanted = [_Wanted(key, source.specs[key], 0, source.specs[key].length) for key in keys]
    for batch in _batches(wanted, size):
        parts = [part for _, part in batch]
        source.read(parts)
        yield parts


class _Wanted(NamedTuple):
    key: Key
    spec: Spec
    start: int
    stop: int


def _batches(wanted: Iterable[_Wanted], size: int) -> Iterator[list[tuple[int, Part]]]:
    """The elements that are wanted as lists of parts that fit into memory of this size; with the number of the wish."""
    scratch = torch.empty(size, dtype=torch.uint8)
    batch: list[tuple[int, Part]] = []
    used = 0
    for number, (key, spec, start, stop) in enumerate(wanted):
        dtype = real_dtype(spec.dtype)
        while start < stop:
            room = (size - used) // dtype.itemsize
            if not room:
                yield batch
                batch, used, room = [], 0, size // dtype.itemsize
            end = min(stop, start + room)
            stretch = scratch[used : used + (end - start) * dtype.itemsize]
            batch.append((number, Part(key, spec, start, stretch.view(dtype))))
            used = min(-(-(used + len(stretch)) // _ALIGN) * _ALIGN, size)
            start = end
    if batch:
        yield batch


class Converted:
    """A `Source` whose tensors have other dtypes.

    Args:
        source: as it is stored.
        dtypes: of those tensors that are wanted in another one.
        without: tensors that are left out.
        progress: told of bytes as they are read.
    """

    def __init__(
        self,
        source: Source,
        dtypes: Mapping[Key, torch.dtype],
        *,
        without: Collection[Key] = (),
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._progress = progress
        self._specs = {
            key: replace(spec, dtype=dtypes.get(key, spec.dtype)) for key, spec in source.specs.items() if key not in without
        }

    @property
    def where(self) -> str:
        """Its path."""
        return self._source.where

    @property
    def specs(self) -> Mapping[Key, Spec]:
        """All tensors, in the dtypes that are wanted."""
        return self._specs

    @property
    def facts(self) -> Facts:
        """Everything else."""
        return self._source.facts

    def read(self, parts: list[Part]) -> None:
        """Fill the values of each part; see `Source.read`. What has to be converted passes through a few megabytes."""
        self._read(parts)
        if self._progress:
            self._progress(sum(part.values.nbytes for part in parts))

    def _read(self, parts: list[Part]) -> None:
        specs = self._source.specs
        self._source.read([replace(part, spec=specs[part.key]) for part in parts if part.spec == specs[part.key]])
        others = [part for part in parts if part.spec != specs[part.key]]
        if not others:
            return
        wanted = [_Wanted(part.key, specs[part.key], part.start, part.stop) for part in others]
        for batch in _batches(wanted, CHUNK):
            self._source.read([part for _, part in batch])
            for number, part in batch:
                start = part.start - others[number].start
                others[number].values[start : start + len(part.values)].copy_(part.values)

    def close(self) -> None:
        """Close files."""
        self._source.close()


def compute_dtypes(source: Source) -> dict[Key, torch.dtype]:
    """The dtypes in which the model computed, of those weights that are stored in another one.

    Raises:
        CheckpointError: one has a name that is none.
    """
    found: dict[Key, torch.dtype] = {}
    for name, called in source.facts.weight_dtypes.items():
        key = Key("weight", name)
        if called not in _BY_NAME:
            raise CheckpointError(explain(f"{source.where} says that {name!r} is of an unknown dtype", found=repr(called)))
        if key in source.specs:
            found[key] = _BY_NAME[called]
    return found


def float_dtypes(source: Source, dtype: torch.dtype) -> dict[Key, torch.dtype]:
    """One dtype for all weights that are real floating-point numbers."""
    return {key: dtype for key, spec in source.specs.items() if key.kind == "weight" and spec.dtype.is_floating_point}
