"""What a mesh axis means to a parameter.

A neutral record: parallel layers will write it and `zero/` reads it, so that neither has to import the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["DATA_PARALLEL", "Placement", "Role"]


class Role(Enum):
    """How the copies of a parameter on the ranks of one axis relate to each other."""

    SPLIT = "different pieces of one tensor; the gradient is complete for its piece"
    PARTIAL = "equal values; each rank's gradient is a part, and the parts must be summed"
    SAME = "equal values and equal, complete gradients; count them once"


@dataclass(frozen=True, slots=True)
class Placement:
    """The role of every mesh axis for one parameter, by axis name."""

    roles: tuple[tuple[str, Role], ...]

    def axes(self, role: Role) -> frozenset[str]:
        """Names of the axes that have this role."""
        return frozenset(axis for axis, found in self.roles if found is role)


DATA_PARALLEL = Placement((("shard", Role.PARTIAL), ("replicate", Role.PARTIAL)))
"""The default: both data axes see different samples, so gradients are summed over both."""
