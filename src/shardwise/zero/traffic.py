"""Bookkeeping of the uses of a unit: what is running, what awaits its backward, what a backward pass has brought.

Pure counters, so that what may be launched and what may be released is decided from numbers that are equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.zero.buffer import Member
from shardwise.zero.gradients import Gradients
from shardwise.zero.unit import Unit

__all__ = ["BackwardPass", "Traffic", "Use"]


@dataclass(eq=False, slots=True)
class Use:
    """One forward call of a unit with gradients. Lives as long as the autograd graph it belongs to."""

    traffic: Traffic
    open: bool = True  # its backward is still to come, or under way
    inputs: int = 0  # tensors it was given whose gradients are watched
    unknown: int = 0  # how many of these gradients are still to come; if one never does, the use ends with the pass


@dataclass(eq=False, slots=True)
class BackwardPass:
    """A traversal of the autograd graph, or several that share one flush.

    Args:
        reduce: whether gradients are summed over ranks during this pass.
        explicit: whether somebody will say when it ends (`engine.backward`), as opposed to a plain `loss.backward()`.
    """

    reduce: bool
    explicit: bool
    cursor: int = 0  # position in the order of reductions


@dataclass(eq=False, slots=True)
class Traffic:
    """What is going on with one unit."""

    unit: Unit
    gradients: tuple[Gradients, ...]
    trainable: int  # number of parameters that will get a gradient
    frozen: tuple[Member, ...] = ()  # parameters that did not require gradients when the engine was made
    active: int = 0  # forward calls under way
    outstanding: int = 0  # uses whose backward is to come
    shadows: int = 0  # forwards without gradients that a reentrant checkpoint will run again during backward
    running: list[Use] = field(default_factory=list[Use])  # uses whose backward is under way
    touched: bool = False  # whether this pass has reached the unit
    delivered: set[int] = field(default_factory=set[int])  # parameters whose gradient this pass has brought

    def opened(self) -> Use:
        """A forward with gradients took place."""
        self.outstanding += 1
        return Use(self)

    def begin(self, use: Use) -> None:
        """The backward of a use begins; it may be the second one of a retained graph."""
        self.touched = True
        use.unknown = use.inputs
        if not use.open:
            use.open = True
            self.outstanding += 1
        if use not in self.running:
            self.running.append(use)

    def end(self, use: Use) -> None:
        """The gradients of the inputs of a use are known."""
        if use.open:
            use.open = False
            self.outstanding = max(0, self.outstanding - 1)
        if use in self.running:
            self.running.remove(use)

    @property
    def ready(self) -> bool:
        """Whether the gradients may be reduced. Depends on calls of the unit only, which are the same on all ranks.

        It does not count delivered gradients: one rank may leave a parameter unused that another uses. What is delivered
        later than this becomes a second partial sum.
        """
        return self.touched and not self.outstanding and not self.shadows

    @property
    def done(self) -> bool:
        """Whether nothing will read the weights any more in this pass.

        Counting gradients alone does not tell: with frozen weights in a unit the count can be complete while a frozen weight
        is still to be read for the gradient of an input. Inputs alone do not tell either: a weight that is computed from
        parameters (weight norm) is read after them.
        """
        return not (self.active or self.outstanding or self.shadows or self.running) and (
            not self.touched or len(self.delivered) >= self.trainable
        )

    def forget_pass(self) -> None:
        """A backward pass has ended, and with it every use it reached."""
        for use in tuple(self.running):
            self.end(use)
        self.touched = False
        self.delivered.clear()

    def forget_graphs(self) -> None:
        """The weights have changed: no older graph can be continued."""
        self.outstanding = self.shadows = 0
        self.running.clear()
