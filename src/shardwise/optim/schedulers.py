"""Learning-rate schedulers: the configuration's five by name, and the user's own.

Owns attaching a schedule to an optimizer's groups. The formulas are in `shardwise.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import OptimizerError, explain
from shardwise.optim.section import nearest_name, read_section, reject_unknown, same_name
from shardwise.schedules import OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, group_weights

__all__ = ["GroupSchedule", "adopt_scheduler", "build_scheduler", "check_scheduler"]

Curve = Callable[[int], float]
"""A value for the next step, given the number of steps taken."""


class GroupSchedule(LRScheduler):
    """Sets each group's learning rate (and momentum) from a function of the number of steps taken.

    Call `step()` after every optimizer step that was applied. The learning rate of the first step is set at construction.

    Args:
        optimizer: whose `param_groups` to drive.
        curves: a learning-rate curve for each group.
        momentum: a curve for the momentum of all groups that have one; None leaves it alone.
    """

    def __init__(self, optimizer: Optimizer, curves: list[Curve], momentum: Curve | None = None) -> None:
        self._curves = curves
        self._momentum = momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Learning rates of the next step, by group."""
        return [curve(self.last_epoch) for curve in self._curves]

    def step(self, epoch: int | None = None) -> None:
        """Move on by one step."""
        super().step(epoch)
        self._set_momentum()

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule is. The curves come from the configuration, not from here."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved place and set the groups accordingly."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._last_lr: list[Any] = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr
        self._set_momentum()

    def _set_momentum(self) -> None:
        if self._momentum is None:
            return
        momentum = self._momentum(self.last_epoch)
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif group.get("momentum"):
                group["momentum"] = momentum


def build_scheduler(section: Any, optimizer: Optimizer) -> GroupSchedule:
    """The scheduler that a configuration section asks for.

    Every group follows the schedule scaled by its own base learning rate, so that ratios between groups stay: the numbers of
    the section are those of the group with the largest one. A list of numbers, one per group, is taken as it is.

    Args:
        section: a mapping or object with `type` (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest) and `params`.
        optimizer: whose groups to drive.

    Raises:
        OptimizerError: unknown type or parameter, or a value that makes no schedule.
    """
    kind, params = read_section(section)
    name = same_name(kind, _BUILDERS)
    if name is None:
        raise OptimizerError(
            explain(
                f"scheduler type {kind!r} is not known",
                expected=f"one of {', '.join(_BUILDERS)}",
                do=f"{nearest_name(kind, _BUILDERS)}Any other schedule can be passed to initialize() as an object",
            )
        )
    build, known = _BUILDERS[name]
    reject_unknown(name, params, known)
    return build(_Params(name, params), optimizer)


def adopt_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """The user's scheduler: an object with `step`, or a function of the optimizer that makes one.

    Raises:
        OptimizerError: neither, or it drives another optimizer's groups.
    """
    made = scheduler
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        made = scheduler(optimizer)
    check_scheduler(made, made=True)
    driven = getattr(made, "optimizer", None)
    groups: Any = getattr(driven, "param_groups", None)
    if groups is not None and not _same_groups(groups, optimizer.param_groups):
        raise OptimizerError(
            explain(
                "the learning-rate scheduler drives the groups of another optimizer",
                do="make it for the optimizer that is given to initialize(), or give a function of the optimizer",
            )
        )
    return made


def check_scheduler(given: Any, *, made: bool = False) -> None:
    """Refuse what is no schedule.

    Args:
        given: what the user gave; None is none at all.
        made: it is what a function of the user's made.

    Raises:
        OptimizerError: it has no `step`, and is no function that could make something that has.
    """
    if callable(getattr(given, "step", None)) or (not made and (given is None or callable(given))):
        return
    raise OptimizerError(
        explain(
            "the learning-rate scheduler cannot be used",
            expected="an object with step(), or a function of the optimizer that makes one",
            found=type(given).__name__,
            do="pass lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10), for example",
        )
    )


def _same_groups(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class _Params:
    """Parameters of one section, read with their defaults."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self._values = values

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OptimizerError(explain(f"{self.name}: bad {key!r}", expected="a number", found=repr(value)))
        return float(value)

    def steps(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self.number(key, default)
        if value < least or value != int(value):
            raise OptimizerError(
                explain(f"{self.name}: bad {key!r}", expected=f"a whole number from {least}", found=repr(value))
            )
        return int(value)

    def require(self, *keys: str) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise OptimizerError(explain(f"{self.name} needs {', '.join(missing)}"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._values.get(key, default))

    def linear(self) -> bool:
        shape = str(self._values.get("warmup_type", "log")).lower()
        if shape not in ("log", "linear"):
            raise OptimizerError(explain(f"{self.name}: bad 'warmup_type'", expected="log or linear", found=repr(shape)))
        return shape == "linear"

    def per_group(self, key: str, bases: list[float], weights: list[float], default: float | None) -> list[float]:
        """A learning rate for each group: one number scaled by the weights, a list as it is, or each group's own base."""
        value = self._values.get(key, default)
        if value is None:
            return bases
        if isinstance(value, (list, tuple)):
            values = [float(one) for one in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            if len(values) != len(bases):
                raise OptimizerError(
                    explain(f"{self.name}: bad {key!r}", expected=f"{len(bases)} numbers, one per group", found=repr(values))
                )
            return values
        return [self.number(key, default) * weight for weight in weights]


def _base_lrs(optimizer: Optimizer) -> tuple[list[float], list[float]]:
    """Each group's own learning rate, and its weight relative to the largest."""
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return bases, group_weights(bases, [not group["params"] for group in optimizer.param_groups])


def _warmup(params: _Params, optimizer: Optimizer) -> GroupSchedule:
    bases, weights = _base_lrs(optimizer)
    starts = params.per_group("warmup_min_lr", bases, weights, 0.0)
    peaks = params.per_group("warmup_max_lr", bases, weights, None)
    steps, linear = params.steps("warmup_num_steps", 1000), params.linear()
    if params.name == "WarmupDecayLR":
        total = params.steps("total_num_steps", least=1)
        shapes = [WarmupDecay(low, high, steps, linear, total) for low, high in zip(starts, peaks, strict=True)]
    else:
        shapes = [Warmup(low, high, steps, linear) for low, high in zip(starts, peaks, strict=True)]
    return GroupSchedule(optimizer, [shape.lr for shape in shapes])


def _cosine(params: _Params, optimizer: Optimizer) -> GroupSchedule:
    bases, _ = _base_lrs(optimizer)
    total = params.steps("total_num_steps", least=1)
    start, end = params.number("warmup_min_ratio", 0.0), params.number("cos_min_ratio", 1e-4)
    steps, linear = params.steps("warmup_num_steps", 1000), params.linear()
    shapes = [WarmupCosine(base, start, steps, total, end, linear) for base in bases]
    return GroupSchedule(optimizer, [shape.lr for shape in shapes])


def _one_cycle(params: _Params, optimizer: Optimizer) -> GroupSchedule:
    bases, weights = _base_lrs(optimizer)
    params.require("cycle_min_lr", "cycle_max_lr")
    lows = params.per_group("cycle_min_lr", bases, weights, None)
    highs = params.per_group("cycle_max_lr", bases, weights, None)
    first, stairs = params.steps("cycle_first_step_size", 2000, least=1), params.steps("cycle_first_stair_count", 0)
    second = params.steps("cycle_second_step_size", first, least=1)
    second_stairs = params.steps("cycle_second_stair_count", stairs)
    shapes = [
        OneCycle(
            low,
            high,
            first,
            second,
            stairs,
            second_stairs,
            decay_every=params.steps("decay_step_size", 0),
            decay_rate=params.number("decay_lr_rate", 0.0),
            momentum_low=params.number("cycle_min_mom", 0.8),
            momentum_high=params.number("cycle_max_mom", 0.9),
            momentum_decay_rate=params.number("decay_mom_rate", 0.0),
        )
        for low, high in zip(lows, highs, strict=True)
    ]
    momentum = shapes[0].momentum if shapes and params.flag("cycle_momentum", True) else None
    return GroupSchedule(optimizer, [shape.lr for shape in shapes], momentum)


def _range_test(params: _Params, optimizer: Optimizer) -> GroupSchedule:
    bases, weights = _base_lrs(optimizer)
    lows = params.per_group("lr_range_test_min_lr", bases, weights, 1e-3)
    every, rate = params.steps("lr_range_test_step_size", 2000, least=1), params.number("lr_range_test_step_rate", 1.0)
    stairs = params.flag("lr_range_test_staircase", False)
    shapes = [RangeTest(low, every, rate, stairs) for low in lows]
    return GroupSchedule(optimizer, [shape.lr for shape in shapes])


_WARMUP = ("warmup_num_steps", "warmup_type")
_BUILDERS: dict[str, tuple[Callable[[_Params, Optimizer], GroupSchedule], tuple[str, ...]]] = {
    "WarmupLR": (_warmup, ("warmup_min_lr", "warmup_max_lr", *_WARMUP)),
    "WarmupDecayLR": (_warmup, ("warmup_min_lr", "warmup_max_lr", "total_num_steps", *_WARMUP)),
    "WarmupCosineLR": (_cosine, ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP)),
    "OneCycle": (
        _one_cycle,
        (
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
        ),
    ),
    "LRRangeTest": (
        _range_test,
        ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
    ),
}
