"""`Unit`: the buffers of one module that are gathered and released together, and the state they are in.

Same storage. A gathered buffer is freed by emptying its storage and refilled by growing the same storage. Autograd saves
views of weights (`weight.t()` for a linear layer); were every gather a fresh allocation, the graph would pin the old one, and
nothing would be freed between forward and backward.

Refuses to know hooks, the order of use, optimizers and checkpoints.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardwise.comm import Comm, Handle
from shardwise.errors import UsageError, explain
from shardwise.mesh import Axis
from shardwise.zero.buffer import Buffer, Member
from shardwise.zero.released import homes

__all__ = ["Home", "State", "Unit", "provisional_units"]


class State(Enum):
    """Where the full weights of a unit are."""

    RESTING = "only shards"
    GATHERING = "on their way"
    LIVE = "here"


_LEGAL = {
    (State.RESTING, State.GATHERING),
    (State.GATHERING, State.LIVE),
    (State.LIVE, State.RESTING),
}


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter lives. The unit is held weakly, since the directory of homes must not keep a model alive."""

    reference: weakref.ref[Unit]
    buffer: Buffer
    member: Member

    @property
    def name(self) -> str:
        """Name of the parameter in the model."""
        return self.member.name

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


provisional_units: MutableMapping[nn.Module, list[Unit]] = WeakKeyDictionary()
"""What keeps units alive that were made under `zero.Init`, before there is an engine: the module they belong to."""


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
        self.pins = 0  # users that need the weights to stay, such as a GatheredParameters context
        self.version = 0  # changes with the weights; a graph recorded with an older version is stale
        self.fetcher: Callable[[Unit], bool] | None = None  # gathers on demand, where that is allowed at this moment
        self.addresses: dict[int, Unit] = {}  # of gathered storages; a runtime shares one among its units
        self._handles: list[Handle] = []
        for home in self.homes():
            homes[home.member.parameter] = home

    @property
    def moving_elements(self) -> int:
        """Storage elements that a gather brings."""
        return sum(buffer.layout.total for buffer in self.moving)

    def homes(self) -> list[Home]:
        """Where each parameter of the unit lives."""
        return [Home(weakref.ref(self), buffer, member) for buffer in self.buffers for member in buffer.members]

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

    def release(self) -> None:
        """Give the full weights back, unless somebody pinned them. A gather in flight is waited for and discarded."""
        if self.pins or not self.moving or self.state is State.RESTING:
            return
        if self.state is State.GATHERING:
            try:
                self.gather()
            except UsageError:  # communication ended before; the error that says why must not be hidden by this one
                return
        for buffer in self.moving:
            self.addresses.pop(buffer.address, None)
            buffer.unbind()
            buffer.storage.release()
        self._to(State.RESTING)

    def fetch(self) -> bool:
        """Gather because somebody touched a released parameter. False where that must not happen (outside a forward)."""
        return self.fetcher is not None and self.fetcher(self)

    @contextmanager
    def pinned(self) -> Generator[None]:
        """Gather, and keep the weights while the context is open; released at the end if they rested before."""
        rested = self.state is not State.LIVE
        self.gather()
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1
            if rested:
                self.release()

    def close(self) -> None:
        """Forget the parameters: their homes are no longer here."""
        for buffer in self.buffers:
            for member in buffer.members:
                home = homes.get(member.parameter)
                if home is not None and home.reference() is self:
                    del homes[member.parameter]

    def _to(self, state: State) -> None:
        assert (self.state, state) in _LEGAL, f"unit {self.name}: {self.state} -> {state}"
        self.state = state
