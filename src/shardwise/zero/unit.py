"""`Unit`: the buffers of one module that are gathered and released together, and the state they are in.

Same storage. A gathered buffer is freed by emptying its storage and refilled by growing the same storage. Autograd saves
views of weights (`weight.t()` for a linear layer); were every gather a fresh allocation, the graph would pin the old one, and
nothing would be freed between forward and backward.

Memory of their own. That storage comes and goes, and whoever kept a view of it would read freed memory. So where users get
weights to keep (`GatheredParameters`, `engine.inference`, under `zero.Init`), parameters are lent: each has a tensor of its
own, which lives as long as anybody holds it.

Refuses to know hooks, the order of use, optimizers and checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import nn

from shardwise.comm import Comm, Handle
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis
from shardwise.zero.buffer import Buffer, Member
from shardwise.zero.released import homes

__all__ = ["Fetcher", "Home", "State", "Unit"]


class State(Enum):
    """Where the full weights of a unit are."""

    RESTING = "only shards"
    GATHERING = "on their way"
    LIVE = "here"
    LENT = "here, each parameter in memory of its own"


_LEGAL = {
    (State.RESTING, State.GATHERING),
    (State.GATHERING, State.LIVE),
    (State.LIVE, State.RESTING),
    (State.LIVE, State.LENT),
    (State.LENT, State.RESTING),
}


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter lives.

    Nothing in here keeps the parameter alive, or the directory of homes could never forget it: an engine's unit, which does,
    is held weakly; one of `zero.Init`, which does not, is kept alive by its parameters through this.

    Args:
        name: name of the parameter in the model.
        reference: gives the unit, or None when it is gone.
        place: number of the buffer in the unit, and of the parameter in the buffer.
    """

    name: str
    reference: Callable[[], Unit | None]
    place: tuple[int, int]

    @property
    def held(self) -> bool:
        """Whether a living engine holds the parameter (as opposed to `zero.Init`, from which an engine takes it over)."""
        unit = self.reference()
        return unit is not None and not unit.provisional

    @property
    def unit(self) -> Unit:
        """The unit that gathers the parameter."""
        unit = self.reference()
        if unit is None:
            raise UsageError(
                explain(
                    f"the engine that held parameter {self.name!r} is gone",
                    do="keep the engine while its model is in use, or call engine.destroy() to get the plain module back",
                )
            )
        return unit

    @property
    def buffer(self) -> Buffer:
        """The buffer it lies in."""
        return self.unit.buffers[self.place[0]]

    @property
    def member(self) -> Member:
        """Its place in the buffer."""
        return self.buffer.members[self.place[1]]


class Fetcher(Protocol):
    """Gathers on demand."""

    def __call__(self, unit: Unit, together: Collection[Unit], /) -> bool:
        """Bring a unit, while others are needed as well; False if nothing may be gathered now."""
        ...


class Unit:
    """A module's buffers and their state.

    Args:
        name: dotted name of the module, as messages and collectives print it.
        buffers: all buffers whose parameters belong to the unit.
        comm: collectives of the engine that holds it.
        data: the axis whose ranks all hold the same weights between them.
        provisional: whether an engine may still lay the parameters out anew (they were built under `zero.Init`).
    """

    def __init__(self, name: str, buffers: Sequence[Buffer], comm: Comm, data: Axis, *, provisional: bool = False) -> None:
        self.name = name or "<root>"
        self.buffers = tuple(buffers)
        self.moving = tuple(buffer for buffer in buffers if not buffer.resident)
        self.comm = comm
        self.data = data
        self.provisional = provisional
        self.owner: weakref.ref[Any] | None = None  # whoever can be asked about the optimizer state of the parameters
        self.state = State.LIVE if all(buffer.storage.is_live for buffer in buffers) else State.RESTING
        self.closed = False
        self.pins = 0  # users that need the weights to stay, such as a GatheredParameters context
        self.version = 0  # changes with the weights; a graph recorded with an older version is stale
        self.fetcher: Fetcher | None = None  # gathers on demand, where that is allowed at this moment
        self.copied: Callable[[nn.Parameter], None] | None = None  # told of copies that are made of parameters
        self.settle: Callable[[Unit], None] | None = None  # takes lent parameters back before somebody else asks for them
        self.watchers: list[Callable[[], None]] = []  # told after the weights have changed
        self.addresses: dict[int, Unit] = {}  # of gathered storages; a runtime shares one among its units
        self._handles: list[Handle] = []
        self._rested = False  # whether the weights rested when the first pin came
        for number, buffer in enumerate(self.buffers):
            for place, member, parameter in buffer.present():
                homes[parameter] = Home(member.name, (lambda: self) if provisional else weakref.ref(self), (number, place))

    @property
    def moving_elements(self) -> int:
        """Storage elements that a gather brings."""
        return sum(buffer.layout.total for buffer in self.moving)

    def homes(self) -> list[Home]:
        """Where each parameter of the unit lives."""
        found = [homes[parameter] for buffer in self.buffers for _, _, parameter in buffer.present() if parameter in homes]
        return [home for home in found if home.reference() is self]

    def start_gather(self) -> None:
        """Ask for the weights; returns at once. Does nothing unless the unit rests."""
        if self.state is not State.RESTING:
            return
        self._handles = [buffer.storage.gather(f"gather {self.name}") for buffer in self.moving]
        self._to(State.GATHERING)

    def gather(self) -> None:
        """Bring the weights here, and return when they are."""
        self.start_gather()
        if self.state is State.GATHERING:
            for handle in self._handles:
                handle.wait()
            self._handles = []
            for buffer in self.moving:
                buffer.bind()
                self.addresses[buffer.address] = self
            self._to(State.LIVE)

    def open(self, name: str) -> None:
        """Before shards are written outside of an optimizer step: wait until no rank reads them any more."""
        for buffer in self.moving:
            buffer.storage.open(f"{name} {self.name}")

    def shut(self) -> None:
        """After such writes: the next gather waits for all ranks."""
        for buffer in self.moving:
            buffer.storage.close()

    def lend(self) -> None:
        """Bring the weights here, each in memory of its own. What is done to them may end up in the shards."""
        if self.state is State.LENT or not self.moving:
            return
        self.gather()
        for buffer in self.moving:
            buffer.lend()
        self.open("lend")
        self._empty()
        self._to(State.LENT)

    def refill(self) -> None:
        """Bring the gathered bytes here as well while parameters are lent, for a graph that was recorded on them before."""
        handles = [buffer.storage.gather(f"refill {self.name}") for buffer in self.moving if not buffer.storage.is_live]
        for handle in handles:
            handle.wait()

    def release(self) -> None:
        """Give the full weights back, unless somebody pinned them. A gather in flight is waited for and discarded."""
        if self.pins or not self.moving or self.state is State.RESTING:
            return
        if self.state is State.GATHERING:
            try:
                self.gather()
            except UsageError:  # communication ended before; the error that says why must not be hidden by this one
                return
        if self.state is State.LENT:
            self.shut()
        for buffer in self.moving:
            buffer.unbind()
        self._empty()
        self._to(State.RESTING)

    def changed(self, *, lent_too: bool = False) -> None:
        """The weights are others now: graphs recorded before are stale, lent copies are refreshed, watchers are told.

        Args:
            lent_too: lent copies have the new values already. Otherwise this is collective where there are some.
        """
        self.version += 1
        if self.state is State.LENT and not lent_too:
            self.refill()
            for buffer in self.moving:
                for _, member, parameter in buffer.present():
                    parameter.data.copy_(member.view(buffer.storage.full))
            self._empty()
        for watcher in tuple(self.watchers):
            watcher()

    def fetch(self, together: Collection[Unit] = ()) -> bool:
        """Gather because somebody touched a released parameter. False where that must not happen (outside a forward).

        Args:
            together: other units whose parameters are needed at the same moment.
        """
        return self.fetcher is not None and self.fetcher(self, together)

    def pin(self, *, lend: bool = False) -> None:
        """Bring the weights and keep them until `unpin`.

        Args:
            lend: where they are not here yet, bring them in memory of their own.
        """
        if not self.pins:
            self._rested = self.state in (State.RESTING, State.GATHERING)
        if lend and self.state is not State.LIVE:
            self.lend()
        self.gather()
        self.pins += 1

    def unpin(self) -> None:
        """Undo one `pin`; after the last, the weights are released if they rested before the first."""
        self.pins -= 1
        if not self.pins and self._rested:
            self.release()

    @contextmanager
    def pinned(self, *, lend: bool = False) -> Generator[None]:
        """`pin`, and `unpin` at the end of the context."""
        self.pin(lend=lend)
        try:
            yield
        finally:
            self.unpin()

    def close(self) -> None:
        """Forget the parameters: their homes are no longer here, and what they have in memory is the module's own."""
        if self.state is State.LIVE:  # what other ranks can write to is no place for a plain module's weights
            for buffer in self.moving:
                if buffer.storage.shared:
                    buffer.lend()
        self.closed, self.moving = True, ()
        for buffer in self.buffers:
            for _, _, parameter in buffer.present():
                home = homes.get(parameter)
                if home is not None and home.reference() is self:
                    del homes[parameter]
            self._disown(buffer)

    def _disown(self, buffer: Buffer) -> None:
        ledger = self.comm.ledger
        ledger.drop("parameters", buffer.storage.nbytes_resting)
        if buffer.storage.is_live and not buffer.resident and not buffer.storage.shared:
            ledger.drop("gathered", buffer.storage.nbytes_full)
        if buffer.master is not None:
            ledger.drop("master weights", buffer.master.nbytes)
        buffer.master = None

    def _empty(self) -> None:
        for buffer in self.moving:
            self.addresses.pop(buffer.address, None)
            buffer.storage.release()

    def _to(self, state: State) -> None:
        assert (self.state, state) in _LEGAL, f"unit {self.name}: {self.state} -> {state}"
        self.state = state
