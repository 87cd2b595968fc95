"""Learning-rate schedules as pure functions of the step.

Owns the formulas. Refuses to know optimizers, parameter groups and configuration sections.

`step` is everywhere the number of optimizer steps already taken; a function returns the value that the *next* step uses, so
`step == 0` is the value before training starts. The formulas are those that DeepSpeed's documentation and schedules give for
the five names of the configuration format. There the first two steps of a warm-up both use its start value: a warm-up's clock
is `step - 1`, and that is kept, because users compare curves between the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "OneCycle",
    "RangeTest",
    "Warmup",
    "WarmupCosine",
    "WarmupDecay",
    "group_weights",
]


@dataclass(frozen=True)
class Warmup:
    """WarmupLR: from `start` to `peak` in `steps` steps, then constant.

    Args:
        start: learning rate before the first step.
        peak: learning rate at the end of the warm-up.
        steps: length of the warm-up in optimizer steps; fewer than 2 counts as 2.
        linear: rise evenly; otherwise by `log(step) / log(steps)`, which is steep at first.
    """

    start: float
    peak: float
    steps: int
    linear: bool = False

    def lr(self, step: int) -> float:
        """Learning rate of the next step."""
        return self.start + (self.peak - self.start) * self.factor(step)

    def factor(self, step: int) -> float:
        """How much of the way from start to peak is done, 0 to 1."""
        return _warmup(step - 1, max(2, self.steps), self.linear)


@dataclass(frozen=True)
class WarmupDecay(Warmup):
    """WarmupDecayLR: the warm-up, then a straight line down to `start` at step `total`."""

    total: int = 1

    def factor(self, step: int) -> float:
        """How much of the way from start to peak is done, 0 to 1."""
        clock, steps = step - 1, max(2, self.steps)
        if clock < steps:
            return _warmup(clock, steps, self.linear)
        return max(0.0, (self.total - clock) / max(1, self.total - steps))


@dataclass(frozen=True)
class WarmupCosine:
    """WarmupCosineLR: the warm-up, then half a cosine from `peak` down to `peak * end_ratio` at step `total`.

    Args:
        peak: learning rate at the end of the warm-up.
        start_ratio: learning rate before the first step, as a fraction of `peak`.
        steps: length of the warm-up in optimizer steps; fewer than 2 counts as 2.
        total: the step at which the cosine ends; the value stays constant from there on.
        end_ratio: learning rate at the end, as a fraction of `peak`.
        linear: shape of the warm-up, as in `Warmup`.
    """

    peak: float
    start_ratio: float
    steps: int
    total: int
    end_ratio: float
    linear: bool = False

    def lr(self, step: int) -> float:
        """Learning rate of the next step."""
        return self.peak * self.ratio(step)

    def ratio(self, step: int) -> float:
        """Learning rate of the next step as a fraction of `peak`."""
        clock, steps = step - 1, max(2, self.steps)
        if clock < steps:
            return self.start_ratio + (1.0 - self.start_ratio) * _warmup(clock, steps, self.linear)
        progress = min(1.0, (clock - steps + 1) / max(1, self.total - steps))
        return self.end_ratio + (1.0 - self.end_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class OneCycle:
    """OneCycle: `low` up to `high` in `first` steps, back down in `second` steps, then decay (arXiv 1803.09820).

    The momentum moves the other way: `momentum_high` where the learning rate is `low`.

    Args:
        low, high: learning rates, the ends of the cycle.
        first, second: lengths of the two halves in optimizer steps.
        first_stairs, second_stairs: move in that many equal stairs instead of every step; 0 is every step.
        decay_every: unit of the decay after the cycle, in steps; 0 is no decay.
        decay_rate: after n units the learning rate is `low / (1 + n * decay_rate)`.
        momentum_low, momentum_high: ends of the momentum's cycle.
        momentum_decay_rate: after n units the momentum is `momentum_high * (1 + n * momentum_decay_rate)`.
    """

    low: float
    high: float
    first: float = 2000
    second: float = 2000
    first_stairs: int = 0
    second_stairs: int = 0
    decay_every: float = 0
    decay_rate: float = 0.0
    momentum_low: float = 0.8
    momentum_high: float = 0.9
    momentum_decay_rate: float = 0.0

    def lr(self, step: int) -> float:
        """Learning rate of the next step."""
        if step <= self.first + self.second:
            return self.low + (self.high - self.low) * self.height(step)
        return self.low / (1.0 + self.decay_rate * self._decayed(step))

    def momentum(self, step: int) -> float:
        """Momentum (the first beta, for Adam and its kin) of the next step."""
        if step <= self.first + self.second:
            return self.momentum_high - (self.momentum_high - self.momentum_low) * self.height(step)
        return self.momentum_high * (1.0 + self.momentum_decay_rate * self._decayed(step))

    def height(self, step: int) -> float:
        """Where on the cycle, 0 (low) to 1 (high)."""
        if step <= self.first:
            done, length, stairs = float(step), self.first, self.first_stairs
        else:
            done, length, stairs = self.first + self.second - step, self.second, self.second_stairs
        if stairs > 0:
            return math.floor(done * stairs / length) / stairs
        return done / length

    def _decayed(self, step: int) -> float:
        return (step - self.first - self.second) / self.decay_every if self.decay_every > 0 else 0.0


@dataclass(frozen=True)
class RangeTest:
    """LRRangeTest: grow from `low` without end, to find the largest learning rate that still trains (arXiv 1803.09820).

    Args:
        low: learning rate before the first step.
        every: unit of the growth in optimizer steps.
        rate: growth per unit: after n units the learning rate is `low * (1 + n * rate)`.
        stairs: move once per unit instead of every step.
    """

    low: float
    every: int = 2000
    rate: float = 1.0
    stairs: bool = False

    def lr(self, step: int) -> float:
        """Learning rate of the next step."""
        units = step / self.every
        return self.low * (1.0 + self.rate * (math.floor(units) if self.stairs else units))


def group_weights(bases: list[float], empty: list[bool]) -> list[float]:
    """What to multiply a schedule by for each parameter group, so that the ratios of the groups' own learning rates stay.

    The schedule as written is that of the non-empty group with the largest base learning rate. Empty groups keep their place.

    >>> group_weights([0.5, 3.0, 0.125], [False, True, False])
    [1.0, 6.0, 0.25]
    """
    candidates = [base for base, none in zip(bases, empty, strict=True) if not none] or bases
    reference = max(candidates, default=0.0)
    return [base / reference for base in bases] if reference > 0.0 else [1.0] * len(bases)


def _warmup(clock: int, steps: int, linear: bool) -> float:
    if clock < 0:
        return 0.0
    if clock >= steps:
        return 1.0
    return clock / steps if linear else math.log(clock + 1) / math.log(steps)
