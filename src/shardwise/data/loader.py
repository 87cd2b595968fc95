"""The loader a training loop iterates over.

Owns the position in the data: the epoch, and how many samples of it were handed out. Sampling order is `order`'s, reading
and worker processes are `torch.utils.data.DataLoader`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shardwise.data.order import Share, mixed_seed
from shardwise.data.sources import MapSource, Source, StreamSource
from shardwise.mesh import Axis

__all__ = ["ShardedLoader", "build_loader"]


class ShardedLoader:
    """Iterates over this rank's micro-batches of one epoch; each `iter()` begins the next epoch, in a new order.

    After `load_state_dict` the first `iter()` goes on from the saved position instead, also when the state was saved by
    another number of ranks or another micro-batch size. What was handed out before `state_dict()` counts as consumed,
    however far worker processes have read ahead.

    The order of the samples is exact across a resume. Random augmentation inside a dataset draws from its worker's generator,
    whose state is not saved.
    """

    def __init__(self, source: Source, share: Share, reading: dict[str, Any]) -> None:
        self._source = source
        self._share = share
        # Its own, so that iterating draws nothing from the generator that the model uses.
        self._generator = torch.Generator()
        self._loader = DataLoader(**reading, generator=self._generator)
        self._epoch = 0
        self._position = 0
        self._begun = False
        self._iteration = 0

    @property
    def dataset(self) -> Any:
        """The dataset as it was given."""
        return self._source.dataset

    @property
    def micro_batch_size(self) -> int:
        """Samples per rank and micro-batch."""
        return self._share.micro_batch_size

    @property
    def epoch(self) -> int:
        """The epoch being handed out, or the next one if none is."""
        return self._epoch

    def __len__(self) -> int:
        """Micro-batches per rank in a whole epoch. Raises TypeError for a stream that has no length."""
        return self._share.batches(self._source.samples())

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.set_epoch(self._epoch + 1)
        self._begun = True
        self._iteration += 1
        return self._run(self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next `iter()` hands out: from its start, or from the position loaded into it."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position, equal on every rank: plain numbers, for `load_state_dict` on any number of ranks."""
        return {"epoch": self._epoch, "position": self._position, **self._source.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, in the order (seed, shuffle) it was saved with.

        Raises:
            UsageError: the state belongs to a dataset of another size or kind, where the position means nothing.
        """
        self._source.adopt(state)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._begun = False
        self._iteration += 1

    def _run(self, iteration: int) -> Iterator[Any]:
        self._source.start(self._epoch, self._position)
        self._generator.manual_seed(mixed_seed(self._source.seed, self._epoch, self._share.axis.index))
        for batch in self._loader:
            if iteration == self._iteration:  # else a later iter() or load took over
                self._position = self._source.end_of_window(self._position)
            yield batch
        if iteration == self._iteration:
            self._epoch, self._position, self._begun = self._epoch + 1, 0, False


def build_loader(
    dataset: Dataset[Any],
    micro_batch_size: int,
    axis: Axis | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ShardedLoader:
    """A loader over this rank's part of a dataset.

    Args:
        dataset: with `__getitem__` and `__len__`, or an iterable one, which must yield the same samples on every rank: its
            order is its own, `shuffle` does not apply, and a `set_epoch` method it has is called before each epoch.
        micro_batch_size: samples per rank and micro-batch.
        axis: the data-parallel ranks, seen from this one. None: this process alone, also for a stream that was split already.
        collate_fn: makes a batch of a list of samples; torch's default if None.
        drop_last: see `shardwise.data.order.Share`.
        shuffle: a new order for every epoch, the same on every rank.
        seed: what the orders are drawn from, equal on all ranks.
        num_workers: reading processes per rank. A stream has at most one, since each would read all of it.
        pin_memory: whether batches are put in pinned memory; no effect without an accelerator.

    Raises:
        ConfigError: `micro_batch_size` is no number of samples, or larger than the dataset allows with `drop_last`.
    """
    share = Share(micro_batch_size, axis or Axis("data", (0,), 0), drop_last)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        source: Source = StreamSource(dataset, share, seed)
    else:
        source = MapSource(dataset, share, shuffle, seed)
    reading = {
        **source.reading(num_workers),
        "collate_fn": collate_fn or default_collate,
        "pin_memory": pin_memory and torch.accelerator.is_available(),
    }
    return ShardedLoader(source, share, reading)
