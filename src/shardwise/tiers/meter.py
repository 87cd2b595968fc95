"""What a tier did so far, in numbers.

Owns the counters. Bytes and counts are exact and repeatable, seconds are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Meter", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since it was made. Bytes are those callers asked for, without padding."""

    reads: int = 0
    """Transfers from the tier that succeeded."""
    writes: int = 0
    """Transfers to the tier that succeeded."""
    bytes_read: int = 0
    bytes_written: int = 0
    peak_buffers: int = 0
    """Buffers of the pool that were ever needed at once, those being written back included: what they take is memory."""
    staging_bytes: int = 0
    """Memory of the worker threads for what is not aligned: at most 2 MiB each."""
    read_seconds: float = 0.0
    """Time in which at least one read was being served."""
    write_seconds: float = 0.0
    """Time in which at least one write was being served."""
    read_waited_seconds: float = 0.0
    """Time that callers spent waiting for reads."""
    write_waited_seconds: float = 0.0
    """Time that callers spent waiting for writes."""

    @property
    def read_hidden(self) -> float:
        """Share of the reading time in which nobody waited for it: 1 when all was hidden, or nothing read."""
        return _hidden(self.read_seconds, self.read_waited_seconds)

    @property
    def write_hidden(self) -> float:
        """Share of the writing time in which nobody waited for it: 1 when all was hidden, or nothing written."""
        return _hidden(self.write_seconds, self.write_waited_seconds)


def _hidden(served: float, waited: float) -> float:
    return max(0.0, 1.0 - waited / served) if served else 1.0


class _Side:
    """Reads, or writes."""

    __slots__ = ("busy", "nbytes", "served", "since", "transfers", "waited")

    def __init__(self) -> None:
        self.transfers = self.nbytes = self.busy = 0
        self.served = self.waited = self.since = 0.0


class Meter:
    """Adds up. Its user sees to it that one thread at a time calls it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._sides = (_Side(), _Side())

    def begin(self, *, write: bool) -> None:
        """A transfer is being served from now on."""
        side = self._sides[write]
        if not side.busy:
            side.since = self.clock()
        side.busy += 1

    def end(self, *, write: bool) -> None:
        """One of those that began is over."""
        side = self._sides[write]
        side.busy -= 1
        if not side.busy:
            side.served += self.clock() - side.since

    def count(self, nbytes: int, *, write: bool) -> None:
        """A transfer succeeded."""
        side = self._sides[write]
        side.transfers += 1
        side.nbytes += nbytes

    def waited(self, seconds: float, *, write: bool) -> None:
        """A caller waited."""
        self._sides[write].waited += seconds

    def stats(self, *, peak_buffers: int = 0, staging_bytes: int = 0) -> TierStats:
        """What was counted so far."""
        read, write = self._sides
        return TierStats(
            reads=read.transfers,
            writes=write.transfers,
            bytes_read=read.nbytes,
            bytes_written=write.nbytes,
            peak_buffers=peak_buffers,
            staging_bytes=staging_bytes,
            read_seconds=read.served,
            write_seconds=write.served,
            read_waited_seconds=read.waited,
            write_waited_seconds=write.waited,
        )
