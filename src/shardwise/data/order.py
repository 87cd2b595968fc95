"""Which sample of an epoch goes to which rank, as arithmetic.

An epoch is one order of all samples. A micro-step takes the next window of `world size x micro-batch size` samples of that
order, and each rank takes its contiguous part of the window. So a position in the epoch is a number of samples, the same on
every rank, and means the same for any number of ranks; and the samples of one optimizer step are the same however they are
split into ranks, micro-batches and accumulation. Refuses to know datasets and processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardwise.errors import ConfigError, explain
from shardwise.mesh import Axis

__all__ = ["SampleOrder", "Share", "mixed_seed"]


def mixed_seed(*parts: int) -> int:
    """A seed of 32 bits (all that torch's CPU generator uses) in which every part counts, the same on every machine."""
    return random.Random(":".join(map(str, parts))).getrandbits(32)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes of each window.

    Args:
        micro_batch_size: samples per rank and micro-step, at least 1.
        axis: the data axis, seen from this rank.
        drop_last: what happens to the samples left over when the last window is not full. True: dropped. False: dealt out
            evenly as one shorter micro-batch per rank; where they do not divide, the first samples of the epoch fill up, at
            most `axis.size - 1` of them. Either way all ranks have equally many micro-batches of equal size.
    """

    micro_batch_size: int
    axis: Axis
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ConfigError(
                explain(
                    "train_micro_batch_size_per_gpu is not a number of samples",
                    expected="an integer of at least 1",
                    found=str(self.micro_batch_size),
                )
            )

    @property
    def window(self) -> int:
        """Samples that all ranks together take in one micro-step."""
        return self.micro_batch_size * self.axis.size

    def batches(self, samples: int) -> int:
        """How many micro-batches this rank gets from `samples` samples."""
        return samples // self.window if self.drop_last else -(-samples // self.window)

    def mine(self, size: int) -> range:
        """The part of a window of `size` samples that is this rank's; offsets from `size` on stand for samples that fill up."""
        each = -(-size // self.axis.size)
        return range(self.axis.index * each, (self.axis.index + 1) * each)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of the samples of a dataset of known size, epoch by epoch.

    Args:
        samples: size of the dataset.
        shuffle: a new permutation for each epoch; otherwise ascending.
        seed: what the permutations are drawn from, equal on all ranks.
    """

    samples: int
    shuffle: bool = True
    seed: int = 0

    def epoch(self, number: int) -> torch.Tensor:
        """All sample indices in the order of epoch `number`; int64, shape `(samples,)`."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, number))
        return torch.randperm(self.samples, generator=generator)

    def batches(self, epoch: int, position: int, share: Share) -> Iterator[list[int]]:
        """The sample indices of each of this rank's micro-batches, from `position` samples into the epoch to its end."""
        order = self.epoch(epoch)
        for _ in range(share.batches(self.samples - position)):
            size = min(share.window, self.samples - position)
            mine = torch.tensor(share.mine(size)) + position
            # Past the end of the epoch only where the last window fills up: with the epoch's first samples.
            yield order[torch.where(mine < position + size, mine, (mine - position - size) % self.samples)].tolist()
            position += size
