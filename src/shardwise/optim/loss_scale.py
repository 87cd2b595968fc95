"""The loss scale: one number and the rule that moves it.

Owns when the scale rises, falls or gives up. Refuses to know tensors, ranks and how an overflow was found; fed with the same
sequence of overflows it is in the same state on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from shardwise.errors import NonFiniteError, explain

__all__ = ["LossScale", "ScaleOptions"]

# A model whose gradients are all zero would double the scale for ever; beyond this, float32 cannot hold it.
_LARGEST = 2.0**126
_PATIENCE = 10


class ScaleOptions(Protocol):
    """The part of the `fp16` section that this module reads; `loss_scale` 0 means dynamic."""

    @property
    def enabled(self) -> bool: ...  # noqa: D102
    @property
    def loss_scale(self) -> float: ...  # noqa: D102
    @property
    def initial_scale_power(self) -> float: ...  # noqa: D102
    @property
    def loss_scale_window(self) -> float: ...  # noqa: D102
    @property
    def hysteresis(self) -> int: ...  # noqa: D102
    @property
    def consecutive_hysteresis(self) -> bool: ...  # noqa: D102
    @property
    def min_loss_scale(self) -> float: ...  # noqa: D102


@dataclass
class LossScale:
    """What the loss is multiplied by before backward, so that small fp16 gradients do not vanish.

    The dynamic rule: an overflow spends one unit of hysteresis; when only one is left, it halves the scale instead. After
    `window` steps without overflow the scale doubles and the hysteresis is full again.

    Args:
        scale: the current factor.
        dynamic: whether it moves at all.
        window: clean steps in a row before the scale doubles.
        hysteresis: overflows it takes to halve the scale for the first time.
        consecutive: every clean step restores the hysteresis, so that only overflows in a row count.
        minimum: the scale never falls below this.
        left: hysteresis not yet spent.
        clean: steps without overflow since the last overflow or doubling.
        stuck: overflows in a row while the scale could not fall any further.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    left: int = 2
    clean: int = 0
    stuck: int = 0

    @classmethod
    def constant(cls, scale: float = 1.0) -> LossScale:
        """A scale that never moves: 1 for fp32 and bf16, or a static fp16 scale."""
        return cls(scale=scale)

    @classmethod
    def from_config(cls, section: ScaleOptions | None) -> LossScale:
        """The scale that an `fp16` configuration section asks for; 1 if there is none or it is off."""
        if section is None or not section.enabled:
            return cls.constant()
        if section.loss_scale:
            return cls.constant(float(section.loss_scale))
        return cls(
            scale=max(2.0**section.initial_scale_power, section.min_loss_scale),
            dynamic=True,
            window=max(1, int(section.loss_scale_window)),
            hysteresis=max(1, section.hysteresis),
            consecutive=section.consecutive_hysteresis,
            minimum=section.min_loss_scale,
            left=max(1, section.hysteresis),
        )

    def update(self, overflow: bool, culprit: str = "") -> None:
        """Account for one attempted step.

        Args:
            overflow: the step was skipped, because some rank had a non-finite gradient.
            culprit: what the error message names as the first bad gradient.

        Raises:
            NonFiniteError: the 10th overflow in a row at a scale that cannot fall any further.
        """
        if overflow:
            self._overflow(culprit)
            return
        self.stuck = 0
        self.clean += 1
        if self.consecutive:
            self.left = self.hysteresis
        if self.dynamic and self.clean >= self.window:
            self.clean = 0
            self.left = self.hysteresis
            self.scale = min(self.scale * 2.0, _LARGEST)

    def _overflow(self, culprit: str) -> None:
        self.clean = 0
        if not self.dynamic or self.scale <= self.minimum:
            self.stuck += 1
            if self.stuck >= _PATIENCE:
                raise NonFiniteError(self._despair(culprit))
        if self.dynamic:
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2.0, self.minimum)

    def _despair(self, culprit: str) -> str:
        at = f" with the loss scale at its minimum ({self.scale:g})" if self.dynamic else ""
        return explain(
            f"{self.stuck} steps in a row were skipped for non-finite gradients{at}",
            expected="finite gradients",
            found=f"the first bad one in {culprit}" if culprit else "Inf or NaN",
            do="look for an overflow, a division by zero or a log of zero before that parameter, or lower the learning rate",
        )

    def state_dict(self) -> dict[str, float | int | bool]:
        """All of it as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Take over scale and counters; the rule (window, hysteresis, ...) stays the one configured now.

        A saved dynamic scale means nothing to a scale that is constant now, so it is then left alone.
        """
        if not (self.dynamic and state.get("dynamic", True)):
            return
        scale = float(state["scale"])
        self.scale = max(scale, self.minimum) if math.isfinite(scale) else self.scale
        self.left = min(int(state["left"]), self.hysteresis)
        self.clean = int(state["clean"])
        self.stuck = int(state["stuck"])
