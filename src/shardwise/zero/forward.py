"""`Forward`: forward calls of units, and of parts of the root.

Owns which calls are under way, and therefore who needs weights while the model runs. Refuses to know what a backward does: it
hands over the tensors between which that will happen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.errors import UsageError, explain
from shardwise.zero.backward import Backward
from shardwise.zero.order import Order
from shardwise.zero.released import ReleasedParameter
from shardwise.zero.saved import SavedWeights
from shardwise.zero.traffic import Traffic
from shardwise.zero.trees import find_tensors, map_direct, map_tensors
from shardwise.zero.unit import State, Unit

__all__ = ["Forward"]


@dataclass(eq=False, slots=True)
class Frame:
    """A forward call of a unit that is under way."""

    traffic: Traffic
    inputs: tuple[Tensor, ...] = ()  # the unit's own nodes of its inputs
    borrowed: list[Traffic] = field(default_factory=list[Traffic])  # other units whose parameters it reads


class Forward:
    """The forward calls of one model. What is named `enter` and `leave` are hooks: of units, and of parts of the root.

    Args:
        traffics: all units, the root first.
        order: gathers and releases units.
        saved: notes weights that a graph keeps.
        backward: the passes; a forward inside of one is a recomputation.
        comm: is told the phase.
    """

    def __init__(
        self, traffics: Mapping[Unit, Traffic], order: Order, saved: SavedWeights, backward: Backward, comm: Comm
    ) -> None:
        self._traffics = traffics
        self._root = next(iter(traffics.values()))
        self._moving = any(unit.moving for unit in traffics)
        self._order = order
        self._saved = saved
        self._backward = backward
        self._comm = comm
        self._stack: list[Frame] = []
        self._depth = 0  # calls of units and of parts of the root that are under way
        self._inside = 0  # depth of calls of the root
        self._recording = False  # whether the running forward of the root records a graph

    # -- units -------------------------------------------------------------------------------------------------------------

    def enter(self, traffic: Traffic, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called: bring its weights. Returns the arguments that it gets in place of these; None for the same."""
        frame = Frame(traffic)
        self._stack.append(frame)
        traffic.active += 1
        if traffic is self._root:
            self._enter_root()
        self._deeper()
        self._order.enter(traffic)
        self._order.need("forward" if self._backward.current is None else "again", traffic.unit)
        if not torch.is_grad_enabled():
            traffic.shadows += self._recording
            return None
        _check_frozen(traffic)
        if not (traffic.gradients or traffic.unit.moving):
            return None
        return _watch_inputs(frame, args, kwargs)

    def leave(self, traffic: Traffic, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A unit returns, or has raised. Returns the output that its caller gets in place of this; None for the same."""
        if all(frame.traffic is not traffic for frame in self._stack):
            return None
        given = output
        if traffic is self._root and self._inside == 1 and self._moving:
            output = map_tensors(self._copy_weight, output)
        while True:  # frames above are of units whose forward raised
            frame = self._stack.pop()
            self._shallower()
            frame.traffic.active -= 1
            for borrowed in frame.borrowed:
                borrowed.unit.pins -= 1
                self._order.let_go(borrowed)
            if frame.traffic is traffic:
                break
        if self._stack and traffic.unit.moving:
            self._keep_aliases(traffic, output)
        outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if outputs:
            self._backward.expect(traffic, outputs, frame.inputs)
        if self._backward.current is None:  # otherwise this is a recomputation, and its backward follows at once
            self._order.let_go(traffic)
        if traffic is self._root:
            self._leave_root(graph=bool(outputs))
        return None if output is given else output

    def settle(self) -> None:
        """The caller of the model has its output: if nothing will run backward, the root is no longer needed."""
        if not self._inside and self._backward.current is None and self._order.is_idle(self._root):
            self._order.release_all()

    def fetch(self, unit: Unit, together: Collection[Unit]) -> bool:
        """Somebody reads a released parameter: bring it if the model is running, which all ranks do alike."""
        if not self._stack and self._backward.current is None:
            return False
        self._order.need("fetch", unit)
        if self._stack:
            _borrow(self._stack[-1], self._traffics[unit])
        return True

    def _keep_aliases(self, traffic: Traffic, output: Any) -> None:
        """An output may be a view of a weight: then the weight has to stay until the model has run."""
        if any(self._saved.unit_of(tensor) is traffic.unit for tensor in find_tensors(output)):
            _borrow(self._stack[0], traffic)

    def _copy_weight(self, tensor: Tensor) -> Tensor:
        """A weight that the model itself returns has to outlast its release; a copy in the graph leads to the same gradient."""
        is_weight = isinstance(tensor, ReleasedParameter) or self._saved.unit_of(tensor) is not None
        return tensor.clone() if is_weight else tensor

    # -- the root ----------------------------------------------------------------------------------------------------------

    def _enter_root(self) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        self._backward.finish_unannounced()
        self._recording = torch.is_grad_enabled()
        self._comm.set_phase("forward" if self._recording else "inference")

    def _leave_root(self, *, graph: bool) -> None:
        self._inside -= 1
        if self._inside:
            return
        self._recording = False
        if self._backward.current is None:
            self._order.end_forward(self._root, graph=graph)

    def enter_part(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A part of the model is called, perhaps on its own (`model.encode(x)`): it finds the root's parameters too."""
        self._deeper()
        if self._root.unit.state is not State.LIVE:
            self._order.need("part", self._root.unit)
            self._order.let_go(self._root)

    def leave_part(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A part of the model returns, or has raised."""
        self._shallower()

    def _deeper(self) -> None:
        """A call begins, of a unit or of a part of the root. The outermost one, of whatever it is, notes saved weights."""
        self._depth += 1
        if self._depth == 1 and self._moving and self._backward.current is None and torch.is_grad_enabled():
            self._saved.start()

    def _shallower(self) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._saved.stop()


def _borrow(frame: Frame, traffic: Traffic) -> None:
    """Keep a unit until a call ends."""
    traffic.unit.pins += 1
    frame.borrowed.append(traffic)


def _check_frozen(traffic: Traffic) -> None:
    """A parameter that is made trainable only now has no place in any optimizer group."""
    for member in traffic.frozen:
        if member.parameter.requires_grad:
            raise UsageError(
                explain(
                    f"parameter {member.name!r} was frozen at initialize and requires gradients now",
                    do="let it require gradients at initialize, and freeze it with requires_grad_(False) afterwards",
                )
            )


def _watch_inputs(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Give the unit its own node of each input, whose gradient is known when this use has run backward.

    The tensor itself serves less well: its gradient is known only when all its users, in other units, have run too. It
    has to do where it lies in a container that the unit may write into, which must stay its caller's.
    """
    own: dict[int, Tensor] = {}
    containers: list[Any] = []

    def watch(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in own:
            own[id(tensor)] = tensor.view_as(tensor)
        return own[id(tensor)]

    watched = (
        tuple(map_direct(watch, value, containers) for value in args),
        {key: map_direct(watch, value, containers) for key, value in kwargs.items()},
    )
    theirs = [tensor for tensor in find_tensors(containers) if tensor.requires_grad]
    # A hook on a leaf would stay for good. Without hooks the use lasts to the end of the backward pass.
    frame.inputs = () if any(tensor.is_leaf for tensor in theirs) else (*own.values(), *theirs)
    return watched
