"""Tensors that are still on disk.

Owns what it takes to read any stretch of one. Refuses to know which file format said where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Spec, real_dtype
from shardwise.checkpoint.foreign.files import Files

__all__ = ["FileTensor", "Readable", "Storage", "StridedTensor", "load"]

_DIMENSIONS = 64  # torch's own limit
_LARGEST = 2**62


class Readable(Protocol):
    """A tensor on disk."""

    @property
    def path(self) -> Path:
        """The file it is in, or the first one of them."""
        ...

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        ...

    def place(self, files: Files) -> int:
        """Where in the file it begins, as far as that is known: for reading in the order on disk."""
        ...

    def read(self, files: Files, start: int, values: Tensor) -> None:
        """Fill `values` (1-D) with the storage elements from `start` on, row-major.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose values lie one after the other.

    Args:
        path: of the file.
        spec: shape and dtype.
        at: its first byte.
    """

    path: Path
    spec: Spec
    at: int

    def place(self, files: Files) -> int:
        """Its first byte."""
        return self.at

    def read(self, files: Files, start: int, values: Tensor) -> None:
        """Fill `values` with the storage elements from `start` on."""
        files.read_into(self.path, self.at + start * real_dtype(self.spec.dtype).itemsize, values)


class Storage:
    """Bytes in an archive that one or several tensors are views of.

    Args:
        path: of the file.
        nbytes: how many.
        locate: finds the first byte; called when it is needed for the first time.
        dtype: of the elements, where the storage has one.
    """

    __slots__ = ("_at", "_locate", "dtype", "nbytes", "path")

    def __init__(self, path: Path, nbytes: int, locate: Callable[[Files], int], dtype: torch.dtype | None) -> None:
        self.path = path
        self.nbytes = nbytes
        self.dtype = dtype
        self._locate = locate
        self._at: int | None = None

    def place(self, files: Files) -> int:
        """The first byte in the file."""
        if self._at is None:
            self._at = self._locate(files)
        return self._at


@dataclass(frozen=True, slots=True)
class StridedTensor:
    """A view of a storage, as torch describes it.

    Args:
        storage: of what.
        spec: shape and dtype.
        strides: elements from one index to the next, for each dimension.
        offset: the first element.
    """

    storage: Storage
    spec: Spec
    strides: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        shape, size = self.spec.shape, self.spec.dtype.itemsize
        numbers = (*shape, *self.strides, self.offset)
        if len(shape) > _DIMENSIONS or len(shape) != len(self.strides):
            raise ValueError(f"a tensor of {len(shape)} dimensions with {len(self.strides)} strides")
        if any(type(number) is not int or not 0 <= number < _LARGEST for number in numbers):
            raise ValueError("a tensor with a shape, strides or an offset that cannot be")
        count = prod(shape)
        last = self.offset + sum((length - 1) * stride for length, stride in zip(shape, self.strides, strict=True))
        # An expanded tensor claims more elements than there are bytes: a few bytes could fill any memory.
        if count and ((last + 1) * size > self.storage.nbytes or count * size > self.storage.nbytes):
            raise ValueError(f"a tensor of shape {shape} {self.spec.dtype} in {self.storage.nbytes} bytes")

    @property
    def path(self) -> Path:
        """The file it is in."""
        return self.storage.path

    @property
    def identity(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Equal for tensors that are the same values in the same place: tied weights."""
        return id(self.storage), self.offset, self.spec.shape, self.strides

    def place(self, files: Files) -> int:
        """Its first byte."""
        return self.storage.place(files) + self.offset * self.spec.dtype.itemsize if self.spec.length else 0

    def read(self, files: Files, start: int, values: Tensor) -> None:
        """Fill `values` with the storage elements from `start` on. What is not contiguous is read as a whole first."""
        if not values.numel():
            return
        real = real_dtype(self.spec.dtype)
        if self._contiguous():
            files.read_into(self.path, self.place(files) + start * real.itemsize, values)
            return
        span = 1 + sum((length - 1) * stride for length, stride in zip(self.spec.shape, self.strides, strict=True))
        held = torch.empty(span * self.spec.dtype.itemsize // real.itemsize, dtype=real)
        files.read_into(self.path, self.place(files), held)
        whole = held.view(self.spec.dtype).as_strided(self.spec.shape, self.strides).contiguous()
        values.copy_(whole.view(-1).view(real)[start : start + values.numel()])

    def _contiguous(self) -> bool:
        expected = 1
        for length, stride in zip(reversed(self.spec.shape), reversed(self.strides), strict=True):
            if length != 1:
                if stride != expected:
                    return False
                expected *= length
        return True


def load(tensor: Readable, files: Files) -> Tensor:
    """All values of a small tensor.

    Raises:
        CheckpointError: it cannot be read.
    """
    values = torch.empty(tensor.spec.length, dtype=real_dtype(tensor.spec.dtype))
    tensor.read(files, 0, values)
    return values.view(tensor.spec.dtype).view(tensor.spec.shape)
