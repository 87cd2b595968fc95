"""What every system is given to do: the model's size, the batch of one rank, the precision. The numbers of `bench.compare`.

Plain values; refuses to know torch and how anything trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CASES", "CLIP", "LEARNING_RATE", "POOL", "WARM_UP", "WEIGHT_DECAY", "Case", "Shape", "Task", "make_task"]

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
CLIP = 1.0

POOL = 4
"""How many different batches there are; step i takes batch i modulo this."""

WARM_UP = 2
"""Untimed steps of new processes after the first step, in which systems learn the order of use and fill caches."""


@dataclass(frozen=True)
class Shape:
    """Size of the GPT."""

    vocabulary: int = 4096
    width: int = 512
    layers: int = 8
    heads: int = 8

    def parameters(self, context: int) -> int:
        """How many numbers the model has: embeddings, blocks, last norm, head."""
        block = 12 * self.width**2 + 2 * self.width
        return self.width * (2 * self.vocabulary + context) + self.layers * block + self.width


@dataclass(frozen=True)
class Case:
    """A kind of load.

    Args:
        about: what it shows.
        batch: sequences in a micro-batch of one rank.
        tokens: tokens in a sequence.
        accumulation: micro-batches in a step.
        steps: timed steps in one turn of a system.
    """

    name: str
    about: str
    batch: int
    tokens: int
    accumulation: int = 1
    steps: int = 10
    shape: Shape = Shape()


CASES = {
    case.name: case
    for case in (
        Case("comm", "little to compute, so that communication and the optimizer decide", batch=1, tokens=64),
        Case("compute", "much to compute, so that overhead and memory decide", batch=4, tokens=256, steps=3),
        Case("accum", "four micro-batches in a step", batch=1, tokens=64, accumulation=4, steps=4),
        Case(
            "tiny",
            "a small model, to check that all systems run and agree; its times mean nothing",
            batch=2,
            tokens=16,
            accumulation=2,
            steps=3,
            shape=Shape(vocabulary=256, width=64, layers=2, heads=4),
        ),
    )
}


@dataclass(frozen=True)
class Task:
    """One run of the benchmark: a case on some ranks in one precision."""

    case: Case
    world: int
    precision: str
    rounds: int

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return self.case.shape.parameters(self.case.tokens)

    @property
    def title(self) -> str:
        """In words."""
        case, shape = self.case, self.case.shape
        batch = f"{case.batch} x {case.tokens}"
        batch = f"{case.accumulation} x {batch}" if case.accumulation > 1 else batch
        return (
            f"{case.name}: GPT of {self.parameters / 1e6:.1f} M parameters ({shape.layers} blocks of width {shape.width}), "
            f"{batch} tokens a rank and step, {self.world} ranks with one thread each, {self.precision}"
        )


def make_task(case: str, world: int, precision: str, rounds: int, steps: int | None = None, layers: int | None = None) -> Task:
    """A task from the command line's words.

    In bf16 the model has 2 blocks unless told otherwise: CPUs without bf16 arithmetic emulate it many times slower, and then
    neither communication nor the optimizer would show.
    """
    chosen = CASES[case]
    if layers is None:
        layers = 2 if precision == "bf16" else chosen.shape.layers
    chosen = replace(chosen, steps=steps or chosen.steps, shape=replace(chosen.shape, layers=layers))
    return Task(chosen, world, precision, rounds)
