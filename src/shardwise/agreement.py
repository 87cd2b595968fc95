"""Whether all ranks were started with the same model, configuration and parameter groups.

Ranks that were not would exchange the wrong bytes. Owns what must agree, and telling where it does not. Refuses to know what is
made of it.
"""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.errors import DivergenceError, explain
from shardwise.mesh import Axis
from shardwise.optim import OptimizerPlan

__all__ = ["check_agreement"]


def check_agreement(comm: Comm, data: Axis, model: nn.Module, config: Config, plan: OptimizerPlan | None) -> None:
    """Compare this rank's beginnings with those of the others. Collective over the data ranks.

    Raises:
        DivergenceError: they differ; on every rank, with the first difference.
    """
    mine = [*_describe_model(model), *_describe_config(config), *([] if plan is None else _describe_groups(plan, model))]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest, data, "compare models"))) == 1:
        return
    everyone: list[list[str]] = comm.all_gather_object(mine, data, "compare models in detail")
    for rank, other in zip(data.ranks, everyone, strict=True):
        for left, right in zip_longest(everyone[0], other, fillvalue="nothing"):
            if left != right:
                raise DivergenceError(
                    explain(
                        f"rank {data.ranks[0]} and rank {rank} were started with different models or configurations",
                        expected=f"on rank {rank}: {left}",
                        found=right,
                        do="build the same model and optimizer from the same configuration on every rank",
                    )
                )


def _describe_model(model: nn.Module) -> list[str]:
    parameters = [f"{name}: {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}" for name, p in model.named_parameters()]
    buffers = [f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return [*(f"parameter {line}" for line in parameters), *(f"buffer {line}" for line in buffers)]


def _describe_config(config: Config) -> list[str]:
    settings: dict[str, Any] = json.loads(config.model_dump_json())
    return [f"configuration {key}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(settings.items())]


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
