"""A source whose tensors are put together from stretches of tensors on disk.

Owns which stretch of which tensor is read for a wanted interval, and in which order. Refuses to know file formats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from shardwise.checkpoint.contents import Facts, Key, Part, Spec, real_dtype
from shardwise.checkpoint.foreign.files import Files, damaged
from shardwise.checkpoint.foreign.stored import Readable, StridedTensor, load

__all__ = ["Piece", "PieceSource", "covering", "guess_kind", "plain", "plain_items", "whole"]

_LARGEST = 1 << 16  # elements of a tensor that is taken for a plain value
_NODES = 1 << 16  # values inside of one plain value: a pickle can repeat what it holds, many times over
_DEPTH = 64
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids")


@dataclass(frozen=True, slots=True)
class Piece:
    """Storage elements `[start, start + length)` of a tensor, which are those from `offset` on of one on disk."""

    start: int
    length: int
    tensor: Readable
    offset: int = 0


def whole(tensor: Readable) -> list[Piece]:
    """The pieces of a tensor that is on disk as it is."""
    return [Piece(0, tensor.spec.length, tensor)]


def covering(pieces: Iterable[Piece], length: int) -> list[Piece] | None:
    """The pieces in order, without empty ones; None if they leave gaps, overlap, or are not `length` elements."""
    ordered = sorted((piece for piece in pieces if piece.length), key=lambda piece: piece.start)
    ends = [0, *(piece.start + piece.length for piece in ordered)]
    starts = [*(piece.start for piece in ordered), length]
    return ordered if ends == starts else None


class PieceSource:
    """Base of the sources of this room: `specs` and `read` for tensors made of pieces.

    Args:
        where: path, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._specs: dict[Key, Spec] = {}
        self._pieces: dict[Key, list[Piece]] = {}
        self._facts: Facts | None = None

    @property
    def where(self) -> str:
        """Its path, for messages."""
        return self._where

    @property
    def specs(self) -> Mapping[Key, Spec]:
        """All tensors that are in it. Ties are there once."""
        return self._specs

    @property
    def facts(self) -> Facts:
        """Everything else. Put together on first use, which may read many small values."""
        if self._facts is None:
            self._facts = self._make_facts()
        return self._facts

    def _make_facts(self) -> Facts:
        raise NotImplementedError

    def close(self) -> None:
        """Files are only open while they are read."""

    def read(self, parts: list[Part]) -> None:
        """Fill the values of each part. Reads the wanted intervals only, in the order in which they lie on disk.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        with Files() as files:
            jobs = [job for part in parts for job in self._jobs(part, files)]
            for _, _, tensor, start, values in sorted(jobs, key=lambda job: job[:2]):
                tensor.read(files, start, values)

    def _jobs(self, part: Part, files: Files) -> list[tuple[str, int, Readable, int, Tensor]]:
        pieces = self._pieces[part.key]
        jobs: list[tuple[str, int, Readable, int, Tensor]] = []
        first = max(0, bisect_right(pieces, part.start, key=lambda piece: piece.start) - 1)
        for piece in pieces[first:]:
            low, high = max(part.start, piece.start), min(part.stop, piece.start + piece.length)
            if low >= high:
                break
            start = piece.offset + low - piece.start
            place = piece.tensor.place(files) + start * real_dtype(part.spec.dtype).itemsize
            jobs.append((str(piece.tensor.path), place, piece.tensor, start, part.values[low - part.start : high - part.start]))
        return jobs

    def add(self, key: Key, spec: Spec, pieces: Sequence[Piece]) -> None:
        """Announce a tensor.

        Raises:
            CheckpointError: the pieces are not all of it, or of different dtypes.
        """
        ordered = covering(pieces, spec.length)
        if ordered is None:
            raise damaged(self._where, f"{sum(piece.length for piece in pieces)} elements of {key}", f"{spec.length}")
        for piece in ordered:
            if piece.tensor.spec.dtype != spec.dtype:
                raise damaged(piece.tensor.path, f"{piece.tensor.spec.dtype} values of {key}", str(spec.dtype))
        self._specs[key] = spec
        self._pieces[key] = ordered


def guess_kind(name: str, spec: Spec) -> Key:
    """The key of a model tensor in a format that does not tell weights from buffers."""
    buffer = not (spec.dtype.is_floating_point or spec.dtype.is_complex) or name.rpartition(".")[2] in _BUFFERS
    return Key("buffer" if buffer else "weight", name)


def plain(value: Any, files: Files) -> Any:
    """A copy of a value with small tensors read from disk: numbers for those of one element and no dimension.

    Raises:
        ValueError: something in it is no plain value, or it is too large or too deep to be one.
    """
    return _Plain(files).copy(value, 0)


def plain_items(values: Mapping[Any, Any], files: Files, names: Iterable[Any] | None = None) -> dict[str, Any]:
    """The entries of a dict (or those of given names) whose names are text and whose values are plain."""
    found: dict[str, Any] = {}
    for name in values if names is None else names:
        with suppress(ValueError):
            if isinstance(name, str) and name in values:
                found[name] = plain(values[name], files)
    return found


class _Plain:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._left = _NODES

    def copy(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise ValueError("too much for a plain value")
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {self.copy(key, depth + 1): self.copy(item, depth + 1) for key, item in items}
        if isinstance(value, list | tuple | set | frozenset):
            items = cast("list[Any]", value)
            return type(items)([self.copy(item, depth + 1) for item in items])
        if isinstance(value, StridedTensor) and value.spec.length <= _LARGEST:
            found = load(value, self._files)
            return found if found.dim() else found.item()
        raise ValueError(f"{type(value).__name__} is no plain value")
