"""`Init`: a model built inside never exists whole on any rank.

A child module is complete when it is registered on its parent, so torch's public registration hooks tell when it can be
sharded. Operations on a sharded parameter (a custom initialisation function, say) fetch it, run on the full values exactly as
in a normal build, and what they wrote is kept. Random numbers are drawn as in a normal build, so weights are equal to it bit
for bit.

Owns construction before an engine exists; the engine lays the parameters out anew. Refuses to know units as an engine forms
them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from shardwise.comm import Comm, get_local_rank, get_rank, get_world_size, init_distributed
from shardwise.config import init_view
from shardwise.device import choose_device
from shardwise.errors import UsageError, explain
from shardwise.mesh import DataMesh
from shardwise.policy import STAGES, Policy
from shardwise.zero.build import Site, build_buffers
from shardwise.zero.discovery import Named
from shardwise.zero.released import homes
from shardwise.zero.unit import State, Unit, provisional_units

__all__ = ["Init"]


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
    differ get rank 0's values.
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
        self._enabled = enabled and (source is None or init_view(source).zero_optimization.stage == 3)
        self._builder: _Sharder | None = None
        self._hooks: list[Any] = []
        if module is not None and self._enabled:
            with self:
                assert self._builder is not None
                self._builder.shard(module)

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()
            self._builder = _Sharder()
            self._hooks = [
                register_module_module_registration_hook(self._on_child),
                register_module_parameter_registration_hook(self._on_parameter),
            ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.finish(shard_rest=kind is None)

    def _on_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if self._builder is not None and child is not None:
            self._builder.shard(child)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if self._builder is not None:
            self._builder.tops[id(module)] = module


class _Sharder:
    """Shards modules as they are finished, and keeps at most one of the finished ones gathered for writing."""

    def __init__(self) -> None:
        rank, world = get_rank(), get_world_size()
        self.tops: dict[int, nn.Module] = {}  # modules that own parameters; what is not sharded at the end is a top's
        mesh = DataMesh.grid(rank, world, world)
        device = choose_device(get_local_rank(), world_size=world)
        self._site = Site(Comm(mesh.data), mesh, Policy(STAGES[3], persist_below=-1), device, groups={})
        self._units: list[Unit] = []
        self._open: Unit | None = None

    def shard(self, module: nn.Module) -> None:
        """Shard all parameters below `module` that still are whole."""
        fresh = [
            Named(parameter, f"{type(module).__name__}.{name}")
            for name, parameter in module.named_parameters()
            if parameter not in homes and not parameter.is_meta
        ]
        if not fresh:
            return
        self._close_open()
        buffers = build_buffers(fresh, self._site, type(module).__name__)
        unit = Unit(type(module).__name__, buffers, self._site.comm, self._site.mesh.data, provisional=True)
        unit.fetcher = self._fetch
        self._units.append(unit)
        provisional_units.setdefault(module, []).append(unit)

    def finish(self, *, shard_rest: bool) -> None:
        """End of the block."""
        if shard_rest:
            for module in self.tops.values():
                self.shard(module)
            self._close_open()
        for unit in self._units:
            unit.fetcher = None

    def _fetch(self, unit: Unit) -> bool:
        if unit is not self._open:
            self._close_open()
            unit.gather()
            self._open = unit
        return True

    def _close_open(self) -> None:
        unit, self._open = self._open, None
        if unit is None or unit.state is not State.LIVE:
            return
        for buffer in unit.buffers:
            for member in buffer.members:
                place = member.view(buffer.storage.full)
                if member.parameter.data_ptr() != place.data_ptr():  # `parameter.data = ...` replaced it
                    place.copy_(member.parameter.detach())
            self._site.comm.broadcast(buffer.storage.full, self._site.mesh.data, 0, f"initialise {unit.name}").wait()
            start, stop = buffer.interval
            buffer.shard.copy_(buffer.storage.full[start:stop])
        unit.release()
