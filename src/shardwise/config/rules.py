"""Rules that look at more than one key, all in this one place.

Each rule says why a combination cannot work, or is worth a warning. Refuses to know how values were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.config.fields import Section
from shardwise.config.model import ConfigView
from shardwise.config.problems import Notes, Problem, show

__all__ = ["apply_rules"]

Rule = Callable[[ConfigView, Notes], Iterator[Problem]]


def apply_rules(config: ConfigView, notes: Notes) -> None:
    """Note everything the rules find. Values that were refused already are at their defaults in `config`."""
    for rule in _RULES:
        for problem in rule(config, notes):
            notes.refuse(problem)
    for warning in _WARNINGS:
        notes.warnings += warning(config, notes)


# --- problems ---------------------------------------------------------------------------------------------------------


def _one_precision(config: ConfigView, _: Notes) -> Iterator[Problem]:
    switched_on = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(switched_on) > 1:
        names = ", ".join(f"{name}.enabled" for name in switched_on)
        yield Problem(
            f"{switched_on[1]}.enabled",
            "conflicts with another precision",
            expected="at most one of fp16.enabled, bf16.enabled, torch_autocast.enabled",
            found=f"{names} all true",
            do="Switch all but one off",
        )


def _sixteen_bits_match(config: ConfigView, _: Notes) -> Iterator[Problem]:
    """The two 16-bit formats do not contain each other: fp16 overflows where bf16 does not, bf16 rounds where fp16 does not."""
    chosen = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else None
    other = {"fp16": "bf16", "bf16": "fp16"}.get(chosen or "")
    places = {
        "communication_data_type": config.communication_data_type,
        "data_types.grad_accum_dtype": config.data_types.grad_accum_dtype,
    }
    for path, value in places.items():
        if value is not None and value == other:
            yield Problem(
                path,
                f"conflicts with {chosen}.enabled",
                expected=f'"{chosen}" or "fp32"',
                found=show(value),
                do="The other 16-bit format would lose range or digits of every gradient",
            )


def _bf16_states(config: ConfigView, _: Notes) -> Iterator[Problem]:
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        yield Problem(
            "bf16.bf16_optimizer_states",
            "needs bf16 master weights",
            expected="bf16.bf16_master_weights_and_grads true",
            found="false",
            do="Set both or neither",
        )


def _units_and_leaves(config: ConfigView, _: Notes) -> Iterator[Problem]:
    leaf = config.zero_optimization.leaf_module
    for name in config.zero_optimization.units:
        if name in leaf.classes or name in leaf.names:
            yield Problem(
                "zero_optimization.units",
                f"names {show(name)}, which zero_optimization.leaf_module names too",
                do="A leaf module already is one unit; name it in one of the two",
            )


def _nesterov(config: ConfigView, notes: Notes) -> Iterator[Problem]:
    if config.optimizer is None or config.optimizer.type != "SGD":
        return
    params = config.optimizer.params
    if notes.knows_bad("optimizer.params.momentum", "optimizer.params.dampening") or not params.get("nesterov"):
        return
    if not params.get("momentum") or params.get("dampening"):
        yield Problem(
            "optimizer.params.nesterov",
            "needs momentum",
            expected="momentum above 0 and dampening 0",
            found=f"momentum {params.get('momentum', 0)} and dampening {params.get('dampening', 0)}",
        )


def _offload(config: ConfigView, _: Notes) -> Iterator[Problem]:
    offload, path = config.zero_optimization.offload_optimizer, "zero_optimization.offload_optimizer"
    if offload.device == "none":
        return
    if not config.zero_optimization.stage:
        yield Problem(
            f"{path}.device",
            "needs a stage at which every rank updates a share",
            expected="zero_optimization.stage 1, 2 or 3",
            found="0",
        )
    if offload.device == "nvme" and not offload.nvme_path:
        yield Problem(f"{path}.nvme_path", "is missing", expected="a folder on a fast disk, for device nvme", found="nothing")
    if config.optimizer is not None and config.optimizer.type == "Lamb":
        yield Problem(
            f"{path}.device",
            "does not go with Lamb",
            expected="an elementwise rule: Adam, AdamW, SGD, Adagrad or Lion",
            found='"Lamb", which passes over the state twice',
        )


_RULES: tuple[Rule, ...] = (_one_precision, _sixteen_bits_match, _bf16_states, _units_and_leaves, _nesterov, _offload)


# --- warnings ---------------------------------------------------------------------------------------------------------


def _forgotten_switch(config: ConfigView, notes: Notes) -> list[str]:
    """Settings under a precision that was never switched on, and never switched off either."""
    warnings: list[str] = []
    for name in ("fp16", "bf16", "torch_autocast"):
        given: Section = getattr(config, name)
        is_mentioned = "enabled" in given.model_fields_set or f"{name}.enabled" in notes.unfilled | notes.bad
        if given.model_fields_set and not is_mentioned:
            warnings.append(f"{name} has settings but no {name}.enabled, so it is off")
    return warnings


def _unscaled_fp16(config: ConfigView, _: Notes) -> list[str]:
    if config.communication_data_type == "fp16" and not (config.fp16.enabled or config.bf16.enabled):
        return ["communication_data_type is fp16 without fp16.enabled: no loss scale keeps gradients in its range"]
    return []


def _adamw_mode(config: ConfigView, _: Notes) -> list[str]:
    optimizer = config.optimizer
    if optimizer is not None and optimizer.type == "AdamW" and optimizer.params.get("adam_w_mode") is False:
        return ["optimizer.params.adam_w_mode is false but type AdamW always decays the weights; use type Adam"]
    return []


def _short_schedule(config: ConfigView, _: Notes) -> list[str]:
    params = config.scheduler.params if config.scheduler else {}
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if total is not None and warmup > total:
        return [f"scheduler.params.warmup_num_steps {warmup} is more than total_num_steps {total}: training ends in warmup"]
    return []


_WARNINGS = (_forgotten_switch, _unscaled_fp16, _adamw_mode, _short_schedule)
