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
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    elif callable(item):
        return
    elif hasattr(item, "__dict__"):
        yield from vars(item).values()
    elif dataclasses.is_dataclass(item):  # with __slots__
        yield from (getattr(item, field.name, None) for field in dataclasses.fields(item))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Rebuild tuples, named tuples, lists, dicts and frozen or plain dataclasses with `function` applied to each tensor.

    Values of other classes are passed through untouched, as only their author knows how to copy them. Containers in which
    nothing changes are returned as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if kind is dict:
        entries = {key: map_tensors(function, item) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        changes = {
            field.name: new
            for field in dataclasses.fields(value)
            if field.init and (new := map_tensors(function, old := getattr(value, field.name, None))) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    return value
