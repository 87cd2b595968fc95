"""`assemble`: from a model and a resolved configuration to an engine.

Owns the order of construction, who is connected to whom, and that the model is the user's again where something fails. Refuses
to know how any part works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.agreement import check_agreement
from shardwise.comm import Comm, get_local_rank, get_rank, get_world_size
from shardwise.config import Config
from shardwise.data import build_loader
from shardwise.device import check_unshared, choose_device, use_device
from shardwise.engine import Engine
from shardwise.errors import ShardwiseError
from shardwise.mesh import Axis, DataMesh
from shardwise.optim import (
    Driver,
    LossScale,
    OptimizerPlan,
    PagedDriver,
    Piece,
    Shard,
    ShardedOptimizer,
    StepPath,
    StepSettings,
    TierMaster,
    adopt_scheduler,
    build_scheduler,
    plan_groups,
)
from shardwise.settings import make_paging, make_policy, share_memory, state_dtype
from shardwise.trainer import Parts, Trainer
from shardwise.zero import Buffer, Runtime, Site, Unit, UnitPlan, build_units, check_parameters

__all__ = ["Given", "assemble"]


@dataclass(frozen=True)
class Given:
    """What the user gave besides the configuration; see `shardwise.initialize`."""

    model: nn.Module
    optimizer: Optimizer | type[Optimizer] | Callable[[Any], Optimizer] | None
    model_parameters: Iterable[Any] | None
    training_data: Any
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None


def assemble(given: Given, config: Config) -> Engine:
    """Shard the model in place and put an engine around it. Collective. Raises as `shardwise.initialize` says."""
    model = given.model
    check_parameters(model)
    site = _find_site(config)
    with ExitStack() as undo:
        undo.callback(site.comm.close)
        _check_devices(site)
        plan = plan_groups(given.optimizer, given.model_parameters, model.named_parameters(), config.optimizer)
        check_agreement(site.comm, site.mesh.data, model, config, plan)
        built = build_units(model, replace(site, groups=_groups_of(plan)))
        undo.callback(_give_back, [unit for unit, _ in built])
        _share_buffers(model, site)
        loader = _make_loader(given, config, site.mesh.data)
        engine = Engine(_make_trainer(_make_parts(model, config, site, plan, built, loader)))
        undo.callback(_destroy, engine)
        if engine.optimizer is not None:
            engine.lr_scheduler = _make_scheduler(given.lr_scheduler, config, engine.optimizer)
        undo.pop_all()
    return engine


# -- where, and with whom ------------------------------------------------------------------------------------------------------


def _find_site(config: Config) -> Site:
    """Where the model will be; which parameters are optimized is not known yet."""
    rank, world = get_rank(), get_world_size()
    policy = make_policy(config, world)
    mesh = DataMesh.grid(rank, world, world if policy.stage.sharded else 1)
    device = choose_device(get_local_rank(), world_size=world)
    use_device(device)
    comm = Comm(mesh.data, watchdog_s=config.watchdog_s, share=share_memory(config, device))
    return Site(comm, mesh, policy, device, groups={})


def _check_devices(site: Site) -> None:
    """Ranks that compute on one accelerator are refused on all ranks."""
    data = site.mesh.data
    check_unshared(site.device, data.ranks, lambda own: site.comm.all_gather_object(own, data, "compare devices"))


def _groups_of(plan: OptimizerPlan | None) -> dict[nn.Parameter, int]:
    if plan is None:
        return {}
    return {param: number for number, group in enumerate(plan.param_groups) for param in group["params"] if param.requires_grad}


def _share_buffers(model: nn.Module, site: Site) -> None:
    """Module buffers (running statistics, position tables) move to the device and become equal to rank 0's; dtypes stay."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != site.device:
                buffer.data = buffer.data.to(site.device)
            whole = buffer.detach().contiguous()
            site.comm.broadcast(whole.view(-1), site.mesh.data, 0, f"broadcast buffer {name}").wait()
            if whole.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(whole)


# -- the parts -----------------------------------------------------------------------------------------------------------------


def _make_parts(
    model: nn.Module,
    config: Config,
    site: Site,
    plan: OptimizerPlan | None,
    built: Sequence[tuple[Unit, UnitPlan]],
    loader: Any,
) -> Parts:
    units = [unit for unit, _ in built]
    shards = tuple(_make_shard(buffer) for unit in units for buffer in unit.buffers if buffer.trainable)
    scaler = LossScale.from_config(config.fp16)
    path = None
    if plan is not None:
        settings = _step_settings(config, site, units)
        driver = plan.driver(shards, make_paging(config))
        over_ranks, over_shards = _summing(site.comm, site.mesh.data), _summing(site.comm, site.mesh.shard)
        path = StepPath(shards, driver, settings, over_ranks, over_shards, scaler)
        _move_masters(driver, [buffer for unit in units for buffer in unit.buffers if buffer.trainable], site.comm)
    # The last of all: it puts hooks on the model, and nothing that can fail may follow.
    runtime = Runtime(built, site.comm, site.mesh.data, site.policy)
    return Parts(
        model=model,
        config=config,
        policy=site.policy,
        mesh=site.mesh,
        comm=site.comm,
        device=site.device,
        runtime=runtime,
        shards=shards,
        step_path=path,
        optimizer=None if plan is None else plan.optimizer,
        scaler=scaler,
        data_loader=loader,
    )


def _move_masters(driver: Driver, buffers: Sequence[Buffer], comm: Comm) -> None:
    """Masters that rest with the optimizer's state are asked for there."""
    if isinstance(driver, PagedDriver):
        for number, buffer in enumerate(buffers):
            if buffer.master is not None and buffer.master.separate:
                comm.ledger.drop("master weights", buffer.master.nbytes)
                buffer.master = TierMaster(driver, number)


def _make_shard(buffer: Buffer) -> Shard:
    """This rank's part of a trainable buffer, as the optimizer sees it."""
    key = buffer.key
    assert key.group is not None
    assert buffer.master is not None
    master = buffer.master.tensor
    assert master is not None, "masters move elsewhere when the driver is there"
    start, _ = buffer.interval
    pieces = tuple(
        Piece(member.name, member.index, first, last, member.slot.length, start + first - member.slot.offset)
        for member, first, last in buffer.own_pieces()
    )
    share = buffer.layout.chunk // key.replicate.size
    counted = slice(key.replicate.index * share, (key.replicate.index + 1) * share)
    return Shard(key.group, master, buffer.shard if buffer.master.separate else None, pieces=pieces, counted=counted)


def _step_settings(config: Config, site: Site, units: Sequence[Unit]) -> StepSettings:
    return StepSettings(
        clip=config.gradient_clipping,
        check_overflow=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        state_dtype=state_dtype(config),
        rank=site.mesh.data.index,
        world=site.mesh.data.size,
        names=[member.name for unit in units for buffer in unit.buffers for member in buffer.members],
        device=site.device,
    )


def _summing(comm: Comm, axis: Axis) -> Callable[[Tensor, str], Tensor]:
    """A function that sums a tensor over the ranks of an axis."""

    def total(values: Tensor, name: str) -> Tensor:
        comm.all_reduce(values, axis, name).wait()
        return values

    return total


def _make_loader(given: Given, config: Config, data: Axis) -> Any:
    if given.training_data is None:
        return None
    return build_loader(
        given.training_data,
        config.train_micro_batch_size_per_gpu,
        data,
        collate_fn=given.collate_fn,
        drop_last=config.dataloader_drop_last,
    )


def _make_scheduler(given: Any, config: Config, optimizer: ShardedOptimizer) -> Any:
    if given is not None:
        return adopt_scheduler(given, optimizer)
    return None if config.scheduler is None else build_scheduler(config.scheduler, optimizer)


def _make_trainer(parts: Parts) -> Trainer:
    """A trainer, and the parts that call it back.

    Weakly, where hooks on the model lead to the part: the model may outlive its engine.
    """
    trainer = Trainer(parts)
    reference = weakref.ref(trainer)

    def reduce_now() -> bool:
        alive = reference()
        return alive is not None and alive.begin_plain_backward()

    parts.runtime.backward.reduce_now = reduce_now
    for unit in parts.runtime.units:
        unit.owner = reference
    if parts.optimizer is not None and parts.step_path is not None:
        by_name = {member.name: member.parameter for member in parts.runtime.parameters}
        parts.optimizer.bind(parts.step_path, by_name, trainer.step, trainer.zero_grad)
    return trainer


# -- where something failed: what cannot be had any more must not hide the reason ----------------------------------------------


def _give_back(units: Sequence[Unit]) -> None:
    with suppress(ShardwiseError):
        for unit in units:
            if not unit.closed:
                unit.gather()
                unit.close()


def _destroy(engine: Engine) -> None:
    with suppress(ShardwiseError):
        engine.destroy()
