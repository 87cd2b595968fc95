"""Hooks on modules that stay with the module they were made for.

A hook holds an engine's insides. A deep copy of a module would copy them along, and its pickle would try to; what users mean by
either is the plain module.

Refuses to know what hooks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Hook"]


class Hook:
    """A callable that is worth nothing in a copy."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the hook does."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., Any]]]:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""
