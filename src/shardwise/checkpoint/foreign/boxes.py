"""Tensors that were saved as n-dimensional blocks, one archive each.

Owns which stretch of which block a wanted interval needs. Whole rows are read as they lie; of other blocks, the stretch from
the first to the last wanted element.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Spec, real_dtype
from shardwise.checkpoint.foreign.archive import read_archive
from shardwise.checkpoint.foreign.files import Files, damaged
from shardwise.checkpoint.foreign.pieces import Piece
from shardwise.checkpoint.foreign.stored import StridedTensor

__all__ = ["Block", "assemble", "intervals"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class Block:
    """A block of a tensor, in an archive of its own inside of a file.

    Args:
        path: of the file.
        at, length: the archive's bytes.
        offsets: of the block in the tensor.
        spec: of the block.
    """

    def __init__(self, path: Path, at: int, length: int, offsets: tuple[int, ...], spec: Spec) -> None:
        self._path = path
        self._at = at
        self._length = length
        self.offsets = offsets
        self._spec = spec

    @property
    def path(self) -> Path:
        """The file it is in."""
        return self._path

    @property
    def spec(self) -> Spec:
        """Shape and dtype of the block."""
        return self._spec

    @cached_property
    def box(self) -> Box:
        """Offsets and sizes in storage elements: a complex number is a dimension of two reals."""
        if self._spec.dtype.is_complex:
            return (*self.offsets, 0), (*self._spec.shape, 2)
        return self.offsets, self._spec.shape

    @cached_property
    def _tensor(self) -> StridedTensor:
        found = read_archive(self._path, start=self._at, length=self._length)
        if not isinstance(found, StridedTensor) or found.spec != self._spec:
            what = f"{found.spec.shape} {found.spec.dtype}" if isinstance(found, StridedTensor) else type(found).__name__
            raise damaged(self._path, f"{what} at byte {self._at}", f"a block of {self._spec.shape} {self._spec.dtype}")
        return found

    def place(self, files: Files) -> int:
        """Where its archive begins."""
        return self._at

    def read(self, files: Files, start: int, values: Tensor) -> None:
        """Fill `values` with the storage elements of the block from `start` on."""
        self._tensor.read(files, start, values)


class _Blocks:
    """A tensor that is put together from blocks which are not whole rows."""

    def __init__(self, spec: Spec, blocks: Sequence[Block]) -> None:
        self.spec = spec
        self.path = blocks[0].path
        self._blocks = blocks
        self._shape = (*spec.shape, 2) if spec.dtype.is_complex else spec.shape

    def place(self, files: Files) -> int:
        return self._blocks[0].place(files)

    def read(self, files: Files, start: int, values: Tensor) -> None:
        at = 0
        for offsets, sizes in intervals(self._shape, start, start + values.numel()):
            count = prod(sizes)
            target = values[at : at + count].view(sizes)
            for block in self._blocks:
                _copy(block, (offsets, sizes), target, files)
            at += count


def _copy(block: Block, box: Box, target: Tensor, files: Files) -> None:
    """Copy what a block and a box have in common into the tensor of the box."""
    offsets, sizes = block.box
    low = [max(a, b) for a, b in zip(offsets, box[0], strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, *box, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    strides = _strides(sizes)
    common = [b - a for a, b in zip(low, high, strict=True)]
    first = sum((a - o) * stride for a, o, stride in zip(low, offsets, strides, strict=True))
    span = 1 + sum((n - 1) * stride for n, stride in zip(common, strides, strict=True))
    held = torch.empty(span, dtype=real_dtype(block.spec.dtype))
    block.read(files, first, held)
    for dim, (a, b, n) in enumerate(zip(low, box[0], common, strict=True)):
        target = target.narrow(dim, a - b, n)
    target.copy_(held.as_strided(common, strides))


def intervals(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements `[start, stop)` of a row-major tensor as boxes, in that order: at most two for each dimension."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner, rest = prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in intervals(rest, head, tail)]
    found: list[Box] = []
    if head:
        found += [((first, *offsets), (1, *sizes)) for offsets, sizes in intervals(rest, head, inner)]
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if tail:
        found += [((last, *offsets), (1, *sizes)) for offsets, sizes in intervals(rest, 0, tail)]
    return found


def assemble(spec: Spec, blocks: Sequence[Block], where: Path) -> list[Piece]:
    """The pieces of a tensor that was saved in blocks.

    Raises:
        CheckpointError: they are not all of it, or overlap.
    """
    blocks = [block for block in blocks if block.spec.length]
    for block in blocks:
        fits = len(block.offsets) == len(block.spec.shape) == len(spec.shape) and all(
            a >= 0 and a + n <= size for a, n, size in zip(block.offsets, block.spec.shape, spec.shape, strict=True)
        )
        if not fits:
            raise damaged(where, f"a block of {block.spec.shape} at {block.offsets}", f"one inside of {spec.shape}")
    if sum(block.spec.length for block in blocks) != spec.length:
        raise damaged(where, f"{sum(block.spec.length for block in blocks)} elements", f"{spec.length}")
    if all(_is_interval(block, spec.shape) for block in blocks):
        strides = _strides(spec.shape)
        width = 2 if spec.dtype.is_complex else 1
        starts = [sum(a * stride for a, stride in zip(block.offsets, strides, strict=True)) * width for block in blocks]
        return [Piece(start, block.spec.length, block) for start, block in zip(starts, blocks, strict=True)]
    if any(_overlap(a.box, b.box) for a, b in combinations(blocks, 2)):
        raise damaged(where, "blocks that overlap", "each element once")
    return [Piece(0, spec.length, _Blocks(spec, blocks))]


def _is_interval(block: Block, shape: tuple[int, ...]) -> bool:
    sizes = block.spec.shape
    cut = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[cut + 1 :] == shape[cut + 1 :]


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*one, *other, strict=True))


def _strides(sizes: tuple[int, ...]) -> list[int]:
    return [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
