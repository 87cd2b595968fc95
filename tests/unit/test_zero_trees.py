"""Tensors inside nested inputs and outputs: found wherever they are, replaced without disturbing what holds them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwise.zero.trees import find_tensors, map_direct, map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    values: Any
    note: str = "n"


@dataclass(frozen=True)
class Frozen:
    values: Any


@dataclass(slots=True)
class Slotted:
    values: Any


@dataclass
class Derived:
    """One field is computed, another is not an argument."""

    values: Any
    calls: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.calls.append("made")


class Opaque:
    """An object of the user's own."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Output(OrderedDict[str, Any]):
    """As Hugging Face's outputs: a dict whose entries are attributes too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)


Loose = namedtuple("Loose", "a b")

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda item: (1, item),
    "list": lambda item: [item, None],
    "dict": lambda item: {"k": item},
    "set": lambda item: {item} if isinstance(item, Tensor) else [item],
    "named tuple": lambda item: Pair(item, "x"),
    "loose named tuple": lambda item: Loose("x", item),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "object": Opaque,
    "output": lambda item: Output(logits=item),
    "defaultdict": lambda item: defaultdict(list, k=item),
    "user dict": lambda item: UserDict(k=item),
}


@pytest.mark.parametrize("outer", HOLDERS)
@pytest.mark.parametrize("inner", HOLDERS)
def test_a_tensor_is_found_in_anything_in_anything(outer: str, inner: str) -> None:
    tensor = torch.zeros(2)
    found = find_tensors(HOLDERS[outer](HOLDERS[inner](tensor)))
    assert len(found) == 1
    assert found[0] is tensor


def test_equal_tensors_are_distinct_and_the_same_one_is_found_once() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    found = find_tensors([one, {"a": other, "b": one}, (one,)])
    assert len(found) == 2
    assert found[0] is one
    assert found[1] is other


@pytest.mark.parametrize(
    "value", [None, 1, 2.0, "text", b"bytes", True, torch.float32, torch.Size([2]), int, print, nn.Linear(2, 2)]
)
def test_other_values_hold_no_tensors(value: Any) -> None:
    assert find_tensors(value) == []
    assert find_tensors([value, {"k": value}]) == []
    assert map_tensors(_boom, value) is value


def test_values_that_contain_themselves() -> None:
    tensor = torch.zeros(1)
    entries: dict[str, Any] = {"t": tensor}
    entries["self"] = entries
    knot: list[Any] = [entries]
    knot.append(knot)
    assert len(find_tensors(knot)) == 1
    node = Plain(tensor)
    child = Plain(node)
    node.note = child  # pyright: ignore[reportAttributeAccessIssue] - a tree whose children know their parents
    assert len(find_tensors(child)) == 1


def test_replacing_in_values_that_contain_themselves_ends() -> None:
    entries: dict[str, Any] = {"t": torch.zeros(1)}
    entries["self"] = entries
    map_tensors(torch.clone, (entries,))
    node = Plain(torch.zeros(1))
    node.note = Plain(node)  # pyright: ignore[reportAttributeAccessIssue]
    map_tensors(torch.clone, node)


def test_a_deep_tree_of_layers_is_searched() -> None:
    """States of a dozen layers, each in its own tuple: the tree is not deep, but some users nest them."""
    value: Any = torch.zeros(1)
    for _ in range(10):
        value = (value,)
    assert len(find_tensors(value)) == 1


@pytest.mark.parametrize("name", ["tuple", "named tuple", "loose named tuple"])
def test_immutable_containers_are_rebuilt_with_their_own_class(name: str) -> None:
    tensor = torch.zeros(2)
    before = HOLDERS[name](tensor)
    after = map_tensors(lambda found: found + 1, before)
    assert type(after) is type(before)
    assert after is not before
    assert [found.tolist() for found in find_tensors(after)] == [[1.0, 1.0]]
    assert find_tensors(before)[0] is tensor


@pytest.mark.parametrize("name", HOLDERS)
def test_where_nothing_changes_the_same_object_is_returned(name: str) -> None:
    """A module that writes into a container it was given must write into its caller's."""
    value = HOLDERS[name](torch.zeros(2))
    assert map_tensors(lambda tensor: tensor, value) is value


def test_every_tensor_is_replaced_where_all_containers_are_plain() -> None:
    value = (torch.zeros(1), [torch.ones(1), {"k": (torch.full((1,), 2.0), None, "s")}], Frozen(torch.full((1,), 3.0)))
    after = map_tensors(lambda tensor: tensor + 10, value)
    assert [tensor.item() for tensor in find_tensors(after)] == [10.0, 11.0, 12.0, 13.0]
    assert after[1][1]["k"][1:] == (None, "s")


def test_a_rebuilt_dataclass_keeps_what_is_not_an_argument() -> None:
    value = Derived(torch.zeros(1))
    value.calls.append("used")
    after = map_tensors(lambda tensor: tensor + 1, value)
    assert find_tensors(after)[0].item() == 1.0
    assert after.calls == ["made", "used"]


@pytest.mark.parametrize("name", HOLDERS)
def test_only_tensors_outside_of_writable_containers_are_replaced_directly(name: str) -> None:
    tensor = torch.zeros(2)
    value = HOLDERS[name](tensor)
    rest: list[Any] = []
    after = map_direct(lambda found: found + 1, value, rest)
    if "tuple" in name:
        assert find_tensors(after)[0].tolist() == [1.0, 1.0]
        assert rest == []
    else:
        assert after is value
        assert len(rest) == 1
        assert rest[0] is value
        assert find_tensors(rest)[0] is tensor
    assert map_direct(_boom, "text", rest) == "text"


def test_objects_of_unknown_classes_pass_through() -> None:
    for name in ("object", "output", "user dict", "defaultdict"):
        value = HOLDERS[name](torch.zeros(2))
        assert map_tensors(torch.clone, value) is value


def _boom(tensor: Tensor) -> Tensor:
    raise AssertionError("there is no tensor")
