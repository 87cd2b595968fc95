"""What a DeepSpeed checkpoint says of the training run besides tensors.

Owns the translation of counters, steps, options, loss scale and schedule. Refuses to know where tensors lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.contents import Facts
from shardwise.checkpoint.foreign.deepspeed_zero import Optimized
from shardwise.checkpoint.foreign.files import Files
from shardwise.checkpoint.foreign.narrow import as_dict
from shardwise.checkpoint.foreign.pieces import plain_items
from shardwise.checkpoint.foreign.unpickle import Record
from shardwise.optim.loss_scale import LossScale

__all__ = ["COUNTERS", "make_facts"]

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Of a parameter group: what is not an option.
_NAMES = ("params", "param_names", "step")
# Of a loss scaler.
_SCALER = (
    "cur_scale",
    "dynamic",
    "dynamic_loss_scale",
    "scale_window",
    "cur_iter",
    "last_overflow_iter",
    "delayed_shift",
    "consecutive_hysteresis",
    "min_scale",
    "cur_hysteresis",
)


def make_facts(state: Mapping[str, Any], optimizer: Mapping[str, Any], found: Optimized, files: Files) -> Facts:
    """Everything but ties and dtypes.

    Args:
        state: of the file of the model.
        optimizer: of the file of the optimizer, or its part of the former.
        found: what it holds by parameter.
        files: to read small tensors with.
    """
    counters = {key: value for key, value in plain_items(state, files, COUNTERS).items() if type(value) is int}
    accumulation = (as_dict(state.get("ds_config")) or {}).get("gradient_accumulation_steps")
    if isinstance(accumulation, int) and "global_steps" in counters:
        counters["micro_steps"] = counters["global_steps"] * accumulation  # a checkpoint falls between two steps
    facts = Facts(counters=counters, loss_scale=_loss_scale(optimizer, files), schedule=_schedule(state, files))
    for options, members in found.groups:
        kept = plain_items(options, files)
        facts.groups.append({"options": {k: v for k, v in kept.items() if k not in _NAMES}, "parameters": members})
    _note_state(facts, optimizer, found, files)
    facts.origin = {"format": "deepspeed", "version": str(state.get("ds_version", "")), "left_out": list(found.left_out)}
    return facts


def _note_state(facts: Facts, optimizer: Mapping[str, Any], found: Optimized, files: Files) -> None:
    """Steps and other numbers of each parameter. Which place the steps are in depends on the optimizer inside."""
    tensors = {state for _, state in found.states}
    known: dict[int, dict[str, Any]] = {}
    common = plain_items(optimizer, files, ("base_optimizer_state_step",)).get("base_optimizer_state_step")
    of_group = {name: plain_items(options, files, ("step",)).get("step") for options, names in found.groups for name in names}
    for name, state in found.others.items():
        if id(state) not in known:
            known[id(state)] = plain_items(state, files, [key for key in state if key not in tensors])
        numbers = _finite(known[id(state)])
        step = next((value for value in (numbers.pop("step", None), of_group.get(name), common) if value is not None), None)
        if isinstance(step, int | float) and math.isfinite(step):
            facts.steps[name] = int(step)
        if numbers:
            facts.numbers[name] = numbers


def _loss_scale(optimizer: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """The loss scale as `LossScale` keeps it. DeepSpeed counts all steps; the clean ones are those since the last overflow."""
    scaler = optimizer.get("loss_scaler", optimizer)
    found = plain_items(scaler.attributes if isinstance(scaler, Record) else as_dict(scaler) or {}, files, _SCALER)
    numbers = _finite(found)
    if "cur_scale" not in numbers:
        return {}
    if not numbers.get("dynamic", numbers.get("dynamic_loss_scale")):
        return LossScale.constant(float(numbers["cur_scale"])).state_dict()
    window = max(1, int(numbers.get("scale_window", 1000)))
    clean = int(numbers.get("cur_iter", 0)) - 1 - int(numbers.get("last_overflow_iter", -1))
    return LossScale(
        scale=float(numbers["cur_scale"]),
        dynamic=True,
        window=window,
        hysteresis=int(numbers.get("delayed_shift", 1)),
        consecutive=bool(numbers.get("consecutive_hysteresis", False)),
        minimum=float(numbers.get("min_scale", 1.0)),
        left=int(numbers.get("cur_hysteresis", 1)),
        clean=max(0, clean) % window,
    ).state_dict()


def _finite(values: Mapping[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}


def _schedule(state: Mapping[str, Any], files: Files) -> dict[str, Any]:
    schedule = as_dict(plain_items(state, files, ("lr_scheduler",)).get("lr_scheduler")) or {}
    last = schedule.get("last_batch_iteration")
    if isinstance(last, int):
        # DeepSpeed's own schedules count from -1, torch's and ours from 0.
        schedule.setdefault("last_epoch", last + 1)
    return schedule
