"""Tensors inside the nested values that modules take and return.

Owns walking and rebuilding such values. Refuses to know what the tensors are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["find_tensors", "map_tensors"]

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, nn.Module, type)
_DEPTH = 12


def find_tensors(value: Any) -> list[Tensor]:
    """Every distinct tensor in tuples, lists, sets, mappings, dataclasses and plain objects' attributes, at any depth."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any, depth: int) -> None:
        if isinstance(item, _OPAQUE) or id(item) in seen or depth > _DEPTH:
            return
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
            return
        for child in _children(item):
            visit(child, depth + 1)

    visit(value, 0)
    return found


def _children(item: Any) -> Iterator[Any]:
    kind = _kind(item)
    if issubclass(kind, Mapping):
        yield from item.values()
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from item
    elif callable(item):
        return
    elif hasattr(item, "__dict__"):
        yield from vars(item).values()
    elif dataclasses.is_dataclass(item):  # with __slots__
        yield from (getattr(item, field.name, None) for field in dataclasses.fields(item))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Rebuild tuples, named tuples, lists, dicts and dataclasses with `function` applied to each tensor.

    Values of other classes are passed through untouched, as only their author knows how to copy them. Containers in which
    nothing changes are returned as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = _kind(value)
    named = tuple in kind.__mro__ and hasattr(kind, "_fields")
    if kind in (list, tuple) or named:
        new = [map_tensors(function, item) for item in value]
        if all(one is other for one, other in zip(new, value, strict=True)):
            return value
        return kind(*new) if named else kind(new)
    if kind is dict:
        entries = {key: map_tensors(function, item) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if not issubclass(kind, Mapping) and dataclasses.is_dataclass(kind):
        return _map_fields(function, value)
    return value


def _kind(value: Any) -> Any:
    return type(value)


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = map_tensors(function, before)
        if field.init and after is not before:
            changes[field.name] = after
    return dataclasses.replace(value, **changes) if changes else value
