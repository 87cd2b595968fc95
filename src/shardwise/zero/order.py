"""`Order`: which unit is needed next, and which may go.

Owns the recorded order of use, the guess that follows from it, and the list of units that nobody uses at the moment. Refuses to
know why a unit is needed: hooks, graphs and passes say so.

Late release. A unit is not released when its forward ends but when the next one is entered, so that user hooks registered after
ours still see full weights, a module called twice in a row is gathered once, and the last block stays for its backward.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwise.zero.traffic import Traffic
from shardwise.zero.unit import Unit

__all__ = ["Order"]


class Order:
    """Gathers units as they are needed, the likely next one ahead of time, and releases them late.

    Args:
        traffics: all units.
        prefetch_elements: how many elements may be gathered ahead of use.
    """

    def __init__(self, traffics: Collection[Traffic], prefetch_elements: int) -> None:
        self._traffics = traffics
        self._prefetch_elements = prefetch_elements
        self._idle: list[Traffic] = []  # gathered, not in use, to be released when another unit is entered
        self._follower: dict[tuple[str, Unit], Unit] = {}  # which unit came next, last time
        self._previous: tuple[str, Unit] | None = None

    def need(self, phase: str, unit: Unit) -> None:
        """Gather a unit now, and begin to gather the one that followed it last time.

        Args:
            phase: what it is needed for; each purpose has an order of its own.
            unit: the unit.
        """
        if self._previous is not None and self._previous[0] == phase and self._previous[1] is not unit:
            self._follower[self._previous] = unit
        self._previous = (phase, unit)
        unit.start_gather()
        follower = self._follower.get((phase, unit))
        if follower is not None and follower.moving_elements <= self._prefetch_elements:
            follower.start_gather()
        unit.gather()

    def let_go(self, traffic: Traffic) -> None:
        """Nobody uses the unit any more for now: it stays until another one is entered."""
        self._idle.append(traffic)

    def is_idle(self, traffic: Traffic) -> bool:
        """Whether the unit was let go and is still here."""
        return traffic in self._idle

    def enter(self, traffic: Traffic) -> None:
        """A unit is entered: those that were let go are released, but for this one."""
        retiring, self._idle = self._idle, [idle for idle in self._idle if idle is traffic]
        for idle in retiring:
            if idle is not traffic and not idle.active and not idle.running:
                idle.unit.release()

    def end_forward(self, root: Traffic, *, graph: bool) -> None:
        """The model has run.

        Args:
            root: the model itself.
            graph: whether a backward can follow.
        """
        if graph:  # the root comes first in backward, the last unit next: both stay
            self._idle = [idle for idle in self._idle if idle is not root][-1:]
        else:  # user hooks on the root that were registered after ours still run
            self.release_all(keep=root)
            self._idle = [root]

    def release_all(self, keep: Traffic | None = None) -> None:
        """Release every unit that is not in use, and is not the one to keep."""
        self._idle.clear()
        for traffic in self._traffics:
            if not traffic.active and traffic is not keep:
                traffic.unit.release()
