"""What a rank asks for, and the guess at what it will ask for next.

Owns the record of one collective and the predictor over a history of them: pure logic, the same on every rank that saw the same
history. Refuses to know stores, processes and clocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import torch

__all__ = ["Event", "Follower", "digest_of"]

_CONTEXT = 64  # how far back two places of a history are compared
_PLACES = 32  # how many earlier places are compared


class Event(NamedTuple):
    """One collective, as every rank of its axis must ask for it."""

    phase: str
    kind: str
    name: str
    elements: int = 0
    dtype: torch.dtype | None = None
    source: int = -1
    user: int = 0
    """Which of those that share a process group asks."""

    @property
    def label(self) -> str:
        """The event in words."""
        what = self.kind
        if self.dtype is not None:
            what += f" of {self.elements} x {str(self.dtype).removeprefix('torch.')}"
        if self.source >= 0:
            what += f" from index {self.source}"
        phase = f", phase {self.phase!r}" if self.phase else ""
        user = f", engine {self.user + 1} of this process group" if self.user else ""
        return f"{self.name!r} ({what}{phase}{user})"

    @property
    def digest(self) -> int:
        """32 bits that are the same in every process."""
        return crc32(self.label.encode())


@lru_cache(maxsize=4096)
def digest_of(event: Event) -> int:
    """Its digest; remembered, as a training loop asks for the same events over and over."""
    return event.digest


class Follower:
    """Guesses the next event of a history: whatever came next the last time the history looked like this.

    A training loop is periodic, so once one period has passed the place being followed lies exactly one period back and
    every guess is right. The guess depends on the history alone. So ranks that saw the same events guess the same, and at
    most one event can be the one that is expected: this is what lets a rank go on without asking the others.

    Args:
        limit: events remembered at least; a loop with a longer period is guessed wrong now and then, never wrongly trusted.
    """

    __slots__ = ("_dropped", "_history", "_known", "_limit", "_next")

    def __init__(self, limit: int = 16384) -> None:
        self._limit = limit
        self._history: list[Event] = []
        self._known: dict[Event, Event] = {}  # the objects in the history: one that comes again costs no memory
        self._dropped = 0
        self._next = -1

    @property
    def count(self) -> int:
        """Number of events so far; also the sequence number of the next one."""
        return self._dropped + len(self._history)

    def at(self, sequence: int) -> Event | None:
        """The event with that number, if it has come and is still remembered."""
        place = sequence - self._dropped
        return self._history[place] if 0 <= place < len(self._history) else None

    def expected(self) -> Event | None:
        """The guess."""
        return self._history[self._next] if self._next >= 0 else None

    def follow(self, event: Event) -> bool:
        """Append `event` if it is the expected one; say whether it was."""
        place = self._next
        if place < 0 or self._history[place] != event:
            return False
        self._history.append(self._history[place])  # the object that is there already: a history costs no memory per event
        self._next = place + 1
        if len(self._history) > 2 * self._limit:
            self._forget()
        return True

    def record(self, event: Event) -> None:
        """Append `event`, whatever was expected: others check that all ranks have the same. Nothing is expected afterwards."""
        self._history.append(self._known.setdefault(event, event))
        self._next = -1
        if len(self._history) > 2 * self._limit:
            self._forget()
            self._known.clear()

    def append(self, event: Event) -> None:
        """Append an event that all ranks agreed on, and look for the place in the past that is like this one."""
        if self.follow(event):
            return
        self._history.append(event)
        self._next = self._alike(event)
        if len(self._history) > 2 * self._limit:
            self._forget()

    def _alike(self, event: Event) -> int:
        """The index after the earlier occurrence of `event` whose past agrees longest with ours; the latest of equals."""
        history = self._history
        last = len(history) - 1
        places = [place for place in range(last) if history[place] == event][-_PLACES:]
        best, length = -1, 0
        for place in places:
            same = 1
            while same < min(_CONTEXT, place + 1) and history[place - same] == history[last - same]:
                same += 1
            if same >= length:
                best, length = place + 1, same
        return best

    def _forget(self) -> None:
        surplus = len(self._history) - self._limit
        del self._history[:surplus]
        self._dropped += surplus
        self._next = self._next - surplus if self._next >= surplus else -1
