"""The side channel: small messages between the ranks of one `Comm`, independent of the collectives it watches over.

Owns a key-value store that belongs to this `Comm` alone, how ranks find it, and whether a rank's process is still there.
Refuses to know what the messages say.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

from shardwise.comm.transport import NO_TAG, Link
from shardwise.errors import PeerLostError, StallError, explain
from shardwise.mesh import Axis

__all__ = ["Ballot", "BoardChannel", "Channel", "ChannelGone", "StoreChannel", "introduce", "machine_name"]

_dist: Any = dist  # its stubs do not export the stores
_FRAME = struct.Struct("<II")  # length and checksum of what a rank says in shared memory
_CARD = 1024  # bytes in which a rank introduces itself
_PIECE = 4 << 20  # bytes of a value that travel in one message


class ChannelGone(Exception):  # noqa: N818 - an event, caught by the guard, not an error that a user meets
    """The channel was closed, or the process it lives in has ended."""


class Channel(Protocol):
    """What the guard needs. `tell` and `hear` raise ChannelGone once the channel is gone."""

    @property
    def host(self) -> int:
        """The rank whose process the channel lives in: it goes when that process goes. -1 if it lives in all of them."""
        ...

    @property
    def ballot(self) -> Ballot | None:
        """Where ranks agree before they start anything; None if every link finds out by itself whether they did."""
        ...

    def tell(self, rank: int, message: str) -> None:
        """Replace what `rank` last said. Does not wait."""
        ...

    def hear(self, ranks: Iterable[int]) -> list[str]:
        """What each of `ranks` last said; empty if it never said anything."""
        ...

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` whose process is known to have ended. A rank on another machine is never known."""
        ...

    def close(self) -> None:
        """Leave; the host's process ends the channel with it."""
        ...


class Ballot(Protocol):
    """Counters and values that ranks share. Every method raises ChannelGone once the channel is gone."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; returns its new value."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Store a value. Does not wait; a later `add` of this rank is seen after it."""
        ...

    def fetch(self, key: str) -> bytes:
        """A value that has been put."""
        ...

    def forget(self, key: str) -> None:
        """Drop a counter or a value that no rank will ask for again."""
        ...


class BoardChannel:
    """A channel through shared memory: each rank has a stretch of it, into which it alone writes what it says.

    What is read while it is being written does not fit its checksum, and is read again.

    Args:
        axis: the ranks.
        boxes: their stretches, in axis order.
        pids: their processes.
    """

    host = -1
    ballot = None

    def __init__(self, axis: Axis, boxes: Sequence[Any], pids: Sequence[int]) -> None:
        self._boxes = dict(zip(axis.ranks, boxes, strict=True))
        others = {rank: pid for rank, pid in zip(axis.ranks, pids, strict=True) if rank != axis.rank}
        self._processes = _watch_processes(others)

    def tell(self, rank: int, message: str) -> None:
        """See `Channel.tell`. A message that is too long is not said."""
        data, box = message.encode(), self._boxes[rank]
        if len(data) <= len(box) - _FRAME.size:
            box[: _FRAME.size + len(data)] = _FRAME.pack(len(data), crc32(data)) + data

    def hear(self, ranks: Iterable[int]) -> list[str]:
        """See `Channel.hear`."""
        return [self._read(self._boxes[rank]) for rank in ranks]

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """See `Channel.gone`."""
        return _ended(self._processes, ranks)

    def close(self) -> None:
        """See `Channel.close`."""
        processes, self._processes = self._processes, {}
        for descriptor in processes.values():
            os.close(descriptor)

    def _read(self, box: Any) -> str:
        limit = time.monotonic() + 1.0  # a rank that is killed while it speaks has said nothing
        while time.monotonic() < limit:
            length, checksum = _FRAME.unpack(box[: _FRAME.size])
            data = box[_FRAME.size : _FRAME.size + length]
            if len(data) == length and crc32(data) == checksum:
                return data.decode()
        return ""


class StoreChannel:
    """A channel through a `torch.distributed.TCPStore` of its own, in the process of the axis's first rank.

    Args:
        axis: the ranks that share the channel; all of them must make it together.
        link: a connection between them, to hand out the address.
        device: where tensors for that link lie.
        patience_s: seconds to wait for the other ranks.

    Raises:
        PeerLostError: another rank ended meanwhile, or the first rank cannot be reached from here.
        StallError: another rank did not come within `patience_s`.
    """

    def __init__(self, axis: Axis, link: Link, device: torch.device, patience_s: float) -> None:
        self.host = axis.ranks[0]
        serving = axis.rank == self.host
        self._processes: dict[int, int] = {}
        self._store: Any = _serve() if serving else None
        mine = {"machine": machine_name(), "pid": os.getpid()}
        if serving:
            mine |= {"port": self._store.port, "addresses": _addresses()}
        cards = introduce(axis, link, device, mine, patience_s)
        if not serving:
            here = cards[0]["machine"] == mine["machine"]
            self._store = _connect(["127.0.0.1"] if here else cards[0]["addresses"], cards[0]["port"])
        neighbours = {
            rank: card["pid"]
            for rank, card in zip(axis.ranks, cards, strict=True)
            if rank != axis.rank and card["machine"] == mine["machine"]
        }
        try:
            self._processes = _watch_processes(neighbours)
            self.tell(axis.rank, "")
            self.add("present", 1)
            self._await_everyone(axis, patience_s)
        except ChannelGone:
            self.close()
            raise PeerLostError(explain(f"rank {self.host} ended while communication was being set up")) from None
        except BaseException:
            self.close()
            raise

    def tell(self, rank: int, message: str) -> None:
        """See `Channel.tell`."""
        self._call("set", f"rank/{rank}", message)

    def hear(self, ranks: Iterable[int]) -> list[str]:
        """See `Channel.hear`."""
        return [value.decode() for value in self._call("multi_get", [f"rank/{rank}" for rank in ranks])]

    def add(self, key: str, amount: int) -> int:
        """See `Ballot.add`."""
        return int(self._call("add", key, amount))

    def put(self, key: str, value: bytes) -> None:
        """See `Ballot.put`."""
        # The store refuses messages over 8 MiB, so a value is a row of pieces that starts with the number of pieces to come.
        pieces = [value[start : start + _PIECE] for start in range(0, max(1, len(value)), _PIECE)]
        for number in range(len(pieces) - 1, 0, -1):
            self._call("set", f"{key}#{number}", pieces[number])
        self._call("set", key, (len(pieces) - 1).to_bytes(4, "big") + pieces[0])

    def fetch(self, key: str) -> bytes:
        """See `Ballot.fetch`."""
        [head] = self._call("multi_get", [key])
        more = [self._call("get", f"{key}#{number + 1}") for number in range(int.from_bytes(head[:4], "big"))]
        return b"".join([head[4:], *more])

    def forget(self, key: str) -> None:
        """See `Ballot.forget`."""
        number = 1
        self._call("delete_key", key)
        while self._call("delete_key", f"{key}#{number}"):
            number += 1

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """See `Channel.gone`."""
        return _ended(self._processes, ranks)

    @property
    def ballot(self) -> Ballot:
        """The store itself."""
        return self

    def close(self) -> None:
        """See `Channel.close`."""
        self._store = None
        processes, self._processes = self._processes, {}
        for descriptor in processes.values():
            os.close(descriptor)

    def _call(self, method: str, *args: Any) -> Any:
        if self._store is None:
            raise ChannelGone("closed")
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError as error:  # torch's DistError and its kind
            raise ChannelGone(str(error).partition("\n")[0]) from error

    def _await_everyone(self, axis: Axis, patience_s: float) -> None:
        limit = time.monotonic() + patience_s
        while self.add("present", 0) < axis.size:
            if lost := self.gone(axis.ranks):
                raise PeerLostError(explain(f"rank {lost[0]} ended while communication was being set up"))
            if time.monotonic() > limit:
                raise _late(axis, patience_s)
            time.sleep(0.002)


def _serve() -> Any:
    return _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _connect(addresses: Sequence[str], port: int) -> Any:
    for address in addresses:
        with suppress(RuntimeError):
            return _dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    raise PeerLostError(
        explain(
            "the first rank's side channel cannot be reached",
            found=f"no answer on port {port} at {', '.join(addresses)}",
            do="let the machines of the job reach each other on any port",
        )
    )


def introduce(axis: Axis, link: Link, device: torch.device, mine: dict[str, Any], patience_s: float) -> list[dict[str, Any]]:
    """Every rank's card, in axis order: something that JSON can carry in a kilobyte. Collective.

    Raises:
        PeerLostError: another rank ended meanwhile.
        StallError: another rank did not come within `patience_s`.
    """
    text = json.dumps(mine).encode().ljust(_CARD)
    card = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    cards = torch.empty(axis.size * _CARD, dtype=torch.uint8, device=device)
    try:
        flight = link.all_gather(cards, card, NO_TAG)
        limit = time.monotonic() + patience_s
        while not flight.poll(1.0):
            if time.monotonic() > limit:
                raise _late(axis, patience_s)
    except ConnectionError as error:
        raise PeerLostError(explain("another rank ended while communication was being set up", found=str(error))) from None
    except TimeoutError:
        raise _late(axis, patience_s) from None
    everyone: Any = cards.cpu().view(axis.size, _CARD)
    return [json.loads(bytes(row)) for row in everyone.tolist()]


def _late(axis: Axis, patience_s: float) -> StallError:
    return StallError(
        explain(
            f"communication on axis {axis.name!r} could not be set up in {patience_s:g} s",
            expected=f"ranks {', '.join(map(str, axis.ranks))}",
            found="at least one of them never came",
            do="look at what the other ranks are doing: all of them must build the engine",
        )
    )


def machine_name() -> str:
    """What processes have in common that can reach each other by 127.0.0.1 and know each other's process ids."""
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        marks += [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid")]
    return "/".join(marks)


def _addresses() -> list[str]:
    """Where other machines may find this one, the likeliest first."""
    found: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; names the interface of the default route
        found.append(probe.getsockname()[0])
    name = socket.gethostname()
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [*dict.fromkeys(address for address in found if not address.startswith("127.")), name][:8]


def _watch_processes(pids: dict[int, int]) -> dict[int, int]:
    """A descriptor for each rank's process; none where the system has no such thing."""
    descriptors: dict[int, int] = {}
    if hasattr(os, "pidfd_open"):
        for rank, pid in pids.items():
            with suppress(OSError):
                descriptors[rank] = os.pidfd_open(pid)
    return descriptors


def _ended(descriptors: dict[int, int], ranks: Iterable[int]) -> list[int]:
    watched = {descriptors[rank]: rank for rank in ranks if rank in descriptors}
    if not watched:
        return []
    poller = select.poll()
    for descriptor in watched:
        poller.register(descriptor, select.POLLIN)  # a process's descriptor becomes readable when it ends
    return sorted(watched[descriptor] for descriptor, _ in poller.poll(0))
