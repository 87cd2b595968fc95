"""Memory that several processes of one machine see, and counters by which they wait for each other.

Owns anonymous files (`memfd_create`), their mappings, and POSIX semaphores that lie in them. An anonymous file has no name: it
is gone when the last process that maps it is, however that process ends, and the size of /dev/shm does not limit it. Another
process opens it through /proc by process id and file descriptor. Linux only; everything here raises OSError where the system
does not play along. Refuses to know ranks and collectives.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import time
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["Segment", "SegmentCard", "Semaphore"]

_SERIALS = itertools.count(1)
SEMAPHORE_BYTES = 64
"""Room for one semaphore: a cache line of its own; a `sem_t` takes 32 bytes."""


class SegmentCard(NamedTuple):
    """How another process finds a segment. Serial numbers are unique in the process that made it."""

    pid: int
    serial: int
    descriptor: int
    nbytes: int


class Segment:
    """A stretch of shared memory, zero at first.

    Attributes:
        memory: 1-D uint8 tensor over all of it; as long as it or a view of it lives, the mapping stays.
        card: where others find it, while the process that made it has not closed it and maps it itself.
    """

    __slots__ = ("_open", "card", "memory")

    def __init__(self, card: SegmentCard, memory: torch.Tensor, descriptors: list[int]) -> None:
        self.card = card
        self.memory = memory
        self._open = descriptors

    @classmethod
    def create(cls, nbytes: int, registry: dict[int, SegmentCard] | None = None) -> Segment:
        """New memory.

        Args:
            nbytes: how much.
            registry: holds the card by address for as long as the memory is mapped here.

        Raises:
            OSError: the system gives none.
        """
        if sys.platform != "linux":
            raise OSError("anonymous shared memory needs Linux")
        descriptors = [os.memfd_create("shardwise", os.MFD_CLOEXEC)]
        try:
            os.ftruncate(descriptors[0], nbytes)
            memory = _map(descriptors[0], nbytes, descriptors, registry)
        except BaseException:
            _close(descriptors)
            raise
        segment = cls(SegmentCard(os.getpid(), next(_SERIALS), descriptors[0], nbytes), memory, descriptors)
        if registry is not None:
            registry[segment.address] = segment.card
        return segment

    @classmethod
    def attach(cls, card: SegmentCard) -> Segment:
        """The segment of another process.

        Raises:
            OSError: it is gone, or this process may not open it.
        """
        descriptor = os.open(f"/proc/{card.pid}/fd/{card.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != card.nbytes:
                raise OSError(f"process {card.pid} has closed its segment {card.serial}")
            return cls(card, _map(descriptor, card.nbytes, [], None), [])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Nobody else will open it; those who have keep it."""
        _close(self._open)

    @property
    def address(self) -> int:
        """Where it is mapped here; also the address of the storage of every tensor over it."""
        return self.memory.untyped_storage().data_ptr()


class Semaphore:
    """A counter in shared memory that one process raises and one other lowers.

    Raising it makes everything visible that was written before, lowering it makes it seen: the order of memory on every
    architecture comes from here.
    """

    __slots__ = ("_address", "_block", "_post", "_try")

    def __init__(self, address: int, *, fresh: bool) -> None:
        library = _library()
        self._address = ctypes.c_void_p(address)
        self._post = library.sem_post
        self._try = library.sem_trywait
        self._block = _blocking_library().sem_clockwait
        if fresh and library.sem_init(self._address, 1, 0):
            raise _error("sem_init")

    def give(self) -> None:
        """Raise it by one."""
        self._post(self._address)

    def take(self) -> bool:
        """Lower it by one if it is above zero; say whether it was."""
        return self._try(self._address) == 0

    def wait(self, seconds: float) -> bool:
        """As `take`, but sleep until it is above zero or the time is over; a signal may end the sleep early."""
        until = time.monotonic() + seconds
        whole = int(until)
        limit = _Timespec(whole, int((until - whole) * 1e9))
        return self._block(self._address, time.CLOCK_MONOTONIC, ctypes.byref(limit)) == 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _map(descriptor: int, nbytes: int, keep: list[int], registry: dict[int, SegmentCard] | None) -> torch.Tensor:
    """Map a file. Not by the mmap module, which would hold a descriptor per mapping."""
    library = _library()
    address = library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _error("mmap")
    block = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors may be read until the process is gone, and then the system unmaps everything.
    weakref.finalize(block, _unmap, library, address, nbytes, keep, registry).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def _unmap(library: Any, address: int, nbytes: int, keep: list[int], registry: dict[int, SegmentCard] | None) -> None:
    if registry is not None:
        registry.pop(address, None)
    library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    _close(keep)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


@cache
def _library() -> Any:
    """The C library, for calls that do not block: they keep the interpreter's lock."""
    library = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(library, "sem_clockwait"):  # glibc has it since 2.30, musl not
        raise OSError("the C library has no sem_clockwait")
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return library


@cache
def _blocking_library() -> Any:
    """The C library, for calls that let other threads of the interpreter go on."""
    return ctypes.CDLL(None, use_errno=True)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
