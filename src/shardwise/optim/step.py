"""The one step path: every optimizer step, at every stage and precision, goes through here.

Owns the order of things: norm, agreement on what is not finite, one scalar, one update, the loss scale. It is the only writer
of master weights. Refuses to know modules, hooks and process groups; sums over ranks are functions it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import UsageError, explain
from shardwise.optim.driver import Driver, Groups, StepSettings, Sum, Sums
from shardwise.optim.loss_scale import LossScale
from shardwise.optim.norm import BadGradient, find_bad, sum_of_squares
from shardwise.optim.shards import Shard

__all__ = ["StepPath", "StepReport"]

# torch.nn.utils.clip_grad_norm_ divides by the norm plus this.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepReport:
    """What one attempted step did; equal on all ranks.

    Args:
        applied: weights were updated.
        grad_norm: norm of the unscaled gradients over all parameters, before clipping; Inf or NaN when some gradient is.
        loss_scale: the scale that the gradients carried.
        nonfinite: some gradient was Inf or NaN.
        culprit: which gradient was bad, when the step was skipped for it.
        extra: the caller's numbers, summed over ranks.
    """

    applied: bool
    grad_norm: float
    loss_scale: float
    nonfinite: bool
    culprit: str = ""
    extra: Tensor | None = None


class StepPath:
    """Takes steps on this rank's shards, together with the other ranks.

    Args:
        shards: what this rank updates.
        driver: how; made for the same shards.
        settings: clipping and what to do about non-finite gradients.
        sum_over_ranks: sums a small tensor over all data ranks, in place; the text names the collective.
        sum_over_shards: the same over the ranks that hold one copy of the parameters between them.
        scaler: the loss scale that the gradients carry.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        driver: Driver,
        settings: StepSettings,
        sum_over_ranks: Sum,
        sum_over_shards: Sum,
        scaler: LossScale,
    ) -> None:
        if len(shards) != len(driver.shards) or any(a is not b for a, b in zip(shards, driver.shards, strict=True)):
            raise UsageError(explain("the driver was made for other shards", do="pass the shards given to plan.driver()"))
        self.shards = driver.shards
        self.driver = driver
        self.settings = settings
        self.scaler = scaler
        self.last: StepReport | None = None
        self._sums = Sums(sum_over_ranks, sum_over_shards)
        self._device = settings.device or (shards[0].master.device if shards else torch.device("cpu"))
        driver.configure(settings)

    def run(
        self,
        param_groups: Groups,
        denominator: float,
        used: Sequence[bool],
        extra: Tensor | None = None,
        describe: Callable[[BadGradient], str] = str,
    ) -> StepReport:
        """Attempt one step. A collective call.

        Args:
            param_groups: live options, by `Shard.group`.
            denominator: what the summed gradients are divided by: micro-batches x data ranks, or the number of tokens.
            used: by parameter index, whether any rank delivered a gradient; equal on all ranks. The others keep their weights
                and their state bit for bit, and do not count a step.
            extra: 1-D, more numbers to sum over ranks in the same collective.
            describe: text for a bad gradient, for messages; called on all ranks alike, so that it may ask them.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            UsageError: the denominator is not above 0.
        """
        if not 0.0 < denominator < math.inf:
            raise UsageError(explain("gradients cannot be averaged", expected="a denominator above 0", found=f"{denominator}"))
        scale = self.scaler.scale
        squares, summed = self._measure(extra)
        culprit: BadGradient | None = None
        nonfinite = False
        if not math.isfinite(squares):
            squares, nonfinite, culprit = self._examine()
        norm = math.sqrt(squares) / (denominator * scale) if squares >= 0.0 else math.nan
        skip = nonfinite and self.settings.check_overflow
        if not skip:
            self._apply(param_groups, used, norm, 1.0 / (denominator * scale))
        text = describe(culprit) if skip and culprit is not None else ""
        self.last = StepReport(not skip, norm, scale, nonfinite, text, summed)
        self.scaler.update(skip, text)
        return self.last

    def _measure(self, extra: Tensor | None) -> tuple[float, Tensor | None]:
        """Sum of squares of all gradients, and the caller's numbers, in one collective."""
        vector = sum_of_squares(self.shards, self._device).view(1)
        if extra is not None:
            vector = torch.cat([vector, extra.to(self._device, torch.float64).view(-1)])
        vector = self._sums.ranks(vector, "gradient norm")
        return float(vector[0]), None if extra is None else vector[1:]

    def _examine(self) -> tuple[float, bool, BadGradient | None]:
        """The sum of squares was not finite: all ranks look closer, and agree on whether and where a gradient is not."""
        bad = find_bad(self.shards)
        vector = torch.zeros(1 + self.settings.world, dtype=torch.float64, device=self._device)
        vector[0] = sum_of_squares(self.shards, self._device, exact=True)
        # One slot per rank: 0 for all finite, else which parameter (counted from 1, 0 for padding) and of which kind.
        if bad is not None:
            vector[1 + self.settings.rank] = 2.0 * (bad.index + 1) + 1.0 + bad.nan
        values = [float(value) for value in self._sums.ranks(vector, "non-finite gradients").cpu()]
        found = [self._decode(rank, int(code) - 1) for rank, code in enumerate(values[1:]) if code]
        return values[0], bool(found), min(found, key=lambda one: (one.index < 0, one.index), default=None)

    def _decode(self, rank: int, code: int) -> BadGradient:
        index = code // 2 - 1
        return BadGradient(index, self._name(index), bool(code % 2), rank)

    def _name(self, index: int) -> str:
        if index < 0:
            return "(padding)"
        if index < len(self.settings.names):
            return self.settings.names[index]
        local = {piece.index: piece.name for shard in self.shards for piece in shard.pieces}
        return local.get(index, f"#{index}")

    def _apply(self, groups: Groups, used: Sequence[bool], norm: float, unscale: float) -> None:
        clip = self.settings.clip
        factor = 1.0
        if clip > 0.0:
            # Not min(): the factor of a NaN norm is NaN, as in clip_grad_norm_.
            factor = clip / (norm + _CLIP_EPSILON)
            factor = 1.0 if factor > 1.0 else factor
        with torch.no_grad():
            self.driver.update(groups, factor * unscale, used, self._sums)
