"""`Comm`: the collectives of one engine.

Owns the one way in: every operation is checked, guarded, counted and named here, whatever transport carries it. Refuses to know
parameters: it sees flat tensors, axes and names.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.comm.channel import Channel, StoreChannel
from shardwise.comm.events import Event
from shardwise.comm.guard import Guard
from shardwise.comm.handle import DONE, Handle
from shardwise.comm.lanes import Crowd, Lane, Stream
from shardwise.comm.ledger import Ledger
from shardwise.comm.shared_transport import SharedTransport
from shardwise.comm.torch_transport import TorchTransport
from shardwise.comm.transport import NO_TAG, Flight, Link, LocalTransport, Mismatch, Storage, StorageSpec, Tag, Transport
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis

__all__ = ["Comm"]

_crowds: weakref.WeakKeyDictionary[dist.ProcessGroup, Crowd] = weakref.WeakKeyDictionary()
"""Who uses each process group."""

_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


@dataclass(slots=True)
class _Line:
    """An axis that is in use."""

    link: Link
    lane: Lane | None
    """None if no other process takes part."""


class _Started(Handle):
    """A collective under the guard's eyes."""

    __slots__ = ("_flight", "_guard", "_lane", "_sequence")

    def __init__(self, flight: Flight, guard: Guard, lane: Lane, sequence: int) -> None:
        self._flight: Flight | None = flight
        self._guard = guard
        self._lane = lane
        self._sequence = sequence

    def wait(self) -> None:
        """Return once the collective is done. Raises as `Comm` says."""
        if self._flight is not None:
            self._guard.watch(self._flight, self._lane, self._sequence)
            self._flight = None


class Comm:
    """Collectives on (contiguous tensor, axis), each returning a `Handle`.

    All ranks of an axis must call the same operations on it, with the same names and lengths, in the same order. A name says
    what is moved ("gather layers.3") and is the same whenever it is moved: no step numbers. Until the handle was waited for,
    outputs are undefined and inputs must not be written. Tensors without elements are legal: nothing is issued. On an axis of
    one rank, results are what one rank alone gets, at once. Not to be called from two threads at a time.

    Any collective, and the `wait()` of any handle, can raise
        DivergenceError: the ranks ask for different operations.
        StallError: something did not finish within `watchdog_s`.
        PeerLostError: another rank is gone.
        UsageError: arguments that do not fit together; or any call after one of the above, or after `close()`.
    The first three are raised on every rank, and leave the process group with operations in flight that will never end: it
    cannot be used again.

    Args:
        data: the ranks this engine may talk to; every axis it is given is part of them. All of them must build the `Comm`.
        group: the torch process group of `data`; None is the default group.
        watchdog_s: seconds after which a collective that has not finished is an error.
        ledger: where to count; a new one by default.
        transport: what carries the bytes; by default nothing at all for a single rank, and else as `share` says.
        share: whether ranks of one machine exchange tensors of the CPU through shared memory: True if they can, False never,
            "required" or it is an error.
    """

    def __init__(
        self,
        data: Axis,
        *,
        group: dist.ProcessGroup | None = None,
        watchdog_s: float = 300.0,
        ledger: Ledger | None = None,
        transport: Transport | None = None,
        share: bool | Literal["required"] = True,
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._data = data
        self._local = LocalTransport()
        self._guard: Guard | None = None
        self._phase = ""
        self._user = 0
        self._closed = False
        self._lines: dict[Axis, _Line] = {}
        if transport is None:
            transport = self._local if data.size == 1 else _choose_transport(data, group, watchdog_s, share)
        self._transport = transport
        if transport.guarded:
            link = transport.connect(data)
            crowd = _crowd_of(group)
            stream = Stream() if link.checks else crowd.stream
            self._user = crowd.join()
            try:
                channel = _open_channel(data, transport, link, watchdog_s)
            except BaseException:
                transport.abandon()
                raise
            self._guard = Guard(data, channel, watchdog_s, on_failure=transport.abandon, stream=stream, crowd=crowd)
            # Without close(), and at the end of the process: others may still be reading what they agreed on last.
            self._leaving = weakref.finalize(self, self._guard.leave)

    def set_phase(self, phase: str) -> None:
        """Say what the engine is doing ("forward", "backward"): names are compared within a phase, and errors print it."""
        if self._guard is not None and phase != self._phase:
            self._guard.mark()
        self._phase = phase

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, axis: Axis, name: str) -> Handle:
        """Fill `out` with the shards of all ranks in axis order.

        Args:
            out: 1-D, `axis.size * n` elements.
            shard: 1-D, n elements, same dtype; may be this rank's own slice of `out`, no other overlap.
            axis: the ranks.
            name: what it is called in errors.
        """
        _check_split("all_gather", name, axis, out, shard)
        return self._issue(
            axis, self._event("all_gather", name, out.numel(), out.dtype), lambda link, tag: link.all_gather(out, shard, tag)
        )

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, axis: Axis, name: str) -> Handle:
        """Sum `full` over all ranks and fill `out` with this rank's slice of the sum.

        Args:
            out: 1-D, n elements; may be this rank's own slice of `full`, no other overlap.
            full: 1-D, `axis.size * n` elements, of a floating dtype, int32 or int64. The rest of it is undefined afterwards.
            axis: the ranks.
            name: what it is called in errors.
        """
        _check_split("reduce_scatter", name, axis, full, out)
        _check_summable("reduce_scatter", name, full)
        return self._issue(
            axis,
            self._event("reduce_scatter", name, full.numel(), full.dtype),
            lambda link, tag: link.reduce_scatter(out, full, tag),
        )

    def all_reduce(self, tensor: torch.Tensor, axis: Axis, name: str) -> Handle:
        """Replace `tensor` (contiguous, any shape, a dtype that `reduce_scatter` takes) by its sum over all ranks."""
        _check_contiguous("all_reduce", name, tensor)
        _check_summable("all_reduce", name, tensor)
        return self._issue(
            axis, self._event("all_reduce", name, tensor.numel(), tensor.dtype), lambda link, tag: link.all_reduce(tensor, tag)
        )

    def broadcast(self, tensor: torch.Tensor, axis: Axis, source_index: int, name: str) -> Handle:
        """Replace `tensor` (contiguous, any shape) by that of the rank with that index on the axis."""
        _check_contiguous("broadcast", name, tensor)
        _check_source("broadcast", name, axis, source_index)
        event = self._event("broadcast", name, tensor.numel(), tensor.dtype, source_index)
        return self._issue(axis, event, lambda link, tag: link.broadcast(tensor, source_index, tag))

    def scatter(self, out: torch.Tensor, full_or_none: torch.Tensor | None, axis: Axis, source_index: int, name: str) -> Handle:
        """Fill `out` (1-D, n) with this rank's slice of the source's tensor (1-D, `axis.size * n`), which others leave None."""
        _check_source("scatter", name, axis, source_index)
        _check_contiguous("scatter", name, out)
        if axis.index == source_index and full_or_none is None:
            raise _unfit("scatter", name, "the tensor to scatter on the source", "None")
        if full_or_none is not None:
            _check_split("scatter", name, axis, full_or_none, out)
        event = self._event("scatter", name, axis.size * out.numel(), out.dtype, source_index)
        return self._issue(axis, event, lambda link, tag: link.scatter(out, full_or_none, source_index, tag))

    def fence(self, axis: Axis, name: str) -> Handle:
        """Done when every rank of the axis has come; it then sees what they wrote to shared storage before."""
        return self._issue(axis, self._event("fence", name), lambda link, tag: link.fence(tag))

    def note(self, axis: Axis, name: str, elements: int, dtype: torch.dtype) -> None:
        """Account for an all-gather that moves nothing, as the bytes are here: all ranks still have to ask for it alike."""
        line, event = self._line(axis), self._event("all_gather", name, elements, dtype)
        if line.lane is not None and self._guard is not None:
            self._guard.note(line.lane, event)
        self._count(axis, event)

    def ended(self) -> list[int]:
        """Other ranks whose process is known to have ended: only those of this machine can be. Asks nobody."""
        return [] if self._guard is None else self._guard.ended()

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Allow collectives so many seconds beyond the watchdog, where ranks have long work of different length before them."""
        return nullcontext() if self._guard is None else self._guard.patient(seconds)

    def all_gather_object(self, obj: Any, axis: Axis, name: str) -> list[Any]:
        """Every rank's object (anything pickle can carry), in axis order. Meant for small things: each rank reads all."""
        line, event = self._line(axis), self._event("all_gather_object", name)
        if axis.size > 1:
            self._count(axis, event)
        if line.lane is None or self._guard is None:
            return [obj] * axis.size
        payload = pickle.dumps(obj)
        exchange = self._exchange if line.link.checks else self._guard.exchange
        return [pickle.loads(each) for each in exchange(line.lane, event, payload)]

    def _exchange(self, lane: Lane, event: Event, payload: bytes) -> list[bytes]:
        """Every rank's bytes, through a link that compares what is asked for."""
        assert self._guard is not None
        axis = lane.axis
        link = self._line(axis).link
        sequence = self._guard.before(lane, event)
        tag = Tag(sequence, lane.digest)
        lengths = torch.empty(axis.size, dtype=torch.int64)
        own = torch.tensor([len(payload)])
        self._guard.watch(link.all_gather(lengths, own, tag), lane, sequence)
        sizes: list[int] = [int(length) for length in lengths]
        rows = torch.empty((axis.size, max(sizes)), dtype=torch.uint8)
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._guard.watch(link.all_gather(rows.view(-1), mine, tag), lane, sequence)
        everyone: Any = rows
        return [everyone[index, :size].numpy().tobytes() for index, size in enumerate(sizes)]

    def barrier(self, axis: Axis, name: str) -> None:
        """Return once every rank of the axis has come here."""
        self._issue(axis, self._event("barrier", name), lambda link, tag: link.fence(tag)).wait()

    def allocate(
        self,
        chunk: int,
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        resident: bool,
        provisional: bool = False,
    ) -> Storage:
        """Storage of a buffer that is split over an axis, `chunk` elements per rank. Its content is undefined. Collective.

        Gathered bytes of storage that is not resident are held in the ledger's category "gathered". Resting bytes are
        not: only the owner knows what they are.
        """
        spec = StorageSpec(chunk, axis, dtype, torch.device(device), resident, provisional)
        self._line(axis)
        return (self._local if axis.size == 1 else self._transport).allocate(spec, self)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """A 1-D tensor of zeros, to be summed over ranks: the transport reads it with the least copying."""
        return self._transport.scratch(numel, dtype, torch.device(device))

    def close(self, note: str = "") -> None:
        """Give back the process groups made here and leave the side channel. Closing again does nothing.

        Args:
            note: when this rank was done ("after 12 steps"), for the errors of ranks that go on.

        The first rank of the data axis stays up to 3 s for the others to close as well.
        """
        if not self._closed:
            self._closed = True
            self._lines.clear()
            if self._guard is not None:
                self._leaving.detach()
                self._guard.close(note)
            self._transport.close()

    def _line(self, axis: Axis) -> _Line:
        if self._closed:
            raise UsageError(explain("this Comm is closed", do="do not use an engine after destroying it"))
        line = self._lines.get(axis)
        if line is None:
            line = self._lines[axis] = self._connect(axis)
        return line

    def _connect(self, axis: Axis) -> _Line:
        if axis.size == 1:
            return _Line(self._local.connect(axis), None)
        if self._guard is None:
            return _Line(self._transport.connect(axis), None)
        lane = self._guard.lane(axis)
        # Connecting may wait for the others, unguarded.
        if self._guard.can_agree and axis.ranks != self._data.ranks and not lane.follower.count:
            self._guard.before(lane, Event("", "connect", axis.name, user=self._user), agree=True)
        link = self._transport.connect(axis)
        lane.checked = link.checks
        return _Line(link, lane)

    def _event(
        self, kind: str, name: str, elements: int = 0, dtype: torch.dtype | None = None, source_index: int = -1
    ) -> Event:
        return Event(self._phase, kind, name, elements, dtype, source_index, self._user)

    def _issue(self, axis: Axis, event: Event, operation: Callable[[Link, Tag], Flight]) -> Handle:
        """Start one collective."""
        line = self._line(axis)
        if event.dtype is not None and not event.elements:
            return DONE
        guard, lane = self._guard, line.lane
        if lane is None or guard is None:
            operation(line.link, NO_TAG)
            if axis.size > 1:
                self._count(axis, event)
            return DONE
        # An operation that has a source may end there before the others have come, so they must agree first.
        sequence = guard.before(lane, event, agree=event.source >= 0)
        try:
            flight = operation(line.link, Tag(sequence, lane.digest))
        except ConnectionError as error:
            guard.lost(lane, sequence, error)
        except Mismatch as mismatch:
            guard.diverged(lane, mismatch.sequence)
        self._count(axis, event)
        return _Started(flight, guard, lane, sequence)

    def _count(self, axis: Axis, event: Event) -> None:
        itemsize = event.dtype.itemsize if event.dtype is not None else 0
        self.ledger.count(event.kind, axis.name, event.elements * itemsize)


def _crowd_of(group: dist.ProcessGroup | None) -> Crowd:
    used = group or dist.group.WORLD
    assert used is not None, "the transport has found it"
    return _crowds.setdefault(used, Crowd())


def _open_channel(data: Axis, transport: Transport, link: Link, watchdog_s: float) -> Channel:
    shared = transport.channel(data) if isinstance(transport, SharedTransport) else None
    return shared or StoreChannel(data, link, transport.device, watchdog_s)


def _choose_transport(
    data: Axis, group: dist.ProcessGroup | None, watchdog_s: float, share: bool | Literal["required"]
) -> Transport:
    base = TorchTransport(data, group)
    if not share or base.device.type != "cpu":
        return base
    return SharedTransport(data, base, watchdog_s, required=share == "required")


def _check_contiguous(kind: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise _unfit(kind, name, "a contiguous tensor", f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def _check_split(kind: str, name: str, axis: Axis, whole: torch.Tensor, part: torch.Tensor) -> None:
    _check_contiguous(kind, name, whole)
    _check_contiguous(kind, name, part)
    if whole.dim() != 1 or part.dim() != 1 or whole.numel() != axis.size * part.numel() or whole.dtype != part.dtype:
        raise _unfit(
            kind,
            name,
            f"1-D tensors of one dtype, one {axis.size} times as long as the other",
            f"{tuple(whole.shape)} {whole.dtype} and {tuple(part.shape)} {part.dtype}",
        )


def _check_summable(kind: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _SUMMABLE:
        raise _unfit(kind, name, f"one of {', '.join(map(str, _SUMMABLE))}", str(tensor.dtype))


def _check_source(kind: str, name: str, axis: Axis, source_index: int) -> None:
    if not 0 <= source_index < axis.size:
        raise _unfit(kind, name, f"a source index below {axis.size}", str(source_index))


def _unfit(kind: str, name: str, expected: str, found: str) -> UsageError:
    return UsageError(explain(f"{kind} of {name!r} cannot be done", expected=expected, found=found))
