"""`GatheredParameters`: full weights for the time of a `with` block, to read or to edit.

Owns what happens to edits. Refuses to know engines: it finds the units of the parameters it is given by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardwise.errors import ParameterError, UsageError, explain
from shardwise.zero.buffer import as_storage
from shardwise.zero.released import ReleasedParameter, homes
from shardwise.zero.unit import Home, State, Unit

__all__ = ["DiscardedEditWarning", "GatheredParameters", "commit"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    Inside a block that edits, `parameter.data` may be written in place or assigned a tensor of the same shape. A block that is
    left by an exception discards edits. Nested blocks, and blocks around parameters that are gathered already, are fine.
    Tensors that were read inside may be kept; at stage 3 they do not follow the weights afterwards.

    Raises:
        ParameterError: `params` holds something else than tensors; or, at the end of a block, a parameter has another shape.
        UsageError: `modifier_rank` is not a rank.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._tensors = _tensors(params) if enabled else []
        self._modifier = modifier_rank
        self._blocks: list[_Block] = []  # one object may be entered again, even inside itself

    def __enter__(self) -> None:
        self._blocks.append(_Block(self._tensors, self._modifier))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._blocks.pop().leave(edits=kind is None)


def _tensors(params: object) -> list[Tensor]:
    """The distinct tensors, in order."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise _no_tensors(params)
    tensors: dict[int, Tensor] = {}
    for tensor in cast("Iterable[object]", params):
        if not isinstance(tensor, Tensor):
            raise _no_tensors(tensor)
        tensors[id(tensor)] = tensor
    return list(tensors.values())


def _no_tensors(found: object) -> ParameterError:
    do = "pass module.parameters()" if isinstance(found, nn.Module) else ""
    text = type(found).__name__ if isinstance(found, nn.Module) else repr(found)
    expected = "a Parameter or an iterable of them"
    return ParameterError(explain("GatheredParameters takes tensors", expected=expected, found=text, do=do))


@dataclass(slots=True)
class _Watched:
    """A parameter in a block, and what it was.

    Args:
        home: where it lives.
        unit: its unit, kept alive for the time of the block.
        parameter: the parameter.
        stays: whether its values stay when the block ends, so that edits have to be undone.
        before: a copy of its values, if they stay.
        mark: a fingerprint of its values otherwise.
    """

    home: Home
    unit: Unit
    parameter: nn.Parameter
    stays: bool
    before: Tensor | None = None
    mark: tuple[int, ...] = ()

    def look(self) -> None:
        """Take the values as they are now for those before any edit."""
        values = self.parameter.detach()
        if self.stays:
            self.before = values.clone()
        else:
            self.mark = _fingerprint(values)

    @property
    def edited(self) -> bool:
        """Whether the values have changed since."""
        values = self.parameter.detach()
        return _fingerprint(values) != self.mark if self.before is None else not _same_bits(values, self.before)

    def undo(self) -> None:
        """Put the values back. Where they are about to be released, they are left to be."""
        if self.before is not None:
            self.parameter.data.copy_(self.before)


class _Block:
    """One time of being inside."""

    def __init__(self, tensors: Sequence[Tensor], modifier: int | None) -> None:
        for tensor in tensors:
            home = homes.get(tensor)
            if home is not None and home.unit.settle is not None:
                home.unit.settle(home.unit)
        found = [(tensor, homes.get(tensor)) for tensor in tensors]
        if any(home is None and isinstance(tensor, ReleasedParameter) for tensor, home in found):
            remedy = "destroy(restore=True) would have left the weights in the model"
            raise UsageError(explain("there are parameters whose engine is gone, and their weights with it", do=remedy))
        held = [home for _, home in found if home is not None]
        self._others = [tensor for tensor, home in found if home is None]
        self._modifier = modifier
        self._units = list({id(home.unit): home.unit for home in held}.values())
        if self._units and modifier is not None and modifier not in self._units[0].data.ranks:
            expected = f"one of {self._units[0].data.ranks}"
            raise UsageError(explain("modifier_rank is not a rank", expected=expected, found=repr(modifier)))
        stay = {unit for unit in self._units if unit.state in (State.LIVE, State.LENT)}
        self._exit = ExitStack()
        with self._exit:  # what was pinned is let go if the next unit cannot be gathered
            for unit in self._units:
                self._exit.enter_context(unit.pinned(lend=True))
            self._watched = [
                _Watched(home, home.unit, home.member.parameter, home.unit in stay or home.buffer.resident) for home in held
            ]
            for watched in self._watched:
                watched.look()
            for unit in self._units:
                if unit in stay and unit.state is State.LIVE:
                    unit.open("begin to edit")
            self._exit = self._exit.pop_all()
        for unit in self._units:
            unit.watchers.append(self._look)

    def leave(self, *, edits: bool) -> None:
        """End of the block.

        Args:
            edits: whether edits count, as opposed to a block that ends by an exception.
        """
        for unit in self._units:
            unit.watchers.remove(self._look)
        # Where an engine was destroyed inside the block, its weights are in the model as they are.
        self._units = [unit for unit in self._units if not unit.closed]
        self._watched = [watched for watched in self._watched if not watched.unit.closed]
        stayed = {watched.unit for watched in self._watched if watched.stays}
        staying = [unit for unit in self._units if unit in stayed and unit.state is State.LIVE]
        with self._exit:
            for unit in staying:
                unit.open("end to edit")
            problems = [problem for watched in self._watched if (problem := _bring_back(watched)) is not None]
            if edits and self._modifier is not None and self._units:
                unit = self._units[0]  # only one rank edits, and yet all must raise
                everyone: list[list[str]] = unit.comm.all_gather_object(problems, unit.data, "are edited shapes right")
                problems = problems or next((other for other in everyone if other), problems)
            if problems or not edits:
                for watched in self._watched:
                    watched.undo()
            elif self._modifier is None:
                self._discard()
            else:
                self._publish(self._modifier)
            for unit in staying:
                unit.open("edited")
            if problems and edits:
                raise ParameterError(problems[0])

    def _look(self) -> None:
        for watched in self._watched:
            watched.look()

    def _discard(self) -> None:
        edited = [watched for watched in self._watched if watched.edited]
        for watched in edited:
            watched.undo()
        if edited:
            names = ", ".join(repr(watched.home.name) for watched in edited)
            warnings.warn(
                f"edits of {names} inside GatheredParameters were discarded; "
                "pass modifier_rank=<the rank whose edit counts> to keep them",
                DiscardedEditWarning,
                stacklevel=4,
            )

    def _publish(self, modifier: int) -> None:
        for watched in self._watched:
            home, unit = watched.home, watched.unit
            values = as_storage(watched.parameter.detach())
            unit.comm.broadcast(values, unit.data, unit.data.ranks.index(modifier), f"edit of {home.name}").wait()
            commit(home)
        for unit in self._units:
            unit.changed(lent_too=True)
        for tensor in self._others if self._units else ():
            unit, flat = self._units[0], tensor.detach()
            whole = flat.contiguous()
            unit.comm.broadcast(whole.view(-1), unit.data, unit.data.ranks.index(modifier), "edit of a buffer").wait()
            if whole.data_ptr() != flat.data_ptr():
                flat.copy_(whole)


def commit(home: Home) -> None:
    """Take the values that a parameter has now, equal on all ranks, as its weights: into the shard and the master weights."""
    buffer, member = home.buffer, home.member
    values = as_storage(member.parameter.detach())
    start, _ = buffer.interval
    for owner, first, last in buffer.own_pieces():
        if owner is not member:
            continue
        new = values[start + first - member.slot.offset : start + last - member.slot.offset]
        if not buffer.resident:
            buffer.shard[first:last].copy_(new)
        master = buffer.master
        if master is not None and master.separate:
            # A master holds more digits than the weight; those of values that were not edited are kept.
            part = master.read(first, last)
            rounded = part.to(new.dtype)
            kept = (new == rounded) & (new.signbit() == rounded.signbit())
            master.write(first, torch.where(kept, part, new.to(part.dtype)))
    if buffer.resident:
        increment_version(member.parameter)


def _bring_back(watched: _Watched) -> str | None:
    """The user may have replaced `parameter.data`: bring its values to where the parameter lives. Says what is wrong."""
    parameter, buffer, member = watched.parameter, watched.home.buffer, watched.home.member
    found, dtype = parameter.detach(), buffer.dtype_of(member)
    right = found.shape == member.slot.shape
    lent = not buffer.resident and watched.home.unit.state is State.LENT
    if lent and right and found.dtype == dtype and _is_dense(found):
        return None
    if lent:
        place = torch.empty(member.slot.shape, dtype=dtype, device=buffer.shard.device)
    else:
        place = member.view(buffer.storage.full)
        if right and found.data_ptr() == place.data_ptr():
            return None
    if right:
        place.copy_(found)
    elif lent and watched.before is not None:
        place.copy_(watched.before)
    parameter.data = place
    return None if right else _wrong_shape(watched.home, found)


def _is_dense(tensor: Tensor) -> bool:
    """Whether every element has bytes of its own, without gaps."""
    return tensor.is_contiguous() or torch.empty_like(tensor, memory_format=torch.preserve_format).stride() == tensor.stride()


def _wrong_shape(home: Home, found: Tensor) -> str:
    expected = f"{tuple(home.member.slot.shape)}"
    return explain(f"parameter {home.name!r} changed its shape", expected=expected, found=f"{tuple(found.shape)}")


def _fingerprint(values: Tensor) -> tuple[int, ...]:
    """Sums over the bits of a tensor and over some of them, which hardly any edit leaves as they are."""
    bits = _bits(values)
    return tuple(int(bits[::stride].sum(dtype=torch.int64)) for stride in (1, 3, 7))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(values: Tensor) -> Tensor:
    flat = as_storage(values).contiguous()
    return flat.view(_INTEGERS[flat.itemsize]) if flat.numel() else flat.to(torch.uint8)
