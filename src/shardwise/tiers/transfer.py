"""One transfer between memory and a swap file, and what makes it wait for another.

Owns the state of a transfer and the rule of order. Refuses to know threads and files.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from shardwise.comm.handle import Handle
from shardwise.errors import UsageError
from shardwise.tiers.failures import StorageError
from shardwise.tiers.memory import Bytes

__all__ = ["Bond", "Transfer"]


class Bond(Enum):
    """Why a transfer waits for an earlier one."""

    ORDER = "both touch the same bytes"
    DATA = "it passes on what the earlier one brings, so it fails with it"


class _Queue(Protocol):
    def wait(self, transfer: Transfer) -> None: ...


class Transfer(Handle):
    """One read or write. Once it was started, its state is guarded by the lock of its queue.

    Args:
        queue: what will serve it.
        memory: the bytes to fill or to store.
        offset: where they lie in the file; aligned.
        nbytes: how many of them the caller asked for; the rest is padding.
        write: from memory to the file.
    """

    __slots__ = (
        "_queue",
        "address",
        "blockers",
        "done",
        "error",
        "followers",
        "length",
        "memory",
        "nbytes",
        "next",
        "offset",
        "running",
        "write",
    )

    def __init__(self, queue: _Queue, memory: Bytes, offset: int, nbytes: int, *, write: bool) -> None:
        self._queue = queue
        self.memory: Bytes | None = memory
        self.address: int = memory.ctypes.data
        self.length = len(memory)
        self.offset = offset
        self.nbytes = nbytes
        self.write = write
        self.next = 0  # what the threads have not taken yet starts here
        self.running = 0  # blocks being moved
        self.blockers = 0  # earlier transfers that must be over first
        self.followers: list[tuple[Transfer, Bond]] = []
        self.error: StorageError | UsageError | None = None
        self.done = False

    def __str__(self) -> str:
        return f"a {'write' if self.write else 'read'} of {self.nbytes:,} bytes at {self.offset:,}"

    def wait(self) -> None:
        """Return once the bytes are where they belong.

        Raises:
            StorageError: they are not, and why; again at every call.
            UsageError: the tier was closed before.
        """
        self._queue.wait(self)

    def bond(self, earlier: Transfer) -> Bond | None:
        """Whether this one must come after `earlier`, and why."""
        file = _overlap(self.offset, self.length, earlier.offset, earlier.length)
        memory = _overlap(self.address, self.length, earlier.address, earlier.length)
        if (file and earlier.write and not self.write) or (memory and self.write and not earlier.write):
            return Bond.DATA
        if (file and self.write) or (memory and not self.write):
            return Bond.ORDER
        return None


def _overlap(start: int, length: int, other: int, other_length: int) -> bool:
    return start < other + other_length and other < start + length
