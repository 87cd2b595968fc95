"""The transport between ranks of one machine: shared memory where it can be had, torch.distributed for everything else.

Owns which axes share memory, the storage whose gathered form is always there, and falling back. Refuses to know the protocol.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from shardwise.comm.channel import BoardChannel, introduce, machine_name
from shardwise.comm.handle import DONE, Handle
from shardwise.comm.segments import Segment, SegmentCard
from shardwise.comm.shared_link import SharedLink, board_bytes, mailbox
from shardwise.comm.torch_transport import TorchTransport
from shardwise.comm.transport import Crew, Link, ShardedStorage, Storage, StorageSpec
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis

__all__ = ["SharedStorage", "SharedTransport"]

log = logging.getLogger("shardwise")


class SharedStorage:
    """Storage whose shards lie side by side in memory that all ranks of the axis see.

    The gathered form is that memory: gathering and releasing move nothing. See `Storage` for the order of writes and reads.
    """

    shared = True

    def __init__(self, spec: StorageSpec, crew: Crew, memory: torch.Tensor) -> None:
        self._axis = spec.axis
        self._crew = crew
        self._written = True  # whether other ranks may have written since this one last waited for them
        self.nbytes_resting = spec.chunk * spec.dtype.itemsize
        self.nbytes_full = spec.axis.size * self.nbytes_resting
        self.full = memory[: self.nbytes_full].view(spec.dtype)
        self.shard = self.full.narrow(0, spec.axis.index * spec.chunk, spec.chunk)
        self.is_live = False

    def open(self, name: str) -> None:
        """Wait until all ranks are here."""
        self._crew.fence(self._axis, name).wait()

    def close(self) -> None:
        """The next gather waits for all ranks."""
        self._written = True

    def gather(self, name: str) -> Handle:
        """Nothing to move; the first time after writes, see that all ranks have written."""
        self.is_live = True
        self._crew.note(self._axis, name, self.full.numel(), self.full.dtype)
        if not self._written:
            return DONE
        self._written = False
        return self._crew.fence(self._axis, name)

    def release(self) -> None:
        """Nothing to do."""
        self.is_live = False


class SharedTransport:
    """Shared memory between ranks of one machine, on top of a transport over torch.distributed. For tensors on the CPU.

    Args:
        data: all ranks.
        base: the transport for axes that leave the machine, and to find each other.
        patience_s: seconds to wait for other ranks while memory is being shared.
        required: not being able to share is an error, instead of a line in the log.
    """

    guarded = True

    def __init__(self, data: Axis, base: TorchTransport, patience_s: float, *, required: bool) -> None:
        self.device = torch.device("cpu")
        self._base = base
        self._patience_s = patience_s
        self._required = required
        self._links: dict[tuple[int, ...], SharedLink | None] = {}
        self._registry: dict[int, SegmentCard] = {}
        cards = introduce(data, base.connect(data), base.device, {"machine": machine_name()}, patience_s)
        self._machines = {rank: card["machine"] for rank, card in zip(data.ranks, cards, strict=True)}
        if required and len(set(self._machines.values())) > 1:
            found = f"ranks on {len(set(self._machines.values()))} machines"
            raise _cannot(explain("memory cannot be shared", expected="all ranks on one machine", found=found))

    def connect(self, axis: Axis) -> Link:
        """The link along `axis`. All its ranks connect together."""
        if axis.ranks not in self._links:
            here = len({self._machines[rank] for rank in axis.ranks}) == 1
            self._links[axis.ranks] = self._share(axis) if here else None
        return self._links[axis.ranks] or self._base.connect(axis)

    def channel(self, data: Axis) -> BoardChannel | None:
        """A side channel through the boards of all ranks; None where they share no memory."""
        link = self._links.get(data.ranks)
        if link is None:
            return None
        return BoardChannel(data, [mailbox(board) for board in link.boards], [board.card.pid for board in link.boards])

    def allocate(self, spec: StorageSpec, crew: Crew) -> Storage:
        """Shared storage, but for what stays gathered: users may write to that, each rank for itself."""
        link = self._links.get(spec.axis.ranks)
        if spec.resident or spec.provisional or link is None or spec.device.type != "cpu" or not spec.chunk:
            return ShardedStorage(spec, crew)
        memory = self._allocate_shared(spec, crew, link)
        return ShardedStorage(spec, crew) if memory is None else SharedStorage(spec, crew, memory)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of this rank that others can read."""
        if device.type != "cpu" or not numel or not any(self._links.values()):
            return torch.zeros(numel, dtype=dtype, device=device)
        try:
            return Segment.create(numel * dtype.itemsize, self._registry).memory.view(dtype)
        except OSError as error:
            raise _cannot(explain("there is no shared memory for gradients", found=str(error))) from error

    def abandon(self) -> None:
        """Nothing here waits by itself."""
        self._base.abandon()

    def close(self) -> None:
        """Let go of boards and of other ranks' memory."""
        self._links.clear()
        self._base.close()

    def _share(self, axis: Axis) -> SharedLink | None:
        """Make boards and open each other's. All ranks share, or none."""
        trouble = ""
        board: Segment | None = None
        boards: list[Segment] = []
        try:
            board = Segment.create(board_bytes(axis.size))
            SharedLink.prepare(board, axis.size)
        except OSError as error:
            trouble = str(error)
        mine: dict[str, Any] = {"board": None if board is None else list(board.card), "trouble": trouble[:200]}
        cards = self._introduce(axis, mine)
        trouble = next((card["trouble"] for card in cards if card["trouble"]), "")
        if not trouble:
            try:
                found = [SegmentCard(*card["board"]) for card in cards]
                boards = [board if index == axis.index and board else Segment.attach(card) for index, card in enumerate(found)]
            except OSError as error:
                trouble = str(error)
        cards = self._introduce(axis, {"trouble": trouble[:200]})
        trouble = next((card["trouble"] for card in cards if card["trouble"]), "")
        if board is not None:
            board.close()
        if not trouble:
            return SharedLink(axis, boards, self._registry)
        # Where all ranks share they have no ballot, so a part of them must share too. Over several machines it may fall back.
        if self._required or any(self._links.values()):
            raise _cannot(explain("memory cannot be shared", found=trouble))
        if axis.index == 0:
            log.warning("ranks of one machine exchange bytes by sockets, as memory cannot be shared: %s", trouble)
        return None

    def _introduce(self, axis: Axis, card: dict[str, Any]) -> list[dict[str, Any]]:
        return introduce(axis, self._base.connect(axis), self._base.device, card, self._patience_s)

    def _allocate_shared(self, spec: StorageSpec, crew: Crew, link: SharedLink) -> torch.Tensor | None:
        """Memory that the first rank of the axis makes and the others open; None on all ranks where one of them cannot."""
        axis, segment, trouble = spec.axis, None, ""
        nbytes = axis.size * spec.chunk * spec.dtype.itemsize
        card = torch.zeros(axis.size * 4, dtype=torch.int64)
        try:
            if axis.index == 0:
                segment = Segment.create(nbytes)
        except OSError as error:
            trouble = str(error)
        own = torch.tensor([0, 0, 0, 0] if segment is None else segment.card, dtype=torch.int64)
        crew.all_gather(card, own, axis, "share memory").wait()
        try:
            if axis.index and card[0]:
                segment = Segment.attach(SegmentCard(*(int(word) for word in card[:4])))
        except OSError as error:
            trouble = str(error)
        missing = torch.tensor([segment is None], dtype=torch.int32)
        crew.all_reduce(missing, axis, "is memory shared").wait()
        if segment is not None:
            segment.close()
        if not missing.item() and segment is not None:
            return segment.memory
        if trouble:
            log.warning("a buffer of %d bytes is not shared between ranks: %s", nbytes, trouble)
        return None


def _cannot(problem: str) -> UsageError:
    return UsageError(f'{problem} Set "transport": "gloo" in the configuration to exchange bytes by sockets.')
