"""Drives any elementwise `torch.optim.Optimizer` over shards.

Owns an inner optimizer of the user's class, whose parameters are views of this rank's pieces. Refuses to know the class: it
sees ordinary parameters with ordinary gradients, and none where a parameter was not in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwise.errors import OptimizerError, explain
from shardwise.optim.driver import Driver, Groups, PieceState, StepSettings, Sums
from shardwise.optim.elementwise import copy_onto
from shardwise.optim.shards import Shard, count_steps, find_runs

__all__ = ["TorchDriver"]

_NOT_OPTIONS = ("params", "param_names")


class TorchDriver(Driver):
    """Updates shards with a copy of a torch optimizer that was found to be elementwise.

    Args:
        shards: what to update.
        template: an optimizer with the class, options and groups wanted; it is not changed.
    """

    def __init__(self, shards: Sequence[Shard], template: Optimizer) -> None:
        super().__init__(shards)
        self._pieces = [[Parameter(shard.master[p.start : p.stop]) for p in shard.pieces] for shard in self.shards]
        by_group: list[list[Parameter]] = [[] for _ in template.param_groups]
        for shard, pieces in zip(self.shards, self._pieces, strict=True):
            by_group[shard.group] += pieces
        self._inner = copy_onto(template, by_group)

    @property
    def name(self) -> str:
        """Of the optimizer's class."""
        return type(self._inner).__name__

    @property
    def inner(self) -> Optimizer:
        """The optimizer that does the work."""
        return self._inner

    def configure(self, settings: StepSettings) -> None:
        """Take settings; state in another dtype than the masters' cannot be had."""
        if settings.state_dtype and any(shard.master.dtype != settings.state_dtype for shard in self.shards):
            name = type(self._inner).__name__
            raise OptimizerError(
                explain(
                    f"{name} keeps its state in the dtype of the parameters",
                    found=f"state asked for in {settings.state_dtype}",
                    do="use a built-in rule (Adam, AdamW, SGD, Adagrad, Lion, Lamb), or leave the state's dtype alone",
                )
            )
        super().configure(settings)

    def update(self, groups: Groups, scale: float, used: Sequence[bool], sums: Sums) -> None:
        """Hand out gradients, step the inner optimizer, refresh the low-precision weights."""
        _copy_options(groups, self._inner.param_groups)
        for shard, params in zip(self.shards, self._pieces, strict=True):
            self._hand_out(shard, params, scale, used)
        self._inner.step()
        # Some classes keep counters in their groups; users see them in theirs.
        _copy_options(self._inner.param_groups, groups)
        for shard, params in zip(self.shards, self._pieces, strict=True):
            for param in params:
                param.grad = None
            if shard.weight is not None:
                for start, stop, _ in find_runs(shard, used):
                    shard.weight[start:stop].copy_(shard.master[start:stop])
            count_steps(shard, used)

    def _hand_out(self, shard: Shard, params: list[Parameter], scale: float, used: Sequence[bool]) -> None:
        gradient = self._scaled(shard, scale) if any(used[piece.index] for piece in shard.pieces) else None
        for piece, param in zip(shard.pieces, params, strict=True):
            # The master's memory may have moved since the last step.
            param.data = shard.master[piece.start : piece.stop]
            if gradient is not None and used[piece.index]:
                param.grad = gradient[piece.start : piece.stop]

    def _scaled(self, shard: Shard, scale: float) -> Tensor:
        grad = shard.grad
        if grad is None:
            return torch.zeros_like(shard.master)
        if grad.dtype != shard.master.dtype:
            wide = torch.promote_types(grad.dtype, shard.master.dtype)
            return grad.to(wide, copy=True).mul_(scale).to(shard.master.dtype)
        if self.settings.keep_grad:
            return grad * scale
        return grad if scale == 1.0 else grad.mul_(scale)

    def piece_state(self, shard: int, piece: int) -> dict[str, Any]:
        """The inner optimizer's own state tensors."""
        return dict(self._inner.state.get(self._pieces[shard][piece], {}))

    def load_piece_state(self, shard: int, piece: int, state: PieceState) -> None:
        """Replace the inner optimizer's state of one piece."""
        home, param = self.shards[shard], self._pieces[shard][piece]
        home.steps[piece] = int(state.get("step", 1 if state else 0))
        known: dict[str, Any] = self._inner.state.pop(param, {})
        if state:
            self._inner.state[param] = {key: _load(value, known.get(key), param) for key, value in state.items()}

    def state_bytes(self) -> int:
        """Bytes of the inner optimizer's state tensors."""
        states = (self._inner.state.get(param, {}) for params in self._pieces for param in params)
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _copy_options(source: Groups, target: Groups) -> None:
    for old, new in zip(source, target, strict=True):
        for key, value in old.items():
            if key not in _NOT_OPTIONS:
                new[key] = value


def _load(value: Any, known: Any, param: Parameter) -> Any:
    """A private copy of `value`; element by element tensors get the dtype and device of the parameter."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(known, Tensor) and known.shape == value.shape:
        return value.detach().to(known.device, known.dtype, copy=True)
    if value.numel() == param.numel() and value.dim() == 1:
        # Contiguous, also if the value is one number that was expanded.
        return value.detach().to(param.device, param.dtype, copy=True, memory_format=torch.contiguous_format)
    return value.detach().clone()
