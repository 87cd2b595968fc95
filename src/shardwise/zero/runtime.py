"""`Runtime`: gathers each unit before it is used, releases it afterwards, and collects and reduces its gradients.

Owns the hooks on modules and parameters, the order of use, and the passes. What a stage is comes in as buffers that move or
stay and a rule when to reduce. Refuses to know optimizers, losses, batches and checkpoints.

Deterministic collectives. Every collective is launched at an event that happens in the same order on all ranks: a unit is
entered, the backward of a use begins, a pass ends. Gradients are reduced in one fixed order. So neither a parameter that one
rank leaves unused nor a rank that is quicker can change the sequence. What a rank could not deliver in time is reduced in the
step, by agreement.

Late release. A unit is not released when its forward ends but when the next one is entered, so that user hooks registered after
ours still see full weights, a module called twice in a row is gathered once, and the last block stays for its backward.

Saved weights. Autograd keeps views of weights. While the model runs forward, saved-tensor hooks note which of them lie in a
unit's buffer; whoever unpacks one finds the unit gathered. It makes any graph safe, however a tensor left the unit (an
auxiliary loss kept as an attribute, an output nobody can look into).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, register_multi_grad_hook, saved_tensors_hooks

from shardwise.comm import Comm
from shardwise.errors import ParameterError, UsageError, explain
from shardwise.mesh import Axis
from shardwise.policy import Policy, Reduce
from shardwise.zero.buffer import Member
from shardwise.zero.discovery import UnitPlan
from shardwise.zero.gathered import commit
from shardwise.zero.gradients import GradientPool, Gradients, Reduction
from shardwise.zero.hooks import Hook
from shardwise.zero.traffic import BackwardPass, Traffic, Use
from shardwise.zero.trees import find_tensors, map_direct
from shardwise.zero.unit import State, Unit
from shardwise.zero.writes import Writes

__all__ = ["Runtime"]

log = logging.getLogger("shardwise")

_IN_FLIGHT = 2  # reductions that may be under way at once; bounds the full-length gradient buffers that exist


@dataclass(eq=False, slots=True)
class Frame:
    """A forward call of a unit that is under way."""

    traffic: Traffic
    inputs: tuple[Tensor, ...] = ()  # the unit's own nodes of its inputs
    borrowed: list[Traffic] = field(default_factory=list[Traffic])  # other units whose parameters it reads


@dataclass(frozen=True, slots=True)
class SavedValue:
    """What autograd keeps in place of any other tensor: with hooks, torch leaves it to them to see that nobody wrote to it."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """What autograd keeps in place of a weight."""

    tensor: Tensor
    traffic: Traffic
    version: int


class Runtime:
    """The moving parts of one engine's model.

    Args:
        units: from `Builder.build`, the root first.
        comm: collectives.
        data: the axis over which samples differ.
        policy: the rules.
        reduce_now: asked when a backward begins that nobody announced: whether it is the last of its accumulation. May raise.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, UnitPlan]],
        comm: Comm,
        data: Axis,
        policy: Policy,
        reduce_now: Callable[[], bool],
    ) -> None:
        self.units = [unit for unit, _ in units]
        self.parameters = [member for unit in self.units for buffer in unit.buffers for member in buffer.members]
        self.delivered = bytearray(len(self.parameters))  # which parameters got a gradient in this accumulation window
        self.synchronize = True  # False inside no_sync(): gradients are only collected
        self._comm = comm
        self._data = data
        self._policy = policy
        self._reduce_now = reduce_now
        self._writes = Writes(self.units, comm, data)
        self._pool = GradientPool(comm)
        self._addresses: dict[int, Unit] = {}
        self._by_unit = {unit: self._traffic(unit) for unit in self.units}
        self._modules = [plan.module for _, plan in units]
        self._root = self._by_unit[self.units[0]]
        self._order = [traffic for traffic in reversed(self._by_unit.values()) if traffic.gradients]
        self._moving = any(unit.moving for unit in self.units)
        self._pass: BackwardPass | None = None
        self._inside = 0  # depth of forward calls of the root
        self._recording = False  # whether the running forward of the root records a graph
        self._stack: list[Frame] = []
        self._idle: list[Traffic] = []  # gathered, not in use, to be released when another unit is entered
        self._flying: deque[Reduction] = deque()
        self._follower: dict[tuple[str, Unit], Unit] = {}  # which unit came next, last time
        self._previous: tuple[str, Unit] | None = None
        self._twice: set[Traffic] = set()  # units whose backward was recorded itself (create_graph), until the next step
        self._depth = 0  # calls of units and of parts of the root that are under way
        self._saving: saved_tensors_hooks | None = None
        self._handles: list[Any] = []
        self._inlets: list[Callable[[nn.Parameter], None]] = []  # where the gradients of parameters go
        for unit, plan in units:
            self._handles += self._hook(self._by_unit[unit], plan)

    def _traffic(self, unit: Unit) -> Traffic:
        unit.fetcher = self._fetch
        unit.addresses = self._addresses
        trainable = [buffer for buffer in unit.buffers if buffer.trainable]
        gradients = tuple(Gradients(buffer, self._comm, self._pool, self._policy.precision) for buffer in trainable)
        frozen = [m for buffer in unit.buffers if not buffer.trainable for m in buffer.members if not m.parameter.requires_grad]
        return Traffic(unit, gradients, sum(len(buffer.members) for buffer in trainable), tuple(frozen))

    def _hook(self, traffic: Traffic, plan: UnitPlan) -> Iterator[Any]:
        module: Any = plan.module  # torch leaves some of its registrations untyped
        yield module.register_forward_pre_hook(Hook(partial(self._enter, traffic)), prepend=True, with_kwargs=True)
        yield module.register_forward_hook(Hook(partial(self._leave, traffic)), always_call=True)
        if traffic is self._root and traffic.unit.moving:
            # A part of the model that is called on its own (`model.encode(x)`) finds the root's parameters too.
            direct = {id(named.parameter) for named in plan.parameters}
            for part in module.modules():
                if part is not module and any(id(p) in direct for p in part.parameters(recurse=False)):
                    yield part.register_forward_pre_hook(Hook(self._enter_part), prepend=True)
                    yield part.register_forward_hook(Hook(self._leave_part), always_call=True)
        yield module.register_load_state_dict_post_hook(Hook(partial(self._loaded, traffic.unit)))
        if traffic is self._root and self._moving:
            yield module.register_state_dict_pre_hook(Hook(self._warn_of_placeholders))
        for buffer in traffic.unit.buffers:
            gradients = next((item for item in traffic.gradients if item.buffer is buffer), None)
            for position, member in enumerate(buffer.members):
                if gradients is not None:
                    self._inlets.append(partial(self._deliver, traffic, gradients, position, member))
                    hook = partial(_deliver_to, weakref.ref(self), len(self._inlets) - 1)
                    yield _after_accumulation(member.parameter, hook)
                elif member.parameter.requires_grad:  # no optimizer wants it, so nobody would ever free it
                    yield _after_accumulation(member.parameter, _discard)

    # -- forward ---------------------------------------------------------------------------------------------------------

    def _enter(self, traffic: Traffic, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = Frame(traffic)
        self._stack.append(frame)
        traffic.active += 1
        if traffic is self._root:
            self._enter_root()
        self._deeper()
        self._retire(keep=traffic)
        self._need("forward" if self._pass is None else "again", traffic)
        if not torch.is_grad_enabled():
            traffic.shadows += self._recording
            return None
        self._check_frozen(traffic)
        if not (traffic.gradients or traffic.unit.moving):
            return None
        return self._watch_inputs(frame, args, kwargs)

    def _check_frozen(self, traffic: Traffic) -> None:
        """A parameter that is made trainable only now has no place in any optimizer group."""
        for member in traffic.frozen:
            if member.parameter.requires_grad:
                raise UsageError(
                    explain(
                        f"parameter {member.name!r} was frozen at initialize and requires gradients now",
                        do="let it require gradients at initialize, and freeze it with requires_grad_(False) afterwards",
                    )
                )

    def _enter_root(self) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        if self._pass is not None and not self._pass.explicit:
            self.end_pass()
        self._recording = torch.is_grad_enabled()
        self._comm.set_phase("forward" if self._recording else "inference")

    def _enter_part(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._deeper()
        if self._root.unit.state is not State.LIVE:
            self._need("part", self._root)
            self._idle.append(self._root)

    def _leave_part(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._shallower()

    def _deeper(self) -> None:
        """A call begins, of a unit or of a part of the root. The outermost one, of whatever it is, notes saved weights."""
        self._depth += 1
        if self._depth == 1 and self._moving and self._pass is None and torch.is_grad_enabled():
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    def _shallower(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._saving is not None and not self._depth:
            self._saving.__exit__(None, None, None)
            self._saving = None

    def _watch_inputs(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
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

    def _leave(self, traffic: Traffic, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if all(frame.traffic is not traffic for frame in self._stack):
            return
        while True:  # frames above are of units whose forward raised
            frame = self._stack.pop()
            self._shallower()
            frame.traffic.active -= 1
            for borrowed in frame.borrowed:
                borrowed.unit.pins -= 1
                self._idle.append(borrowed)
            if frame.traffic is traffic:
                break
        self._keep_aliases(traffic, output)
        graph = self._watch_outputs(frame, output)
        if self._pass is None:  # otherwise this is a recomputation, and its backward follows at once
            self._idle.append(traffic)
        if traffic is self._root:
            self._leave_root(graph)

    def _keep_aliases(self, traffic: Traffic, output: Any) -> None:
        """An output may be a view of a weight: then the weight has to stay until the model has run."""
        if not (traffic.unit.moving and self._stack):
            return
        if any(self._addresses.get(t.untyped_storage().data_ptr()) is traffic.unit for t in find_tensors(output)):
            traffic.unit.pins += 1
            self._stack[0].borrowed.append(traffic)

    def _watch_outputs(self, frame: Frame, output: Any) -> bool:
        """Prepare for the backward of this use. Returns whether there can be one."""
        outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if not outputs:
            return False
        traffic = frame.traffic
        if traffic.shadows and self._pass is not None:
            traffic.shadows -= 1
        use = traffic.opened()
        register_multi_grad_hook(outputs, lambda _: self._begin(use), mode="any")
        if frame.inputs:
            # Not torch's hook for all of several tensors: it refers to the graph it is part of, so that the memory of a graph
            # that is dropped would wait for one garbage collection after the other, one for each unit.
            use.inputs = use.unknown = len(frame.inputs)
            for tensor in frame.inputs:
                _on_gradient(tensor, partial(self._input_known, use))
        return True

    def _leave_root(self, graph: bool) -> None:
        self._inside -= 1
        if self._inside:
            return
        self._recording = False
        if self._pass is None:
            if graph:  # the root comes first in backward, the last unit next: both stay
                self._idle = [traffic for traffic in self._idle if traffic is not self._root][-1:]
            else:  # user hooks on the root that were registered after ours still run
                self.release_all(keep=self._root)
                self._idle = [self._root]

    def settle(self) -> None:
        """The caller of the model has its output: if nothing will run backward, the root is no longer needed."""
        if self._root in self._idle and not self._inside and self._pass is None:
            self.release_all()

    # -- backward --------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, *, reduce: bool) -> Generator[None]:
        """Announce a backward pass; its gradients are in place when the context closes.

        Args:
            reduce: whether it is the last of its accumulation. Stages that reduce in every backward do so anyway.
        """
        self.finish_pass()
        self._open_pass(reduce, explicit=True)
        try:
            yield
        except BaseException:
            with suppress(UsageError):  # where communication has ended, what is in flight cannot be waited for
                self._abort_pass()
            raise
        self.end_pass()

    def finish_pass(self) -> None:
        """End a pass that nobody announced, if there is one."""
        if self._pass is not None:
            self.end_pass()

    def end_pass(self) -> None:
        """Reduce what is to be reduced, wait for it, and release the weights."""
        current = self._pass
        assert current is not None
        if current.reduce:
            for traffic in self._order[current.cursor :]:
                self._launch(traffic)
        self._drain()
        self._close_pass()

    def _open_pass(self, reduce: bool, *, explicit: bool) -> None:
        every = self._policy.stage.reduce is Reduce.EVERY
        self._pass = BackwardPass(reduce=self.synchronize and (every or reduce), explicit=explicit)
        self._comm.set_phase("backward")
        for traffic in self._by_unit.values():
            if traffic in self._twice:
                self._need("twice", traffic)

    def _abort_pass(self) -> None:
        """A backward raised: what it has brought so far is worthless, and so is the window."""
        try:
            self.clear_gradients()
        finally:
            self._close_pass()

    def _close_pass(self) -> None:
        self._pass = None
        for traffic in self._by_unit.values():
            traffic.forget_pass()
        self.release_all()

    def _unannounced(self) -> None:
        if self._pass is None:
            self._open_pass(self._reduce_now(), explicit=False)

    def _begin(self, use: Use) -> None:
        again = use.traffic is self._root and use in use.traffic.running
        if again and self._pass is not None and not self._pass.explicit:
            self.end_pass()  # the plain `loss.backward()` that ran this graph before is over
        self._unannounced()
        if torch.is_grad_enabled():  # create_graph: a later backward will go through this one
            self._twice.add(use.traffic)
        use.traffic.begin(use)
        if use.traffic is not self._root:  # the root's begins first, and the last unit has stayed to be the next
            self._retire(keep=use.traffic)
        self._need("backward", use.traffic)
        current = self._pass
        assert current is not None
        while current.reduce and current.cursor < len(self._order) and self._order[current.cursor].ready:
            self._launch(self._order[current.cursor])
            current.cursor += 1

    def _input_known(self, use: Use, gradient: Tensor) -> None:
        use.unknown -= 1
        if use.unknown == 0:
            self._end(use)

    def _end(self, use: Use) -> None:
        use.traffic.end(use)
        if use.traffic.done and use.traffic not in self._twice:
            use.traffic.unit.release()

    def deliver(self, inlet: int, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is complete for one backward pass. For hooks."""
        self._inlets[inlet](parameter)

    def _deliver(self, traffic: Traffic, gradients: Gradients, position: int, member: Member, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:  # the hook also fires for a node that contributed nothing
            return
        parameter.grad = None
        self._unannounced()
        gradients.deliver(position, gradient)
        traffic.delivered.add(member.index)
        self.delivered[member.index] = 1

    def _launch(self, traffic: Traffic) -> None:
        for gradients in traffic.gradients:
            self._flying.append(gradients.start_reduce(f"reduce {traffic.unit.name}"))
            while len(self._flying) > _IN_FLIGHT:
                self._flying.popleft().finish()

    def _drain(self) -> None:
        while self._flying:
            self._flying.popleft().finish()

    # -- weights ---------------------------------------------------------------------------------------------------------

    def release_all(self, keep: Traffic | None = None) -> None:
        """Release every unit that is not in use, and is not the one to keep."""
        self._idle.clear()
        for traffic in self._by_unit.values():
            if not traffic.active and traffic is not keep:
                traffic.unit.release()

    def _need(self, phase: str, traffic: Traffic) -> None:
        """Gather a unit now, and begin to gather the one that followed it last time."""
        unit = traffic.unit
        if self._previous is not None and self._previous[0] == phase and self._previous[1] is not unit:
            self._follower[self._previous] = unit
        self._previous = (phase, unit)
        unit.start_gather()
        follower = self._follower.get((phase, unit))
        if follower is not None and follower.moving_elements <= self._policy.prefetch_elements:
            follower.start_gather()
        unit.gather()

    def _retire(self, keep: Traffic) -> None:
        retiring, self._idle = self._idle, [traffic for traffic in self._idle if traffic is keep]
        for traffic in retiring:
            if traffic is not keep and not traffic.active and not traffic.running:
                traffic.unit.release()

    def _fetch(self, unit: Unit, together: Collection[Unit]) -> bool:
        """Somebody reads a released parameter: bring it if the model is running, which all ranks do alike."""
        if not self._stack and self._pass is None:
            return False
        traffic = self._by_unit[unit]
        self._need("fetch", traffic)
        if self._stack:
            unit.pins += 1
            self._stack[-1].borrowed.append(traffic)
        return True

    def _pack(self, tensor: Tensor) -> Any:
        unit = self._addresses.get(tensor.untyped_storage().data_ptr())
        if unit is not None:
            return SavedWeight(tensor, self._by_unit[unit], unit.version)
        # An operation that saves its own result hands it over with the graph: kept like that, it would be a reference cycle.
        # There is no public name for the counter by which torch itself notices writes; a detached tensor shares it.
        return SavedValue(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is SavedValue:
            return _unwritten(saved)
        unit = saved.traffic.unit
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
            self._need("unpack", saved.traffic)
        return saved.tensor

    # -- the step --------------------------------------------------------------------------------------------------------

    def finish_window(self) -> list[bool]:
        """Reduce what is still to be reduced, so that the shards of all gradients are complete.

        Returns:
            for each parameter, whether any rank has a gradient for it in this accumulation window.

        Raises:
            ParameterError: a parameter was given other data, or was written in place differently on different ranks.
        """
        self.finish_pass()
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer.resident:
                    buffer.check_bound()
        self._comm.set_phase("step")
        pending = [any(gradients.pending for gradients in traffic.gradients) for traffic in self._order]
        flags = torch.tensor([*self.delivered, *pending], dtype=torch.int32, device=self._root_device())
        self._writes.announce(flags)
        self._comm.all_reduce(flags, self._data, "agree on gradients").wait()
        counts: Any = flags
        agreed: list[bool] = [count > 0 for count in self._writes.take_over(counts.tolist())]
        for traffic, due in zip(self._order, agreed[len(self.parameters) :], strict=True):
            if due:
                self._launch(traffic)
        self._drain()
        return agreed[: len(self.parameters)]

    def clear_gradients(self) -> None:
        """Forget all gradients of this accumulation window."""
        self._drain()
        self.delivered = bytearray(len(self.parameters))
        for traffic in self._order:
            for gradients in traffic.gradients:
                gradients.clear()

    def weights_changed(self, units: Sequence[Unit] | None = None) -> None:
        """The shards were updated: refresh the gathered copies that stay, and outdate all graphs recorded before.

        Args:
            units: those that were; None for all that an optimizer updates, and only what it updates in them.
        """
        written = self._writes.found()  # by somebody else, before
        changed = [unit for unit in self.units if any(b.trainable for b in unit.buffers)] if units is None else list(units)
        for unit in changed:
            self._by_unit[unit].forget_graphs()
        resident = [(unit, b) for unit in changed for b in unit.buffers if b.resident and (b.trainable or units is not None)]
        handles = [buffer.storage.gather(f"refresh {unit.name}") for unit, buffer in resident]
        for handle in handles:
            handle.wait()
        increment_version([member.parameter for _, buffer in resident for member in buffer.members])
        self._writes.note(but=written)
        self._twice.clear()
        for unit in changed:
            unit.changed()
        self.release_all()

    def gradients(self) -> list[Gradients]:
        """The gradients of all trainable buffers, in the order of `units` and their buffers."""
        return [gradients for traffic in self._by_unit.values() for gradients in traffic.gradients]

    def contributors(self, parameter: int) -> list[int]:
        """The ranks that brought an Inf or NaN to the buffer of a parameter in this window. Collective."""
        buffers = [item for item in self.gradients() if any(m.index == parameter for m in item.buffer.members)]
        found = self._comm.all_gather_object(any(item.suspicious for item in buffers), self._data, "who brought Inf or NaN")
        return [rank for rank, guilty in zip(self._data.ranks, found, strict=True) if guilty]

    # -- for the engine --------------------------------------------------------------------------------------------------

    @property
    def unit_modules(self) -> list[nn.Module]:
        """The modules that are units, except the model itself if there are others."""
        return self._modules[1:] or self._modules

    @contextmanager
    def pinned(self) -> Generator[None]:
        """All weights, gathered once and kept until the end of the context, in memory that users may keep."""
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(unit.pinned(lend=True))
            yield

    @property
    def missing_bytes(self) -> int:
        """Bytes that gathering all units would take now."""
        resting = [unit for unit in self.units if unit.state is State.RESTING]
        return sum(buffer.storage.nbytes_full for unit in resting for buffer in unit.moving)

    def memory(self) -> dict[str, int]:
        """Bytes of parameters and gradients on this rank, and unsharded; see `Engine.memory_report`."""
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        counted = self._comm.ledger.snapshot()
        held = counted["resident"]
        parameters = sum(b.layout.used * b.key.dtype.itemsize for b in buffers)
        # Where gradients are reduced in every backward, full-length buffers are transport, a few units' worth; else they are
        # what the gradients accumulate in.
        full, sharded = held.get("full gradients", 0), self._policy.stage.reduce is Reduce.EVERY
        return {
            "parameters_resting": sum(b.storage.nbytes_resting for b in buffers),
            "parameters_live_peak": counted["peak"].get("gathered", 0),
            "masters": held.get("master weights", 0),
            "gradients": held.get("gradients", 0) + (0 if sharded else full),
            "gradients_in_flight": full if sharded else 0,
            "padding": sum(b.layout.padding * b.key.dtype.itemsize for b in buffers),
            "unsharded_parameters": parameters,
            "unsharded_gradients": sum(item.buffer.layout.used * item.dtype.itemsize for item in self.gradients()),
            "unsharded_masters": sum(
                b.layout.used * b.master.itemsize for b in buffers if b.master is not None and b.master is not b.shard
            ),
        }

    def _loaded(self, unit: Unit, module: nn.Module, keys: Any) -> None:
        """`load_state_dict` has written into gathered weights: shards and master weights follow."""
        if unit is self.units[0]:
            registered = {id(parameter) for parameter in module.parameters()}
            lost = [member.name for member in self.parameters if id(member.parameter) not in registered]
            if lost:
                remedy = "load with assign=False, which copies into the parameters that the engine trains"
                raise ParameterError(explain(f"parameter {lost[0]!r} was replaced by load_state_dict", do=remedy))
        if unit.state in (State.LIVE, State.LENT):
            for buffer in unit.buffers:
                if buffer.resident or unit.state is State.LIVE:
                    buffer.check_bound()
            for home in unit.homes():
                commit(home)
            unit.changed(lent_too=True)

    def _warn_of_placeholders(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if any(unit.state is State.RESTING for unit in self.units):
            log.warning(
                "state_dict() of a sharded model holds NaN in place of released weights; "
                "read it inside `with engine.inference():`, where they are whole"
            )

    def close(self, *, restore: bool) -> None:
        """Remove all hooks and free gradients.

        Args:
            restore: gather all weights, so that the module is an ordinary one again (collective at stage 3).
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        if restore:
            self._drain()
            for unit in self.units:
                unit.gather()
        for traffic in self._by_unit.values():
            for gradients in traffic.gradients:
                with suppress(UsageError):  # as above: after an error of communication
                    gradients.close()
            traffic.unit.fetcher = None
            traffic.unit.close()
        self._pool.clear()

    def _root_device(self) -> torch.device:
        return next((buffer.shard.device for unit in self.units for buffer in unit.buffers), torch.device("cpu"))


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


def _deliver_to(runtime: weakref.ref[Runtime], inlet: int, parameter: nn.Parameter) -> None:
    """Hand a gradient over. The garbage collector does not see what such a hook holds: a strong reference would be for ever."""
    alive = runtime()
    if alive is not None:
        alive.deliver(inlet, parameter)


def _after_accumulation(parameter: Any, hook: Callable[[nn.Parameter], None]) -> Any:
    """Register a hook that runs when a parameter's gradient of a backward pass is complete (untyped in torch)."""
    return parameter.register_post_accumulate_grad_hook(hook)


def _on_gradient(tensor: Any, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that runs when the gradient of a tensor is known (untyped in torch)."""
    tensor.register_hook(hook)


def _discard(parameter: nn.Parameter) -> None:
    parameter.grad = None
