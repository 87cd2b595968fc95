"""The valid key that a misspelt one most likely stands for.

Pure text; refuses to know the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["edit_distance", "nearest"]

_TYPO = 2
"""Edits up to which two keys count as the same word mistyped."""


def edit_distance(left: str, right: str) -> int:
    """Fewest insertions, deletions, substitutions and swaps of neighbours between two texts (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, previous, row = row, before, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, previous[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(word: str, here: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The most likely meaning of `word`.

    Args:
        word: the unknown key.
        here: keys that are valid where it stands.
        elsewhere: dotted paths of all keys; the same key in another object is better than a far one here.

    Returns:
        a key of `here`, or a dotted path of `elsewhere`; "" when there is nothing to choose from.
    """
    wanted = _plain(word)
    known = sorted(here)
    typos = [candidate for candidate in known if abs(len(candidate) - len(wanted)) <= _TYPO]
    closest = _closest(wanted, typos)
    if closest and edit_distance(wanted, _plain(closest)) <= _TYPO:
        return closest
    for path in elsewhere:
        if wanted in (_plain(path), _plain(path.rpartition(".")[2])):
            return path
    return _closest(wanted, [candidate for candidate in known if _contains(wanted, _plain(candidate))] or known)


def _closest(wanted: str, candidates: Sequence[str]) -> str:
    return min(candidates, key=lambda candidate: edit_distance(wanted, _plain(candidate)), default="")


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_").replace(" ", "_")


def _contains(left: str, right: str) -> bool:
    """Whether one of two keys is a part of the other (not by the accident of being very short), or all its words are."""
    shorter, longer = sorted((left, right), key=len)
    return len(shorter) > _TYPO + 1 and (shorter in longer or set(shorter.split("_")) <= set(longer.split("_")))
