"""Handles: something was started and must be waited for.

Owns the one verb every asynchronous operation of Shardwise has. Refuses to know what was started.
"""

from __future__ import annotations

__all__ = ["DONE", "Handle"]


class Handle:
    """Something started that must be waited for. As it stands: something that has finished already."""

    __slots__ = ()

    def wait(self) -> None:
        """Return once the result may be used. Waiting again costs nothing and changes nothing."""


DONE = Handle()
"""The handle of an operation that was finished when it returned."""
