"""The loader: epochs, resume, streams, workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from shardwise.data import RepeatingLoader, ShardedLoader, build_loader
from shardwise.errors import ConfigError, UsageError
from shardwise.mesh import Axis


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers that depend on the epoch; splits itself among reading processes, as torch's documentation shows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(100 * self.epoch + start, 100 * self.epoch + self.size, step))


def loaders(world: int, dataset: Any, micro_batch_size: int = 2, **options: Any) -> list[ShardedLoader]:
    axes = [Axis("data", tuple(range(world)), rank) for rank in range(world)]
    return [build_loader(dataset, micro_batch_size, axis, **options) for axis in axes]


def ids(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def take(loader: Any, count: int) -> list[int]:
    """The next `count` batches of a new iteration, which is then abandoned."""
    iterator = iter(loader)
    return ids(next(iterator) for _ in range(count))


@pytest.mark.parametrize("dataset", [Numbers(24), Stream(24)], ids=["indexed", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_are_disjoint_and_each_epoch_is_complete(dataset: Any, workers: int) -> None:
    pair = loaders(2, dataset, 3, num_workers=workers)
    epochs = []
    for epoch in range(2):
        first, second = (ids(loader) for loader in pair)
        assert set(first).isdisjoint(second)
        offset = 100 * epoch if isinstance(dataset, Stream) else 0
        assert sorted(first + second) == list(range(offset, offset + 24))
        epochs.append(first + second)
    assert epochs[0] != epochs[1]
    assert [loader.epoch for loader in pair] == [2, 2]


def test_length_counts_batches_of_a_rank() -> None:
    assert [len(loaders(2, Numbers(25), 3, drop_last=drop)[0]) for drop in (True, False)] == [4, 5]
    assert len(list(loaders(2, Numbers(25), 3)[1])) == 5
    with pytest.raises(TypeError, match="len"):
        len(loaders(1, Stream(4))[0])


def test_a_stream_has_the_same_tail_as_an_indexed_dataset() -> None:
    for drop_last in (False, True):
        for size in (1, 2, 5, 11, 12):
            if drop_last and size < 6:
                continue
            indexed = [ids(each) for each in loaders(3, Numbers(size), shuffle=False, drop_last=drop_last)]
            stream = [ids(each) for each in loaders(3, Stream(size), drop_last=drop_last)]
            assert indexed == stream


@pytest.mark.parametrize("dataset", [Numbers(40), Stream(40)], ids=["indexed", "stream"])
@pytest.mark.parametrize(("world", "new_world"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_resume_in_the_second_epoch(dataset: Any, world: int, new_world: int) -> None:
    whole = loaders(1, dataset)[0]
    list(whole)
    complete = sorted(ids(whole))

    before = []
    for loader in (old := loaders(world, dataset)):
        list(loader)
        before += take(loader, 3)
    states = [loader.state_dict() for loader in old]
    assert all(state == states[0] for state in states)

    after = []
    for loader in (new := loaders(new_world, dataset, seed=99)):
        loader.load_state_dict(states[0])
        assert loader.epoch == 1
        after += ids(loader)
    assert sorted(before + after) == complete
    if world == new_world:
        for loader in old:
            loader.load_state_dict(states[0])
        assert after == [index for loader in old for index in ids(loader)]
    # and the epoch after the resumed one is whole again, and the same as if nothing had happened
    third = [index for loader in new for index in ids(loader)]
    assert sorted(third) == sorted(ids(whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_ahead_does_not_count(workers: int) -> None:
    loader = build_loader(Numbers(40), 2, num_workers=workers)
    seen, state = [], {}
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 4:
            state = loader.state_dict()
            break
    assert state["position"] == 10
    resumed = build_loader(Numbers(40), 2, num_workers=workers)
    resumed.load_state_dict(state)
    assert sorted(seen + ids(resumed)) == list(range(40))


def test_state_at_the_end_of_an_epoch_leaves_nothing_of_it() -> None:
    loader = build_loader(Numbers(6), 2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    resumed = build_loader(Numbers(6), 2)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == []
    assert next(iterator, None) is None
    assert ids(resumed) == ids(loader)  # both in epoch 1 now


def test_set_epoch_and_abandoned_iterations() -> None:
    loader = build_loader(Numbers(30), 2)
    first, second = ids(loader), ids(loader)
    loader.set_epoch(0)
    assert ids(loader) == first
    loader.set_epoch(1)  # what it would hand out anyway
    assert take(loader, 3) == second[:6]
    assert loader.epoch == 1
    third = ids(loader)
    assert third not in (first, second)
    loader.set_epoch(2)
    assert ids(loader) == third

    saved = build_loader(Numbers(30), 2)
    take(saved, 5)
    resumed = build_loader(Numbers(30), 2)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_epoch(0)  # as loops do at the start of each epoch: the position is kept
    assert ids(resumed) == first[10:]


def test_an_older_iterator_does_not_move_the_position() -> None:
    loader = build_loader(Numbers(30), 2)
    old = iter(loader)
    next(old)
    take(loader, 2)
    state = loader.state_dict()
    list(old)
    assert loader.state_dict() == state == {"epoch": 1, "position": 4, "samples": 30, "shuffle": True, "seed": 0}


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_draws_nothing_from_the_global_generator(workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(build_loader(Numbers(8), 2, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_collate_and_structure() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    points, labels = next(iter(build_loader(data, 3, shuffle=False)))
    assert points.shape == (3, 2)
    assert labels.tolist() == [0, 1, 2]
    batch = next(iter(build_loader(data, 3, shuffle=False, collate_fn=lambda samples: {"n": len(samples)})))
    assert batch == {"n": 3}
    assert next(iter(build_loader(Stream(6), 3, collate_fn=tuple))) == (0, 1, 2)
    assert next(iter(build_loader([3, 4], 2, shuffle=False))).tolist() == [3, 4]  # type: ignore[arg-type]


def test_too_small_datasets_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"at least 8 samples \(micro-batch 4 x 2 ranks, drop_last True\), found 7"):
        loaders(2, Numbers(7), 4, drop_last=True)
    with pytest.raises(ConfigError, match="at least 1 samples"):
        build_loader(Numbers(0), 4)


def test_state_of_another_dataset_is_refused() -> None:
    state = build_loader(Numbers(8), 2).state_dict()
    with pytest.raises(UsageError, match="expected an indexed dataset of 9 samples, found an indexed dataset of 8"):
        build_loader(Numbers(9), 2).load_state_dict(state)
    with pytest.raises(UsageError, match="expected a stream"):
        build_loader(Stream(8), 2).load_state_dict(state)


def test_repeating_loader_goes_on_and_resumes() -> None:
    plain = build_loader(Numbers(10), 2)
    expected = ids(plain) + ids(plain) + ids(plain)
    repeating = RepeatingLoader(build_loader(Numbers(10), 2))
    assert len(repeating) == 5
    assert ids(next(repeating) for _ in range(10)) == expected[:20]
    state = repeating.state_dict()
    rest = expected[20:]
    assert ids(next(repeating) for _ in range(5)) == rest

    resumed = RepeatingLoader(build_loader(Numbers(10), 2))
    next(resumed)
    resumed.load_state_dict(state)
    assert ids(next(resumed) for _ in range(5)) == rest
    assert [int(batch.numel()) for batch, _ in zip(resumed, range(3), strict=False)] == [2, 2, 2]


def test_repeating_loader_reshuffles_foreign_samplers_and_refuses_nothing() -> None:
    sampler = DistributedSampler(Numbers(20), num_replicas=2, rank=0)  # type: ignore[arg-type]
    repeating = RepeatingLoader(DataLoader(Numbers(20), 2, sampler=sampler))
    first, second = (ids(next(repeating) for _ in range(5)) for _ in range(2))
    assert first != second
    with pytest.raises(UsageError, match="loader to repeat is empty"):
        next(RepeatingLoader([]))
