"""`initialize`: from a model and a configuration to an engine.

Owns the order of construction. Refuses to know how any part works.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.arguments import check_arguments
from shardwise.comm import Comm, get_local_rank, get_rank, get_world_size, init_distributed, is_initialized
from shardwise.config import Config, load_config
from shardwise.data import build_loader
from shardwise.device import check_unshared, choose_device, use_device
from shardwise.engine import Engine, trainer_of
from shardwise.errors import ConfigError, DivergenceError, ParameterError, ShardwiseError, UsageError, explain
from shardwise.mesh import DataMesh
from shardwise.optim import (
    LossScale,
    OptimizerPlan,
    Piece,
    Shard,
    ShardedOptimizer,
    StepPath,
    StepSettings,
    adopt_scheduler,
    build_scheduler,
    check_scheduler,
    plan_groups,
)
from shardwise.settings import make_policy, share_memory, show_log, state_dtype
from shardwise.trainer import Parts, Trainer
from shardwise.zero import Runtime, Site, Unit, build_units, check_parameters

__all__ = ["initialize"]

log = logging.getLogger("shardwise")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Shard a model over the data-parallel ranks and make it trainable. Collective: every rank calls it with the same model.

    Args:
        args: parsed arguments; an attribute `deepspeed_config` or `shardwise_config` is a path used when `config` is None.
        model: the model; changed in place, its parameters stay the same objects. May have been built under `zero.Init`.
        optimizer: an elementwise `torch.optim` optimizer, its class, or a function of the parameters; wins over the
        configuration. model_parameters: parameters, (name, parameter) pairs or parameter groups to train; None for all that
        require gradients. training_data: a dataset; a distributed, resumable loader over it is returned. lr_scheduler: a
        `torch.optim.lr_scheduler` object, or a function of the optimizer; wins over the configuration. mpu: not available
        yet. dist_init_required: False if the process group exists already. None finds out. collate_fn: for the loader.
        config: a dict, a path, or JSON text. config_params: older name of `config`.

    Returns:
        `(engine, optimizer, data loader, learning-rate scheduler)`; what there is none of is None.

    Raises:
        ConfigError: the configuration has problems; all are listed.
        ParameterError: the model has parameters that cannot be managed, or `model_parameters` holds none.
        UsageError: `training_data` is no dataset, or `collate_fn` no function.
        OptimizerError: the optimizer or the schedule is none, or cannot be used on shards.
        DivergenceError: the ranks have different models or configurations.
    """
    if not isinstance(model, nn.Module):
        raise ParameterError(
            explain("initialize needs a model", expected="model=<torch.nn.Module>", found=type(model).__name__)
        )
    check_arguments(model_parameters=model_parameters, training_data=training_data, collate_fn=collate_fn)
    check_scheduler(lr_scheduler)
    if mpu is not None:
        raise UsageError(
            explain("initialize(mpu=...) is not available yet", do="leave it out; all ranks are data-parallel ranks")
        )
    if not is_initialized() and dist_init_required is not False:
        init_distributed()
    settings = load_config(_pick_config(args, config, config_params), world_size=get_world_size())
    show_log(settings)
    for warning in settings.warnings:
        log.warning(warning)
    check_parameters(model)
    rank, world = get_rank(), get_world_size()
    policy = make_policy(settings, world)
    mesh = DataMesh.grid(rank, world, world if policy.stage.sharded else 1)
    device = choose_device(get_local_rank(), world_size=world)
    use_device(device)
    comm = Comm(mesh.data, watchdog_s=settings.watchdog_s, share=share_memory(settings, device))
    built: list[Any] = []
    engine: Engine | None = None
    try:
        check_unshared(device, mesh.data.ranks, lambda own: comm.all_gather_object(own, mesh.data, "compare devices"))
        plan = plan_groups(optimizer, model_parameters, model.named_parameters(), settings.optimizer)
        _check_agreement(comm, mesh, model, settings, plan)
        groups = _groups_of(plan)
        built = build_units(model, Site(comm, mesh, policy, device, groups))
        _share_buffers(model, comm, mesh, device)
        engine = _assemble(model, settings, comm, mesh, device, plan, built, _loader(settings, training_data, mesh, collate_fn))
        if engine.optimizer is not None:
            engine.lr_scheduler = _scheduler(lr_scheduler, settings, engine.optimizer)
    except BaseException:
        _give_back(engine, [unit for unit, _ in built])
        comm.close()
        raise
    _announce(engine, settings)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _give_back(engine: Engine | None, units: list[Unit]) -> None:
    """Nothing came of it: the model is the user's again. What cannot be had any more must not hide the reason."""
    with suppress(ShardwiseError):
        if engine is not None:
            engine.destroy()
        for unit in () if engine is not None else units:
            unit.gather()
            unit.close()


def _pick_config(args: Any, config: Any, config_params: Any) -> Any:
    if config is not None and config_params is not None and config is not config_params:
        raise ConfigError(explain("both config and config_params were given", do="pass config only"))
    for candidate in (config, config_params, getattr(args, "shardwise_config", None), getattr(args, "deepspeed_config", None)):
        if candidate is not None:
            return candidate
    return None


def _check_agreement(comm: Comm, mesh: DataMesh, model: nn.Module, config: Config, plan: OptimizerPlan | None) -> None:
    """Ranks that were started with different models, configurations or groups would exchange the wrong bytes."""
    mine = [f"parameter {name}: {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}" for name, p in model.named_parameters()]
    mine += [f"buffer {name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    settings: dict[str, Any] = json.loads(config.model_dump_json())
    mine += [f"configuration {key}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(settings.items())]
    mine += [] if plan is None else _describe_groups(plan, model)
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest, mesh.data, "compare models"))) == 1:
        return
    everyone = comm.all_gather_object(mine, mesh.data, "compare models in detail")
    first = everyone[0]
    for rank, other in zip(mesh.data.ranks, everyone, strict=True):
        for position in range(max(len(first), len(other))):
            left = first[position] if position < len(first) else "nothing"
            right = other[position] if position < len(other) else "nothing"
            if left != right:
                raise DivergenceError(
                    explain(
                        f"rank {mesh.data.ranks[0]} and rank {rank} were started with different models or configurations",
                        expected=f"on rank {rank}: {left}",
                        found=right,
                        do="build the same model and optimizer from the same configuration on every rank",
                    )
                )


def _describe_groups(plan: OptimizerPlan, model: nn.Module) -> list[str]:
    """A line for each group of parameters, with the options that are plain values."""
    names = {param: name for name, param in model.named_parameters()}
    lines: list[str] = []
    for number, group in enumerate(plan.param_groups):
        options = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
        plain = {key: value for key, value in sorted(options.items()) if isinstance(value, (int, float, str, tuple))}
        members = ", ".join(names[param] for param in group["params"])
        lines.append(f"optimizer group {number}: {plain} of {members or 'no parameters'}")
    return lines


def _groups_of(plan: OptimizerPlan | None) -> dict[nn.Parameter, int]:
    if plan is None:
        return {}
    return {param: number for number, group in enumerate(plan.param_groups) for param in group["params"] if param.requires_grad}


def _share_buffers(model: nn.Module, comm: Comm, mesh: DataMesh, device: torch.device) -> None:
    """Module buffers (running statistics, position tables) move to the device and become equal to rank 0's; dtypes stay."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                buffer.data = buffer.data.to(device)
            whole = buffer.detach().contiguous()
            comm.broadcast(whole.view(-1), mesh.data, 0, f"broadcast buffer {name}").wait()
            if whole.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(whole)


def _assemble(
    model: nn.Module,
    config: Config,
    comm: Comm,
    mesh: DataMesh,
    device: torch.device,
    plan: OptimizerPlan | None,
    built: list[Any],
    loader: Any,
) -> Engine:
    policy = make_policy(config, mesh.data.size)
    scaler = LossScale.from_config(config.fp16)
    units = [unit for unit, _ in built]
    shards = _make_shards(units)
    holder: list[weakref.ref[Trainer]] = []

    def reduce_now() -> bool:
        trainer = holder[0]()
        return trainer is not None and trainer.begin_plain_backward()

    runtime = Runtime(built, comm, mesh.data, policy, reduce_now)
    path = None
    if plan is not None:
        names = [member.name for member in runtime.parameters]
        check = config.bf16.check_grad_overflow if config.bf16.enabled else True
        step_settings = StepSettings(
            clip=config.gradient_clipping,
            check_overflow=check,
            state_dtype=state_dtype(config),
            rank=mesh.data.index,
            world=mesh.data.size,
            names=names,
            device=device,
        )

        def sum_over(axis: Any) -> Callable[[Tensor, str], Tensor]:
            def total(values: Tensor, name: str) -> Tensor:
                comm.all_reduce(values, axis, name).wait()
                return values

            return total

        path = StepPath(shards, plan.driver(shards), step_settings, sum_over(mesh.data), sum_over(mesh.shard), scaler)
    optimizer = None if plan is None else plan.optimizer
    trainer = Trainer(Parts(model, config, policy, mesh, comm, device, runtime, tuple(shards), path, optimizer, scaler, loader))
    holder.append(weakref.ref(trainer))
    for unit in units:
        unit.owner = holder[0]
    if optimizer is not None and path is not None:
        by_name = {member.name: member.parameter for member in runtime.parameters}
        optimizer.bind(path, by_name, trainer.step, trainer.zero_grad)
    return Engine(trainer)


def _make_shards(units: list[Unit]) -> list[Shard]:
    """This rank's part of every trainable buffer, as the optimizer sees it."""
    shards: list[Shard] = []
    for unit in units:
        for buffer in unit.buffers:
            if buffer.key.group is None or buffer.master is None:
                continue
            start, _ = buffer.interval
            pieces = tuple(
                Piece(member.name, member.index, first, last, member.slot.length, start + first - member.slot.offset)
                for member, first, last in buffer.own_pieces()
            )
            replicas = buffer.key.replicate
            share = buffer.layout.chunk // replicas.size
            counted = slice(replicas.index * share, (replicas.index + 1) * share)
            weight = None if buffer.master is buffer.shard else buffer.shard
            shards.append(Shard(buffer.key.group, buffer.master, weight, pieces=pieces, counted=counted))
    return shards


def _loader(config: Config, training_data: Any, mesh: DataMesh, collate_fn: Any) -> Any:
    if training_data is None:
        return None
    return build_loader(
        training_data,
        config.train_micro_batch_size_per_gpu,
        mesh.data,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
    )


def _scheduler(given: Any, config: Config, optimizer: ShardedOptimizer) -> Any:
    if given is not None:
        return adopt_scheduler(given, optimizer)
    return None if config.scheduler is None else build_scheduler(config.scheduler, optimizer)


def _announce(engine: Engine, config: Config) -> None:
    if get_rank() != 0:
        return
    clipping = config.gradient_clipping or "off"
    log.info(
        "stage %d over %d ranks on %s, %d units, gradient clipping %s",
        engine.zero_optimization_stage(),
        get_world_size(),
        engine.device,
        len(trainer_of(engine).parts.runtime.units),
        clipping,
    )
    if config.dump_state:
        log.warning("configuration: %s", config.model_dump_json(indent=2))
