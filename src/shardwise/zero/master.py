"""Master weights: the values that an optimizer updates, from which the weights are rounded where they have fewer digits.

Owns where one rank's chunk of them is. Refuses to know who updates them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Master", "OwnMaster", "SameMaster"]


class Master(Protocol):
    """One rank's chunk of the master weights of a buffer, 1-D."""

    @property
    def separate(self) -> bool:
        """Whether they are other bytes than the weights, which then have to follow them."""
        ...

    @property
    def tensor(self) -> Tensor | None:
        """The values, if they are in memory."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that they take in memory, besides the weights."""
        ...

    def read(self, first: int, last: int) -> Tensor:
        """Elements `[first, last)`, not to be written: the values themselves where they are in memory, else a copy."""
        ...

    def write(self, first: int, values: Tensor) -> None:
        """Replace elements `[first, first + len(values))`; any floating dtype."""
        ...


class SameMaster:
    """The weights are their own masters.

    Args:
        shard: the chunk of the weights.
    """

    separate = False
    nbytes = 0

    def __init__(self, shard: Tensor) -> None:
        self.tensor = shard
        self.dtype = shard.dtype

    def read(self, first: int, last: int) -> Tensor:
        """See `Master.read`."""
        return self.tensor[first:last]

    def write(self, first: int, values: Tensor) -> None:
        """See `Master.write`."""
        self.tensor[first : first + values.numel()].copy_(values)


class OwnMaster(SameMaster):
    """Masters in memory of their own.

    Args:
        values: the chunk.
    """

    separate = True

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.nbytes = values.nbytes
