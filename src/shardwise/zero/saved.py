"""`SavedWeights`: weights that autograd keeps for backward, although their unit is released meanwhile.

While the model runs forward, saved-tensor hooks note which of the tensors that autograd keeps lie in a unit's buffer; whoever
unpacks one finds the unit gathered. It makes any graph safe, however a tensor left the unit (an auxiliary loss kept as an
attribute, an output nobody can look into). A graph whose weights have changed since is refused.

Owns these hooks, and telling a view of gathered weights from any other tensor. Refuses to know forwards and passes: it is told
when to take note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import UsageError, explain
from shardwise.zero.order import Order
from shardwise.zero.unit import State, Unit

__all__ = ["SavedWeights"]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """What autograd keeps in place of any other tensor: with hooks, torch leaves it to them to see that nobody wrote to it."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """What autograd keeps in place of a weight."""

    tensor: Tensor
    unit: Unit
    version: int


class SavedWeights:
    """Notes weights among what autograd saves, and brings them back when it wants them.

    Args:
        order: gathers units.
    """

    def __init__(self, order: Order) -> None:
        self.addresses: dict[int, Unit] = {}  # of gathered storages; the units keep it true
        self._order = order
        self._noting: saved_tensors_hooks | None = None

    def start(self) -> None:
        """Take note of what is saved from now on, on this thread."""
        self._noting = saved_tensors_hooks(self._pack, self._unpack)
        self._noting.__enter__()

    def stop(self) -> None:
        """Take no more notes. Harmless where none are taken."""
        if self._noting is not None:
            self._noting.__exit__(None, None, None)
            self._noting = None

    def unit_of(self, tensor: Tensor) -> Unit | None:
        """The unit in whose gathered weights a tensor lies."""
        if tensor.layout != torch.strided:
            return None
        return self.addresses.get(tensor.untyped_storage().data_ptr())

    def _pack(self, tensor: Tensor) -> SavedWeight | SavedValue:
        unit = self.addresses.get(tensor.untyped_storage().data_ptr())
        if unit is not None:
            return SavedWeight(tensor, unit, unit.version)
        # An operation that saves its own result hands it over with the graph: kept like that, it would be a reference cycle.
        # There is no public name for the counter by which torch itself notices writes; a detached tensor shares it.
        return SavedValue(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is SavedValue:
            return _unwritten(saved)
        unit = saved.unit
        if unit.version != saved.version:
            raise UsageError(
                explain(
                    f"the weights of unit {unit.name!r} changed between the forward and the backward of this graph",
                    do="run forward again after optimizer steps and after edits of weights",
                )
            )
        if unit.state is State.LENT:
            unit.refill()
        elif unit.state is not State.LIVE:
            self._order.need("unpack", unit)
        return saved.tensor


def _unwritten(saved: SavedValue) -> Tensor:
    tensor = saved.tensor
    if tensor._version != saved.version:
        raise UsageError(
            explain(
                "a tensor that backward needs has been modified by an inplace operation",
                expected=f"{tensor.dtype} {tuple(tensor.shape)} at version {saved.version}",
                found=f"version {tensor._version}",
                do="write into a clone() instead, or run forward again after optimizer steps and edits of weights",
            )
        )
    return tensor
