"""`Runtime`: gathers each unit before it is used, releases it afterwards, and collects and reduces its gradients.

Owns the parts that do this and the hooks through which torch drives them, and what concerns all units at once: the end of an
accumulation window, changed weights, the end. What a stage is comes in as buffers that move or stay and a rule when to reduce.
Refuses to know optimizers, losses, batches and checkpoints.

The parts, each knowing only those before it: `Order` (which unit is needed next, which may go), `SavedWeights` (what autograd
keeps), `Reducer` (sums of gradients), `Backward` (passes), `Forward` (calls).

Deterministic collectives. Every collective is launched at an event that happens in the same order on all ranks: a unit is
entered, the backward of a use begins, a pass ends. Gradients are reduced in one fixed order. So neither a parameter that one
rank leaves unused nor a rank that is quicker can change the sequence. What a rank could not deliver in time is reduced in the
step, by agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version

from shardwise.comm import Comm
from shardwise.mesh import Axis
from shardwise.policy import Policy, Precision, Reduce
from shardwise.zero.backward import Backward
from shardwise.zero.discovery import UnitPlan
from shardwise.zero.footprint import footprint, missing_bytes
from shardwise.zero.forward import Forward
from shardwise.zero.gradients import GradientPool, Gradients
from shardwise.zero.hooks import Hook
from shardwise.zero.order import Order
from shardwise.zero.reducer import Reducer
from shardwise.zero.saved import SavedWeights
from shardwise.zero.state_dict import check_registered, take_over, warn_of_placeholders
from shardwise.zero.traffic import Traffic
from shardwise.zero.unit import Unit
from shardwise.zero.writes import Writes

__all__ = ["Runtime"]


class Runtime:
    """The moving parts of one engine's model.

    Args:
        units: from `build_units`, the root first.
        comm: collectives.
        data: the axis over which samples differ.
        policy: the rules.

    Attributes:
        units: all units, the root first.
        parameters: all parameters, by number.
        forward, backward, reducer: the parts that the engine steers.
    """

    def __init__(self, units: Sequence[tuple[Unit, UnitPlan]], comm: Comm, data: Axis, policy: Policy) -> None:
        pool = GradientPool(comm)
        self.units = [unit for unit, _ in units]
        self.parameters = [member for unit in self.units for buffer in unit.buffers for member in buffer.members]
        self._traffics = {unit: _traffic(unit, comm, pool, policy.precision) for unit in self.units}
        self._writes = Writes(self.units, comm, data)
        self._modules = [plan.module for _, plan in units]
        self._every = policy.stage.reduce is Reduce.EVERY
        self._comm = comm
        traffics = list(self._traffics.values())
        self._order = Order(traffics, policy.prefetch_elements)
        self._saved = SavedWeights(self._order)
        self.reducer = Reducer(traffics, pool, comm, data)
        self.backward = Backward(traffics, self._order, self.reducer, comm, every=self._every)
        self.forward = Forward(self._traffics, self._order, self._saved, self.backward, comm)
        self._handles: list[Any] = []
        for (unit, plan), traffic in zip(units, traffics, strict=True):
            unit.fetcher = self.forward.fetch
            unit.addresses = self._saved.addresses
            self._handles += self._hook_module(traffic, plan)
            self._handles += self._hook_parameters(traffic)

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def _hook_module(self, traffic: Traffic, plan: UnitPlan) -> Iterator[Any]:
        module: Any = plan.module  # torch leaves some of its registrations untyped
        yield module.register_forward_pre_hook(Hook(partial(self.forward.enter, traffic)), prepend=True, with_kwargs=True)
        yield module.register_forward_hook(Hook(partial(self.forward.leave, traffic)), always_call=True)
        if traffic.unit is self.units[0]:
            yield from self._hook_root(plan)
        yield module.register_load_state_dict_post_hook(Hook(partial(take_over, traffic.unit)))

    def _hook_root(self, plan: UnitPlan) -> Iterator[Any]:
        module: Any = plan.module
        yield module.register_load_state_dict_post_hook(Hook(partial(check_registered, self.parameters)))
        if any(unit.moving for unit in self.units):
            yield module.register_state_dict_pre_hook(Hook(partial(warn_of_placeholders, self.units)))
        if not self.units[0].moving:
            return
        direct = {id(named.parameter) for named in plan.parameters}
        for part in module.modules():
            if part is not module and any(id(p) in direct for p in part.parameters(recurse=False)):
                yield part.register_forward_pre_hook(Hook(self.forward.enter_part), prepend=True)
                yield part.register_forward_hook(Hook(self.forward.leave_part), always_call=True)

    def _hook_parameters(self, traffic: Traffic) -> Iterator[Any]:
        gradients = {item.buffer: item for item in traffic.gradients}
        for buffer in traffic.unit.buffers:
            for position, member in enumerate(buffer.members):
                if buffer in gradients:
                    inlet = self.backward.inlet(traffic, gradients[buffer], position)
                    yield _after_accumulation(member.parameter, inlet)
                elif member.parameter.requires_grad:  # no optimizer wants it, so nobody would ever free it
                    yield _after_accumulation(member.parameter, _discard)

    # -- all units at once -------------------------------------------------------------------------------------------------

    def finish_window(self) -> list[bool]:
        """Reduce what is still to be reduced, so that the shards of all gradients are complete.

        Returns:
            for each parameter, whether any rank has a gradient for it in this accumulation window.

        Raises:
            ParameterError: a parameter was given other data, or was written in place differently on different ranks.
        """
        self.backward.finish()
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer.resident:
                    buffer.check_bound()
        self._comm.set_phase("step")
        return self.reducer.complete(self._writes)

    def weights_changed(self, units: Sequence[Unit] | None = None) -> None:
        """The shards were updated: refresh the gathered copies that stay, and outdate all graphs recorded before.

        Args:
            units: those that were; None for all that an optimizer updates, and only what it updates in them.
        """
        written = self._writes.found()  # by somebody else, before
        changed = [unit for unit in self.units if any(b.trainable for b in unit.buffers)] if units is None else list(units)
        for unit in changed:
            self._traffics[unit].forget_graphs()
        for axis in dict.fromkeys(b.key.shard for unit in changed for b in unit.moving if b.storage.shared):
            self._comm.fence(axis, "weights are written").wait()
        resident = [(unit, b) for unit in changed for b in unit.buffers if b.resident and (b.trainable or units is not None)]
        handles = [buffer.storage.gather(f"refresh {unit.name}") for unit, buffer in resident]
        for handle in handles:
            handle.wait()
        increment_version([member.parameter for _, buffer in resident for member in buffer.members])
        self._writes.note(but=written)
        self.backward.forget_recorded()
        for unit in changed:
            unit.changed()
        self._order.release_all()

    def settle_writes(self) -> None:
        """Take in-place writes of users over into the master weights now. Collective.

        Raises:
            ParameterError: weights were written differently on different ranks.
        """
        self.backward.finish()
        self._writes.settle()

    def other_state(self) -> dict[str, Any]:
        """What the model's `state_dict` holds besides parameters: buffers, and what its modules add by themselves."""
        found: dict[str, Any] = self._modules[0].state_dict(keep_vars=True)
        return {name: value for name, value in found.items() if not isinstance(value, nn.Parameter)}

    @contextmanager
    def pinned(self) -> Generator[None]:
        """All weights, gathered once and kept until the end of the context, in memory that users may keep."""
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(unit.pinned(lend=True))
            yield

    def close(self, *, restore: bool) -> None:
        """Remove all hooks and free gradients.

        Args:
            restore: gather all weights, so that the module is an ordinary one again (collective at stage 3).
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._saved.stop()
        if restore:
            self.reducer.drain()
            for unit in self.units:
                unit.gather()
        self.reducer.close()
        for unit in self.units:
            unit.fetcher = None
            unit.close()

    # -- what there is -----------------------------------------------------------------------------------------------------

    @property
    def unit_modules(self) -> list[nn.Module]:
        """The modules that are units, except the model itself if there are others."""
        return self._modules[1:] or self._modules

    @property
    def missing_bytes(self) -> int:
        """Bytes that gathering all units would take now."""
        return missing_bytes(self.units)

    def memory(self) -> dict[str, int]:
        """Bytes of parameters and gradients on this rank, and unsharded; see `footprint`."""
        return footprint(self.units, self.reducer.gradients, self._comm.ledger, sharded=self._every)


def _traffic(unit: Unit, comm: Comm, pool: GradientPool, precision: Precision) -> Traffic:
    trainable = [buffer for buffer in unit.buffers if buffer.trainable]
    gradients = tuple(Gradients(buffer, comm, pool, precision) for buffer in trainable)
    frozen = [m for buffer in unit.buffers if not buffer.trainable for m in buffer.members if not m.parameter.requires_grad]
    return Traffic(unit, gradients, sum(len(buffer.members) for buffer in trainable), tuple(frozen))


def _after_accumulation(parameter: Any, hook: Callable[[nn.Parameter], None]) -> Any:
    """Register a hook that runs when a parameter's gradient of a backward pass is complete (untyped in torch)."""
    return parameter.register_post_accumulate_grad_hook(hook)


def _discard(parameter: nn.Parameter) -> None:
    parameter.grad = None
