"""Bytes that rest on a disk.

Owns the swap file of one user, its buffers, and the pipeline of reading ahead and writing behind. Refuses to know what the
bytes mean.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.comm.handle import DONE, Handle
from shardwise.errors import ConfigError, UsageError, explain
from shardwise.tiers.files import SwapFile, System
from shardwise.tiers.memory import bytes_of
from shardwise.tiers.meter import Meter, TierStats
from shardwise.tiers.pool import Buffer, BufferPool
from shardwise.tiers.tier import Loan, Range, Tier
from shardwise.tiers.transfers import TransferQueue

__all__ = ["DiskSettings", "DiskTier"]


class _Item(NamedTuple):
    """One item of a stream on its way."""

    held: Range
    buffer: Buffer
    handle: Handle


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How a disk tier moves bytes.

    Its memory is at most `buffer_count` buffers of `buffer_size` bytes, plus 2 MiB per thread once a tensor is moved that does
    not lie as `aligned_bytes` lays it.

    Raises:
        ConfigError: a number is below 1.
    """

    buffer_count: int = 4
    """Buffers for streams and loans. A stream keeps up with `ahead` + 2 of them when it writes back, `ahead` + 1 when not."""
    buffer_size: int = 32 << 20
    """Bytes of each buffer, rounded up to the disk's alignment: the largest range that can be streamed or lent."""
    threads: int = 2
    """Threads that share each transfer."""
    block_bytes: int = 8 << 20
    """Bytes that one thread moves at once, rounded up to the disk's alignment."""
    queue_depth: int = 8
    """Transfers that may be started and not finished; starting one more waits."""
    pipeline_read: bool = True
    """Whether streams read the next item while one is in use."""
    pipeline_write: bool = True
    """Whether streams write an item back while the next is in use."""
    pinned: bool = False
    """Whether buffers are page-locked, which makes copies to an accelerator faster; no effect without one."""
    timeout: float = 60.0
    """Seconds that a call waits for a buffer."""

    def __post_init__(self) -> None:
        for name in ("buffer_count", "buffer_size", "threads", "block_bytes", "queue_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(explain(f"{name} of a disk tier", expected="at least 1", found=str(getattr(self, name))))


class DiskTier(Tier):
    """A tier in one nameless file, moved by threads past the system's cache where the file system allows.

    Nothing of it is left when it is closed or collected, or the process ends, however it ends. Not usable in a forked child.

    Args:
        directory: a folder on the disk, made when missing.
        settings: numbers of threads and buffers.
        name: what it is called in errors.
        system: the calls to use.
        meter: counts.

    Raises:
        StorageError: no file can be made there; names the path.
    """

    def __init__(
        self,
        directory: str | Path,
        settings: DiskSettings | None = None,
        *,
        name: str = "swap file",
        system: System | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.settings = settings or DiskSettings()
        asked = self.settings
        self._file = SwapFile(directory, name, system=system)
        self._pool = BufferPool(asked.buffer_count, asked.buffer_size, alignment=self._file.alignment, pinned=asked.pinned)
        self._queue = TransferQueue(
            self._file, threads=asked.threads, block_bytes=asked.block_bytes, depth=asked.queue_depth, meter=meter
        )
        self._owner = object()
        self._growing = threading.Lock()
        end = weakref.finalize(self, self._queue.abandon)
        end.atexit = False  # the queue sees to that itself, and waits for its threads then

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the system's cache."""
        return self._file.direct

    @property
    def alignment(self) -> int:
        """See `Tier.alignment`; memory that starts on it, as that of `aligned_bytes` does, is moved without a copy."""
        return self._file.alignment

    @property
    def buffer_size(self) -> int:
        """Bytes of a buffer: the settings', rounded up to the alignment."""
        return self._pool.size

    def reserve(self, nbytes: int) -> Range:
        """See `Tier.reserve`. The room is taken on the disk now."""
        self._queue.check_open()
        if nbytes < 0:
            raise UsageError(explain("a range of negative length was asked for", found=f"{nbytes:,} bytes"))
        with self._growing:
            start = self._file.grow(nbytes)
        return Range(start, nbytes, self._file.alignment, self._owner)

    def start_write(self, held: Range, tensor: torch.Tensor) -> Handle:
        """See `Tier.start_write`. Tensors in memory of `aligned_bytes` are written without a copy."""
        return self._start(held, tensor, write=True)

    def start_read(self, held: Range, tensor: torch.Tensor) -> Handle:
        """See `Tier.start_read`. Tensors in memory of `aligned_bytes` are filled without a copy."""
        return self._start(held, tensor, write=False)

    def lend(self, held: Range) -> Loan:
        """See `Tier.lend`."""
        self._check_fits(held)
        buffer = self._pool.take(f"a loan of {held.nbytes:,} bytes at {held.start:,}", self.settings.timeout)
        try:
            handle = self._move(held, buffer, write=False)
        except BaseException:
            self._pool.give(buffer)
            raise

        return Loan(handle, buffer.memory[: held.nbytes], lambda: self._pool.give(buffer))

    def stream(
        self, ranges: Sequence[Range], *, ahead: int | None = None, write_back: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `Tier.stream`."""
        for held in ranges:
            self._check_fits(held)
        if ahead is None:
            ahead = int(self.settings.pipeline_read)
        return self._stream(deque(ranges), ahead, write_back)

    def flush(self) -> None:
        """See `Tier.flush`."""
        self._queue.flush()

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        return self._queue.stats(self._pool.made)

    def close(self) -> None:
        """See `Tier.close`."""
        self._queue.close()

    def _start(self, held: Range, tensor: torch.Tensor, *, write: bool) -> Handle:
        held.check_owner(self._owner)
        memory = bytes_of(tensor, held.nbytes)
        return self._queue.start(memory, held.start, held.nbytes, write=write) if held.nbytes else DONE

    def _move(self, held: Range, buffer: Buffer, *, write: bool) -> Handle:
        """In whole blocks: a buffer has room for the padding."""
        memory = bytes_of(buffer.memory[: held.padded], held.padded)
        return self._queue.start(memory, held.start, held.nbytes, write=write) if held.nbytes else DONE

    def _stream(self, todo: deque[Range], ahead: int, write_back: bool) -> Iterator[tuple[int, torch.Tensor]]:
        reading: deque[_Item] = deque()
        writing: deque[Handle] = deque()
        try:
            for index in range(len(todo)):
                self._read_ahead(todo, reading, index, ahead)
                held, buffer, handle = reading[0]
                handle.wait()
                yield index, buffer.memory[: held.nbytes]
                if write_back:
                    writing.append(self._move(held, buffer, write=True))
                reading.popleft()
                self._pool.give(buffer)  # while it is still being written: see BufferPool
                # As many writes as buffers: with the next one, the oldest had to be over for its buffer to be filled again.
                while len(writing) > (self._pool.count if self.settings.pipeline_write else 0):
                    writing.popleft().wait()
            while writing:
                writing.popleft().wait()
        finally:
            for _, buffer, _ in reading:
                self._pool.give(buffer)

    def _read_ahead(self, todo: deque[Range], reading: deque[_Item], index: int, ahead: int) -> None:
        """Start reads until the item that is needed now and `ahead` more are on their way, the latter as buffers are free."""
        while todo and len(reading) <= ahead:
            holder = f"item {index + len(reading)} of a stream"
            buffer = self._pool.try_take(holder) if reading else self._pool.take(holder, self.settings.timeout)
            if buffer is None:
                return
            try:
                reading.append(_Item(todo[0], buffer, self._move(todo[0], buffer, write=False)))
            except BaseException:
                self._pool.give(buffer)
                raise
            todo.popleft()

    def _check_fits(self, held: Range) -> None:
        held.check_owner(self._owner)
        if held.padded > self.buffer_size:
            raise UsageError(
                explain(
                    f"a range of {held.nbytes:,} bytes does not fit in a buffer",
                    expected=f"at most {self.buffer_size:,} bytes",
                    do="raise buffer_size, or cut the range with split()",
                )
            )
