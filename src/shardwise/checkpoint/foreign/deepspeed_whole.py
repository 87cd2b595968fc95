"""Which parameter is which in an optimizer that DeepSpeed saved without ZeRO: it numbers them and does not say.

Groups keep the order of the model, which leaves a question only of which group each parameter is in, or none. Shapes answer it,
and where there are masters, so do values: a weight is its master, rounded. Where two answers are possible, none is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import Spec
from shardwise.checkpoint.foreign.deepspeed_files import take
from shardwise.checkpoint.foreign.deepspeed_zero import Optimized
from shardwise.checkpoint.foreign.files import Files, damaged
from shardwise.checkpoint.foreign.narrow import as_dict, as_list, as_shape
from shardwise.checkpoint.foreign.pieces import Piece, whole
from shardwise.checkpoint.foreign.stored import StridedTensor

__all__ = ["assign", "collect_whole"]

_NAMELESS = "the optimizer's masters and state, since it cannot be told which parameter has which"
_WAYS = 4096  # places in the search at a time
_COMPARED = 64  # values of each weight that are compared with its master


def collect_whole(model: Mapping[str, StridedTensor], optimizer: Mapping[str, Any], path: Path, files: Files) -> Optimized:
    """What an optimizer holds, by parameter.

    Args:
        model: the weights, each once, in the order of the model.
        optimizer: as torch's `state_dict` gives it, or in an envelope of DeepSpeed's that adds masters.
        path: of the file, for errors.
        files: to read with.

    Raises:
        CheckpointError: the file is damaged.
    """
    inner = take(optimizer, "optimizer_state_dict", dict, path) if "optimizer_state_dict" in optimizer else optimizer
    groups: list[dict[str, Any]] = _items(take(inner, "param_groups", list, path), dict, path)
    numbers = [as_shape(group.get("params")) for group in groups]
    held = as_dict(inner.get("state"))
    if held is None or any(each is None for each in numbers):
        raise damaged(path, "no optimizer state", "a DeepSpeed checkpoint")
    states = [_items([held.get(number, {}) for number in each or ()], dict, path) for each in numbers]
    flat = as_list(optimizer.get("fp32_groups_flat"))
    if flat is not None:
        _items(flat, StridedTensor, path)
        if len(flat) != len(groups):
            raise damaged(path, f"{len(flat)} masters", f"{len(groups)}")
        return _collect_flat(model, flat, [each[0] if each else {} for each in states], groups, files)
    slots = _Slots(_masters(optimizer, states, path), states, files)
    names = _given_names(groups, states, model)
    if names is None:
        names = assign(list(model), [1] * len(model), [len(each) for each in states], slots.fits(model))
    return slots.collect(names, model, groups)


def _items(found: list[Any], kind: type[Any], path: Path) -> list[Any]:
    if not all(isinstance(each, kind) for each in found):
        raise damaged(path, "an optimizer that is none", "a DeepSpeed checkpoint")
    return found


def _masters(
    optimizer: Mapping[str, Any], states: Sequence[Sequence[Any]], path: Path
) -> Sequence[Sequence[StridedTensor | None]]:
    """One for each parameter, by group; None for all, if weights are their own masters."""
    if "fp32_groups" not in optimizer:
        return [[None] * len(group) for group in states]
    found = [_items(as_list(group) or [], StridedTensor, path) for group in as_list(optimizer["fp32_groups"]) or ()]
    if [len(group) for group in found] != [len(group) for group in states]:
        raise damaged(path, "masters that do not fit the groups of the optimizer", "a DeepSpeed checkpoint")
    return found


def _given_names(
    groups: Sequence[Mapping[str, Any]], states: Sequence[Sequence[Any]], model: Mapping[str, StridedTensor]
) -> list[list[str]] | None:
    """The names that newer versions of torch save, if they were given and are those of the model."""
    found = [as_list(group.get("param_names")) or [] for group in groups]
    every = [name for names in found for name in names]
    fit = [len(names) for names in found] == [len(group) for group in states] and len(set(map(str, every))) == len(every)
    return found if fit and all(isinstance(name, str) and name in model for name in every) else None


@dataclass(frozen=True)
class _Slots:
    """Parameters that have a number each: masters, if any, and states, by group."""

    masters: Sequence[Sequence[StridedTensor | None]]
    states: Sequence[Sequence[Mapping[str, Any]]]
    files: Files

    def fits(self, model: Mapping[str, StridedTensor]) -> Callable[[int, int, str], bool]:
        """Whether a parameter can be the one with a number in a group."""
        known: dict[tuple[int, int, str], bool] = {}

        def fits(group: int, at: int, name: str) -> bool:
            weight, master = model[name], self.masters[group][at]
            shapes = [value.spec.shape for value in self.states[group][at].values() if isinstance(value, StridedTensor)]
            if any(shape not in ((), weight.spec.shape) for shape in shapes):
                return False
            return master is None or (master.spec.shape == weight.spec.shape and _rounded(master, 0, weight, self.files))

        def remembered(group: int, at: int, name: str) -> bool:
            spot = (group, at, name)
            if spot not in known:
                known[spot] = fits(*spot)
            return known[spot]

        return remembered

    def collect(
        self, names: list[list[str]] | None, model: Mapping[str, StridedTensor], groups: Sequence[Mapping[str, Any]]
    ) -> Optimized:
        """By parameter, if it is known which is which."""
        if names is None:
            return Optimized(left_out=[_NAMELESS])
        found = Optimized(groups=list(zip(groups, names, strict=True)))
        for group, members in enumerate(names):
            for at, name in enumerate(members):
                master, weight = self.masters[group][at], model[name]
                if master is not None:
                    found.weights[name] = (master.spec, whole(master))
                found.others[name] = self.states[group][at]
                for state, value in self.states[group][at].items():
                    if state != "step" and isinstance(value, StridedTensor) and value.spec.shape == weight.spec.shape:
                        found.states[name, state] = (value.spec, whole(value))
        return found


def assign(
    names: Sequence[str], weights: Sequence[int], ends: Sequence[int], fits: Callable[[int, int, str], bool]
) -> list[list[str]] | None:
    """The one way to put parameters into groups, in order, or None if there is none or more than one.

    Args:
        names: the parameters in the order of the model; some may be in no group.
        weights: what each takes of the length of a group.
        ends: length of each group.
        fits: whether a parameter can begin at a place in a group.
    """
    left = sum(weights)
    ways: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(ends): (1, None)}
    for name, weight in zip(names, weights, strict=True):
        left -= weight
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for place, (count, chain) in ways.items():
            steps: list[tuple[tuple[int, ...], Any]] = [(place, chain)]
            for group, (at, end) in enumerate(zip(place, ends, strict=True)):
                if at + weight <= end and fits(group, at, name):
                    steps.append(((*place[:group], at + weight, *place[group + 1 :]), (chain, group, name)))
            for spot, taken in steps:
                if sum(ends) - sum(spot) <= left:
                    before = following[spot][0] if spot in following else 0
                    following[spot] = (before + count, taken)
        if len(following) > _WAYS:
            return None
        ways = following
    count, chain = ways.get(tuple(ends), (0, None))
    if count != 1:
        return None
    chosen: list[tuple[int, str]] = []
    while chain is not None:
        chain, group, name = chain
        chosen.append((group, name))
    return [[name for group, name in reversed(chosen) if group == number] for number in range(len(ends))]


def _collect_flat(
    model: Mapping[str, StridedTensor],
    masters: Sequence[StridedTensor],
    states: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    files: Files,
) -> Optimized:
    """The same where each group has one master and one state for all its parameters, end to end."""

    def fits(group: int, at: int, name: str) -> bool:
        return _rounded(masters[group], at, model[name], files)

    lengths = [tensor.spec.length for tensor in model.values()]
    names = assign(list(model), lengths, [master.spec.length for master in masters], fits)
    if names is None:
        return Optimized(left_out=[_NAMELESS])
    found = Optimized(groups=list(zip(groups, names, strict=True)))
    for master, state, members in zip(masters, states, names, strict=True):
        at = 0
        flat = {key: value for key, value in state.items() if isinstance(value, StridedTensor) and value.spec == master.spec}
        for name in members:
            shape, length = model[name].spec.shape, model[name].spec.length
            found.weights[name] = (Spec(shape, master.spec.dtype), [Piece(0, length, master, at)])
            found.others[name] = state
            for key, value in flat.items():
                found.states[name, key] = (Spec(shape, value.spec.dtype), [Piece(0, length, value, at)])
            at += length
    return found


def _rounded(master: StridedTensor, at: int, weight: StridedTensor, files: Files) -> bool:
    """Whether the first values of a weight are those of a master from there on, rounded."""
    count = min(_COMPARED, weight.spec.length)
    ours, theirs = (torch.empty(count, dtype=tensor.spec.dtype) for tensor in (weight, master))
    weight.read(files, 0, ours)
    master.read(files, at, theirs)
    return torch.equal(ours.nan_to_num(), theirs.to(ours.dtype).nan_to_num())
