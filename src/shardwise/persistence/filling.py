"""Filling tensors from a checkpoint.

Owns the way through memory of their own for values that are stored in another format than they are wanted. Refuses to know what
the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.checkpoint import Key, Part, Source
from shardwise.checkpoint.contents import real_dtype
from shardwise.zero import Buffer, Master

__all__ = ["Filling"]

_STAGED = 1 << 25  # bytes that may wait in memory of their own
_SLICE = 1 << 22  # elements that are converted at a time


class Filling:
    """Tensors to be filled from a source, and what is to be done when they are.

    Where the values cannot be read straight to where they belong, they go through memory of their own.

    Args:
        source: where they are.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._parts: list[Part] = []
        self._then: list[Callable[[], object]] = []
        self._staged = 0

    def add(self, key: Key, start: int, target: Tensor) -> None:
        """Ask for elements of a tensor."""
        spec = self.source.specs[key]
        if target.dtype == real_dtype(spec.dtype):
            self._parts.append(Part(key, spec, start, target))
            return
        for first in range(0, target.numel(), _SLICE):
            place = target[first : first + _SLICE]
            self.add_elsewhere(key, start + first, place.numel(), place.copy_)

    def add_weight(self, key: Key, start: int, buffer: Buffer, place: slice) -> None:
        """Ask for elements of master weights, which the weights then follow.

        Args:
            key, start: where they are.
            buffer: of the parameter.
            place: elements of this rank's chunk.
        """
        master, weight = buffer.precise, buffer.shard[place]
        if master.tensor is not None:
            self.add(key, start, master.tensor[place])
            if master.separate:
                self.then(partial(weight.copy_, master.tensor[place]))
            return
        for first in range(0, len(weight), _SLICE):
            part = weight[first : first + _SLICE]
            self.add_elsewhere(key, start + first, len(part), partial(_write, master, place.start + first, part))

    def add_elsewhere(self, key: Key, start: int, length: int, store: Callable[[Tensor], object]) -> None:
        """Ask for elements that a function stores, which is called with them when they are there."""
        spec = self.source.specs[key]
        staged = torch.empty(length, dtype=real_dtype(spec.dtype))
        self._parts.append(Part(key, spec, start, staged))
        self._then.append(lambda: store(staged))
        self._staged += staged.nbytes
        if self._staged > _STAGED:
            self.run()

    def then(self, work: Callable[[], object]) -> None:
        """Do something after everything that was asked for so far."""
        self._then.append(work)

    def run(self) -> None:
        """Read now."""
        self.source.read(self._parts)
        for work in self._then:
            work()
        self._parts, self._then, self._staged = [], [], 0


def _write(master: Master, first: int, weight: Tensor, values: Tensor) -> None:
    master.write(first, values)
    weight.copy_(values)
