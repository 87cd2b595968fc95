"""Drives a built-in update rule over flat shards: one pass over memory, no loop over parameters.

Owns blocks, dtype staging and the flat optimizer state. Refuses to know the rules' arithmetic.

Where everything has the dtype the rule computes in, one fused kernel call per shard unscales, clips and updates in place.
Otherwise (16-bit gradients, masters, state or weights; rules without a kernel) the pass goes block by block: what has another
dtype is widened into scratch memory that stays in the cache, updated there, and written back, so that main memory is still read
and written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.driver import Driver, Groups, PieceState, Sums
from shardwise.optim.rules import UNIT, Options, Rule
from shardwise.optim.shards import Run, Shard, compute_dtype, count_steps, find_runs, state_bytes

__all__ = ["Block", "RuleDriver", "blocks"]

_CPU_BLOCK = 1 << 17
_DEVICE_BLOCK = 1 << 24
# A kernel takes the scale as float32; beyond this range it is multiplied in beforehand.
_KERNEL_SCALES = (1e-30, 1e30)


class Scratch:
    """Reusable blocks of memory by purpose."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, purpose: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of `length` elements with anything in it, valid until the next call with the same purpose."""
        key = (purpose, dtype, device)
        if key not in self._memory or len(self._memory[key]) < length:
            self._memory[key] = torch.empty(length, dtype=dtype, device=device)
        return self._memory[key][:length]


def blocks(start: int, stop: int, size: int, unit: int) -> Iterator[tuple[int, int]]:
    """Cut `[start, stop)` in blocks of `size`; what is left over in a multiple of `unit`, and the rest.

    >>> list(blocks(0, 23, 8, 4))
    [(0, 8), (8, 16), (16, 20), (20, 23)]
    """
    while stop - start >= size:
        yield start, start + size
        start += size
    even = start + (stop - start) // unit * unit
    if start < even:
        yield start, even
    if even < stop:
        yield even, stop


class Block:
    """A stretch of a shard as the rule sees it: tensors of one dtype, with a length that is a multiple of the unit.

    `p` and `state` are for the rule to change; `write_back` then puts what was staged in its place.
    """

    def __init__(self, shard: Shard, start: int, stop: int, names: Sequence[str], scratch: Scratch) -> None:
        self.shard, self.start, self.stop = shard, start, stop
        self._scratch = scratch
        self._dtype = compute_dtype(shard)
        self._device = shard.master.device
        unit = UNIT if self._device.type == "cpu" else 1
        self._width = -(-(stop - start) // unit) * unit
        self._staged: list[tuple[Tensor, Tensor]] = []
        self.p = self._stage("master", shard.master)
        self.state = [self._stage(name, shard.state[name]) for name in names]

    @property
    def length(self) -> int:
        """Elements of the shard in this block; `p` may be longer."""
        return self.stop - self.start

    def gradient(self, scale: float) -> Tensor:
        """The gradient times `scale`; the shard's own is not changed."""
        grad = self.shard.grad
        if grad is not None and scale == 1.0 and self._fits(grad):
            return grad[self.start : self.stop]
        memory = self._scratch.take("gradient", self._width, self._dtype, self._device)
        memory[self.length :].zero_()
        if grad is None:
            return memory.zero_()
        # The product of a 16-bit tensor and a number is rounded to 16 bits: widen first.
        memory[: self.length].copy_(grad[self.start : self.stop])
        return memory if scale == 1.0 else memory.mul_(scale)

    def write_back(self) -> None:
        """Store what was staged, and refresh the low-precision weights."""
        for place, memory in self._staged:
            place.copy_(memory[: self.length])
        if self.shard.weight is not None:
            self.shard.weight[self.start : self.stop].copy_(self.p[: self.length])

    def _fits(self, tensor: Tensor) -> bool:
        return tensor.dtype == self._dtype and self.length == self._width

    def _stage(self, purpose: str, tensor: Tensor) -> Tensor:
        place = tensor[self.start : self.stop]
        if self._fits(tensor):
            return place
        memory = self._scratch.take(purpose, self._width, self._dtype, self._device)
        memory[: self.length].copy_(place)
        memory[self.length :].zero_()
        self._staged.append((place, memory))
        return memory


class RuleDriver(Driver):
    """Updates shards by one rule, with flat state in `Shard.state`."""

    def __init__(self, shards: Sequence[Shard], rule: Rule, groups: Groups) -> None:
        super().__init__(shards)
        self.rule = rule
        self.groups = groups
        self._scratch = Scratch()

    @property
    def name(self) -> str:
        """Of the rule."""
        return self.rule.name

    def state_names(self) -> set[str] | None:
        """See `Driver.state_names`."""
        return {name for group in self.groups for name in self.rule.state_names(group)}

    def update(self, groups: Groups, scale: float, used: Sequence[bool], sums: Sums) -> None:
        """One pass over every run of pieces in use."""
        for shard in self.shards:
            runs = find_runs(shard, used)
            if runs:
                names = self._allocate(shard, groups[shard.group])
                for run in runs:
                    self._update_run(shard, run, names, groups[shard.group], scale)
                count_steps(shard, used)

    def _update_run(self, shard: Shard, run: Run, names: Sequence[str], options: Options, scale: float) -> None:
        in_kernel = self._scales_in_kernel(shard, scale)
        before, within = (1.0, scale) if in_kernel else (scale, 1.0)
        whole = before == 1.0 and self._fits_kernel(shard, names)
        for start, stop in self._blocks(run.start, run.stop, shard, whole=whole):
            block = Block(shard, start, stop, names, self._scratch)
            self.rule.update(block.p, block.gradient(before), block.state, run.step, options, within)
            block.write_back()

    def _blocks(self, start: int, stop: int, shard: Shard, *, whole: bool = False) -> Iterator[tuple[int, int]]:
        on_cpu = shard.master.device.type == "cpu"
        unit = UNIT if on_cpu else 1
        size = _CPU_BLOCK if on_cpu else _DEVICE_BLOCK
        return blocks(start, stop, max(unit, (stop - start) // unit * unit) if whole else size, unit)

    def _scales_in_kernel(self, shard: Shard, scale: float) -> bool:
        """Whether the kernel itself can multiply the gradient by `scale`, overwriting it."""
        grad, dtype = shard.grad, compute_dtype(shard)
        if grad is None or self.settings.keep_grad or not (self.rule.scales_gradient and self.rule.fused(grad.device, dtype)):
            return False
        low, high = _KERNEL_SCALES
        return grad.dtype == dtype == torch.float32 and low < scale < high

    def _fits_kernel(self, shard: Shard, names: Sequence[str]) -> bool:
        """Whether one kernel call can do everything else."""
        grad, dtype = shard.grad, compute_dtype(shard)
        if grad is None or shard.weight is not None or not self.rule.fused(grad.device, dtype):
            return False
        return all(tensor.dtype == dtype for tensor in (grad, shard.master, *(shard.state[name] for name in names)))

    def _allocate(self, shard: Shard, options: Options) -> tuple[str, ...]:
        names = self.rule.state_names(options)
        for name in names:
            self._flat_state(shard, name)
        return names

    def _flat_state(self, shard: Shard, name: str) -> Tensor:
        if name not in shard.state:
            dtype = self.settings.state_dtype or shard.master.dtype
            initial = self.rule.initial(name, self.groups[shard.group])
            shard.state[name] = torch.full_like(shard.master, initial, dtype=dtype)
        return shard.state[name]

    def piece_state(self, shard: int, piece: int) -> dict[str, Any]:
        """Views of the flat state; empty before the piece's first update."""
        home = self.shards[shard]
        if not home.steps[piece]:
            return {}
        part = home.pieces[piece]
        views = {name: tensor[part.start : part.stop] for name, tensor in home.state.items()}
        return {"step": home.steps[piece], **views}

    def load_piece_state(self, shard: int, piece: int, state: PieceState) -> None:
        """Overwrite the piece's part of the flat state; names that are absent start over."""
        home, part = self.shards[shard], self.shards[shard].pieces[piece]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
        # Torch's SGD keeps no step count; having a momentum means having stepped.
        home.steps[piece] = int(state.get("step", 1 if tensors else 0))
        for name in home.state.keys() - tensors.keys():
            home.state[name][part.start : part.stop] = self.rule.initial(name, self.groups[home.group])
        for name, value in tensors.items():
            self._flat_state(home, name)[part.start : part.stop].copy_(value.reshape(-1))

    def state_bytes(self) -> int:
        """Bytes of the flat state."""
        return state_bytes(self.shards)
