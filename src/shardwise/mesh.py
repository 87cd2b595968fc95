"""Which ranks form which axis.

An axis is a line of ranks that talk to each other: a value of plain integers that is passed down, never a global, so that a
mesh can be built for rank r of N without any process group. Refuses to know modules, devices and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import LayoutError, explain

__all__ = ["Axis", "DataMesh"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A line of ranks, seen from one of them.

    Args:
        name: what the axis is for, as messages print it ("shard", "replicate").
        ranks: global ranks in axis order.
        rank: this process's global rank; must be one of `ranks`.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or self.rank not in self.ranks:
            raise LayoutError(
                explain(f"axis {self.name!r} is not a line of distinct ranks through rank {self.rank}", found=f"{self.ranks}")
            )

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Position of this process on the axis, `0 <= index < size`."""
        return self.ranks.index(self.rank)


@dataclass(frozen=True, slots=True)
class DataMesh:
    """The data-parallel ranks as a grid of `replicate x shard`.

    Parameters are cut along `shard` and copied along `replicate`; `data` is their product, the ranks that see different
    samples.
    """

    data: Axis
    shard: Axis
    replicate: Axis

    @classmethod
    def grid(cls, rank: int, world_size: int, shard_size: int) -> DataMesh:
        """The grid seen from `rank`: neighbours (consecutive ranks) share a shard line, as they are nearest in a cluster."""
        if shard_size < 1 or world_size % shard_size:
            raise LayoutError(
                explain(
                    "the shard axis does not fit the world",
                    expected=f"a divisor of the world size {world_size}",
                    found=str(shard_size),
                )
            )
        first = rank - rank % shard_size
        return cls(
            data=Axis("data", tuple(range(world_size)), rank),
            shard=Axis("shard", tuple(range(first, first + shard_size)), rank),
            replicate=Axis("replicate", tuple(range(rank % shard_size, world_size, shard_size)), rank),
        )
