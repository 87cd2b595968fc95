"""Filling tensors from a checkpoint.

Owns the way through memory of their own for values that are stored in another format than they are wanted. Refuses to know what
the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.checkpoint import Key, Part, Source
from shardwise.checkpoint.contents import real_dtype

__all__ = ["Filling"]

_STAGED = 1 << 26  # bytes that may wait in memory of their own


class Filling:
    """Tensors to be filled from a source, and what is to be done when they are.

    Where the values cannot be read straight to where they belong, they go through memory of their own.

    Args:
        source: where they are.
        most: bytes that may wait in memory of their own, besides one target's.
    """

    def __init__(self, source: Source, most: int = _STAGED) -> None:
        self.source = source
        self._most = most
        self._parts: list[Part] = []
        self._then: list[Callable[[], object]] = []
        self._staged = 0

    def add(self, key: Key, start: int, target: Tensor) -> None:
        """Ask for elements of a tensor."""
        spec = self.source.specs[key]
        if target.dtype == real_dtype(spec.dtype):
            self._parts.append(Part(key, spec, start, target))
        else:
            self.add_elsewhere(key, start, target.numel(), target.copy_)

    def add_elsewhere(self, key: Key, start: int, length: int, store: Callable[[Tensor], object]) -> None:
        """Ask for elements that a function stores, which is called with them when they are there."""
        spec = self.source.specs[key]
        staged = torch.empty(length, dtype=real_dtype(spec.dtype))
        self._parts.append(Part(key, spec, start, staged))
        self._then.append(lambda: store(staged))
        self._staged += staged.nbytes
        if self._staged > self._most:
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
