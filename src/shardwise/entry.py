"""`initialize`: the door to the engine.

Owns its signature, and what the arguments may be. Refuses to know what is made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.arguments import check_arguments
from shardwise.assembly import Given, assemble
from shardwise.comm import get_rank, get_world_size, init_distributed, is_initialized
from shardwise.config import Config, load_config
from shardwise.engine import Engine, trainer_of
from shardwise.errors import ConfigError, ParameterError, UsageError, explain
from shardwise.optim import ShardedOptimizer, check_scheduler
from shardwise.settings import show_log

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
            configuration.
        model_parameters: parameters, (name, parameter) pairs or parameter groups to train; None for all that require gradients.
        training_data: a dataset; a distributed, resumable loader over it is returned.
        lr_scheduler: a `torch.optim.lr_scheduler` object, or a function of the optimizer; wins over the configuration.
        mpu: not available yet.
        dist_init_required: False if the process group exists already; None finds out.
        collate_fn: for the loader.
        config: a dict, a path, or JSON text.
        config_params: older name of `config`.

    Returns:
        `(engine, optimizer, data loader, learning-rate scheduler)`; what there is none of is None.

    Raises:
        ConfigError: the configuration has problems; all are listed.
        ParameterError: the model has parameters that cannot be managed, or `model_parameters` holds none.
        UsageError: `training_data` is no dataset, or `collate_fn` no function.
        OptimizerError: the optimizer or the schedule is none, or cannot be used on shards.
        DivergenceError: the ranks have different models or configurations.
    """
    model = _checked(model, mpu)
    check_arguments(model_parameters=model_parameters, training_data=training_data, collate_fn=collate_fn)
    check_scheduler(lr_scheduler)
    if not is_initialized() and dist_init_required is not False:
        init_distributed()
    settings = load_config(_pick_config(args, config, config_params), world_size=get_world_size())
    show_log(settings)
    for warning in settings.warnings:
        log.warning(warning)
    engine = assemble(Given(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn), settings)
    _announce(engine, settings)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _checked(model: Any, mpu: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ParameterError(
            explain("initialize needs a model", expected="model=<torch.nn.Module>", found=type(model).__name__)
        )
    if mpu is not None:
        raise UsageError(
            explain("initialize(mpu=...) is not available yet", do="leave it out; all ranks are data-parallel ranks")
        )
    return model


def _pick_config(args: Any, config: Any, config_params: Any) -> Any:
    if config is not None and config_params is not None and config is not config_params:
        raise ConfigError(explain("both config and config_params were given", do="pass config only"))
    for candidate in (config, config_params, getattr(args, "shardwise_config", None), getattr(args, "deepspeed_config", None)):
        if candidate is not None:
            return candidate
    return None


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
