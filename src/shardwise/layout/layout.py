"""`Layout`: parameters side by side in one 1-D buffer that is cut into equal contiguous chunks, one per rank.

Slots start on 128-byte boundaries: views are aligned for vector loads, and the waste is about 0.01 % on transformer blocks.
Chunks are *not* aligned to slots or rows, so a parameter may lie in several of them; aligning chunks to rows would cost far
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from shardwise.errors import LayoutError, explain
from shardwise.layout.placement import DATA_PARALLEL, Placement

__all__ = ["SLOT_BYTES", "Layout", "Request", "Slot", "pack"]

SLOT_BYTES = 128
"""Every slot and every chunk starts at a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a parameter asks of a layout.

    Args:
        name: global name, unique within the model.
        shape: global shape of the parameter.
        width: storage elements per parameter element (2 for complex numbers, which are stored as pairs of reals).
        granule: length unit, in storage elements, that a consumer needs whole inside the slot (a row, a quantisation block).
        placement: what each mesh axis means to it.
    """

    name: str
    shape: tuple[int, ...]
    width: int = 1
    granule: int = 1
    placement: Placement = DATA_PARALLEL


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter: storage elements `[offset, offset + length)` of the buffer."""

    request: Request
    offset: int
    length: int

    @property
    def name(self) -> str:
        """Global parameter name."""
        return self.request.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Global parameter shape."""
        return self.request.shape

    @property
    def stop(self) -> int:
        """One past the last storage element."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots in a buffer of `chunk * shards` elements. Validates itself; build one with `pack`.

    Args:
        slots: in buffer order, not overlapping.
        chunk: elements per rank.
        shards: number of chunks.
    """

    slots: tuple[Slot, ...]
    chunk: int
    shards: int

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            if slot.offset < end:
                problem = f"slot of {slot.name!r} overlaps the one before"
                raise LayoutError(explain(problem, expected=f"offset >= {end}", found=str(slot.offset)))
            end = slot.stop
        if self.shards < 1 or end > self.total:
            raise LayoutError(explain("the slots do not fit", expected=f"at most {self.total} elements", found=str(end)))

    @property
    def total(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.chunk * self.shards

    @property
    def used(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.length for slot in self.slots)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.total - self.used

    def interval(self, shard: int) -> tuple[int, int]:
        """Buffer elements `[start, stop)` of one chunk."""
        return shard * self.chunk, (shard + 1) * self.chunk

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of slots inside buffer elements `[start, stop)`, as `(slot index, first, last + 1)` in buffer elements."""
        for index, slot in enumerate(self.slots):
            first, last = max(slot.offset, start), min(slot.stop, stop)
            if first < last:
                yield index, first, last


def pack(requests: Sequence[Request], itemsize: int, shards: int) -> Layout:
    """Lay parameters out one after the other, in the given order.

    Args:
        requests: one per parameter; names must differ. Zero-sized and 0-d parameters are legal.
        itemsize: bytes per storage element.
        shards: how many equal chunks the buffer is cut into.

    Raises:
        LayoutError: two parameters have one name, or there are no chunks.
    """
    if shards < 1:
        raise LayoutError(explain("a buffer cannot be cut", expected="at least 1 chunk", found=str(shards)))
    align = max(1, SLOT_BYTES // itemsize)
    slots: list[Slot] = []
    seen: set[str] = set()
    end = 0
    for request in requests:
        if request.name in seen:
            raise LayoutError(explain(f"two parameters are called {request.name!r}", do="give every parameter its own name"))
        seen.add(request.name)
        length = prod(request.shape) * request.width
        offset = _round_up(end, lcm(align, request.granule)) if length else end
        slots.append(Slot(request, offset, length))
        end = offset + length
    return Layout(tuple(slots), chunk=_round_up(-(-end // shards), align), shards=shards)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
