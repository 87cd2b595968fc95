"""Full and local values of one parameter's master weights, gradient and optimizer state, to read or to set.

Owns putting a parameter together from the pieces of all ranks and taking it apart again. Functions named `full` are
collective over the data ranks; those named `local` are not, and treat this rank's piece: a 1-D tensor, possibly empty.

All return None for a tensor that belongs to no engine, and for state that does not exist yet. Values are float32 (float64 for
float64 parameters) and copies; complex parameters come as complex values. Names of state are torch's ("exp_avg", "exp_avg_sq",
"momentum_buffer", ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ParameterError, UsageError, explain
from shardwise.zero import Gradients, Home, Master, as_storage, homes

if TYPE_CHECKING:
    from shardwise.trainer import Trainer

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


class Piece(NamedTuple):
    """This rank's part of a parameter: elements `[first, last)` of the chunk, which begin at `offset` of the flat parameter."""

    first: int
    last: int
    offset: int


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The master weights of a parameter, whole. Collective."""
    home = _home(param)
    return None if home is None else _assemble(home, lambda piece: _master(home).read(piece.first, piece.last))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace the master weights of a parameter, and the weights with them. Collective, with equal values on all ranks."""
    home = _required(param)
    _write_weights(home, _split(home, value))
    _weights_changed(home)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient that the next step will see, whole: averaged, unscaled, before clipping. Collective.

    None when no rank has one in this accumulation window.
    """
    home = _home(param)
    if home is None or not home.buffer.trainable:
        return None
    trainer, gradients, position = _trainer(home), _gradients(home), _position(home)
    reduced = gradients.shard
    total = _assemble(home, lambda piece: torch.empty(0) if reduced is None else reduced[piece.first : piece.last], flat=True)
    # What this rank has not reduced yet, and whether it has anything at all, summed over ranks in one collective.
    local = torch.zeros(total.numel() + 1, dtype=total.dtype, device=total.device)
    mine = gradients.contribution(position)
    if mine is not None:
        local[:-1] = mine.reshape(-1).to(local.dtype) / trainer.gradient_predivide
    local[-1] = float(trainer.has_gradient(home.member.index))
    home.unit.comm.all_reduce(local, home.unit.data, f"gradient of {home.name}").wait()
    if not local[-1].item():
        return None
    return _shaped(home, (total + local[:-1]) * (1.0 / trainer.gradient_divisor))


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the gradient that the next step will see (averaged, unscaled). Collective, with equal values on all ranks."""
    home = _required(param, trainable=True)
    trainer, gradients, position = _trainer(home), _gradients(home), _position(home)
    flat = _flat(home, value) * trainer.gradient_divisor
    trainer.mark_gradient(home.member.index)
    waiting = gradients.contribution(position)
    if gradients.shard is None:
        # Nothing was reduced yet: the first data rank contributes all of it, and the others nothing.
        share = flat * (trainer.gradient_predivide if home.unit.data.index == 0 else 0.0)
        if waiting is None:
            gradients.deliver(position, _shaped(home, share))
        else:
            waiting.copy_(share.view(waiting.shape))
        return
    if waiting is not None:
        waiting.zero_()
    for piece in _pieces(home):
        gradients.shard[piece.first : piece.last] = flat[piece.offset : piece.offset + piece.last - piece.first]


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """One optimizer state of a parameter, whole, in the parameter's shape. Collective."""
    home = _home(param)
    if home is None or not home.buffer.trainable:
        return None
    parts = _state(home, optim_state_key)
    known = torch.tensor([float(parts is not None)], dtype=torch.float64, device=home.buffer.shard.device)
    home.unit.comm.all_reduce(known, home.unit.data, f"is there {optim_state_key} of {home.name}").wait()
    if not known.item():
        return None
    return _assemble(home, lambda _: parts if parts is not None else torch.empty(0))


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace one optimizer state of a parameter. Collective, with equal values on all ranks.

    Raises:
        UsageError: there is no such state.
    """
    home = _required(param, trainable=True)
    parts = _split(home, value)
    # A rank without a piece of the parameter cannot know; all must raise, or none.
    missing = torch.tensor([float(bool(parts) and _state(home, optim_state_key) is None)], device=home.buffer.shard.device)
    home.unit.comm.all_reduce(missing, home.unit.data, f"is there {optim_state_key} of {home.name}").wait()
    if missing.item():
        raise _no_state(home, optim_state_key)
    for _, part in parts:
        _set_state(home, optim_state_key, part)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's piece of the master weights."""
    home = _home(param)
    return None if home is None else _local(home, _master(home).read)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Replace this rank's piece of the master weights, and the weights with them. All ranks call it."""
    home = _required(param)
    _write_weights(home, _own(home, value))
    _weights_changed(home)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's piece of the reduced gradient, averaged and unscaled; None when nothing was reduced in this window."""
    home = _home(param)
    if home is None or not home.buffer.trainable:
        return None
    reduced = _gradients(home).shard
    return (
        None
        if reduced is None
        else _local(home, lambda first, last: reduced[first:last]) * (1.0 / _trainer(home).gradient_divisor)
    )


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Replace this rank's piece of the reduced gradient (averaged, unscaled).

    Raises:
        UsageError: nothing was reduced in this window.
    """
    home = _required(param, trainable=True)
    reduced = _gradients(home).shard
    if reduced is None:
        raise UsageError(
            explain(
                f"the gradient of {home.name!r} is not reduced yet",
                do="use safe_set_full_grad, or call after the last backward",
            )
        )
    for piece, part in _own(home, value):
        reduced[piece.first : piece.last] = part.to(reduced.dtype) * _trainer(home).gradient_divisor


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's piece of one optimizer state."""
    home = _home(param)
    if home is None or not home.buffer.trainable:
        return None
    part = _state(home, optim_state_key)
    return None if part is None else part.detach().clone()


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's piece of one optimizer state."""
    home = _required(param, trainable=True)
    for _, part in _own(home, value):
        _set_state(home, optim_state_key, part)


# -- a parameter and its pieces ------------------------------------------------------------------------------------------------


def _home(param: Tensor) -> Home | None:
    home = homes.get(param)
    return home if home is not None and home.held else None


def _required(param: Tensor, *, trainable: bool = False) -> Home:
    home = _home(param)
    if home is None or (trainable and not home.buffer.trainable):
        problem = "this tensor belongs to no engine" if home is None else f"no optimizer updates {home.name!r}"
        raise ParameterError(explain(problem, expected="a parameter that the engine trains"))
    return home


def _trainer(home: Home) -> Trainer:
    trainer = home.unit.owner() if home.unit.owner is not None else None
    if trainer is None:
        raise UsageError(explain(f"the engine that trained {home.name!r} is gone"))
    return trainer


def _gradients(home: Home) -> Gradients:
    return next(item for item in _trainer(home).gradients() if item.buffer is home.buffer)


def _position(home: Home) -> int:
    return home.buffer.members.index(home.member)


def _pieces(home: Home) -> list[Piece]:
    start, _ = home.buffer.interval
    return [
        Piece(first, last, start + first - member.slot.offset)
        for member, first, last in home.buffer.own_pieces()
        if member is home.member
    ]


def _master(home: Home) -> Master:
    return home.buffer.precise


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _assemble(home: Home, local: Callable[[Piece], Tensor], *, flat: bool = False) -> Tensor:
    """Put the ranks' pieces together. An empty piece from `local` stands for zeros."""
    dtype = _wide(_master(home).dtype)
    # Each element comes from one rank of the shard axis; minus zero on the others makes the sum exact, signs of zeros included.
    total = torch.zeros(home.member.slot.length, dtype=dtype, device=home.buffer.shard.device).neg_()
    for piece in _pieces(home):
        part = local(piece)
        if part.numel():
            total[piece.offset : piece.offset + piece.last - piece.first] = part.to(dtype)
    home.unit.comm.all_reduce(total, home.buffer.key.shard, f"assemble {home.name}").wait()
    return total if flat else _shaped(home, total)


def _shaped(home: Home, flat: Tensor) -> Tensor:
    slot = home.member.slot
    return torch.view_as_complex(flat.view(*slot.shape, 2)) if slot.request.width == 2 else flat.view(slot.shape)


def _flat(home: Home, value: Tensor) -> Tensor:
    if tuple(value.shape) != home.member.slot.shape:
        raise ParameterError(
            explain(
                f"a value for {home.name!r} has the wrong shape",
                expected=f"{home.member.slot.shape}",
                found=f"{tuple(value.shape)}",
            )
        )
    return as_storage(value.detach()).to(home.buffer.shard.device, _wide(_master(home).dtype))


def _split(home: Home, value: Tensor) -> list[tuple[Piece, Tensor]]:
    flat = _flat(home, value)
    return [(piece, flat[piece.offset : piece.offset + piece.last - piece.first]) for piece in _pieces(home)]


def _own(home: Home, value: Tensor) -> list[tuple[Piece, Tensor]]:
    """A value for this rank's piece; there is none where the rank holds nothing of the parameter."""
    pieces = _pieces(home)
    length = sum(piece.last - piece.first for piece in pieces)
    if value.numel() != length:
        problem = f"a value for this rank's piece of {home.name!r} has the wrong length"
        raise ParameterError(explain(problem, expected=str(length), found=str(value.numel())))
    return [(piece, value.detach().reshape(-1)) for piece in pieces]


def _local(home: Home, read: Callable[[int, int], Tensor]) -> Tensor:
    """A copy of this rank's piece of a chunk, of which `read` gives elements."""
    parts = [read(piece.first, piece.last) for piece in _pieces(home)] or [read(0, 0)]
    return parts[0].to(_wide(parts[0].dtype), copy=True)


def _write_weights(home: Home, parts: list[tuple[Piece, Tensor]]) -> None:
    home.unit.open("set weights of")
    for piece, part in parts:
        _master(home).write(piece.first, part)
        home.buffer.shard[piece.first : piece.last] = part
    home.unit.shut()


def _weights_changed(home: Home) -> None:
    _trainer(home).weights_edited(home.unit)


def _state(home: Home, key: str) -> Tensor | None:
    """This rank's piece of a state, as a view; None where there is none."""
    found = _trainer(home).piece_state(home.member.index).get(key)
    return found if isinstance(found, Tensor) and found.dim() == 1 else None


def _set_state(home: Home, key: str, part: Tensor) -> None:
    if _state(home, key) is None:
        raise _no_state(home, key)
    _trainer(home).set_piece_state(home.member.index, key, part)


def _no_state(home: Home, key: str) -> UsageError:
    return UsageError(
        explain(f"{home.name!r} has no optimizer state {key!r}", do="states exist after the first step; check the name")
    )
