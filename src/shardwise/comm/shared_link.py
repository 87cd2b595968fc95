"""The link between ranks of one machine: collectives through shared memory.

Owns the protocol. Refuses to know how the memory was obtained, process groups, names and counters.

Every rank has a board: a ring of slots that it alone writes, and semaphores that the others raise. An operation is a row of
pieces, the same row on all ranks. For each piece a rank fills a slot of its board and tells the others ("ready"); when all are
ready, it reads their slots and tells them ("done"); a slot is filled again when all are done with it. Operations begin in the
order in which they were issued, on all ranks, and nothing runs in the background: waiting for one drives all before it.

Large tensors are cut to fit the slots, but for those that lie in shared memory themselves ("scratch"): then a slot holds only
where, and the others read them in place. Sums are made in axis order, 16-bit numbers in 32 bits and rounded once; each element
is summed by one rank, so that all ranks get the same bits.

Each slot carries the number and the digest of the operation, so that ranks which ask for different things notice at once.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwise.comm.segments import SEMAPHORE_BYTES, Segment, SegmentCard, Semaphore
from shardwise.comm.transport import Flight, Mismatch, Tag
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis

__all__ = ["SharedLink", "board_bytes", "mailbox"]

_RING = 4  # slots of a board: how far a rank may be ahead of the slowest
_PAYLOAD = 1 << 19  # bytes of a slot: large enough that copying outweighs the waiting
_HEADER = 64
_MAILBOX = 1 << 17  # bytes at the end of a board, for what a rank says of itself
_WORDS = _HEADER // 8
_BLOCK = 1 << 17  # elements that are summed at once: they stay in the cache between two operands
_IN_PLACE = 1 << 14  # bytes below which copying is cheaper than looking where a tensor lies
_YIELDS = 10  # times that a waiting rank gives way before it sleeps
_NAP_S = 0.1


def board_bytes(size: int) -> int:
    """Length of one rank's board on an axis of `size` ranks."""
    return 2 * size * SEMAPHORE_BYTES + _RING * (_HEADER + _PAYLOAD) + _MAILBOX


def mailbox(board: Segment) -> Any:
    """The bytes at the end of a board that are no part of the protocol, as a ctypes array."""
    return (ctypes.c_char * _MAILBOX).from_address(board.address + board.card.nbytes - _MAILBOX)


class _Slot(NamedTuple):
    """A slot of some rank's board: eight integers, and bytes.

    The integers: number and digest of the operation, whether it lends, and then the card and the offset of what is lent.
    """

    header: Any
    payload: torch.Tensor

    def holds(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The first elements of the payload."""
        return self.payload[: count * dtype.itemsize].view(dtype)


_Fill = Callable[[_Slot], object]
_Pieces = Generator[_Fill, Sequence[_Slot], None]


@dataclass(eq=False, slots=True)
class _Operation:
    """An operation under way.

    Args:
        tag: what it is, equal on all ranks.
        steps: yields how the slot of each piece is filled, and is sent all ranks' slots in return.
        pieces: how often it yields.
        lends: whether others read this rank's memory, which must not change until all are done.
    """

    tag: Tag
    steps: _Pieces
    pieces: int
    lends: bool
    fill: _Fill | None = None
    posted: int = 0
    last: int = -1  # number of the last piece that was posted
    over: bool = False


class _SharedFlight:
    """The flight of one operation."""

    __slots__ = ("_link", "_operation")

    def __init__(self, link: SharedLink, operation: _Operation) -> None:
        self._link = link
        self._operation = operation

    def poll(self, seconds: float) -> bool:
        return self._link.run(self._operation, seconds)


class SharedLink:
    """See the module's text. All its ranks make it together.

    Args:
        axis: the ranks.
        boards: every rank's board, in axis order.
        registry: this rank's own scratch memory, by address.
    """

    checks = True

    def __init__(self, axis: Axis, boards: Sequence[Segment], registry: dict[int, SegmentCard]) -> None:
        self._size, self._me = axis.size, axis.index
        self.boards = tuple(boards)
        self._registry = registry
        self._attached: dict[tuple[int, int], Segment] = {}
        self._slots = [[_slot(board, axis.size, number) for board in boards] for number in range(_RING)]
        others = [index for index in range(axis.size) if index != axis.index]
        self._ready = [_Gate(self._semaphore(self._me, peer), self._semaphore(peer, self._me)) for peer in others]
        self._done = [_Gate(self._semaphore(self._me, peer, 1), self._semaphore(peer, self._me, 1)) for peer in others]
        self._queue: deque[_Operation] = deque()
        self._next = 0  # number of the next piece to be posted
        self._taken = 0  # number of the next piece to be read
        self._awaited: _Gate | None = None  # what the last attempt to go on was stopped by

    @staticmethod
    def prepare(board: Segment, size: int) -> None:
        """Set the semaphores of a board that nobody uses yet."""
        for number in range(2 * size):
            Semaphore(board.address + number * SEMAPHORE_BYTES, fresh=True)

    # -- operations; see `Link` --------------------------------------------------------------------------------------------

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Flight:
        """`out` becomes all shards."""
        return self._start(tag, self._all_gather(_raw(out).view(self._size, -1), _raw(shard)), _count(shard.nbytes))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Flight:
        """`out` becomes this rank's slice of the sum."""
        if self._is_scratch(full):
            return self._start(tag, self._reduce_scatter_in_place(out, full), 1, lends=True)
        length = max(1, _PAYLOAD // full.itemsize // self._size)
        return self._start(tag, self._reduce_scatter(out, full.view(self._size, -1), length), -(-out.numel() // length))

    def all_reduce(self, tensor: torch.Tensor, tag: Tag) -> Flight:
        """`tensor` becomes the sum."""
        flat = tensor.view(-1)
        if self._is_scratch(flat):
            return self._start(tag, self._all_reduce_in_place(flat), 2, lends=True)
        return self._start(tag, self._all_reduce(flat), _count(tensor.nbytes))

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Flight:
        """`tensor` becomes the source's."""
        return self._start(tag, self._broadcast(_raw(tensor), source), _count(tensor.nbytes))

    def scatter(self, out: torch.Tensor, full: torch.Tensor | None, source: int, tag: Tag) -> Flight:
        """`out` becomes this rank's slice of the source's tensor."""
        rows = _raw(full).view(self._size, -1) if full is not None and source == self._me else None
        length = _PAYLOAD // self._size
        return self._start(tag, self._scatter(_raw(out), rows, source, length), -(-out.nbytes // length))

    def fence(self, tag: Tag) -> Flight:
        """Over when all ranks have come."""
        return self._start(tag, self._fence(), 1)

    def _all_gather(self, rows: torch.Tensor, mine: torch.Tensor) -> _Pieces:
        apart = rows[self._me].data_ptr() != mine.data_ptr()
        for start in range(0, len(mine), _PAYLOAD):
            part = mine[start : start + _PAYLOAD]
            slots = yield partial(_put, part)
            for index, slot in enumerate(slots):
                if index != self._me:
                    rows[index, start : start + len(part)].copy_(slot.payload[: len(part)])
                elif apart:
                    rows[index, start : start + len(part)].copy_(part)

    def _reduce_scatter(self, out: torch.Tensor, rows: torch.Tensor, length: int) -> _Pieces:
        for start in range(0, out.numel(), length):
            part = rows[:, start : start + length]
            width = part.shape[1]
            slots = yield partial(_put, part)
            parts = [slot.holds(out.dtype, part.numel())[self._me * width : (self._me + 1) * width] for slot in slots]
            _sum(out[start : start + width], parts)

    def _reduce_scatter_in_place(self, out: torch.Tensor, full: torch.Tensor) -> _Pieces:
        slots = yield self._lend(full)
        own = slice(self._me * out.numel(), (self._me + 1) * out.numel())
        _sum(out, [whole[own] for whole in self._borrow(full, slots)])

    def _all_reduce(self, flat: torch.Tensor) -> _Pieces:
        length = _PAYLOAD // flat.itemsize
        for start in range(0, flat.numel(), length):
            part = flat[start : start + length]
            slots = yield partial(_put, part)
            _sum(part, [slot.holds(part.dtype, part.numel()) for slot in slots])

    def _all_reduce_in_place(self, flat: torch.Tensor) -> _Pieces:
        slots = yield self._lend(flat)
        wholes = self._borrow(flat, slots)
        parts = [whole.tensor_split(self._size) for whole in wholes]
        _sum(parts[self._me][self._me], [rows[self._me] for rows in parts])
        yield _nothing  # every rank has summed its part of its own tensor; the others' parts are read from there
        for index in range(self._size):
            if index != self._me:
                parts[self._me][index].copy_(parts[index][index])

    def _broadcast(self, flat: torch.Tensor, source: int) -> _Pieces:
        for start in range(0, len(flat), _PAYLOAD):
            part = flat[start : start + _PAYLOAD]
            slots = yield partial(_put, part) if source == self._me else _nothing
            if source != self._me:
                part.copy_(slots[source].payload[: len(part)])

    def _scatter(self, out: torch.Tensor, rows: torch.Tensor | None, source: int, length: int) -> _Pieces:
        for start in range(0, len(out), length):
            part = out[start : start + length]
            fill = _nothing if rows is None else partial(_put, rows[:, start : start + length])
            slots = yield fill
            first = self._me * len(part)
            part.copy_(slots[source].payload[first : first + len(part)])

    def _fence(self) -> _Pieces:
        yield _nothing

    # -- tensors that are read where they lie ------------------------------------------------------------------------------

    def _is_scratch(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes > _IN_PLACE and tensor.untyped_storage().data_ptr() in self._registry

    def _lend(self, tensor: torch.Tensor) -> _Fill:
        address = tensor.untyped_storage().data_ptr()
        words = (*self._registry[address], tensor.data_ptr() - address)

        def fill(slot: _Slot) -> None:
            slot.header[3:8] = words

        return fill

    def _borrow(self, mine: torch.Tensor, slots: Sequence[_Slot]) -> list[torch.Tensor]:
        """Every rank's tensor of this operation, in axis order."""
        found: list[torch.Tensor] = []
        for index, slot in enumerate(slots):
            if index == self._me:
                found.append(mine)
                continue
            *card, offset = slot.header[3:8]
            memory = self._attach(index, SegmentCard(*card)).memory
            found.append(memory[offset : offset + mine.nbytes].view(mine.dtype))
        return found

    def _attach(self, index: int, card: SegmentCard) -> Segment:
        key = index, card.serial
        if key not in self._attached:
            try:
                self._attached[key] = Segment.attach(card)
            except OSError as error:
                raise ConnectionError(f"shared memory of process {card.pid} cannot be opened: {error}") from error
        return self._attached[key]

    # -- the machinery -----------------------------------------------------------------------------------------------------

    def _start(self, tag: Tag, steps: _Pieces, pieces: int, *, lends: bool = False) -> Flight:
        operation = _Operation(tag, steps, pieces, lends, next(steps))
        self._queue.append(operation)
        self._advance()
        return _SharedFlight(self, operation)

    def run(self, operation: _Operation, seconds: float) -> bool:
        """Drive operations until `operation` is finished, or the time is over; say which."""
        turns, limit = 0, 0.0
        while not self._is_finished(operation):
            if self._advance():
                continue
            turns += 1
            if turns == 1:
                limit = time.monotonic() + seconds
            elif turns <= _YIELDS:
                os.sched_yield()
            elif (left := limit - time.monotonic()) <= 0:
                return False
            elif self._awaited is not None:
                self._awaited.wait(min(left, _NAP_S))
        return True

    def _is_finished(self, operation: _Operation) -> bool:
        return operation.over and (not operation.lends or self._are_open(self._done, operation.last))

    def _are_open(self, gates: Sequence[_Gate], piece: int) -> bool:
        """Whether all other ranks have let that piece pass."""
        for gate in gates:
            if not gate.passed(piece):
                self._awaited = gate
                return False
        return True

    def _advance(self) -> bool:
        """Do what can be done now; say whether that was anything."""
        moved = False
        while self._post() or self._take():
            moved = True
        return moved

    def _post(self) -> bool:
        """Fill a slot, if an operation has something to say and a slot is free."""
        for operation in self._queue:
            if operation.fill is not None:
                before = self._next - _RING  # what the slot holds so far; this rank reads it as well
                if before >= 0 and not (self._taken > before and self._are_open(self._done, before)):
                    return False
                slot = self._slots[self._next % _RING][self._me]
                slot.header[:3] = (*operation.tag, operation.lends)
                operation.fill(slot)
                operation.fill = None
                operation.posted += 1
                operation.last = self._next
                self._next += 1
                for gate in self._ready:
                    gate.give()
                return True
            if operation.posted < operation.pieces:
                return False  # its next piece comes before those of later operations
        return False

    def _take(self) -> bool:
        """Read all ranks' slots of one piece, if they are there."""
        if not self._queue or self._queue[0].last != self._taken or not self._are_open(self._ready, self._taken):
            return False
        operation = self._queue[0]
        slots = self._slots[self._taken % _RING]
        for slot in slots:
            if tuple(slot.header[:2]) != operation.tag:
                raise Mismatch(operation.tag.sequence)
            if slot.header[2] != operation.lends:
                problem = "a tensor lies in shared memory on some ranks only"
                raise UsageError(explain(problem, do='set "transport": "gloo" in the configuration'))
        try:
            operation.fill = operation.steps.send(slots)
        except StopIteration:
            operation.over = True
            self._queue.popleft()
        self._taken += 1
        for gate in self._done:
            gate.give()
        return True

    def _semaphore(self, owner: int, sender: int, row: int = 0) -> Semaphore:
        """One on `owner`'s board that `sender` raises."""
        return Semaphore(self.boards[owner].address + (row * self._size + sender) * SEMAPHORE_BYTES, fresh=False)


class _Gate:
    """How many pieces another rank has let pass, and how to tell it that one has passed here."""

    __slots__ = ("_passed", "_theirs", "give")

    def __init__(self, theirs: Semaphore, ours: Semaphore) -> None:
        self._theirs = theirs
        self._passed = 0
        self.give = ours.give

    def passed(self, piece: int) -> bool:
        """Whether that rank has let the piece with that number pass."""
        while self._passed <= piece:
            if not self._theirs.take():
                return False
            self._passed += 1
        return True

    def wait(self, seconds: float) -> None:
        """Sleep until that rank has let one more piece pass, or the time is over."""
        self._passed += self._theirs.wait(seconds)


def _slot(board: Segment, size: int, number: int) -> _Slot:
    start = 2 * size * SEMAPHORE_BYTES + number * (_HEADER + _PAYLOAD)
    header = (ctypes.c_int64 * _WORDS).from_address(board.address + start)
    return _Slot(header, board.memory[start + _HEADER : start + _HEADER + _PAYLOAD])


def _count(nbytes: int) -> int:
    return -(-nbytes // _PAYLOAD)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _put(part: torch.Tensor, slot: _Slot) -> None:
    slot.holds(part.dtype, part.numel()).view(part.shape).copy_(part)


def _nothing(slot: _Slot) -> None:
    pass


def _sum(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """`out` becomes the sum of `parts`, in order. It may be one of them."""
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    direct = len(parts) == 2 or (wide == out.dtype and all(part.data_ptr() != out.data_ptr() for part in parts[2:]))
    for start in range(0, out.numel(), _BLOCK):
        block = [part[start : start + _BLOCK] for part in parts]
        target = out[start : start + _BLOCK]
        total = torch.add(block[0], block[1], out=target) if direct else torch.add(block[0].to(wide), block[1])
        for part in block[2:]:
            total += part
        if not direct:
            target.copy_(total)
