"""What carries bytes between the ranks of an axis, and where a sharded buffer's storage lies.

Owns the protocol that every transport follows, and the two transports that need no other process: the axis of one rank, and the
dry run. Refuses to know process groups, names, counters and the guard: those are the same for every transport.

A transport decides where the storage of a sharded buffer lies, because only it knows what gathering and releasing costs: one
that keeps the shards of all ranks side by side in shared memory gathers by doing nothing at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.comm.handle import DONE, Handle
from shardwise.comm.ledger import Ledger
from shardwise.errors import UsageError
from shardwise.mesh import Axis

__all__ = [
    "Crew",
    "FINISHED",
    "Flight",
    "Link",
    "LocalTransport",
    "Mismatch",
    "NO_TAG",
    "NullTransport",
    "ShardedStorage",
    "Storage",
    "StorageSpec",
    "Tag",
    "Transport",
    "WholeStorage",
]


class Tag(NamedTuple):
    """What an operation is, equal on all ranks that ask for the same: its number on the axis, and a digest of its name."""

    sequence: int
    digest: int


NO_TAG = Tag(0, 0)


class Mismatch(Exception):  # noqa: N818 - an event, caught by the guard, not an error that a user meets
    """A link has noticed that the ranks ask for different operations.

    Args:
        sequence: number of this rank's operation.
    """

    def __init__(self, sequence: int) -> None:
        super().__init__(sequence)
        self.sequence = sequence


class Flight(Protocol):
    """One operation that a transport has started."""

    def poll(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; say whether it has come. May be called again after True.

        Raises:
            ConnectionError: it can never end, because a peer is gone.
            TimeoutError: it can never end, because the transport's own time limit has passed.
            Mismatch: it can never end, because the ranks ask for different operations; only from links that check.
        """
        ...


class _Finished:
    def poll(self, seconds: float) -> bool:
        return True


FINISHED: Flight = _Finished()
"""The flight of an operation that was over when it returned."""


class Link(Protocol):
    """The ranks of one axis, connected. Tensors are contiguous, of matching length and dtype, and not empty.

    Any dtype can be gathered, broadcast and scattered; float16, bfloat16, float32, float64, int32 and int64 can be summed.
    An operation may be given memory that overlaps in the one way its method names.
    """

    @property
    def checks(self) -> bool:
        """Whether the link itself notices that ranks ask for different operations. No operation then ends before all came."""
        ...

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Flight:
        """`out` (1-D, size x n) becomes all ranks' shards (1-D, n) in axis order. `shard` may be its own slice of `out`."""
        ...

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Flight:
        """`out` (1-D, n) becomes this rank's slice of the sum of all ranks' `full` (1-D, size x n).

        `out` may be that slice of `full`. What the rest of `full` holds afterwards is not defined.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, tag: Tag) -> Flight:
        """`tensor` becomes the sum of all ranks' tensors."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Flight:
        """`tensor` becomes that of the rank with index `source` on the axis."""
        ...

    def scatter(self, out: torch.Tensor, full: torch.Tensor | None, source: int, tag: Tag) -> Flight:
        """`out` (1-D, n) becomes this rank's slice of the source's `full` (1-D, size x n), which is None elsewhere."""
        ...

    def fence(self, tag: Tag) -> Flight:
        """Over when all ranks have come, and sees what they wrote to shared memory before."""
        ...


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What storage is asked for: `axis.size` chunks of `chunk` elements, one of which rests on this rank."""

    chunk: int
    axis: Axis
    dtype: torch.dtype
    device: torch.device
    resident: bool
    """The gathered form is never released: the resting shard is a slice of it."""
    provisional: bool = False
    """It will soon be given up for other storage."""


class Storage(Protocol):
    """The bytes of one buffer that is split over an axis.

    Where `shared`, the shards of all ranks lie side by side in memory that all of them see, and gathering moves nothing. Then
    two things must hold: nobody writes to its shard while others may read it, and nobody reads before all have written.
    Writes outside of an optimizer step come between `open` and `close`, and the first `gather` after that waits for all ranks.
    In a step, which has made sure by itself that nobody reads, one `Comm.fence` afterwards does for all storages on the axis.
    """

    @property
    def shared(self) -> bool:
        """Whether a write to `shard` is seen by the other ranks at once."""
        ...

    def open(self, name: str) -> None:
        """Wait until all ranks are here, so that each may write to its shard. Does nothing unless `shared`."""
        ...

    def close(self) -> None:
        """All ranks have stopped writing, each at its own time: the next gather waits for them. Nothing unless `shared`."""
        ...

    @property
    def shard(self) -> torch.Tensor:
        """This rank's chunk, 1-D, always readable and writable."""
        ...

    @property
    def full(self) -> torch.Tensor:
        """All chunks in axis order, 1-D. The same tensor object for life; its memory is there only while `is_live`."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether `full` has memory. Its content is that of the last gather that was waited for."""
        ...

    def gather(self, name: str) -> Handle:
        """Start filling `full` from all ranks' shards as they are now."""
        ...

    def release(self) -> None:
        """Give back the memory of `full`, after waiting for a gather in flight. Nothing for resident storage."""
        ...

    @property
    def nbytes_resting(self) -> int:
        """Bytes this rank holds while the storage is released."""
        ...

    @property
    def nbytes_full(self) -> int:
        """Bytes of `full` while it is live."""
        ...


class Crew(Protocol):
    """What a storage needs of the `Comm` it belongs to."""

    @property
    def ledger(self) -> Ledger:
        """Where gathered bytes are counted as resident, in category "gathered"."""
        ...

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, axis: Axis, name: str) -> Handle:
        """The guarded, counted operation."""
        ...

    def all_reduce(self, tensor: torch.Tensor, axis: Axis, name: str) -> Handle:
        """The guarded, counted operation."""
        ...

    def fence(self, axis: Axis, name: str) -> Handle:
        """The guarded, counted operation."""
        ...

    def note(self, axis: Axis, name: str, elements: int, dtype: torch.dtype) -> None:
        """Account for an all-gather that moves nothing."""
        ...


class Transport(Protocol):
    """One way to move bytes."""

    @property
    def guarded(self) -> bool:
        """Whether other processes take part, so that divergence has to be guarded against."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors lie that every link can carry: the host if possible."""
        ...

    def connect(self, axis: Axis) -> Link:
        """The link along `axis`. Costs nothing until it is used."""
        ...

    def allocate(self, spec: StorageSpec, crew: Crew) -> Storage:
        """Storage whose bytes lie where this transport wants them. The content is not defined."""
        ...

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor of zeros for sums over ranks, where this transport reads it with the least copying."""
        ...

    def abandon(self) -> None:
        """Operations in flight will never end. From now on nothing may block on them."""
        ...

    def close(self) -> None:
        """Give back what `connect` made. Closing again does nothing."""
        ...


class WholeStorage:
    """Storage on an axis of one rank: the shard is everything."""

    shared = False

    def __init__(self, spec: StorageSpec) -> None:
        self.full = self.shard = torch.empty(spec.chunk, dtype=spec.dtype, device=spec.device)
        self.is_live = True
        self.nbytes_full = self.nbytes_resting = spec.chunk * spec.dtype.itemsize

    def open(self, name: str) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def gather(self, name: str) -> Handle:
        """Nothing to do."""
        return DONE

    def release(self) -> None:
        """Nothing to do."""


class ShardedStorage:
    """Storage that is gathered by copying: a chunk of its own per rank, and a full tensor that comes and goes.

    Releasing resizes the storage of `full` to nothing and gathering resizes it back. Autograd saves views of that storage, and
    they must neither keep released memory alive nor miss what is gathered next.
    """

    shared = False

    def __init__(self, spec: StorageSpec, crew: Crew) -> None:
        self._axis = spec.axis
        self._resident = spec.resident
        self._crew = crew
        self._flight: Handle = DONE
        self.nbytes_full = spec.axis.size * spec.chunk * spec.dtype.itemsize
        self.nbytes_resting = self.nbytes_full if spec.resident else spec.chunk * spec.dtype.itemsize
        self.full = torch.empty(spec.axis.size * spec.chunk, dtype=spec.dtype, device=spec.device)
        self.is_live = spec.resident
        if spec.resident:
            self.shard = self.full.narrow(0, spec.axis.index * spec.chunk, spec.chunk)
        else:
            self.full.untyped_storage().resize_(0)
            self.shard = torch.empty(spec.chunk, dtype=spec.dtype, device=spec.device)

    def open(self, name: str) -> None:
        """Nothing to do: nobody else sees the shard."""

    def close(self) -> None:
        """Nothing to do."""

    def gather(self, name: str) -> Handle:
        """Start filling `full`; `name` is what messages call it."""
        if not self.is_live:
            self.full.untyped_storage().resize_(self.nbytes_full)
            self._crew.ledger.hold("gathered", self.nbytes_full)
            self.is_live = True
        self._flight = self._crew.all_gather(self.full, self.shard, self._axis, name)
        return self._flight

    def release(self) -> None:
        """Give the memory of `full` back. After an error it stays: a transport may still be writing into it."""
        if self._resident or not self.is_live:
            return
        flight, self._flight = self._flight, DONE
        try:
            flight.wait()
        except UsageError:
            return
        self.full.untyped_storage().resize_(0)
        self._crew.ledger.drop("gathered", self.nbytes_full)
        self.is_live = False


class _LocalLink:
    """An axis of one rank."""

    checks = False

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Flight:
        return _copy(out, shard)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Flight:
        return _copy(out, full)

    def all_reduce(self, tensor: torch.Tensor, tag: Tag) -> Flight:
        return FINISHED

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Flight:
        return FINISHED

    def scatter(self, out: torch.Tensor, full: torch.Tensor | None, source: int, tag: Tag) -> Flight:
        return FINISHED if full is None else _copy(out, full)

    def fence(self, tag: Tag) -> Flight:
        return FINISHED


class LocalTransport:
    """The transport of an axis of one rank. Needs no process group."""

    guarded = False
    device = torch.device("cpu")

    def connect(self, axis: Axis) -> Link:
        """The link of a rank with itself."""
        return _LocalLink()

    def allocate(self, spec: StorageSpec, crew: Crew) -> Storage:
        """One tensor that is both shard and full."""
        return WholeStorage(spec)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def abandon(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing was made."""


class _NullLink:
    """As if every rank of the axis held what this one holds."""

    checks = False

    def __init__(self, axis: Axis) -> None:
        self._size = axis.size
        self._index = axis.index

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Flight:
        out.view(self._size, -1).copy_(shard.clone())  # a clone, as the shard may be a slice of `out`
        return FINISHED

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Flight:
        _copy(out, full.narrow(0, self._index * out.numel(), out.numel()))
        out.mul_(self._size)
        return FINISHED

    def all_reduce(self, tensor: torch.Tensor, tag: Tag) -> Flight:
        tensor.mul_(self._size)
        return FINISHED

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Flight:
        return FINISHED

    def scatter(self, out: torch.Tensor, full: torch.Tensor | None, source: int, tag: Tag) -> Flight:
        if full is not None:
            _copy(out, full.narrow(0, self._index * out.numel(), out.numel()))
        return FINISHED

    def fence(self, tag: Tag) -> Flight:
        return FINISHED


class NullTransport:
    """The transport of a dry run, as one rank of any number: nothing leaves this process, and no process group is needed.

    Results are as if every rank of the axis held what this one holds, so numbers stay finite and counters are exact. Works
    on fake tensors.
    """

    guarded = False
    device = torch.device("cpu")

    def connect(self, axis: Axis) -> Link:
        """A link to imagined ranks."""
        return _NullLink(axis)

    def allocate(self, spec: StorageSpec, crew: Crew) -> Storage:
        """Storage as a transport that copies has it."""
        return ShardedStorage(spec, crew)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def abandon(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing was made."""


def _copy(out: torch.Tensor, source: torch.Tensor) -> Flight:
    out = out.view(-1)
    source = source.view(-1)
    # Only a saving. Asking for addresses, or whether one tensor is set to the other, would compute on fake tensors for real.
    in_place = out.untyped_storage() is source.untyped_storage() and out.storage_offset() == source.storage_offset()
    if not in_place:
        out.copy_(source)
    return FINISHED
