"""What `shardwise doctor` prints about a configuration: what is wrong with it, or else what was understood, and from where each
number came.

Owns the layout of that text. Refuses to judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from pydantic.fields import FieldInfo

from shardwise.config.batch import BATCH_KEYS
from shardwise.config.fields import Section
from shardwise.config.loading import Examination, examine
from shardwise.config.model import ConfigView
from shardwise.config.problems import dotted, raise_for, show
from shardwise.config.sections import Optimizer, Scheduler
from shardwise.config.source import Source
from shardwise.errors import ConfigError

__all__ = ["Diagnosis", "diagnose", "doctor_report"]


@dataclass(frozen=True)
class Diagnosis:
    """A report and its verdict."""

    text: str
    healthy: bool


def doctor_report(source: Source, world_size: int = 1) -> str:
    """Describe a configuration for a person: batch numbers and their origin, precision, values, inert keys; or its problems.

    Args:
        source: as for `load_config`.
        world_size: ranks to resolve the batch numbers for.
    """
    return diagnose(source, world_size).text


def diagnose(source: Source, world_size: int = 1) -> Diagnosis:
    """The report together with whether `load_config` would accept the configuration.

    A configuration with problems is described by them alone: they must not be looked for under what is right.
    """
    try:
        examined = examine(source, world_size)
        raise_for(examined.notes.problems, examined.text.name)
    except ConfigError as error:
        return Diagnosis(f"{error}\n", healthy=False)
    blocks = [
        f"{examined.text.name}, resolved for {world_size} rank{'' if world_size == 1 else 's'}",
        _block("Batch", _table(_batch_rows(examined))),
        _block("In short", _table(_summary_rows(examined.view))),
        _block("Values given", _table(_value_rows(examined.view, set(examined.notes.inert)))),
        _block("Keys without effect here", examined.notes.inert),
        _block("Warnings", [f"- {line}" for line in examined.notes.warnings]),
    ]
    return Diagnosis("\n\n".join(block for block in blocks if block) + "\n", healthy=True)


def _block(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _batch_rows(examined: Examination) -> list[tuple[str, ...]]:
    if examined.batch is None:
        raise AssertionError("no problem was noted and the batch numbers are unknown")
    numbers = examined.batch.as_keys()
    return [(name, str(numbers[name]), examined.batch.origin[name]) for name in BATCH_KEYS]


def _summary_rows(view: ConfigView) -> list[tuple[str, ...]]:
    clipping = view.gradient_clipping
    return [
        ("ZeRO stage", str(view.zero_optimization.stage)),
        ("Precision", _precision(view)),
        ("Gradients", _gradients(view)),
        ("Gradient clipping", f"to a norm of {clipping:g}" if clipping else "off (0; DeepSpeed clips to 1.0 since 0.19)"),
        ("Optimizer", view.optimizer.type if view.optimizer else "none here; pass one to initialize()"),
        *_offloads(view),
        ("Schedule", view.scheduler.type if view.scheduler else "none here"),
    ]


def _offloads(view: ConfigView) -> list[tuple[str, ...]]:
    offload = view.zero_optimization.offload_optimizer
    if offload.device == "none":
        return []
    low = view.fp16.enabled or (view.bf16.enabled and not view.bf16.bf16_master_weights_and_grads)
    what = "moments and fp32 master weights" if low else "moments"
    share = "" if offload.ratio == 1 else f"{offload.ratio:.0%} of "
    if offload.device == "cpu":
        return [("Optimizer state", f"{share}{what} in host memory")]
    memory = offload.buffer_count * offload.buffer_size / 2**20
    return [("Optimizer state", f"{share}{what} on disk under {offload.nvme_path}; {memory:.0f} MiB of buffers per rank")]


def _precision(view: ConfigView) -> str:
    pinned = len(view.data_types.keep_in_fp32_modules)
    tail = f"; {pinned} pattern{'' if pinned == 1 else 's'} kept in fp32" if pinned else ""
    if view.fp16.enabled:
        fp16 = view.fp16
        dynamic = f"loss scale adapts from {2**fp16.initial_scale_power}, never below {fp16.min_loss_scale}"
        scale = f"loss scale fixed at {fp16.loss_scale:g}" if fp16.loss_scale else dynamic
        return f"fp16 with fp32 master weights; {scale}{tail}"
    if view.bf16.enabled:
        master = "bf16" if view.bf16.bf16_master_weights_and_grads else "fp32"
        return f"bf16 with {master} master weights{tail}"
    if view.torch_autocast.enabled:
        return f"weights as the model has them, forward pass under autocast in {view.torch_autocast.dtype}"
    return "as the model has it (fp32 for an ordinary model)"


def _gradients(view: ConfigView) -> str:
    low = view.bf16.enabled and view.bf16.bf16_master_weights_and_grads
    accumulate = view.data_types.grad_accum_dtype or ("bf16" if low else "fp32")
    travel = view.communication_data_type or accumulate
    operation = "averaged" if view.gradient_allreduce_op == "mean" else "summed"
    return f"accumulated in {accumulate}, sent in {travel}, {operation} over the data-parallel ranks"


def _value_rows(view: ConfigView, without_effect: set[str]) -> list[tuple[str, ...]]:
    return [row for row in _values(view, "") if row[0] not in without_effect]


def _values(given: Section, path: str) -> Iterator[tuple[str, ...]]:
    """Path, value and default of every key that was given."""
    for name, field in type(given).model_fields.items():
        here, value = dotted(path, name), cast("object", getattr(given, name))
        if name not in given.model_fields_set or name in BATCH_KEYS:
            continue
        if isinstance(value, Section):
            yield from _values(value, here)
        elif isinstance(given, (Optimizer, Scheduler)) and name == "params":
            yield from ((dotted(here, key), show(item, key), "") for key, item in given.params.items())
        else:
            yield here, show(value, here), _compared(field, value)


def _compared(field: FieldInfo, value: object) -> str:
    """How a value relates to the default."""
    if field.is_required():
        return ""
    default = cast("object", field.get_default(call_default_factory=True))
    if default == value:
        return "the default"
    return "unset by default" if default is None else f"default {show(default)}"
