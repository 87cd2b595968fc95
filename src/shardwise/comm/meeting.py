"""Where the ranks meet: torch's store, reached and filled within a limit.

Owns the offering of the store, the way to it, and the counting-in of ranks. torch alone would wait half an hour for a rank
that never comes, and forever on a port where something else answers; here every wait ends at one deadline, and the error names
the address and the ranks that are missing. Refuses to know environment variables and process groups.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from shardwise.errors import LaunchError, explain

__all__ = ["Placement", "Store", "file_opener", "first_line", "meet", "tcp_opener"]

_dist: Any = dist  # its own annotations do not export the stores
_POLL_S = 0.02
_BACKLOG = 4096
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process is in the job.

    Args:
        rank, world_size: `0 <= rank < world_size`.
        address, port: where rank 0 offers the store; empty and 0 where none is needed.
        agent: the launcher (torchrun) offers the store at that address, and rank 0 is a client like the others.
        attempt: how often the launcher has restarted the ranks.
    """

    rank: int
    world_size: int
    address: str = ""
    port: int = 0
    agent: bool = False
    attempt: str = "0"


class Store(Protocol):
    """What is asked of a torch store; all of it raises `torch.distributed.DistError` when the connection breaks."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits for one that is not there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Count up, and return the new count."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """True when all keys have values."""
        ...


class _StoreLostError(Exception):
    """The connection to the store broke; it may be that of a group that is just being closed, so it is worth another try."""


def meet(open_store: Callable[[float], Store], place: Placement, deadline: float) -> Store:
    """A store on which every rank is known to have arrived.

    Args:
        open_store: opens it; takes the deadline.
        place: this process.
        deadline: monotonic seconds.

    Raises:
        LaunchError: the store was not reached, or not all ranks arrived, before the deadline.

    The one who offers the store may close the one of an earlier process group just when another rank comes for the next group.
    That rank then sees its connection break, and tries again.
    """
    while True:
        try:
            return _join(open_store(deadline), place, deadline)
        except _StoreLostError as lost:
            if time.monotonic() >= deadline:
                raise LaunchError(_lost(place, str(lost))) from None
            time.sleep(_POLL_S)


def _join(store: Store, place: Placement, deadline: float) -> Store:
    """Count in, and wait for the others.

    A store can outlive a process group (torchrun's does). Each rank counts its own arrivals on it, and the number is part
    of all later keys: nobody finds the addresses of an earlier group. So no state has to be kept in the process.
    """
    try:
        prefix = f"shardwise/{place.attempt}"
        meeting: Store = _dist.PrefixStore(f"{prefix}/{store.add(f'{prefix}/arrivals/{place.rank}', 1)}", store)
        meeting.set(f"here/{place.rank}", str(place.world_size))
        if place.rank == 0:
            meeting.set("world", str(place.world_size))
        meeting.add("count", 1)
        while int(meeting.add("count", 0)) < place.world_size:
            _check_world(meeting, place)
            if time.monotonic() >= deadline:
                raise LaunchError(_missing(meeting, place))
            time.sleep(_POLL_S)
        _check_world(meeting, place)
    except _dist.DistError as error:
        raise _StoreLostError(first_line(error)) from None
    return meeting


def _check_world(meeting: Store, place: Placement) -> None:
    if meeting.check(["world"]) and int(meeting.get("world")) != place.world_size:
        raise LaunchError(
            explain(
                "the ranks were started for worlds of different sizes",
                expected=f"WORLD_SIZE={int(meeting.get('world'))} as on rank 0",
                found=f"WORLD_SIZE={place.world_size} on rank {place.rank}",
            )
        )


def _missing(meeting: Store, place: Placement) -> str:
    missing = [str(rank) for rank in range(place.world_size) if not meeting.check([f"here/{rank}"])]
    named = ", ".join(missing[:16]) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    return explain(
        f"rank {place.rank} waited in vain for rank{'s' if len(missing) > 1 else ''} {named}",
        expected=f"WORLD_SIZE={place.world_size} processes to start",
        found=f"{place.world_size - len(missing)}",
        do="look at the output of the missing ranks; each RANK must be used exactly once",
    )


def file_opener(path: str, place: Placement) -> Callable[[float], Store]:
    """Opens a store in a file that all ranks see."""
    return lambda _deadline: _dist.FileStore(path, place.world_size)


def tcp_opener(place: Placement) -> Callable[[float], Store]:
    """Opens the store at the placement's address: offers it on rank 0 (unless the launcher does), connects elsewhere."""

    def open_store(deadline: float) -> Store:
        if place.rank == 0 and not place.agent:
            return _serve(place, deadline)
        _reach(place, deadline)
        return _bounded(lambda: _tcp_store(place, deadline), place, deadline)

    return open_store


def _tcp_store(place: Placement, deadline: float, **options: Any) -> Store:
    remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return _dist.TCPStore(place.address, place.port, place.world_size, timeout=remaining, wait_for_workers=False, **options)


def _serve(place: Placement, deadline: float) -> Store:
    """The store itself, on rank 0. `multi_tenant`: one that this process still has on the port is used again."""
    listener = _listener(place)
    options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    try:
        return _bounded(lambda: _tcp_store(place, deadline, is_master=True, multi_tenant=True, **options), place, deadline)
    except _StoreLostError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(
                explain(
                    f"MASTER_PORT={place.port} is in use on this machine",
                    do="choose another port, or let `shardwise run` find a free one",
                )
            ) from None
        raise LaunchError(_lost(place, str(error))) from None


def _listener(place: Placement) -> socket.socket | None:
    """A socket on the very address the ranks were told, so that a job on one machine is not offered to the network.

    Only where the address is given as a number or as localhost: a host's own name is often a loopback address to itself.
    None: torch opens one on all addresses.
    """
    text = "127.0.0.1" if place.address == "localhost" else place.address
    try:
        address = str(ipaddress.IPv4Address(text))
    except ValueError:
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, place.port))
        listener.listen(_BACKLOG)
    except OSError:
        # Not an address of this machine (a forwarded one), or taken, perhaps by an earlier store of this process: torch knows.
        listener.close()
        return None
    return listener


def _reach(place: Placement, deadline: float) -> None:
    """Wait until something answers at the address. torch's own attempts fill the screen with native stack traces."""
    pause = _POLL_S
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise LaunchError(_lost(place, _reason(error))) from None
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name cannot be resolved"
    if error.errno == errno.ECONNREFUSED:
        return "nothing listens there"
    return (error.strerror or str(error)).lower()


def _bounded(make: Callable[[], _T], place: Placement, deadline: float) -> _T:
    """The result of `make`, which may block for ever inside torch: its handshake has no time limit of its own."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(make())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="shardwise-store")
    thread.start()
    thread.join(max(1.0, deadline + 1.0 - time.monotonic()))
    if results:
        return results[0]
    if not errors:
        raise LaunchError(_lost(place, "what listens there does not answer as the store of a job"))
    if isinstance(errors[0], RuntimeError):
        raise _StoreLostError(first_line(errors[0]))
    raise errors[0]


def _lost(place: Placement, reason: str) -> str:
    return explain(
        f"rank {place.rank} could not reach rank 0 at MASTER_ADDR={place.address} MASTER_PORT={place.port} in time",
        found=reason,
        do="check that rank 0 was started and that both variables are the same on all ranks",
    )


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the native stack that follows it."""
    return str(error).strip().partition("\n")[0]
