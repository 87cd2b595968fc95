"""Gradients of one buffer: collected from autograd, summed over the data ranks, accumulated in this rank's shard.

Sum inside, divide once. Nothing here averages: the optimizer step multiplies by one scalar. Reductions are linear, so a
gradient that arrives after its buffer was already reduced simply starts another partial sum.

Owns the memory of gradients. Refuses to know when a reduction is due, and what an optimizer does with the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Comm, Handle
from shardwise.policy import Precision
from shardwise.zero.buffer import Buffer, as_storage

__all__ = ["GradientPool", "Gradients", "Reduction"]


@dataclass(frozen=True, slots=True)
class FullGradient:
    """A full-length gradient buffer (1-D) and its slots as real tensors of the parameters' shapes (1-D for complex ones)."""

    flat: Tensor
    slots: tuple[Tensor, ...]


class GradientPool:
    """Full-length gradient buffers that are used again instead of allocated.

    Buffers are interchangeable when their layouts are equal but for names: padding is zeroed once, at allocation, and sums of
    zeros stay zero.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ledger = comm.ledger
        self._free: defaultdict[object, list[FullGradient]] = defaultdict(list)

    def take(self, buffer: Buffer, dtype: torch.dtype) -> FullGradient:
        """A buffer of the layout's total length with zeros in the padding and anything elsewhere."""
        free = self._free[self._kind(buffer, dtype)]
        if free:
            return free.pop()
        flat = self._comm.scratch(buffer.layout.total, dtype, buffer.shard.device)
        self._ledger.hold("full gradients", flat.nbytes)
        parts = ((flat[slot.offset : slot.stop], slot) for slot in buffer.layout.slots)
        return FullGradient(flat, tuple(part if slot.request.width == 2 else part.view(slot.shape) for part, slot in parts))

    def give(self, buffer: Buffer, full: FullGradient) -> None:
        """Return a buffer that nobody reads any more."""
        self._free[self._kind(buffer, full.flat.dtype)].append(full)

    def clear(self) -> None:
        """Free what is not in use."""
        for free in self._free.values():
            for full in free:
                self._ledger.drop("full gradients", full.flat.nbytes)
        self._free.clear()

    @staticmethod
    def _kind(buffer: Buffer, dtype: torch.dtype) -> object:
        slots = tuple((slot.offset, slot.shape, slot.request.width) for slot in buffer.layout.slots)
        return dtype, buffer.layout.total, buffer.shard.device, slots


class Reduction:
    """A sum over ranks under way. `finish` waits for it and adds the result to the shard; finishing twice is harmless."""

    def __init__(self, gradients: Gradients, full: FullGradient, wire: Tensor, handle: Handle) -> None:
        self._gradients = gradients
        self._full: FullGradient | None = full
        self._wire = wire
        self._handle = handle

    def finish(self) -> None:
        """Wait, accumulate, and give the full-length buffer back."""
        full, self._full = self._full, None
        if full is not None:
            self._handle.wait()
            self._gradients.accept(full, self._wire)


class Gradients:
    """The gradients of one trainable buffer during one accumulation window.

    Args:
        buffer: whose gradients.
        comm: how sums over ranks are made.
        pool: where full-length buffers come from.
        precision: the dtypes of accumulation and communication.
    """

    def __init__(self, buffer: Buffer, comm: Comm, pool: GradientPool, precision: Precision) -> None:
        self.buffer = buffer
        self.dtype = precision.gradient_dtype(buffer.key.dtype)
        self._comm = comm
        self._pool = pool
        self._communicate = buffer.key.wire or precision.communicate or self.dtype
        self._predivide = precision.predivide
        self._own = slice(*buffer.interval)
        self._sum: FullGradient | None = None  # the reduced sum where this rank holds all of it (shard axis of size 1)
        self._shard: Tensor | None = None  # the reduced sum otherwise
        self._reduced = False  # whether the sum is of this window
        self._flying: Reduction | None = None
        self._full: FullGradient | None = None  # contributions of this rank that were not reduced yet
        self._filled = bytearray(len(buffer.members))
        self._probe = torch.zeros((), dtype=torch.float32, device=buffer.shard.device)
        if buffer.key.shard.size > 1:
            self._shard = torch.zeros(buffer.layout.chunk, dtype=self.dtype, device=buffer.shard.device)
            comm.ledger.hold("gradients", self._shard.nbytes)

    @property
    def pending(self) -> bool:
        """Whether this rank has contributions that were not reduced yet."""
        return self._full is not None

    @property
    def shard(self) -> Tensor | None:
        """The reduced sum, 1-D, this rank's chunk; None when nothing was reduced in this window."""
        if not self._reduced:
            return None
        return self._sum.flat if self._sum is not None else self._shard

    @property
    def suspicious(self) -> bool:
        """Whether this rank contributed an Inf or a NaN in this window. Waits for the device."""
        return not bool(torch.isfinite(self._probe))

    def deliver(self, position: int, gradient: Tensor) -> None:
        """Add one parameter's gradient.

        Args:
            position: index of the parameter in the buffer.
            gradient: of the parameter's shape; any dtype and stride; a sparse one is made dense.
        """
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if self._full is None:
            self._full = self._pool.take(self.buffer, self.dtype)
        slot = self._full.slots[position]
        source = as_storage(gradient) if gradient.is_complex() else gradient
        if self._filled[position]:
            slot.add_(source)
        else:
            slot.copy_(source)
            self._filled[position] = 1

    def start_reduce(self, name: str) -> Reduction:
        """Launch the sum over all data ranks; parameters without a gradient on this rank contribute zeros."""
        if self._flying is not None:
            self._flying.finish()
        full = self._full or self._pool.take(self.buffer, self.dtype)
        for slot, filled in zip(full.slots, self._filled, strict=True):
            if not filled:
                slot.zero_()
        self._full = None
        self._filled = bytearray(len(self.buffer.members))
        # One read of the buffer tells, should the step turn out to be non-finite, whether this rank was the cause.
        self._probe += full.flat.sum(dtype=torch.float32)
        if self._predivide != 1.0:
            full.flat.mul_(1.0 / self._predivide)
        wire = full.flat.to(self._communicate)
        self._flying = Reduction(self, full, wire, self._launch(wire, name))
        return self._flying

    def accept(self, full: FullGradient, wire: Tensor) -> None:
        """Take the result of a finished reduction; `Reduction.finish` calls this."""
        self._flying = None
        if self._shard is None:
            self._accept_whole(full, wire)
        elif self._reduced:
            self._shard.add_(wire[self._own])
            self._pool.give(self.buffer, full)
        else:
            if wire.dtype != self.dtype:
                self._shard.copy_(wire[self._own])
            self._pool.give(self.buffer, full)
        self._reduced = True

    def contribution(self, position: int) -> Tensor | None:
        """What this rank collected for one parameter and did not reduce yet, as a view; None when there is nothing."""
        return self._full.slots[position] if self._full is not None and self._filled[position] else None

    def clear(self) -> None:
        """Forget the window's gradients."""
        if self._flying is not None:
            self._flying.finish()
        for full in (self._full, self._sum):
            if full is not None:
                self._pool.give(self.buffer, full)
        self._full = self._sum = None
        self._filled = bytearray(len(self.buffer.members))
        self._reduced = False
        self._probe.zero_()

    def close(self) -> None:
        """Free the memory."""
        self.clear()
        if self._shard is not None:
            self._comm.ledger.drop("gradients", self._shard.nbytes)
            self._shard = None

    def _launch(self, wire: Tensor, name: str) -> Handle:
        key = self.buffer.key
        if key.shard.size == 1:
            return self._comm.all_reduce(wire, key.replicate, name)
        # The first sum of a window lands in the shard itself; later ones in the own slice of `wire`, to be added.
        direct = self._shard is not None and not self._reduced and wire.dtype == self.dtype
        out = self._shard if direct and self._shard is not None else wire[self._own]
        handle = self._comm.reduce_scatter(out, wire, key.shard, name)
        if key.replicate.size == 1:
            return handle
        handle.wait()
        return self._comm.all_reduce(out, key.replicate, name)

    def _accept_whole(self, full: FullGradient, wire: Tensor) -> None:
        if wire is not full.flat:
            full.flat.copy_(wire)
        if self._reduced and self._sum is not None:
            full.flat.add_(self._sum.flat)
            self._pool.give(self.buffer, self._sum)
        self._sum = full
