"""What an unpickled value is: the one question that everything read from a pickle must be asked before it is used."""

from __future__ import annotations

from typing import Any, cast

__all__ = ["as_dict", "as_list", "as_shape"]

_LARGEST = 2**62


def as_dict(value: object) -> dict[Any, Any] | None:
    """The value, if it is a dict."""
    return cast("dict[Any, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    """The items, if it is a list or tuple."""
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else None


def as_shape(value: object) -> tuple[int, ...] | None:
    """The value, if it is whole numbers that sizes or offsets can be."""
    sizes = as_list(value)
    if sizes is None or any(type(size) is not int or not 0 <= size < _LARGEST for size in sizes):
        return None
    return tuple(sizes)
