"""What the ranks say of themselves through the side channel, and how it reads in an error.

Owns the report and its wording. Refuses to know how reports travel and what is done about them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

__all__ = ["Report", "first_difference", "tell_apart"]

_DID = {"runs": "was last seen after", "waits": "waits for", "asks": "asks for", "answers": "asks for", "failed": "asks for"}
_SHOWN = 8  # lines of an error that name ranks


@dataclass
class Report:
    """What a rank last said: what it is doing, and what it asked for at one place in the history of one lane."""

    rank: int
    state: str = "silent"
    """runs, waits (in a collective it started), asks, answers, failed, closed; silent if it never said anything."""
    moment: float = 0.0
    """When, in seconds since the epoch on that rank's clock."""
    lane: str = ""
    sequence: int = -1
    label: str = ""
    """What it asked for at number `sequence` of `lane`."""
    reached: dict[str, int] = field(default_factory=dict[str, int])
    """By lane: how many events it has let pass."""
    failure: str = ""
    """The kind of error it stopped with."""
    text: str = ""
    """The message of that error; or, of a rank that has closed, when it did ("after 12 steps")."""
    trail: list[str] = field(default_factory=list[str])
    """What it asked for from number `begins` of `lane` on, where histories are to be compared."""
    begins: int = 0

    @classmethod
    def parse(cls, rank: int, message: str) -> Report:
        """The report in a message that was heard from `rank`."""
        return cls(rank=rank, **json.loads(message)) if message else cls(rank=rank)

    def message(self) -> str:
        """The report as a message."""
        fields = asdict(self)
        del fields["rank"]
        return json.dumps(fields)

    def passed(self, lane: str, sequence: int) -> bool:
        """Whether the rank had started number `sequence` of `lane` when it last said something."""
        return self.reached.get(lane, 0) > sequence

    def answers(self, lane: str, sequence: int) -> bool:
        """Whether it says what it asked for there, or brings the part of its history in which that is."""
        return self.lane == lane and (bool(self.trail) or self.sequence == sequence)

    def asking(self, lane: str, sequence: int) -> Report:
        """The report, worded as what was asked for if it tells of that very number; the rank may be past it, or wait in it."""
        told = self.state in ("runs", "waits") and self.lane == lane and self.sequence == sequence
        return replace(self, state="asks") if told else self

    def words(self, now: float) -> str:
        """What the rank did, for people: the part of a sentence that follows "rank 3"."""
        if self.state == "silent":
            return "has not been heard from"
        if not self.label and self.state == "closed":
            return f"has closed its engine {self.text}".rstrip()
        if not self.label:
            return "has failed" if self.state == "failed" else "has started nothing yet"
        ago = f", {now - self.moment:.0f} s ago" if self.state == "runs" else ""
        return f"{_DID.get(self.state, 'has closed after')} {self.label}{ago}"

    def last_seen(self, now: float) -> str:
        """The same for a rank whose process is no more."""
        if self.state == "silent" or not self.label:
            return "had started nothing yet"
        where = "in" if self.state in ("waits", "asks") else "after"
        return f"was last seen {where} {self.label}, {now - self.moment:.0f} s before"


def first_difference(reports: Iterable[Report], sequence: int) -> tuple[int, list[Report]]:
    """The number at which the histories that the reports bring differ first, and the reports as of there.

    Args:
        reports: of the ranks of one lane; those without a history stay as they are.
        sequence: the result where no difference is to be seen.

    >>> reports = [Report(0, trail=["'a'", "'b'"], begins=4), Report(1, trail=["'c'"], begins=5)]
    >>> [each.label for each in first_difference(reports, 9)[1]]
    ["'b'", "'c'"]
    """
    everyone = list(reports)
    known = [each for each in everyone if each.trail]
    first = max((each.begins for each in known), default=0)
    last = max((each.begins + len(each.trail) for each in known), default=0)
    for number in range(first, last):
        labels = [each.trail[number - each.begins] if number - each.begins < len(each.trail) else "" for each in known]
        if len(set(labels)) > 1:
            there = {each.rank: replace(each, label=label, state="asks") for each, label in zip(known, labels, strict=True)}
            return number, [there.get(each.rank, each) for each in everyone]
    return sequence, everyone


def tell_apart(reports: Iterable[Report], now: float) -> str:
    """What the ranks did, ranks that did the same named together.

    >>> a, b, c = (Report(rank, "asks", label=label) for rank, label in enumerate(("'x'", "'y'", "'x'")))
    >>> tell_apart([a, b, c], 0.0)
    "ranks 0, 2: asks for 'x'; rank 1: asks for 'y'"
    """
    groups: dict[str, list[int]] = {}
    for report in reports:
        groups.setdefault(report.words(now), []).append(report.rank)
    parts = [f"{_name(ranks)}: {words}" for words, ranks in groups.items()]
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and {len(parts) - _SHOWN} more"]
    return "; ".join(parts)


def _name(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
