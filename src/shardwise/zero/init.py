"""`Init`: a model built inside never exists whole on any rank.

A child module is complete when it is registered on its parent, so torch's public registration hooks tell when it can be
sharded. Operations on a sharded parameter (a custom initialisation function, say) fetch it, run on the full values exactly as
in a normal build, and what they wrote is kept. Random numbers are drawn as in a normal build, so weights are equal to it bit
for bit.

Fetched parameters are lent: their values are ordinary tensors, which the user's code may keep and write later. They are taken
back when another module's are fetched, except those that somebody still holds; which ones, the ranks agree on.

Owns construction before an engine exists; the engine lays the parameters out anew. Refuses to know units as an engine forms
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from shardwise.comm import Comm, get_local_rank, get_rank, get_world_size, init_distributed
from shardwise.config import init_view
from shardwise.device import check_unshared, choose_device
from shardwise.errors import ParameterError, UsageError, explain
from shardwise.mesh import DataMesh
from shardwise.policy import STAGES, Policy
from shardwise.zero.buffer import as_storage
from shardwise.zero.build import Site, build_buffers, overlaps
from shardwise.zero.discovery import Named
from shardwise.zero.released import homes
from shardwise.zero.unit import State, Unit

__all__ = ["Init"]

_open: list[_Sharder] = []
"""The sharder of the outermost open block. The registration hooks of torch act on the whole process, and so does a block."""


class Init:
    """Context manager for sharded construction. Collective: all ranks build the same model.

    Args:
        module: a finished model to shard at once, instead of building one inside.
        config_dict_or_path: the configuration; stages below 3 make the context do nothing. None means stage 3.
        config: older name of `config_dict_or_path`.
        enabled: False makes it do nothing.
        dtype: accepted for compatibility. Parameters keep the dtype they are built with; the engine casts them and keeps the
            original digits in the master weights.
        remote_device: "cpu" and "nvme" are not available yet.
        others: further arguments of the same call in other libraries are accepted and have no effect.

    After the block, use `GatheredParameters` to read or load weights, and `initialize` to train. Ranks whose random seeds
    differ get rank 0's values. A block inside another is part of it. With one rank there is nothing to shard.

    Raises:
        ConfigError: the configuration has problems.
        UsageError: `remote_device` asks for memory that is not available yet.
        ParameterError: `module` is not a module.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        remote_device: str | None = None,
        **others: Any,
    ) -> None:
        if remote_device not in (None, "none"):
            raise UsageError(explain("zero.Init(remote_device=...) is not available yet", found=repr(remote_device)))
        source = config_dict_or_path if config_dict_or_path is not None else config
        given = cast("object", module)
        if given is not None and not isinstance(given, nn.Module):
            raise ParameterError(explain("zero.Init shards a module", expected="an nn.Module", found=type(given).__name__))
        self._enabled = enabled and (source is None or init_view(source).zero_optimization.stage == 3)
        self._entered: list[_Sharder | None] = []
        if module is not None and self._enabled:
            with self:
                for sharder in _open:
                    sharder.shard(module)

    def __enter__(self) -> Init:
        sharder = None
        if self._enabled:
            init_distributed()
            if get_world_size() > 1:
                sharder = _open[0] if _open else _Sharder()
                sharder.enter()
        self._entered.append(sharder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sharder = self._entered.pop()
        if sharder is not None:
            sharder.leave(finished=kind is None)


class _Sharder:
    """Shards modules as they are finished, and keeps few of the finished ones whole for writing."""

    def __init__(self) -> None:
        rank, world = get_rank(), get_world_size()
        mesh = DataMesh.grid(rank, world, world)
        device = choose_device(get_local_rank(), world_size=world)
        policy = Policy(STAGES[3], persist_below=-1)
        comm = Comm(mesh.data, share=device.type == "cpu")
        try:
            check_unshared(device, mesh.data.ranks, lambda own: comm.all_gather_object(own, mesh.data, "compare devices"))
        except BaseException:
            comm.close()
            raise
        self._site = Site(comm, mesh, policy, device, groups={}, provisional=True)
        self._tops: dict[int, nn.Module] = {}  # modules that own parameters; what is not sharded at the end is a top's
        self._lent: list[Unit] = []
        self._depth = 0
        self._hooks: list[Any] = []

    def enter(self) -> None:
        """A block begins."""
        self._depth += 1
        if self._depth == 1:
            _open.append(self)
            self._hooks = [
                register_module_module_registration_hook(self._on_child),
                register_module_parameter_registration_hook(self._on_parameter),
            ]

    def leave(self, *, finished: bool) -> None:
        """A block ends.

        Args:
            finished: whether the model in it was finished, as opposed to an exception.
        """
        self._depth -= 1
        try:
            if finished:
                for module in self._tops.values():
                    self.shard(module)
                if not self._depth:
                    self._leave_shared_memory()
                    self._take_back(self._lent)
        finally:
            if not self._depth:
                _open.remove(self)
                for hook in self._hooks:
                    hook.remove()

    def shard(self, module: nn.Module) -> None:
        """Shard all parameters below `module` that still are whole."""
        fresh = [
            Named(parameter, f"{type(module).__name__}.{name}")
            for name, parameter in module.named_parameters()
            if parameter not in homes and not parameter.is_meta and not nn.parameter.is_lazy(parameter)
        ]
        if fresh:
            self._settle(())
            self._shard(fresh, type(module).__name__)

    def fetch(self, unit: Unit, together: Collection[Unit]) -> bool:
        """Somebody touches a parameter of a sharded module."""
        if unit.state is not State.LENT:
            self._settle(together)
            unit.lend()
            self._lent.append(unit)
        return True

    def copied(self, parameter: nn.Parameter) -> None:
        """A parameter was made as a copy of a sharded one."""
        self._shard([Named(parameter, "copy")], "copy")

    def settle(self, unit: Unit) -> None:
        """Somebody else is about to gather a unit: what is lent stays so, as views may be held, but equal on all ranks."""
        if unit not in self._lent:
            return
        members = [(buffer, member, parameter) for buffer in unit.buffers for _, member, parameter in buffer.present()]
        if any(p.shape != member.slot.shape or p.dtype != buffer.dtype_of(member) for buffer, member, p in members):
            self._take_back([unit])
            return
        for _, member, parameter in members:
            values = as_storage(parameter.detach().clone(memory_format=torch.contiguous_format))
            self._site.comm.broadcast(values, self._site.mesh.data, 0, f"initialise {member.name}").wait()
            same = torch.view_as_complex(values.view(*parameter.shape, 2)) if parameter.is_complex() else values
            parameter.data.copy_(same.view(parameter.shape))

    def _on_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.shard(child)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        self._tops[id(module)] = module

    def _shard(self, fresh: Sequence[Named], name: str) -> None:
        buffers = build_buffers(fresh, self._site, name)
        unit = Unit(name, buffers, self._site.comm, self._site.mesh.data, provisional=True)
        unit.fetcher, unit.copied, unit.settle = _fetch, _copied, _settle

    def _settle(self, keep: Collection[Unit]) -> None:
        """Take back what is lent and not needed now, but for tensors that somebody holds on some rank."""
        units = [unit for unit in self._lent if unit not in keep]
        if units:
            held = torch.tensor([any(_is_shared(p) for p in _parameters(unit)) for unit in units], dtype=torch.int32)
            held = held.to(self._site.device)
            self._site.comm.all_reduce(held, self._site.mesh.data, "whose weights are held").wait()
            free = [unit for unit, count in zip(units, held, strict=True) if not count.item()]
            self._take_back(free)

    def _take_back(self, units: Sequence[Unit]) -> None:
        """Shard lent parameters again, as they are now: rank 0's values, and whatever shape and dtype they have."""
        for unit in tuple(units):
            self._lent.remove(unit)
            fresh = [Named(parameter, homes[parameter].name) for parameter in _parameters(unit)]
            if fresh:
                self._shard(fresh, unit.name)

    def _leave_shared_memory(self) -> None:
        """Parameters that were made to share memory stay whole, so that `initialize` can say what it thinks of it."""
        lent = {str(id(parameter)): parameter for unit in self._lent for parameter in _parameters(unit)}
        for name in {name for pair in overlaps(lent.items()) for name in pair}:
            home = homes.pop(lent[name])
            home.buffer.forget(home.place[1])


def _fetch(unit: Unit, together: Collection[Unit]) -> bool:
    return bool(_open) and _open[0].fetch(unit, together)


def _copied(parameter: nn.Parameter) -> None:
    for sharder in _open:
        sharder.copied(parameter)


def _settle(unit: Unit) -> None:
    for sharder in _open:
        sharder.settle(unit)


def _parameters(unit: Unit) -> list[nn.Parameter]:
    return [parameter for buffer in unit.buffers for _, _, parameter in buffer.present()]


def _is_shared(parameter: nn.Parameter) -> bool:
    """Whether anything else holds the memory of a parameter: a view, a graph, another parameter.

    For a moment the parameter gets other memory; if its storage, which torch ties to one Python object, is still alive then,
    somebody holds it.
    """
    data = parameter.detach()
    shape, strides, offset = data.shape, data.stride(), int(data.storage_offset())
    storage = weakref.ref(data.untyped_storage())
    parameter.data = data.clone()
    del data
    held = storage()
    if held is None:
        return False
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(held, offset, shape, strides)
    return True
