"""Which learning-rate schedules the format names, and the arguments each takes.

Refuses to know the formulas, which are in `shardwise.schedules`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from shardwise.config.fields import Lower, Number, Section, Whole, key

__all__ = [
    "SCHEDULER_PARAMS",
    "LRRangeTestParams",
    "OneCycleParams",
    "WarmupCosineLRParams",
    "WarmupDecayLRParams",
    "WarmupLRParams",
]


class WarmupLRParams(Section):
    """Rises from `warmup_min_lr` to `warmup_max_lr`, then stays."""

    warmup_min_lr: Number = key(0.0, "Learning rate of the first step.", ge=0, auto_is_error=True)
    warmup_max_lr: Number | None = key(
        None, "Learning rate after the warmup; the optimizer's own when absent.", ge=0, auto_is_error=True
    )
    warmup_num_steps: Whole = key(1000, "Steps of the warmup; fewer than 2 count as 2.", ge=0, auto_is_error=True)
    warmup_type: Annotated[Literal["log", "linear"], Lower] = key("log", "Shape of the rise.")


class WarmupDecayLRParams(WarmupLRParams):
    """Rises like WarmupLR, then falls in a straight line to `warmup_min_lr` at `total_num_steps`."""

    total_num_steps: Whole = key(..., "Steps of the whole training.", ge=1, auto_is_error=True)


class WarmupCosineLRParams(Section):
    """Rises to the optimizer's own learning rate, then falls along half a cosine."""

    total_num_steps: Whole = key(..., "Steps of the whole training.", ge=1, auto_is_error=True)
    warmup_min_ratio: Number = key(0.0, "Share of the learning rate at the first step.", ge=0)
    warmup_num_steps: Whole = key(1000, "Steps of the warmup; fewer than 2 count as 2.", ge=0, auto_is_error=True)
    cos_min_ratio: Number = key(1e-4, "Share of the learning rate at the end.", ge=0)
    warmup_type: Annotated[Literal["log", "linear"], Lower] = key("log", "Shape of the rise.")


class OneCycleParams(Section):
    """One cycle (Smith, arXiv:1803.09820): up, down, then a slow decay; momentum goes the other way."""

    cycle_min_lr: Number = key(..., "Learning rate at the start and end of the cycle.", ge=0, auto_is_error=True)
    cycle_max_lr: Number = key(..., "Learning rate at the top of the cycle.", ge=0, auto_is_error=True)
    decay_lr_rate: Number = key(0.0, "Decay of the learning rate after the cycle.", ge=0)
    cycle_first_step_size: Whole = key(2000, "Steps of the rise.", ge=1, auto_is_error=True)
    cycle_second_step_size: Whole | None = key(
        None, "Steps of the fall; as many as the rise when absent.", ge=1, auto_is_error=True
    )
    decay_step_size: Whole = key(0, "Steps per decay interval after the cycle; 0 for none.", ge=0, auto_is_error=True)
    cycle_momentum: bool = key(True, "Whether momentum cycles too.")
    cycle_min_mom: Number = key(0.8, "Momentum at the top of the cycle.", ge=0, le=1)
    cycle_max_mom: Number = key(0.9, "Momentum at the start and end of the cycle.", ge=0, le=1)
    decay_mom_rate: Number = key(0.0, "Growth of the momentum after the cycle.", ge=0)
    cycle_first_stair_count: Whole = key(0, "Rise in this many stairs; 0 for a straight line.", ge=0)
    cycle_second_stair_count: Whole | None = key(None, "Fall in this many stairs; as many as the rise when absent.", ge=0)


class LRRangeTestParams(Section):
    """Raises the learning rate steadily, to see where training breaks (Smith, arXiv:1803.09820)."""

    lr_range_test_min_lr: Number = key(1e-3, "Learning rate at the start.", ge=0, auto_is_error=True)
    lr_range_test_step_size: Whole = key(2000, "Steps per increase.", ge=1, auto_is_error=True)
    lr_range_test_step_rate: Number = key(1.0, "How much each increase adds, as a share of the start.", ge=0)
    lr_range_test_staircase: bool = key(False, "Increase in stairs instead of at every step.")


SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
