"""What every tier can do, and the vocabulary for it.

Owns `Range` (a stretch of bytes that rests in a tier), `Loan` (bytes in memory that the tier lends) and the interface.
Refuses to know what the bytes mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeVar

import torch

from shardwise.comm.handle import Handle
from shardwise.errors import UsageError, explain
from shardwise.tiers.memory import round_up
from shardwise.tiers.meter import TierStats

__all__ = ["Loan", "Range", "Tier"]

_T = TypeVar("_T", bound="Tier")


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `start` of one tier; `Tier.reserve` makes them. Only the tier that made it takes it.

    A part of a range is a range too. Its start and length must be multiples of `alignment`, except that the last part ends
    where the whole does.
    """

    start: int
    nbytes: int
    alignment: int
    owner: object = field(repr=False)

    @property
    def stop(self) -> int:
        """The first byte after it."""
        return self.start + self.nbytes

    @property
    def padded(self) -> int:
        """Bytes of memory that hold it in whole blocks."""
        return round_up(self.nbytes, self.alignment)

    def part(self, start: int, stop: int) -> Range:
        """Bytes `start` to `stop` of it.

        Raises:
            UsageError: not inside the range, or not aligned.
        """
        inside = 0 <= start <= stop <= self.nbytes
        if not inside or start % self.alignment or (stop % self.alignment and stop != self.nbytes):
            raise UsageError(
                explain(
                    f"bytes {start:,} to {stop:,} are no part of a range of {self.nbytes:,} bytes",
                    expected=f"both between 0 and {self.nbytes:,}, and multiples of {self.alignment:,} except for the end",
                    do="cut ranges with split()",
                )
            )
        return replace(self, start=self.start + start, nbytes=stop - start)

    def split(self, nbytes: int) -> list[Range]:
        """Cut it into parts of at most `nbytes` bytes, all but the last of equal length.

        Raises:
            UsageError: `nbytes` is less than the alignment.
        """
        step = nbytes - nbytes % self.alignment
        if step < self.alignment:
            raise UsageError(
                explain(f"a range cannot be cut into parts of {nbytes:,} bytes", expected=f"at least {self.alignment:,}")
            )
        return [self.part(at, min(at + step, self.nbytes)) for at in range(0, self.nbytes, step)]

    def check_owner(self, owner: object) -> None:
        """Raises UsageError if it is the range of another tier."""
        if owner is not self.owner:
            raise UsageError(explain(f"{self} belongs to another tier", do="reserve a range in the tier that is used"))


class Loan(Handle):
    """The bytes of a range in memory that the tier lends. Must be given back, by `with` or `give()`.

    >>> with tier.lend(held) as tensor:  # doctest: +SKIP
    ...     total = tensor.view(torch.float32).sum()
    """

    __slots__ = ("_give", "_handle", "_tensor")

    def __init__(self, handle: Handle, tensor: torch.Tensor, give: Callable[[], None]) -> None:
        self._handle = handle
        self._tensor: torch.Tensor | None = tensor
        self._give = give

    def wait(self) -> None:
        """Return once the bytes are there.

        Raises:
            StorageError: they could not be read.
            UsageError: the tier was closed before.
        """
        self._handle.wait()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, 1-D uint8, as long as the range; waits for them. Views of it are void once the loan is given back.

        Raises:
            StorageError: they could not be read.
            UsageError: the loan was given back.
        """
        if self._tensor is None:
            raise UsageError(explain("these bytes were given back to the tier", do="use them before, or read them again"))
        self.wait()
        return self._tensor

    def give(self) -> None:
        """Give the memory back. Giving it again does nothing."""
        if self._tensor is not None:
            self._tensor = None
            self._give()

    def __enter__(self) -> torch.Tensor:
        try:
            return self.tensor
        except BaseException:
            self.give()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give()


class Tier(ABC):
    """A place where bytes rest: reserve a range once, then write and read it, as often as needed.

    Transfers are started and waited for. Their order is kept where it matters: one that shares bytes, in the tier or in
    memory, with an earlier one happens after it, unless both only look at them. The caller leaves a tensor and its storage
    alone (no write, no resize) between the start of a transfer and the end of its `wait()`. A range that was never written
    reads as zeros.
    """

    @property
    @abstractmethod
    def alignment(self) -> int:
        """Bytes on which ranges, and parts of them, start."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Range:
        """Room for `nbytes` bytes, for as long as the tier is open.

        Raises:
            StorageError: there is no room.
            UsageError: the tier is closed, or `nbytes` is negative.
        """

    @abstractmethod
    def start_write(self, held: Range, tensor: torch.Tensor) -> Handle:
        """Begin to store a tensor.

        Args:
            held: a range as long as the tensor.
            tensor: contiguous, of any dtype and shape, in host memory.

        Returns:
            What to wait for. An error that nobody waits for is raised by the next call that starts something, or by `flush()`.

        Raises:
            UsageError: the tensor does not fit, the range is another tier's, or the tier is closed.
            StorageError: an earlier write failed and nobody has waited for it.
        """

    @abstractmethod
    def start_read(self, held: Range, tensor: torch.Tensor) -> Handle:
        """Begin to fill a tensor from a range that is as long; arguments and errors as for `start_write`."""

    @abstractmethod
    def lend(self, held: Range) -> Loan:
        """Begin to read a range into memory of the tier; waits for a buffer where none is free.

        Raises:
            UsageError: the range is larger than a buffer, or no buffer became free in time; names who holds them.
            StorageError: an earlier write failed and nobody has waited for it.
        """

    @abstractmethod
    def stream(
        self, ranges: Sequence[Range], *, ahead: int | None = None, write_back: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Go through ranges in order: while one is in use, the next is being read and the one before is being written.

        An item is done with when the next is asked for; a loop that is left earlier does not write the item it was at. When
        the loop ends, all that was written back has arrived. The ranges must not overlap.

        Args:
            ranges: none larger than a buffer.
            ahead: how many items are read before they are needed, as far as buffers are free; the tier's default if None.
            write_back: store each item as the loop left it. Without it, the loop must not change what it is given.

        Yields:
            The index of the range, and its bytes: a 1-D uint8 tensor that is valid until the next item is asked for.

        Raises:
            UsageError: a range does not fit, or no buffer became free in time; names who holds them.
            StorageError: a transfer failed.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait for everything that was started.

        Raises:
            StorageError: a write failed and nobody has waited for it.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """What the tier did so far."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. What is in flight is given up: waiting for it is a UsageError. Closing again does nothing.

        When it returns, no tensor is read or written any more.
        """

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
