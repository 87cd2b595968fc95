"""Systems that misbehave on purpose, for the tests of tiers. All of them are seams of `SwapFile`; nothing is patched."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.tiers.files import System
from shardwise.tiers.memory import Bytes


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Strict(System):
    """Takes what the strictest disk takes, on any file system: a harmless flag stands for the one that asks for it."""

    direct = os.O_NONBLOCK

    def __init__(self, alignment: int = 4096) -> None:
        self.alignment = alignment
        self.moved: list[tuple[str, int, int]] = []

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.check("read", memory, offset)
        return super().read(descriptor, memory, offset)

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.check("write", memory, offset)
        return super().write(descriptor, memory, offset)

    def check(self, kind: str, memory: Bytes, offset: int) -> None:
        if (memory.ctypes.data | offset | len(memory)) % self.alignment:
            raise refuse(errno.EINVAL)
        self.moved.append((kind, offset, len(memory)))


class Halting(Strict):
    """Moves less than asked for, in a pattern: a number of bytes, 0, or an interruption."""

    def __init__(self, pattern: list[int | None]) -> None:
        super().__init__()
        self.pattern = pattern
        self.calls = 0

    def least(self, memory: Bytes) -> int:
        limit = self.pattern[self.calls % len(self.pattern)]
        self.calls += 1
        if limit is None:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return min(limit, len(memory))

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.check("read", memory, offset)
        limit = self.least(memory)
        return os.preadv(descriptor, [memory[:limit].data], offset) if limit else 0

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.check("write", memory, offset)
        limit = self.least(memory)
        return os.pwritev(descriptor, [memory[:limit].data], offset) if limit else 0


class Failing(System):
    """Fails transfers for which `when(kind, offset)` is true. Direct transfers are off, so that no probing fails."""

    direct = 0

    def __init__(self, when: Callable[[str, int], bool], code: int = errno.EIO) -> None:
        self.when = when
        self.code = code

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        if self.when("read", offset):
            raise refuse(self.code)
        return super().read(descriptor, memory, offset)

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        if self.when("write", offset):
            raise refuse(self.code)
        return super().write(descriptor, memory, offset)


class Gated(System):
    """Holds each transfer until the test lets it go. Direct transfers are off, so that no probing is held."""

    direct = 0

    def __init__(self) -> None:
        self.arrived: queue.Queue[tuple[str, int]] = queue.Queue()
        self.arrivals = self.permits = 0
        self.turn = threading.Condition()
        self.order: list[tuple[str, int]] = []
        self.fail: Callable[[str, int], bool] = lambda kind, offset: False

    def hold(self, kind: str, offset: int) -> None:
        with self.turn:
            number = self.arrivals
            self.arrivals += 1
            self.arrived.put((kind, offset))
            if not self.turn.wait_for(lambda: number < self.permits, timeout=20):
                raise TimeoutError("the test forgot a transfer")
            self.order.append((kind, offset))
        if self.fail(kind, offset):
            raise refuse(errno.EIO)

    def next(self) -> tuple[str, int]:
        """The transfer that a thread has begun and that waits at the gate."""
        return self.arrived.get(timeout=20)

    def let(self, count: int = 1) -> None:
        """Let that many go, in the order in which they come to the gate."""
        with self.turn:
            self.permits += count
            self.turn.notify_all()

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.hold("read", offset)
        return super().read(descriptor, memory, offset)

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        self.hold("write", offset)
        return super().write(descriptor, memory, offset)


class Without(System):
    """A file system that lacks things."""

    def __init__(self, *, direct: bool = True, nameless: bool = True, unlink: bool = True, allocate: bool = True) -> None:
        self.takes_direct = direct
        self.takes_nameless = nameless
        self.takes_unlink = unlink
        self.takes_allocate = allocate

    def open(self, path: Path, flags: int) -> int:
        if not self.takes_nameless and flags & self.nameless == self.nameless:
            raise refuse(errno.EISDIR)
        if not self.takes_direct and flags & self.direct:
            raise refuse(errno.EINVAL)
        return super().open(path, flags)

    def unlink(self, path: Path) -> None:
        if not self.takes_unlink:
            raise refuse(errno.EBUSY)
        super().unlink(path)

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        if not self.takes_allocate:
            raise refuse(errno.EOPNOTSUPP)
        super().allocate(descriptor, offset, nbytes)
