"""What was asked for, and by whom: the histories that guards compare.

Owns the history of one order of sending, the ranks that have it, and who uses one process group. Refuses to know channels and
what is done about differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet
from zlib import crc32

from shardwise.comm.events import Event, Follower, digest_of
from shardwise.mesh import Axis

if TYPE_CHECKING:
    from shardwise.comm.guard import Guard

__all__ = ["Crowd", "Lane", "Stream"]

_TRAIL = 256  # events that are compared to find the first that differs


class Stream:
    """What was asked for in one order.

    Attributes:
        follower: the history.
        asking: what this rank wants to add to it, while it asks the others.
    """

    def __init__(self) -> None:
        self.follower = Follower()
        self.asking: Event | None = None


class Crowd:
    """All that use one process group.

    Attributes:
        stream: of what goes through the group itself, whoever sends it.
        guards: of those that use the group now.
    """

    def __init__(self) -> None:
        self.stream = Stream()
        self.guards: WeakSet[Guard] = WeakSet()
        self._users = 0

    def join(self) -> int:
        """The number of one more user, the same on every rank if all ranks bring their users in the same order."""
        self._users += 1
        return self._users - 1


class Lane:
    """The ranks of one axis, and what they have asked for so far."""

    def __init__(self, axis: Axis, stream: Stream) -> None:
        self.axis = axis
        self.key = "-".join(map(str, axis.ranks))
        self.stream = stream
        self.follower = stream.follower
        self.checked = False  # whether the link itself notices that the histories of the ranks differ
        self.digest = 0  # of the whole history
        self.verified = -1  # number of the last event up to which all ranks have the same history
        self.agreed = -1  # number of the last event that the ranks agreed on through the channel
        self.litter: list[str] = []

    def label_at(self, sequence: int) -> str:
        """What this rank asked for at that number; empty if it has not come there, or too long ago."""
        asking = self.stream.asking
        event = asking if asking is not None and sequence == self.follower.count else self.follower.at(sequence)
        return event.label if event else ""

    def record(self, event: Event) -> None:
        """Append an event without asking anybody."""
        self.follower.record(event)
        self.digest = crc32(digest_of(event).to_bytes(4, "big"), self.digest)

    def trail(self) -> list[str]:
        """What this rank has asked for since all ranks were last known to have asked for the same."""
        first = max(self.verified + 1, self.follower.count - _TRAIL)
        return [self.label_at(sequence) for sequence in range(first, self.follower.count)]
