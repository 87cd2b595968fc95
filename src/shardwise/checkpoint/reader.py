"""A checkpoint of this package's own format, as something to read from.

Owns the way from intervals of tensors to bytes of files, and that no more is read than was asked for. Refuses to know what the
tensors are for.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Facts, Key, Part, Spec, real_dtype
from shardwise.checkpoint.datafile import Checksums, DataFile, Stats, Wanted, to_bytes
from shardwise.checkpoint.folder import Folder
from shardwise.checkpoint.index import Index, Piece
from shardwise.errors import CheckpointError, explain

__all__ = ["NativeSource", "first_line"]

_STAGED = 1 << 26  # bytes that are read at a time where they cannot go straight to where they belong


class NativeSource:
    """A `Source`; see there.

    Args:
        folder: where the run's checkpoints are.
        tag: which one.
        progress: told of bytes as they are read, from any thread.

    Attributes:
        stats: what reading has cost so far.
        index: all that is known without reading tensors.

    Raises:
        CheckpointError: there is no such checkpoint, or its index is damaged.
    """

    def __init__(self, folder: Folder, tag: str, progress: Callable[[int], None] | None = None) -> None:
        self.index: Index = folder.read_index(tag)
        self.stats = Stats()
        self.progress = progress
        self._path: Path = folder.path / tag
        self._files: dict[int, DataFile] = {}

    @property
    def where(self) -> str:
        """Its directory."""
        return str(self._path)

    @property
    def specs(self) -> Mapping[Key, Spec]:
        """All tensors that are in it."""
        return self.index.specs

    @property
    def facts(self) -> Facts:
        """Everything else."""
        return self.index.facts

    def read(self, parts: list[Part]) -> None:
        """Fill the values of each part; see `Source.read`. Values in host memory are read in place. Parts may overlap."""
        wanted: dict[int, list[Wanted]] = {}
        for part in parts:
            if part.values.device.type == "cpu":
                self._collect(part, part.values, wanted)
        self._read(wanted)
        for part in parts:
            if part.values.device.type != "cpu":
                self._read_staged(part)

    def _read_staged(self, part: Part) -> None:
        """Through host memory, a few megabytes at a time."""
        size = max(1, _STAGED // part.values.itemsize)
        for first in range(0, part.values.numel(), size):
            target = part.values[first : first + size]
            staged = torch.empty(target.shape, dtype=target.dtype)
            wanted: dict[int, list[Wanted]] = {}
            self._collect(Part(part.key, part.spec, part.start + first, staged), staged, wanted)
            self._read(wanted)
            target.copy_(staged)

    def _collect(self, part: Part, values: Tensor, wanted: dict[int, list[Wanted]]) -> None:
        """Find the bytes of a part."""
        width = real_dtype(part.spec.dtype).itemsize
        view = to_bytes(values)
        for piece, first, last in _overlaps(self.index.pieces[part.key], part.start, part.stop):
            place = view[(first - part.start) * width : (last - part.start) * width]
            start = piece.offset + (first - piece.start) * width
            wanted.setdefault(piece.file, []).append(Wanted(start, place, str(part.key)))

    def _read(self, wanted: dict[int, list[Wanted]]) -> None:
        for number, each in sorted(wanted.items()):
            self._file(number).read(each, self.progress)

    def _file(self, number: int) -> DataFile:
        if number not in self._files:
            name, sums = self.index.files[number]
            self._files[number] = DataFile(self._path / name, sums, self.stats)
        return self._files[number]

    def verify(self) -> None:
        """Read every byte of every file and compare it with its checksum.

        Raises:
            CheckpointError: one is damaged; the first of them is named.
        """
        files = [*self.index.files, *([self.index.client_state] if self.index.client_state else [])]
        for name, sums in files:
            file = DataFile(self._path / name, sums, self.stats)
            try:
                file.verify(self.progress)
            finally:
                file.close()

    def client_state(self, *, trusted: bool = False) -> dict[str, Any]:
        """What the user saved along with it.

        Args:
            trusted: unpickle objects of any class, which can run any code.

        Raises:
            CheckpointError: it holds objects of classes that torch does not load without being told that they are safe.
        """
        if self.index.client_state is None:
            return {}
        name, sums = self.index.client_state
        data = bytearray(sums.size)
        self._read_whole(self._path / name, sums, memoryview(data))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
        except Exception as error:  # whatever an unpickler may come across
            raise CheckpointError(
                explain(
                    f"the client_state in {self._path / name} cannot be loaded",
                    expected="plain values and tensors",
                    found=first_line(error),
                    do="if you trust the file, pass trust_client_state=True, or allow its classes with "
                    "torch.serialization.add_safe_globals([...])",
                )
            ) from error

    def _read_whole(self, path: Path, sums: Checksums, into: memoryview) -> None:
        file = DataFile(path, sums, self.stats)
        try:
            file.read([Wanted(0, into, "")])
        finally:
            file.close()

    def close(self) -> None:
        """Close files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the codes that colour it on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0] or type(error).__name__


def _overlaps(pieces: list[Piece], start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces of a tensor that hold some of its elements `[start, stop)`, each with which."""
    if start >= stop:
        return
    for piece in pieces[bisect_right(pieces, start, key=lambda piece: piece.start) - 1 :]:
        if piece.start >= stop:
            return
        yield piece, max(piece.start, start), min(piece.stop, stop)
