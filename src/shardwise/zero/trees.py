"""Tensors inside the nested values that modules take and return.

Owns walking and rebuilding such values. Refuses to know what the tensors are for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["find_tensors", "map_direct", "map_tensors"]

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, nn.Module, type)
_DEPTH = 12


def find_tensors(value: Any) -> list[Tensor]:
    """Every distinct tensor in tuples, lists, sets, mappings, dataclasses and plain objects' attributes, at any depth."""
    found: list[Tensor] = []
    _visit(value, 0, found, set())
    return found


# Not nested in its caller: a function that knows itself is a reference cycle, and would keep tensors until it is collected.
def _visit(item: Any, depth: int, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(item, _OPAQUE) or id(item) in seen or depth > _DEPTH:
        return
    seen.add(id(item))
    if isinstance(item, Tensor):
        found.append(item)
        return
    for child in _children(item):
        _visit(child, depth + 1, found, seen)


def _children(item: Any) -> Iterator[Any]:
    kind = _kind(item)
    if issubclass(kind, Mapping):
        yield from item.values()
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from item
    elif callable(item):
        return
    elif hasattr(item, "__dict__"):
        yield from cast("dict[str, Any]", vars(item)).values()
    elif dataclasses.is_dataclass(item):  # with __slots__
        yield from (getattr(item, field.name, None) for field in dataclasses.fields(item))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Rebuild tuples, named tuples, lists, dicts and dataclasses with `function` applied to each tensor.

    Values of other classes are passed through untouched, as only their author knows how to copy them; so is a container met
    again inside itself. Containers in which nothing changes are returned as they are.
    """
    return _rebuild(function, value, ())


def map_direct(function: Callable[[Tensor], Tensor], value: Any, rest: list[Any]) -> Any:
    """Apply `function` to the tensors that stand alone or in tuples.

    Anything else, which its receiver may write into, is the same object in the result and is appended to `rest`.
    """
    if isinstance(value, Tensor):
        return function(value)
    if _is_tuple(value):
        return _same_or(value, [map_direct(function, item, rest) for item in value])
    if not isinstance(value, _OPAQUE):
        rest.append(value)
    return value


def _rebuild(function: Callable[[Tensor], Tensor], value: Any, around: tuple[int, ...]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in around:
        return value
    around = (*around, id(value))
    kind = _kind(value)
    if _is_tuple(value) or kind is list:
        return _same_or(value, [_rebuild(function, item, around) for item in value])
    if kind is dict:
        entries = {key: _rebuild(function, item, around) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if not issubclass(kind, Mapping) and dataclasses.is_dataclass(kind):
        return _rebuild_dataclass(function, value, around)
    return value


def _rebuild_dataclass(function: Callable[[Tensor], Tensor], value: Any, around: tuple[int, ...]) -> Any:
    before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    after = {name: _rebuild(function, item, around) for name, item in before.items()}
    changes = {name: item for name, item in after.items() if item is not before[name]}
    if not changes:
        return value
    made = copy.copy(value)  # `dataclasses.replace` would run the author's `__post_init__` a second time
    for name, item in changes.items():
        object.__setattr__(made, name, item)  # frozen ones refuse the ordinary way
    return made


def _kind(value: Any) -> Any:
    return cast("Any", type(value))


def _is_tuple(value: Any) -> bool:
    kind = _kind(value)
    return kind is tuple or (tuple in kind.__mro__ and hasattr(kind, "_fields"))


def _same_or(value: Any, items: list[Any]) -> Any:
    """A container of the same class with these items; the same one if they are its items."""
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    kind = _kind(value)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)
