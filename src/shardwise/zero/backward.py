"""`Backward`: backward passes, and what happens in them to each use of a unit.

A pass begins when it is announced (`engine.backward`), or when autograd reaches a unit although nobody said so (a plain
`loss.backward()`); then it lasts until something else begins. Units are gathered before the backward of a use, reduced when
all of their uses are done, and released when nothing will read their weights any more.

Owns the pass under way, the hooks on outputs, inputs and parameters that tell of its progress, and delivered gradients. Refuses
to know how uses come about, the order in which gradients are reduced, and what a loss counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from shardwise.comm import Comm
from shardwise.errors import UsageError
from shardwise.zero.gradients import Gradients
from shardwise.zero.order import Order
from shardwise.zero.reducer import Reducer
from shardwise.zero.traffic import BackwardPass, Traffic, Use

__all__ = ["Backward"]


class Inlet(NamedTuple):
    """Where the gradients of one parameter go."""

    traffic: Traffic
    gradients: Gradients
    position: int  # of the parameter in the buffer
    number: int  # of the parameter in the model


class Backward:
    """The backward passes of one model, one at a time.

    Args:
        traffics: all units, the root first.
        order: gathers and releases units.
        reducer: sums gradients.
        comm: is told the phase.
        every: whether gradients are reduced in every pass, not only in the last one of an accumulation.
    """

    def __init__(self, traffics: Sequence[Traffic], order: Order, reducer: Reducer, comm: Comm, *, every: bool) -> None:
        self.current: BackwardPass | None = None
        """The pass under way."""
        self.synchronize = True
        """False inside `no_sync()`: gradients are only collected."""
        self.reduce_now: Callable[[], bool] = lambda: False
        """Asked when a pass begins that nobody announced: whether it is the last of its accumulation. May raise."""
        self._traffics = traffics
        self._root = traffics[0]
        self._order = order
        self._reducer = reducer
        self._comm = comm
        self._every = every
        self._twice: set[Traffic] = set()  # units whose backward was recorded itself (create_graph), until the next step
        self._inlets: list[Inlet] = []

    # -- passes ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def announced(self, *, reduce: bool) -> Generator[None]:
        """A backward pass; its gradients are in place when the context closes.

        Args:
            reduce: whether it is the last of its accumulation. Stages that reduce in every backward do so anyway.
        """
        self.finish()
        self._open(reduce, explicit=True)
        try:
            yield
        except BaseException:
            with suppress(UsageError):  # where communication has ended, what is in flight cannot be waited for
                self._abort()
            raise
        assert self.current is not None, "somebody else has ended an announced pass"
        self._end(self.current)

    def finish(self) -> None:
        """End the pass under way, if there is one: reduce what is to be reduced, wait for it, and release the weights."""
        if self.current is not None:
            self._end(self.current)

    def finish_unannounced(self) -> None:
        """End the pass under way if nobody will say when it ends."""
        if self.current is not None and not self.current.explicit:
            self._end(self.current)

    def forget_recorded(self) -> None:
        """The weights have changed: no backward that was recorded itself can be gone through any more."""
        self._twice.clear()

    def _open(self, reduce: bool, *, explicit: bool) -> BackwardPass:
        self.current = BackwardPass(reduce=self.synchronize and (self._every or reduce), explicit=explicit)
        self._comm.set_phase("backward")
        for traffic in self._traffics:
            if traffic in self._twice:
                self._order.need("twice", traffic.unit)
        return self.current

    def _end(self, current: BackwardPass) -> None:
        if current.reduce:
            self._reducer.reduce_rest(current)
        self._reducer.drain()
        self._close()

    def _abort(self) -> None:
        """A backward raised: what it has brought so far is worthless, and so is the window."""
        try:
            self._reducer.clear()
        finally:
            self._close()

    def _close(self) -> None:
        self.current = None
        for traffic in self._traffics:
            traffic.forget_pass()
        self._order.release_all()

    # -- uses --------------------------------------------------------------------------------------------------------------

    def expect(self, traffic: Traffic, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """A forward call of a unit has recorded a graph: watch for its backward.

        Args:
            traffic: of the unit.
            outputs: of the call, those that require gradients; not empty.
            inputs: the unit's own nodes of its inputs. When their gradients are known, its backward has run.
        """
        if traffic.shadows and self.current is not None:
            traffic.shadows -= 1
        use = traffic.opened()
        register_multi_grad_hook(outputs, lambda _: self._begin(use), mode="any")
        # Not torch's hook for all of several tensors: it refers to the graph it is part of, so that the memory of a graph
        # that is dropped would wait for one garbage collection after the other, one for each unit.
        use.inputs = use.unknown = len(inputs)
        for tensor in inputs:
            _on_gradient(tensor, partial(self._input_known, use))

    def _begin(self, use: Use) -> None:
        traffic = use.traffic
        if traffic is self._root and use in traffic.running:
            self.finish_unannounced()  # the plain `loss.backward()` that ran this graph before is over
        current = self.current or self._open(self.reduce_now(), explicit=False)
        if torch.is_grad_enabled():  # create_graph: a later backward will go through this one
            self._twice.add(traffic)
        traffic.begin(use)
        if traffic is not self._root:  # the root's begins first, and the last unit has stayed to be the next
            self._order.enter(traffic)
        self._order.need("backward", traffic.unit)
        if current.reduce:
            self._reducer.reduce_ready(current)

    def _input_known(self, use: Use, gradient: Tensor) -> None:
        use.unknown -= 1
        if use.unknown == 0:
            use.traffic.end(use)
            if use.traffic.done and use.traffic not in self._twice:
                use.traffic.unit.release()

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def inlet(self, traffic: Traffic, gradients: Gradients, position: int) -> Callable[[nn.Parameter], None]:
        """A hook that takes a parameter's gradient when it is complete for one pass. It does not keep this object alive.

        Args:
            traffic: of the parameter's unit.
            gradients: of its buffer.
            position: its place in the buffer.
        """
        self._inlets.append(Inlet(traffic, gradients, position, gradients.buffer.members[position].index))
        return partial(_deliver_to, weakref.ref(self), len(self._inlets) - 1)

    def deliver(self, inlet: int, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is complete for one pass. For hooks."""
        gradient = parameter.grad
        if gradient is None:  # the hook also fires for a node that contributed nothing
            return
        parameter.grad = None
        if self.current is None:
            self._open(self.reduce_now(), explicit=False)
        traffic, gradients, position, number = self._inlets[inlet]
        gradients.deliver(position, gradient)
        traffic.delivered.add(number)
        self._reducer.delivered[number] = 1


def _deliver_to(backward: weakref.ref[Backward], inlet: int, parameter: nn.Parameter) -> None:
    """Hand a gradient over. The garbage collector does not see what such a hook holds: a strong reference would be for ever."""
    alive = backward()
    if alive is not None:
        alive.deliver(inlet, parameter)


def _on_gradient(tensor: Any, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that runs when the gradient of a tensor is known (untyped in torch)."""
    tensor.register_hook(hook)
