"""The norm of the gradients, and who has a bad one.

Owns the arithmetic of one rank's part. Refuses to know other ranks: it gives float64 sums that can be added over ranks.

Numerics: float32 norms of rows of 256 elements, squared and summed in float64, so that the result does not depend on how
tensors are cut, is the same in every run, and is within 2e-7 of the exact value. (One float32 norm over a large tensor, as in
`clip_grad_norm_`, is off by 1e-5 at a million elements; and a row of thousands of equal or 16-bit values by up to 1e-6.) A row
whose squares overflow float32 shows as a sum that is not finite; `sum_of_squares(..., exact=True)` then works in float64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.optim.shards import Shard

__all__ = ["BadGradient", "block_sum_of_squares", "find_bad", "sum_of_squares"]

_ROW = 256
_CACHED = 1 << 17
_BLOCK = 1 << 22


@dataclass(frozen=True)
class BadGradient:
    """The first non-finite gradient found.

    Args:
        index: the parameter's number; -1 for padding.
        name: the parameter's name.
        nan: NaN, else Inf.
        rank: the rank whose shard holds it.
    """

    index: int
    name: str
    nan: bool
    rank: int = 0

    def __str__(self) -> str:
        return f"parameter {self.name!r} ({'NaN' if self.nan else 'Inf'}, in the shard of rank {self.rank})"


def sum_of_squares(shards: Sequence[Shard], device: torch.device, *, exact: bool = False) -> Tensor:
    """Sum of squares of all gradients that this rank counts: a 0-d float64 tensor on `device`.

    Args:
        shards: whose `grad[counted]` to take.
        device: where to put the result.
        exact: work in float64 throughout, so that finite gradients give a finite sum.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in _counted(shards):
        # What is widened on a CPU should stay in its cache.
        widened = exact or part.element_size() < 4
        for block in _blocks(part, _CACHED if widened and part.device.type == "cpu" else _BLOCK):
            total += block_sum_of_squares(block, exact=exact).to(device)
    return total


def block_sum_of_squares(block: Tensor, *, exact: bool = False) -> Tensor:
    """Sum of squares of a 1-D tensor, 0-d float64, as the module's text says."""
    dtype = torch.float64 if exact or block.dtype == torch.float64 else torch.float32
    rows = block.numel() // _ROW * _ROW
    block = block.to(dtype)
    norms, rest = _norm_of_rows(block[:rows].view(-1, _ROW)), _norm_of_rows(block[rows:].view(1, -1))
    return norms.double().square_().sum() + rest.double().square_().sum()


def _norm_of_rows(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)  # pyright: ignore
    return norms  # pyright: ignore


def find_bad(shards: Sequence[Shard]) -> BadGradient | None:
    """The first parameter, by index, with a non-finite gradient among those that this rank counts."""
    found = [_name(shard, *bad) for shard in shards if (bad := _first_bad(shard))]
    return min(found, key=lambda bad: (bad.index < 0, bad.index), default=None)


def _first_bad(shard: Shard) -> tuple[int, bool] | None:
    """Position and kind (NaN or not) of the first non-finite element."""
    position = shard.counted_range()[0]
    for part in _counted([shard]):
        for block in _blocks(part, _CACHED):
            where = torch.nonzero(~torch.isfinite(block))
            if len(where):
                first = int(where[0])
                return position + first, bool(torch.isnan(block[first]))
            position += len(block)
    return None


def _name(shard: Shard, position: int, nan: bool) -> BadGradient:
    number = bisect_right([piece.start for piece in shard.pieces], position) - 1
    if number < 0 or position >= shard.pieces[number].stop:
        return BadGradient(-1, "(padding)", nan)
    return BadGradient(shard.pieces[number].index, shard.pieces[number].name, nan)


def _blocks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    for start in range(0, len(tensor), size):
        yield tensor[start : start + size]


def _counted(shards: Sequence[Shard]) -> Iterator[Tensor]:
    for shard in shards:
        start, stop = shard.counted_range()
        if shard.grad is not None and start < stop:
            yield shard.grad[start:stop]
