"""Turns a model's parameters into units: lays them out, allocates storage, makes all ranks equal, binds the parameters.

Owns the moment of construction only. Refuses to know hooks and optimizers; which optimizer group a parameter is in comes as a
mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from shardwise.comm import Comm
from shardwise.errors import ParameterError, explain
from shardwise.layout import Layout, Request, pack
from shardwise.mesh import DataMesh
from shardwise.policy import Policy, Release, matches_module
from shardwise.zero.buffer import Buffer, BufferKey, Member, as_storage, storage_dtype_of
from shardwise.zero.discovery import Named, UnitPlan, class_names, named_modules, plan_units
from shardwise.zero.master import OwnMaster, SameMaster
from shardwise.zero.released import ReleasedParameter, homes
from shardwise.zero.unit import Unit

__all__ = ["Site", "build_buffers", "build_units", "check_parameters", "full_values", "overlaps"]


def build_units(model: nn.Module, site: Site) -> list[tuple[Unit, UnitPlan]]:
    """Shard a model in place, unit by unit, so that at most one unit exists twice. Rank 0's values win.

    Collective: all data ranks call it with models of the same structure.
    """
    precision = site.policy.precision
    pinned = _pinned_parameters(model, precision.pinned)
    narrow = {
        parameter
        for name, module in named_modules(model)
        if matches_module(precision.narrow, name, class_names(module))
        for parameter in module.parameters(recurse=False)
    }
    units: list[tuple[Unit, UnitPlan]] = []
    count = 0
    for plan in plan_units(model, site.policy):
        buffers = build_buffers(plan.parameters, site, plan.name or "<root>", kinds=Kinds(pinned, narrow), first_index=count)
        count += len(plan.parameters)
        units.append((Unit(plan.name, buffers, site.comm, site.mesh.data), plan))
    return units


def build_buffers(
    parameters: Sequence[Named], site: Site, label: str, *, kinds: Kinds | None = None, first_index: int = 0
) -> list[Buffer]:
    """Lay parameters out in buffers and bind them to it.

    Args:
        parameters: what to lay out; they may rest in other buffers so far.
        site: where.
        label: what the collectives are called.
        kinds: parameters that are treated in a way of their own.
        first_index: number of the first parameter within the engine.
    """
    kinds = kinds or Kinds()
    members: dict[BufferKey, list[Named]] = {}
    for named in parameters:
        parameter = named.parameter
        dtype = site.policy.precision.storage_dtype(parameter.dtype, parameter in kinds.pinned)
        key = BufferKey(
            group=site.groups.get(parameter),
            dtype=storage_dtype_of(dtype),
            wire=site.policy.precision.autocast if parameter in kinds.narrow and dtype == torch.float32 else None,
            small=parameter.numel() <= site.policy.persist_below,
            shard=site.mesh.shard,
            replicate=site.mesh.replicate,
        )
        members.setdefault(key, []).append(named)
    buffers: list[Buffer] = []
    for key, named in members.items():
        buffer = _allocate(key, named, site, first_index)
        first_index += len(named)
        full = torch.zeros(buffer.layout.total, dtype=_master_dtype(key, site.policy), device=site.device)
        for member in buffer.members:
            with full_values(member.parameter):
                full[member.slot.offset : member.slot.stop].copy_(as_storage(member.parameter.detach()))
        site.comm.broadcast(full, site.mesh.data, 0, f"broadcast {label}").wait()
        buffer.write(full)
        for member in buffer.members:
            _move_out(member.parameter)
        if buffer.storage.is_live:
            buffer.bind()
        else:
            buffer.unbind()
        buffers.append(buffer)
    return buffers


def _move_out(parameter: nn.Parameter) -> None:
    """Leave the unit where the parameter has lived so far, which must not touch it again."""
    home = homes.pop(parameter, None)
    if home is not None and home.reference() is not None:
        home.buffer.forget(home.place[1])


@dataclass(frozen=True, slots=True)
class Kinds:
    """Parameters that are treated in a way of their own.

    Args:
        pinned: those that keep float32.
        narrow: those whose gradients travel in the autocast dtype.
    """

    pinned: Collection[nn.Parameter] = ()
    narrow: Collection[nn.Parameter] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """Where units are built.

    Args:
        comm: storage and collectives.
        mesh: the data axes.
        policy: stage, dtypes, thresholds.
        device: where the parameters shall live.
        groups: optimizer group of each parameter that an optimizer updates.
        provisional: whether buffers leave it to others to keep their parameters alive.
    """

    comm: Comm
    mesh: DataMesh
    policy: Policy
    device: torch.device
    groups: Mapping[nn.Parameter, int]
    provisional: bool = False


def _allocate(key: BufferKey, named: Sequence[Named], site: Site, first_index: int) -> Buffer:
    """A buffer with storage for the shard and, if it is trainable, for the master weights; no values yet."""
    requests = [Request(item.name, tuple(item.parameter.shape), 2 if item.parameter.is_complex() else 1) for item in named]
    # Cut as for all data ranks even where each holds everything: then norms are the same sums at every stage.
    packed = pack(requests, key.dtype.itemsize, key.shard.size * key.replicate.size)
    layout = Layout(packed.slots, packed.total // key.shard.size, key.shard.size)
    alone = key.shard.size == 1  # nothing to release
    resident = alone or key.small or site.policy.stage.release is not Release.USE
    storage = site.comm.allocate(
        layout.chunk, key.shard, key.dtype, site.device, resident=resident, provisional=site.provisional
    )
    site.comm.ledger.hold("parameters", storage.nbytes_resting)
    numbered = enumerate(zip(named, layout.slots, strict=True), start=first_index)
    members = [
        Member(_reference(item.parameter, site), slot, index, _strides(item.parameter, site))
        for index, (item, slot) in numbered
    ]
    buffer = Buffer(key, layout, members, storage, resident=resident)
    master = _master_dtype(key, site.policy)
    if buffer.trainable and master == key.dtype:
        buffer.master = SameMaster(buffer.shard)
    elif buffer.trainable:
        buffer.master = OwnMaster(torch.zeros(layout.chunk, dtype=master, device=site.device))
        site.comm.ledger.hold("master weights", buffer.master.nbytes)
    return buffer


def _reference(parameter: nn.Parameter, site: Site) -> Callable[[], nn.Parameter | None]:
    return cast("Callable[[], nn.Parameter | None]", TensorWeakRef(parameter)) if site.provisional else lambda: parameter


def _strides(parameter: Tensor, site: Site) -> tuple[int, ...] | None:
    """Strides other than row-major: random numbers are drawn in the order of memory, and construction may go on."""
    if not site.provisional or isinstance(parameter, ReleasedParameter) or parameter.is_contiguous():
        return None
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()


def _master_dtype(key: BufferKey, policy: Policy) -> torch.dtype:
    return key.dtype if key.group is None else policy.precision.master_dtype(key.dtype)


def check_parameters(model: nn.Module) -> None:
    """Refuse parameters that cannot be managed.

    Raises:
        ParameterError: a parameter is on the meta device or held by another engine, or two parameters share memory without
            being the same object.
    """
    for name, module in named_modules(model):
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            problem = f"{name!r} changes its weight during forward (max_norm={module.max_norm}), on each rank differently"
            raise ParameterError(explain(problem, do="leave max_norm out, and normalise in the loss or after engine.step()"))
    whole: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        home = homes.get(parameter)
        if home is not None and home.held:
            remedy = "call destroy() on that engine first, or give the second engine a model of its own"
            raise ParameterError(explain(f"parameter {name!r} belongs to another engine", do=remedy))
        if nn.parameter.is_lazy(parameter):
            remedy = "run one forward of the model before, on an example input"
            raise ParameterError(explain(f"parameter {name!r} is lazy and has no shape yet", do=remedy))
        if parameter.is_meta:
            remedy = "build the model under `with shardwise.zero.Init():`, or materialise it with to_empty() and load weights"
            raise ParameterError(explain(f"parameter {name!r} is on the meta device and has no values", do=remedy))
        if not isinstance(parameter, ReleasedParameter):
            whole.append((name, parameter))
        elif home is None or home.reference() is None:
            remedy = "build it anew and load weights; destroy(restore=True) would have left them here"
            raise ParameterError(explain(f"parameter {name!r} has no values: the engine that held it is gone", do=remedy))
    for one, other in overlaps(whole):
        remedy = "to tie weights, assign the same nn.Parameter to both modules; to untie them, clone() one"
        problem = f"parameters {one!r} and {other!r} are different objects that share memory"
        raise ParameterError(explain(problem, do=remedy))


def overlaps(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Names of tensors that have bytes in common, as pairs of neighbours in memory."""
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        if tensor.numel() and tensor.layout == torch.strided:
            base, start, stop = _extent(tensor)
            extents.setdefault(base, []).append((start, stop, name))
    return [
        (one, other)
        for spans in extents.values()
        for (_, end, one), (start, _, other) in pairwise(sorted(spans))
        if start < end
    ]


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Address of the storage, and the first and one past the last byte of it that belong to the tensor."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return tensor.untyped_storage().data_ptr(), start * tensor.itemsize, (start + reach + 1) * tensor.itemsize


@contextmanager
def full_values(parameter: Tensor) -> Generator[None]:
    """The values of a parameter that may rest in shards (built under `zero.Init`); gathers for the time of the context."""
    with homes[parameter].unit.pinned() if isinstance(parameter, ReleasedParameter) else nullcontext():
        yield


def _pinned_parameters(model: nn.Module, patterns: tuple[str, ...]) -> set[nn.Parameter]:
    """Parameters that a pattern means: by name or last part of it, by a module around them, or by such a module's class."""
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        meant = {
            parameter
            for name, module in named_modules(model)
            if name and matches_module((pattern,), name, (*class_names(module), name.rpartition(".")[2]))
            for parameter in module.parameters()
        }
        meant.update(
            parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if matches_module((pattern,), name, (name.rpartition(".")[2],))
        )
        if not meant:
            raise ParameterError(
                explain(
                    f"data_types.keep_in_fp32_modules names {pattern!r}, which matches no parameter",
                    expected="a parameter or module name, a pattern, or a class name",
                    do="print(model) shows modules and classes",
                )
            )
        found |= meant
    return found
