"""Moving bytes between tensors and data files, with a checksum for every block of a file.

Owns how a file is cut into blocks, the threads that write and read it, and the discovery of damage. Refuses to know what the
tensors are and what else a checkpoint is made of.

Blocks. A file is a row of blocks of `BLOCK` bytes, each with a CRC-32, so that a reader that wants part of a tensor reads and
checks no more than the blocks around it. Full blocks are read straight to where they belong.
"""

from __future__ import annotations

import base64
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shardwise.checkpoint.safetensors import Header, encode_header
from shardwise.errors import CheckpointDamagedError, CheckpointError, explain

__all__ = ["BLOCK", "Checksums", "DataFile", "Progress", "Stats", "Wanted", "refuse", "to_bytes", "write_file", "write_tensors"]

BLOCK = 1 << 18
"""Bytes with a checksum of their own."""

_SEGMENT = 1 << 23  # bytes a thread moves at a time, a multiple of BLOCK
_SYNCED = 1 << 26  # bytes of a file between two waits for the disk
_THREADS = 4

Progress = Callable[[int], None]
"""Told of bytes that were moved; may be called from any thread."""


@dataclass(frozen=True)
class Checksums:
    """CRC-32 of each block of a file.

    Args:
        size: bytes of the file.
        values: one per block; the last may be shorter.
        block: bytes per block.
    """

    size: int
    values: tuple[int, ...]
    block: int = BLOCK

    def to_dict(self) -> dict[str, Any]:
        """As plain values: the checksums as base64 of little-endian 32-bit numbers."""
        packed = struct.pack(f"<{len(self.values)}I", *self.values)
        return {"bytes": self.size, "block": self.block, "crc32": base64.b64encode(packed).decode()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Checksums:
        """The inverse.

        Raises:
            ValueError, KeyError, TypeError: these are not the checksums of a file.
        """
        size, block = found["bytes"], found["block"]
        if type(size) is not int or type(block) is not int or size < 0 or not 0 < block <= 1 << 30:
            raise ValueError(f"{size!r} bytes in blocks of {block!r}")
        packed = base64.b64decode(found["crc32"], validate=True)
        if len(packed) != 4 * -(-size // block):
            raise ValueError(f"{len(packed) // 4} checksums for {size} bytes in blocks of {block}")
        return cls(size, struct.unpack(f"<{len(packed) // 4}I", packed), block)


@dataclass
class Stats:
    """What reading has cost."""

    bytes_read: int = 0
    """Bytes asked of the file system."""


# -- writing -------------------------------------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], progress: Progress | None = None
) -> tuple[Checksums, Header]:
    """Write a safetensors file, and return when it is on disk for good: its checksums, and what lies where.

    Tensors in host memory are written from where they are; others pass through a buffer of a few megabytes.

    Args:
        path: must not exist yet.
        tensors: contiguous, of any shape, by name.
        metadata: text for the header.
        progress: told of bytes as they are written.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    first, header = encode_header({name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}, metadata)
    flat = [value.detach().reshape(-1).view(torch.uint8) for value in tensors.values() if value.numel()]
    return _write(path, [torch.frombuffer(bytearray(first), dtype=torch.uint8), *flat], progress), header


def write_file(path: Path, data: bytes) -> Checksums:
    """Write a file of bytes, and return when it is on disk for good. Raises CheckpointError if it cannot be."""
    return _write(path, [torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else [], None)


def _write(path: Path, pieces: Sequence[Tensor], progress: Progress | None) -> Checksums:
    total = sum(piece.numel() for piece in pieces)
    try:
        _check_room(path, total)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            sums = _write_segments(descriptor, list(_segments(pieces)), progress)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refuse(path, error, total) from error
    return Checksums(total, tuple(sums))


def _check_room(path: Path, size: int) -> None:
    """Notice a full disk before anything is written."""
    stats = os.statvfs(path.parent)
    if stats.f_bavail * stats.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _segments(pieces: Iterable[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """The file as stretches of `_SEGMENT` bytes: where each begins, and the parts of pieces in it."""
    offset, room, parts = 0, _SEGMENT, list[Tensor]()
    for piece in pieces:
        start = 0
        while start < piece.numel():
            part = piece[start : start + room]
            parts.append(part)
            start += part.numel()
            room -= part.numel()
            if not room:
                yield offset, parts
                offset, room, parts = offset + _SEGMENT, _SEGMENT, []
    if parts:
        yield offset, parts


def _write_segments(descriptor: int, segments: list[tuple[int, list[Tensor]]], progress: Progress | None) -> list[int]:
    def write(segment: tuple[int, list[Tensor]]) -> list[int]:
        offset, parts = segment
        views = [to_bytes(part) for part in parts]
        _write_all(descriptor, views, offset)
        if offset % _SYNCED + _SEGMENT >= _SYNCED:  # now and then, so that the end has little left, and others see progress
            os.fdatasync(descriptor)
        sums = list(_block_sums(views))
        if progress:
            progress(sum(len(view) for view in views))
        return sums

    return [value for sums in _run_all(write, segments, "shardwise-write") for value in sums]


def _run_all(work: Callable[[Any], Any], items: Sequence[Any], name: str) -> list[Any]:
    """Like `map`, in a few threads; where one fails, what has not begun is left out.

    Not by an executor of the standard library: those take no more work once the interpreter has begun to end, and a save in
    the background may go on for that long.
    """
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    numbers = iter(range(len(items)))

    def run() -> None:
        for number in numbers:  # one iterator for all: each number goes to one thread
            if errors:
                return
            try:
                results[number] = work(items[number])
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                errors.append(error)

    others = [threading.Thread(target=run, name=name, daemon=True) for _ in range(min(_THREADS, len(items)) - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _write_all(descriptor: int, views: list[memoryview], offset: int) -> None:
    """`pwritev`, again for what a short write has left; at most as many views at a time as the system takes."""
    views = [view for view in views if len(view)]
    while views:
        done = os.pwritev(descriptor, views[:1024], offset)
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


def _block_sums(views: Iterable[memoryview], block: int = BLOCK) -> Iterator[int]:
    """CRC-32 of each block of the bytes in the views, one after the other."""
    value, filled = 0, 0
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + block - filled]
            value = crc32(part, value)
            start += len(part)
            filled += len(part)
            if filled == block:
                yield value
                value = filled = 0
    if filled:
        yield value


def to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor: in place if they are in host memory, else a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    array: Any = flat.cpu().numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def refuse(path: Path, error: OSError, size: int) -> CheckpointError:
    """The error for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stats = os.statvfs(path.parent)
        return CheckpointError(
            explain(
                f"{path} cannot be written: the disk is full",
                expected=f"room for {size} bytes",
                found=f"{stats.f_bavail * stats.f_frsize} bytes free ({error.strerror})",
                do="free some space, or save elsewhere; earlier checkpoints are as they were",
            )
        )
    reason = error.strerror or str(error)
    return CheckpointError(explain(f"{path} cannot be written", found=reason, do="check the path, its owner and the disk"))


# -- reading -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes of a file, and where they shall go.

    Args:
        start: the first byte.
        into: as long as what is wanted.
        about: what it is, for messages.
    """

    start: int
    into: memoryview
    about: str


class DataFile:
    """A data file that is checked as it is read.

    Args:
        path: the file.
        sums: its checksums.
        stats: counts what is read.
    """

    def __init__(self, path: Path, sums: Checksums, stats: Stats) -> None:
        self._path = path
        self._sums = sums
        self._stats = stats
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise CheckpointDamagedError(
                explain(f"{path} cannot be read", found=error.strerror or str(error), do=_OTHERS)
            ) from None
        if size != sums.size:
            self.close()
            raise damaged(path, f"{sums.size} bytes", f"{size}")

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, wanted: Sequence[Wanted], progress: Progress | None = None) -> None:
        """Read and check all of it, in the order of the file. What is wanted twice is read twice.

        Raises:
            CheckpointError: a block is damaged.
        """
        left = sorted((each for each in wanted if len(each.into)), key=lambda each: each.start)
        while left:
            now, left = _part_overlaps(left)
            _run_all(lambda job: self._run(job, progress), list(_jobs(now, self._sums.block)), "shardwise-read")

    def verify(self, progress: Progress | None = None) -> None:
        """Read all of the file and check it. Raises CheckpointError if a block is damaged."""
        scratch = bytearray(_SEGMENT)
        for start in range(0, self._sums.size, _SEGMENT):
            view = memoryview(scratch)[: min(_SEGMENT, self._sums.size - start)]
            self._run([Wanted(start, view, "")], progress)

    def _run(self, job: list[Wanted], progress: Progress | None) -> None:
        """Read what lies in neighbouring blocks, with as few calls as there are gaps."""
        block = self._sums.block
        first = job[0].start // block * block
        last = min(-(-(job[-1].start + len(job[-1].into)) // block) * block, self._sums.size)
        views = _scatter(job, first, last)
        self._read_all(views, first)
        for number, value in enumerate(_block_sums(views, block), first // block):
            if value != self._sums.values[number]:
                at = number * block
                inside = next((each.about for each in job if each.start < at + block and at < each.start + len(each.into)), "")
                about = f" ({inside})" if inside else ""
                length = min(block, self._sums.size - at)
                expected = f"checksum {self._sums.values[number]:08x} for the {length} bytes from {at}{about}"
                raise damaged(self._path, expected, f"{value:08x}")
        if progress:
            progress(sum(len(each.into) for each in job))

    def _read_all(self, views: list[memoryview], offset: int) -> None:
        views = [view for view in views if len(view)]
        while views:
            try:
                done = os.preadv(self._descriptor, views[:1024], offset)
            except OSError as error:
                raise damaged(self._path, "readable bytes", error.strerror or str(error)) from error
            if not done:
                raise damaged(self._path, f"{self._sums.size} bytes", f"an end at {offset}")
            self._stats.bytes_read += done
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]


_OTHERS = "load another checkpoint (`shardwise checkpoint list` shows them; fallback=True takes the newest valid one)"


def damaged(path: Path, expected: str, found: str) -> CheckpointDamagedError:
    """The error for a file that is not as it was written."""
    return CheckpointDamagedError(explain(f"{path} is damaged", expected=expected, found=found, do=_OTHERS))


def _part_overlaps(wanted: list[Wanted]) -> tuple[list[Wanted], list[Wanted]]:
    """Stretches no two of which overlap, and the others; both in order."""
    apart: list[Wanted] = []
    others: list[Wanted] = []
    end = -1
    for each in wanted:
        if each.start < end:
            others.append(each)
        else:
            apart.append(each)
            end = each.start + len(each.into)
    return apart, others


def _jobs(wanted: list[Wanted], block: int) -> Iterator[list[Wanted]]:
    """Wanted bytes, in order, as lists that no two of which touch one block; long stretches are cut."""
    job: list[Wanted] = []
    end = size = 0  # the end of the job's last block, and its bytes
    for each in _cut(wanted, block):
        if job and (each.start >= end + block or (each.start >= end and size >= _SEGMENT)):
            yield job
            job, size = [], 0
        job.append(each)
        size += len(each.into)
        end = -(-(each.start + len(each.into)) // block) * block
    if job:
        yield job


def _cut(wanted: Iterable[Wanted], block: int) -> Iterator[Wanted]:
    """The same bytes in parts that end at blocks, none longer than a segment."""
    length = max(_SEGMENT // block, 1) * block
    for each in wanted:
        start, stop = each.start, each.start + len(each.into)
        while start < stop:
            end = min(stop, (start // length + 1) * length)
            yield Wanted(start, each.into[start - each.start : end - each.start], each.about)
            start = end


def _scatter(job: list[Wanted], first: int, last: int) -> list[memoryview]:
    """Where the bytes `[first, last)` of a file go: straight to who wants them, and to scratch what nobody does."""
    views: list[memoryview] = []
    at = first
    for each in job:
        views += [memoryview(bytearray(each.start - at)), each.into]
        at = each.start + len(each.into)
    return [*views, memoryview(bytearray(last - at))]
