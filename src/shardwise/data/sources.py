"""The two kinds of dataset, behind one face: those with an index, and those that are a stream.

Owns how each is cut into the micro-batches of one rank from a given position on. Refuses to know what has been handed out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset, Sampler

from shardwise.data.order import SampleOrder, Share
from shardwise.errors import ConfigError, UsageError, explain

__all__ = ["MapSource", "Source", "StreamSource"]


class Source(Protocol):
    """A dataset and this rank's share of it."""

    dataset: Any

    @property
    def seed(self) -> int:
        """What all drawing is seeded from."""
        ...

    def samples(self) -> int:
        """How many samples an epoch has. Raises TypeError if that is not known."""
        ...

    def reading(self, workers: int) -> dict[str, Any]:
        """The arguments that make a DataLoader read this source."""
        ...

    def start(self, epoch: int, position: int) -> None:
        """Make the next iteration begin `position` samples into `epoch`."""
        ...

    def end_of_window(self, position: int) -> int:
        """The position after the window that begins at `position`."""
        ...

    def identity(self) -> dict[str, Any]:
        """What a saved position depends on."""
        ...

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the order of a saved state. Raises UsageError if it belongs to another dataset."""
        ...


class MapSource(Sampler[list[int]]):
    """A dataset with an index; as a batch sampler, the indices of this rank's micro-batches.

    Args:
        dataset: has `__getitem__` and `__len__`.
        share: what this rank takes.
        shuffle: a new order for every epoch.
        seed: of the orders.
    """

    def __init__(self, dataset: Any, share: Share, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self._share = share
        self._order = SampleOrder(len(dataset), shuffle, seed)
        self._start = (0, 0)
        if not share.batches(self._order.samples):
            needed = share.window if share.drop_last else 1
            raise ConfigError(
                explain(
                    "the dataset gives no batch",
                    expected=f"at least {needed} samples (micro-batch {share.micro_batch_size} x {share.axis.size} ranks,"
                    f" drop_last {share.drop_last})",
                    found=str(self._order.samples),
                )
            )

    @property
    def seed(self) -> int:
        """What the orders are drawn from."""
        return self._order.seed

    def samples(self) -> int:
        """How many samples an epoch has."""
        return self._order.samples

    def reading(self, workers: int) -> dict[str, Any]:
        """The arguments that make a DataLoader read this source."""
        return {"dataset": self.dataset, "batch_sampler": self, "num_workers": workers}

    def start(self, epoch: int, position: int) -> None:
        """Make the next iteration begin `position` samples into `epoch`."""
        self._start = (epoch, position)

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.batches(*self._start, self._share)

    def end_of_window(self, position: int) -> int:
        """The position after the window that begins at `position`."""
        return min(position + self._share.window, self._order.samples)

    def identity(self) -> dict[str, Any]:
        """What a saved position depends on."""
        return {"samples": self._order.samples, "shuffle": self._order.shuffle, "seed": self._order.seed}

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the order of a saved state."""
        _same_size(state, self._order.samples)
        self._order = SampleOrder(self._order.samples, bool(state["shuffle"]), int(state["seed"]))


class StreamSource(IterableDataset[list[Any]]):
    """A dataset that is a stream; as a dataset itself, this rank's micro-batches as lists of samples, not collated.

    Every rank reads the whole stream and keeps its part, which is right for any stream that is the same on all ranks. Going
    on from a position reads and discards what lies before it.

    Args:
        dataset: yields samples, the same on every rank.
        share: what this rank takes.
        seed: of what the reading process draws.
    """

    def __init__(self, dataset: Any, share: Share, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._share = share
        self._position = 0

    def samples(self) -> int:
        """How many samples an epoch has."""
        return len(self.dataset)

    def reading(self, workers: int) -> dict[str, Any]:
        """The arguments that make a DataLoader read this source."""
        # Each worker would read the whole stream, and a stream that splits itself among workers would be cut twice.
        return {"dataset": self, "batch_size": None, "num_workers": min(workers, 1)}

    def start(self, epoch: int, position: int) -> None:
        """Make the next iteration begin `position` samples into `epoch`."""
        self._position = position
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        stream = iter(self.dataset)
        first = list(itertools.islice(stream, self._share.axis.size))
        rest = itertools.islice(itertools.chain(first, stream), self._position, None)
        while window := list(itertools.islice(rest, self._share.window)):
            if len(window) < self._share.window and self._share.drop_last:
                return
            yield self._mine(window, first)

    def _mine(self, window: list[Any], first: list[Any]) -> list[Any]:
        size = len(window)
        return [window[at] if at < size else first[(at - size) % len(first)] for at in self._share.mine(size)]

    def end_of_window(self, position: int) -> int:
        """The position after the window that begins at `position`."""
        return position + self._share.window

    def identity(self) -> dict[str, Any]:
        """What a saved position depends on."""
        return {"samples": None, "shuffle": None, "seed": self.seed}

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over the order of a saved state."""
        _same_size(state, None)
        self.seed = int(state["seed"])


def _same_size(state: dict[str, Any], samples: int | None) -> None:
    if state["samples"] != samples:
        raise UsageError(
            explain(
                "the saved position belongs to another dataset",
                expected=_kind(samples),
                found=_kind(state["samples"]),
                do="load it into a loader over the dataset it was saved with, or begin anew",
            )
        )


def _kind(samples: int | None) -> str:
    return "a stream" if samples is None else f"an indexed dataset of {samples} samples"
