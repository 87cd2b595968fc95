"""The one place that counts collectives, bytes moved and bytes resident.

Owns exact counters and their peaks. Refuses to know what the bytes mean: categories and kinds are plain strings.

The convention: a collective counts the bytes of its *full* tensor (elements x element size), whatever a transport does to
deliver them. An all-gather or reduce-scatter on N ranks of chunks of n elements counts N x n elements, an all-reduce or a
broadcast of m elements counts m. So a stage's traffic can be compared with its formula on any transport. Operations on an axis
of one rank, and on tensors without elements, count nothing. Objects, barriers and fences count calls and no bytes. Residency is
what is there: where ranks share the memory of gathered weights, gathering holds nothing more.
"""

from __future__ import annotations

from typing import TypedDict

from shardwise.errors import UsageError, explain

__all__ = ["Ledger", "Snapshot", "difference"]


class Snapshot(TypedDict):
    """What a ledger held at one moment; plain dictionaries, so that it can be compared and written as JSON."""

    calls: dict[str, int]
    """Collectives issued, by kind ("all_gather", ...)."""
    bytes: dict[str, int]
    """Payload bytes, by kind."""
    axes: dict[str, dict[str, int]]
    """Payload bytes, by axis name and then by kind."""
    resident: dict[str, int]
    """Bytes held now, by category."""
    peak: dict[str, int]
    """Most bytes held at once since the last reset, by category."""
    resident_total: int
    """Bytes held now, all categories."""
    peak_total: int
    """Most bytes held at once since the last reset, all categories together."""


class Ledger:
    """Exact counters of one engine on one rank."""

    def __init__(self) -> None:
        self._traffic: dict[tuple[str, str], list[int]] = {}
        self._resident: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._total = 0
        self._peak_total = 0

    def count(self, kind: str, axis: str, nbytes: int) -> None:
        """One collective of `kind` on the axis called `axis`, with `nbytes` of payload."""
        entry = self._traffic.get((kind, axis))
        if entry is None:
            entry = self._traffic[kind, axis] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes

    def hold(self, category: str, nbytes: int) -> None:
        """`nbytes` more are resident on this rank."""
        held = self._resident[category] = self._resident.get(category, 0) + nbytes
        self._total += nbytes
        self._peak[category] = max(self._peak.get(category, 0), held)
        self._peak_total = max(self._peak_total, self._total)

    def drop(self, category: str, nbytes: int) -> None:
        """`nbytes` of those held are gone.

        Raises:
            UsageError: fewer bytes than that are held in this category.
        """
        held = self._resident.get(category, 0)
        if nbytes > held:
            raise UsageError(
                explain(f"bytes of {category!r} are dropped that nobody holds", expected=f"at most {held}", found=str(nbytes))
            )
        self._resident[category] = held - nbytes
        self._total -= nbytes

    def resident(self, category: str) -> int:
        """Bytes of a category that are held now."""
        return self._resident.get(category, 0)

    def peak(self, category: str) -> int:
        """Most bytes of a category that were held at once since the last reset."""
        return self._peak.get(category, 0)

    def snapshot(self) -> Snapshot:
        """A copy of every counter."""
        calls: dict[str, int] = {}
        moved: dict[str, int] = {}
        axes: dict[str, dict[str, int]] = {}
        for (kind, axis), (number, nbytes) in self._traffic.items():
            calls[kind] = calls.get(kind, 0) + number
            moved[kind] = moved.get(kind, 0) + nbytes
            axes.setdefault(axis, {})[kind] = nbytes
        return Snapshot(
            calls=calls,
            bytes=moved,
            axes=axes,
            resident=dict(self._resident),
            peak=dict(self._peak),
            resident_total=self._total,
            peak_total=self._peak_total,
        )

    def reset(self) -> None:
        """Forget the traffic, and measure peaks from what is held now. What is held stays held."""
        self._traffic.clear()
        self._resident = {category: held for category, held in self._resident.items() if held}
        self._peak = dict(self._resident)
        self._peak_total = self._total


def difference(before: Snapshot, after: Snapshot) -> Snapshot:
    """What happened between two snapshots: counters and residency subtracted, peaks as they were at `after`.

    Kinds and categories that did not change are left out of the counters.
    """
    axes = {axis: _minus(kinds, before["axes"].get(axis, {})) for axis, kinds in after["axes"].items()}
    return Snapshot(
        calls=_minus(after["calls"], before["calls"]),
        bytes=_minus(after["bytes"], before["bytes"]),
        axes={axis: kinds for axis, kinds in axes.items() if kinds},
        resident=_minus(after["resident"], before["resident"]),
        peak=dict(after["peak"]),
        resident_total=after["resident_total"] - before["resident_total"],
        peak_total=after["peak_total"],
    )


def _minus(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    keys = [*after, *(key for key in before if key not in after)]
    changes = {key: after.get(key, 0) - before.get(key, 0) for key in keys}
    return {key: change for key, change in changes.items() if change}
