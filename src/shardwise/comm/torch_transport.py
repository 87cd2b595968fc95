"""The transport over torch.distributed.

Owns process groups of axes, the calls of collectives, and what a backend's error means. Refuses to know names, counters, the
guard. Nothing else in Shardwise calls a collective of torch.distributed.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.transport import Crew, Flight, Link, ShardedStorage, Storage, StorageSpec, Tag
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis

__all__ = ["TorchTransport"]

_dist: Any = dist  # its own annotations leave most of its functions partly unknown
# torch 2.13 renamed these; the older names warn on every call there.
_all_gather = _dist.all_gather_single if hasattr(dist, "all_gather_single") else _dist.all_gather_into_tensor
_reduce_scatter = _dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else _dist.reduce_scatter_tensor

_END_S = 5.0
_NATIVE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64})


class TorchTransport:
    """Moves bytes through process groups.

    Args:
        data: the axis that the given group spans.
        group: its process group; None is the default group.

    Raises:
        UsageError: there is no process group, or it has other ranks than the axis.
    """

    guarded = True

    def __init__(self, data: Axis, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise UsageError(
                explain(
                    f"axis {data.name!r} has {data.size} ranks and there is no process group",
                    do="call shardwise.init_distributed() first, or start the script with `shardwise run`",
                )
            )
        members = tuple(dist.get_process_group_ranks(group))
        if members != data.ranks:
            raise UsageError(
                explain(
                    f"the process group does not span axis {data.name!r}", expected=f"ranks {data.ranks}", found=f"{members}"
                )
            )
        self._given = group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {data.ranks: group}
        self._made: list[dist.ProcessGroup] = []
        self._abandoned = False
        self._spare: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def connect(self, axis: Axis) -> Link:
        """The link along `axis`. Its process group is made at the first operation, which all its ranks start together."""
        return _TorchLink(axis, self)

    def allocate(self, spec: StorageSpec, crew: Crew) -> Storage:
        """Storage that is gathered by copying."""
        return ShardedStorage(spec, crew)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group of an axis, made when it is asked for the first time."""
        if axis.ranks not in self._groups:
            if list(axis.ranks) != sorted(axis.ranks):
                raise UsageError(explain(f"the ranks of axis {axis.name!r} are not in ascending order", found=f"{axis.ranks}"))
            backend = None if self._given is None else dist.get_backend(self._given)
            # Only the ranks of the axis take part: the others may never need it.
            made = _dist.new_group(list(axis.ranks), backend=backend, use_local_synchronization=True)
            self._groups[axis.ranks] = made
            self._made.append(made)
        return self._groups[axis.ranks]

    @property
    def device(self) -> torch.device:
        """Where tensors lie that the group of the data axis can carry: the host if it can."""
        if "cpu:" in dist.get_backend_config(self._given):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu" if accelerator is None else accelerator)

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory with anything in it, to receive into; give it back by `restore`."""
        spare = self._spare[numel, dtype]
        return spare.pop() if spare else torch.empty(numel, dtype=dtype)

    def restore(self, memory: torch.Tensor) -> None:
        """Take back what was borrowed."""
        self._spare[memory.numel(), memory.dtype].append(memory)

    def abandon(self) -> None:
        """Leave the groups alone from now on, and see to it that this process can end.

        Destroying a gloo group waits for what is in flight in it, for as long as the group's time limit (30 minutes) if no
        peer ends first; and the interpreter destroys every group when it shuts down.
        """
        if not self._abandoned:
            self._abandoned = True
            atexit.register(_end_in_time)

    def close(self) -> None:
        """Destroy the groups that were made here."""
        self._spare.clear()
        made, self._made = self._made, []
        self._groups.clear()
        for group in made:
            if not self._abandoned and dist.is_initialized():
                dist.destroy_process_group(group)


class _TorchLink:
    """One axis of a `TorchTransport`."""

    checks = False

    def __init__(self, axis: Axis, transport: TorchTransport) -> None:
        self._axis = axis
        self._transport = transport
        self._known = False
        self._group: dist.ProcessGroup | None = None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Flight:
        out, shard = _carried(out), _carried(shard)
        if out.device.type != "cpu":
            return self._start(_all_gather, out, shard)
        # gloo's own receives into a second copy of `out`, which it allocates; broadcasts of the parts receive in place.
        parts = out.view(self._axis.size, -1)
        own = parts[self._axis.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return _AllFlights(
            [self._start(_dist.broadcast, part, src=rank) for part, rank in zip(parts, self._axis.ranks, strict=True)]
        )

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Flight:
        if full.device.type != "cpu":
            return self._start(_reduce_scatter, out, full)
        # gloo's own sums everything everywhere, keeps one slice, and cannot be waited for in pieces. Exchanging the slices and
        # summing one of them here moves half the bytes, and adds in axis order whatever the number of ranks.
        received = self._transport.borrow(full.numel(), full.dtype)
        return _SumFlight(self._start(_dist.all_to_all_single, received, full), received, out, self._transport.restore)

    def all_reduce(self, tensor: torch.Tensor, tag: Tag) -> Flight:
        return self._start(_dist.all_reduce, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Flight:
        return self._start(_dist.broadcast, _carried(tensor), src=self._axis.ranks[source])

    def scatter(self, out: torch.Tensor, full: torch.Tensor | None, source: int, tag: Tag) -> Flight:
        out = _carried(out)
        pieces = None if full is None else list(_carried(full).view(self._axis.size, -1).unbind())
        if self._axis.index != source:
            pieces = None
        return self._start(_dist.scatter, out, pieces, src=self._axis.ranks[source])

    def fence(self, tag: Tag) -> Flight:
        return self._start(_dist.all_reduce, torch.zeros(1, dtype=torch.int32, device=self._transport.device))

    def _start(self, collective: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Flight:
        try:
            if not self._known:
                self._group = self._transport.group(self._axis)
                self._known = True
            work = collective(tensor, *args, group=self._group, async_op=True, **kwargs)
        except dist.DistError as error:
            raise ConnectionError(_first_line(error)) from error
        return _HostFlight(work) if tensor.device.type == "cpu" else _DeviceFlight(work)


class _HostFlight:
    """Work on host memory: it can be waited for in pieces."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def poll(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            # Either the time is over, and the work goes on, or the work has failed. Only the latter is an end.
            if not self._work.is_completed():
                return False
            try:
                self._work.wait()
            except RuntimeError as error:
                kind = TimeoutError if "imed out" in str(error) else ConnectionError
                raise kind(_first_line(error)) from error
        return True


class _AllFlights:
    """Several pieces of work that were started together."""

    __slots__ = ("_flights",)

    def __init__(self, flights: list[Flight]) -> None:
        self._flights = flights

    def poll(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while self._flights:
            if not self._flights[-1].poll(max(0.001, limit - time.monotonic())):
                return False
            self._flights.pop()
        return True


class _SumFlight:
    """Slices on their way here, one from each rank, and their sum once they have come."""

    __slots__ = ("_flight", "_out", "_received", "_restore")

    def __init__(
        self, flight: Flight, received: torch.Tensor, out: torch.Tensor, restore: Callable[[torch.Tensor], None]
    ) -> None:
        self._flight = flight
        self._restore = restore
        self._received: torch.Tensor | None = received
        self._out = out

    def poll(self, seconds: float) -> bool:
        if not self._flight.poll(seconds):
            return False
        if self._received is not None:
            # Sums of 16-bit numbers are accumulated in 32 bits and rounded once.
            slices = self._received.view(-1, self._out.numel())
            torch.sum(slices, dim=0, dtype=self._out.dtype, out=self._out)
            self._restore(self._received)
            self._received = None
        return True


class _DeviceFlight:
    """Work on an accelerator: waiting orders streams and returns at once, so there is nothing to watch from the host."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def poll(self, seconds: float) -> bool:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error
        return True


def _end_in_time() -> None:
    """Let the interpreter shut down, and end the process if it cannot; there is no public way to stop work in flight."""
    # faulthandler's timer needs no Python thread, so it goes on while the interpreter is being taken down.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - must stay open until the end of the process
    faulthandler.dump_traceback_later(_END_S, exit=True, file=nowhere)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as backends can carry it: dtypes that not all of them know travel as bytes."""
    return tensor if tensor.dtype in _NATIVE else tensor.view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    """A backend's message without stack frames and the path of its source file."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2] if line.startswith("[") else line
