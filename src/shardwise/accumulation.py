"""When a step is due, and what one gradient is divided by: the one accumulation rule.

The gradients of the backwards of a window are summed. `engine.backward(loss)` contributes grad(loss) /
gradient_accumulation_steps; with `scale_wrt_gas=False`, and from a plain `loss.backward()`, a loss contributes grad(loss) as
it is. The sum is averaged over the data ranks. A window ends with the `gradient_accumulation_steps`-th call of `step()`; or,
once `set_gradient_accumulation_boundary` was called, when that says so; or, with `managed_gradient_accumulation` off, with
every `step()`.

Pure counting. Refuses to know tensors and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import UsageError, explain

__all__ = ["Window"]


@dataclass
class Window:
    """One accumulation window after the other.

    Args:
        length: `gradient_accumulation_steps`.
        managed: whether calls of `step()` are counted.
    """

    length: int
    managed: bool = True
    forced: bool | None = None  # what set_gradient_accumulation_boundary said last
    steps: int = 0  # calls of step() in this window so far
    backwards: int = 0  # backward passes in this window so far
    since_step: int = 0  # backward passes since the last call of step()
    divided: bool | None = None  # whether the window's sum is of losses to be divided by `length`

    @property
    def at_boundary(self) -> bool:
        """Whether the next call of `step()` ends the window."""
        if self.forced is not None:
            return self.forced
        return not self.managed or self.steps + 1 >= self.length

    @property
    def last_backward(self) -> bool:
        """Whether the next backward is known to be the last of the window. A wrong guess costs time only."""
        return self.at_boundary and (self.managed or self.forced is not None)

    @property
    def divisor(self) -> int:
        """What the sum of the window is divided by, besides the number of ranks."""
        return self.length if self.divided else 1

    def add_backward(self, *, divide: bool) -> float:
        """Count a backward pass.

        The first one settles whether the window's sum is divided at the end; a later one of the other kind is weighted so
        that it contributes what it should.

        Args:
            divide: whether its gradient is to be divided by `length`.

        Returns:
            what the gradient has to be multiplied by, nearly always 1.0.
        """
        if self.divided is None:
            self.divided = divide
        self.backwards += 1
        self.since_step += 1
        if divide == self.divided:
            return 1.0
        return 1.0 / self.length if divide else float(self.length)

    def add_plain_backward(self) -> None:
        """Count a `loss.backward()`, whose gradient nobody can weigh any more.

        Raises:
            UsageError: the window already holds losses that will be divided, so this one would be divided too.
        """
        if self.add_backward(divide=False) != 1.0:
            raise UsageError(
                explain(
                    "loss.backward() after engine.backward(loss) in one accumulation window",
                    do="use engine.backward(loss, scale_wrt_gas=False) for a loss that is not to be divided by "
                    f"gradient_accumulation_steps ({self.length})",
                )
            )

    def add_step(self) -> bool:
        """Count a call of `step()`. Returns whether it is the boundary; the window starts anew with `restart`."""
        boundary = self.at_boundary
        self.since_step = 0
        if not boundary:
            self.steps += 1
        return boundary

    def forget_backwards(self) -> None:
        """The gradients of this window are dropped; its calls of `step()` still count."""
        self.backwards = self.since_step = 0
        self.divided = None

    def restart(self) -> None:
        """A new window begins."""
        self.forget_backwards()
        self.steps = 0
