"""Bytes that rest in host memory.

Owns that memory. Refuses to know what the bytes mean. It has the face of the disk tier, so that callers have one path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from shardwise.comm.handle import DONE, Handle
from shardwise.device import pin_memory
from shardwise.errors import UsageError, explain
from shardwise.tiers.failures import StorageError
from shardwise.tiers.memory import Bytes, bytes_of, round_up
from shardwise.tiers.meter import Meter, TierStats
from shardwise.tiers.tier import Loan, Range, Tier

__all__ = ["HostTier"]

_ALIGNMENT = 4096  # that of most disks, so that what was cut for one tier is cut for the other


class HostTier(Tier):
    """A tier in host memory. A transfer is one copy, made when it is started; what is lent or streamed is the memory itself.

    Args:
        pinned: whether the memory is page-locked, which makes copies to an accelerator faster; no effect without one.
        meter: counts.
    """

    def __init__(self, *, pinned: bool = False, meter: Meter | None = None) -> None:
        self._pinned = pinned
        self._meter = meter or Meter()
        self._starts: list[int] = []
        self._memory: list[torch.Tensor] = []
        self._end = 0
        self._owner = object()
        self._closed = False

    @property
    def alignment(self) -> int:
        """See `Tier.alignment`."""
        return _ALIGNMENT

    def reserve(self, nbytes: int) -> Range:
        """See `Tier.reserve`. The memory is the system's until it is touched, unless it is page-locked."""
        self._check_open()
        if nbytes < 0:
            raise UsageError(explain("a range of negative length was asked for", found=f"{nbytes:,} bytes"))
        try:
            memory = torch.zeros(nbytes, dtype=torch.uint8)
            memory = pin_memory(memory) if self._pinned and nbytes else memory
        except RuntimeError as error:
            raise StorageError(
                explain(
                    f"cannot reserve {nbytes:,} bytes of host memory", found=str(error).splitlines()[0], do="offload to a disk"
                )
            ) from None
        held = Range(self._end, nbytes, _ALIGNMENT, self._owner)
        if nbytes:
            self._starts.append(held.start)
            self._memory.append(memory)
            self._end += round_up(nbytes, _ALIGNMENT)
        return held

    def start_write(self, held: Range, tensor: torch.Tensor) -> Handle:
        """See `Tier.start_write`."""
        self._bytes_at(held)[:] = bytes_of(tensor, held.nbytes)
        self._count(held, write=True)
        return DONE

    def start_read(self, held: Range, tensor: torch.Tensor) -> Handle:
        """See `Tier.start_read`."""
        bytes_of(tensor, held.nbytes)[:] = self._bytes_at(held)
        self._count(held, write=False)
        return DONE

    def lend(self, held: Range) -> Loan:
        """See `Tier.lend`. Never waits."""
        tensor = self._at(held)
        self._count(held, write=False)
        return Loan(DONE, tensor, lambda: None)

    def stream(
        self, ranges: Sequence[Range], *, ahead: int | None = None, write_back: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `Tier.stream`. Nothing is copied: a loop changes the stored bytes themselves."""
        del ahead
        for held in ranges:
            self._at(held)
        return self._stream(list(ranges), write_back)

    def flush(self) -> None:
        """See `Tier.flush`."""
        self._check_open()

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        return self._meter.stats()

    def close(self) -> None:
        """See `Tier.close`."""
        self._closed = True
        self._memory.clear()
        self._starts.clear()

    def _stream(self, ranges: list[Range], write_back: bool) -> Iterator[tuple[int, torch.Tensor]]:
        for index, held in enumerate(ranges):
            tensor = self._at(held)
            self._count(held, write=False)
            yield index, tensor
            if write_back:
                self._check_open()
                self._count(held, write=True)

    def _count(self, held: Range, *, write: bool) -> None:
        if held.nbytes:
            self._meter.count(held.nbytes, write=write)

    def _bytes_at(self, held: Range) -> Bytes:
        return bytes_of(self._at(held), held.nbytes)

    def _at(self, held: Range) -> torch.Tensor:
        self._check_open()
        held.check_owner(self._owner)
        if not held.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        place = bisect_right(self._starts, held.start) - 1
        begin = held.start - self._starts[place]
        return self._memory[place][begin : begin + held.nbytes]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(explain("this tier is closed", do="make another one"))
