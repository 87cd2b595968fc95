"""A fixed number of buffers that are used again and again.

Owns who holds which buffer. Refuses to know what is in them.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from shardwise.errors import UsageError, explain
from shardwise.tiers.failures import StorageError
from shardwise.tiers.memory import aligned_bytes, round_up

__all__ = ["Buffer", "BufferPool"]


class Buffer:
    """One buffer of a pool.

    Attributes:
        memory: 1-D uint8 tensor over all of it.
        holder: who has it, in words; empty while it is free.
    """

    __slots__ = ("holder", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.holder = ""


class BufferPool:
    """At most `count` buffers of `size` bytes, made when they are first needed. Usable from any thread.

    A buffer may be given back while a transfer still reads or fills it: the queue of transfers orders those that share memory,
    and the one that was given back first is handed out first, so that it has had the most time.

    Args:
        count: how many, at least 1.
        size: bytes of each, rounded up to `alignment`.
        alignment: on what they start, a power of two.
        pinned: whether they are page-locked; see `aligned_bytes`.
    """

    def __init__(self, count: int, size: int, *, alignment: int = 4096, pinned: bool = False) -> None:
        self.count = count
        self.size = round_up(size, alignment)
        self._alignment = alignment
        self._pinned = pinned
        self._free: deque[Buffer] = deque()
        self._all: list[Buffer] = []
        self._most_held = 0
        # Re-entrant: the garbage collector may close an abandoned stream, which gives its buffers back, at any moment.
        self._changed = threading.Condition(threading.RLock())

    @property
    def held(self) -> int:
        """Buffers that someone holds now."""
        return len(self._all) - len(self._free)

    @property
    def most_held(self) -> int:
        """Most buffers held at once so far."""
        return self._most_held

    @property
    def made(self) -> int:
        """Buffers that exist: those held and those free. Free ones are kept, so this is also the most so far."""
        return len(self._all)

    def try_take(self, holder: str) -> Buffer | None:
        """A free buffer, as `take` gives it; None if there is none now."""
        with self._changed:
            return self._hand_out(holder)

    def take(self, holder: str, timeout: float = 60.0) -> Buffer:
        """A free buffer, its content arbitrary; waits for one.

        Args:
            holder: who takes it, in words, for the error of others.
            timeout: seconds.

        Raises:
            UsageError: none became free in time; names who holds them.
            StorageError: there is no memory for another one.
        """
        until = time.monotonic() + timeout
        with self._changed:
            while (buffer := self._hand_out(holder)) is None:
                left = until - time.monotonic()
                if left <= 0:
                    raise UsageError(self._exhausted(holder, timeout))
                self._changed.wait(left)
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back.

        Raises:
            UsageError: it is free already, or another pool's.
        """
        with self._changed:
            if not buffer.holder or buffer not in self._all:
                raise UsageError(explain("a buffer was given back that nobody holds", do="give each buffer back once"))
            buffer.holder = ""
            self._free.append(buffer)
            self._changed.notify()

    def _hand_out(self, holder: str) -> Buffer | None:
        if len(self._all) < self.count:
            buffer = self._made()
        elif self._free:
            buffer = self._free.popleft()
        else:
            return None
        buffer.holder = holder
        self._most_held = max(self._most_held, self.held)
        return buffer

    def _made(self) -> Buffer:
        try:
            memory = aligned_bytes(self.size, self._alignment, pinned=self._pinned)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                explain(
                    f"no host memory for buffer {len(self._all) + 1} of {self.count}",
                    expected=f"{self.size:,} bytes",
                    found=str(error),
                    do="lower buffer_count or buffer_size",
                )
            ) from None
        self._all.append(Buffer(memory))
        return self._all[-1]

    def _exhausted(self, holder: str, timeout: float) -> str:
        return explain(
            f"{holder} got no buffer within {timeout:g} s",
            expected=f"one of {self.count} buffers of {self.size:,} bytes to become free",
            found="all held by " + ", ".join(buffer.holder for buffer in self._all),
            do="give buffers back when they are done with, or raise buffer_count",
        )
