"""`GatheredParameters`: full weights for the time of a `with` block, to read or to edit.

Owns what happens to edits. Refuses to know engines: it finds the units of the parameters it is given by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardwise.errors import ParameterError, UsageError, explain
from shardwise.zero.buffer import as_storage
from shardwise.zero.released import homes
from shardwise.zero.unit import Home, State, Unit

__all__ = ["DiscardedEditWarning", "GatheredParameters"]


class DiscardedEditWarning(UserWarning):
    """Weights were edited inside `GatheredParameters` without naming the rank whose edit counts."""


class GatheredParameters:
    """Context manager in which the given parameters are whole. Collective: all data ranks enter it with the same parameters.

    Args:
        params: one parameter or an iterable of them. Duplicates, buffers and plain tensors are fine; so is nothing at all.
        modifier_rank: the global rank whose edits count. They reach every rank and the master weights when the block ends.
            None: weights are only read; edits are undone, with a `DiscardedEditWarning`.
        fwd_module: accepted for compatibility; parameters used outside their module are found without it.
        enabled: False makes it do nothing.

    Inside a block that edits, `parameter.data` may be written in place or assigned a tensor of the same shape.
    Nested blocks, and blocks around parameters that are gathered already, are fine.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        for tensor in given:
            if not isinstance(tensor, Tensor):
                raise ParameterError(
                    explain(
                        "GatheredParameters takes tensors", expected="a Parameter or an iterable of them", found=repr(tensor)
                    )
                )
        unique: list[Tensor] = list({id(tensor): tensor for tensor in given}.values()) if enabled else []
        held = [(tensor, home) for tensor in unique if (home := homes.get(tensor)) is not None and home.reference() is not None]
        self._homes: list[Home] = [home for _, home in held]
        self._others = [tensor for tensor in unique if homes.get(tensor) is None]
        self._modifier = modifier_rank
        self._exit = ExitStack()
        self._before: list[Tensor | None] = []

    def __enter__(self) -> None:
        units = _units(self._homes)
        if units and self._modifier is not None and self._modifier not in units[0].data.ranks:
            raise UsageError(
                explain("modifier_rank is not a rank", expected=f"one of {units[0].data.ranks}", found=repr(self._modifier))
            )
        stay = {unit for unit in units if unit.state is State.LIVE}
        for unit in units:
            self._exit.enter_context(unit.pinned())
        if self._modifier is None:
            # What is released at the end forgets edits by itself; what stays has to be put back.
            self._before = [
                home.member.parameter.detach().clone() if home.unit in stay or home.buffer.resident else None
                for home in self._homes
            ]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                for home in self._homes:
                    _take_assigned_data(home)
                if self._modifier is None:
                    self._undo()
                else:
                    self._publish(self._modifier)
        finally:
            self._exit.close()

    def _undo(self) -> None:
        edited = [home.name for home, before in zip(self._homes, self._before, strict=True) if _undo_edit(home, before)]
        if edited:
            warnings.warn(
                f"edits of {', '.join(map(repr, edited))} inside GatheredParameters were discarded; "
                "pass modifier_rank=<the rank whose edit counts> to keep them",
                DiscardedEditWarning,
                stacklevel=3,
            )

    def _publish(self, modifier: int) -> None:
        for home in self._homes:
            unit = home.unit
            values = as_storage(home.member.parameter.detach())
            unit.comm.broadcast(values, unit.data, unit.data.ranks.index(modifier), f"edit of {home.name}").wait()
            commit(home)
        for unit in _units(self._homes):
            unit.version += 1
            for tensor in self._others if unit is _units(self._homes)[0] else ():
                flat = tensor.detach()
                whole = flat.contiguous()
                unit.comm.broadcast(whole.view(-1), unit.data, unit.data.ranks.index(modifier), "edit of a buffer").wait()
                flat.copy_(whole)


def commit(home: Home) -> None:
    """Take the gathered values of a parameter as its weights: into the resting shard and the master weights."""
    buffer = home.buffer
    start, _ = buffer.interval
    for member, first, last in buffer.own_pieces():
        if member is not home.member:
            continue
        new = buffer.storage.full[start + first : start + last]
        if not buffer.resident:
            buffer.shard[first:last].copy_(new)
        master = buffer.master
        if master is not None and master is not buffer.shard:
            # A master holds more digits than the weight; those of values that were not edited are kept.
            part = master[first:last]
            torch.where(new == part.to(new.dtype), part, new.to(part.dtype), out=part)
    if buffer.resident:
        increment_version(home.member.parameter)


def _units(found: list[Home]) -> list[Unit]:
    return list({id(home.unit): home.unit for home in found}.values())


def _take_assigned_data(home: Home) -> None:
    """The user may have replaced `parameter.data`: bring its values back to where the parameter lives."""
    parameter, place = home.member.parameter, home.member.view(home.buffer.storage.full)
    if parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape:
        return
    if parameter.shape != place.shape:
        found = tuple(parameter.shape)
        home.buffer.bind()
        raise ParameterError(
            explain(f"parameter {home.name!r} changed its shape", expected=f"{tuple(place.shape)}", found=f"{found}")
        )
    place.copy_(parameter.detach())
    parameter.data = place


def _undo_edit(home: Home, before: Tensor | None) -> bool:
    """Whether the parameter was edited on this rank (its chunk of it, where the rest is about to be released anyway)."""
    parameter = home.member.parameter
    if before is not None:
        if _same_bits(parameter.detach(), before):
            return False
        parameter.data.copy_(before)
        return True
    start, _ = home.buffer.interval
    return any(
        not _same_bits(home.buffer.storage.full[start + first : start + last], home.buffer.shard[first:last])
        for member, first, last in home.buffer.own_pieces()
        if member is home.member
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return (
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        if one.dim()
        else bool(torch.equal(one, other) or (one.isnan() and other.isnan()))
    )
