"""Which sample goes to which rank: properties of the arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import SampleOrder
from shardwise.data.order import Share, mixed_seed
from shardwise.errors import ConfigError
from shardwise.mesh import Axis

sizes = st.integers(1, 60)
small = st.integers(1, 5)


def shares(world: int, micro_batch: int, drop_last: bool) -> list[Share]:
    return [Share(micro_batch, Axis("data", tuple(range(world)), rank), drop_last) for rank in range(world)]


def dealt(order: SampleOrder, world: int, micro_batch: int, drop_last: bool, epoch: int = 0, position: int = 0) -> list:
    return [list(order.batches(epoch, position, share)) for share in shares(world, micro_batch, drop_last)]


@given(sizes, small, small, st.booleans(), st.integers(0, 3))
def test_every_sample_once_and_filling_up_is_bounded(
    samples: int, world: int, micro_batch: int, shuffle: bool, epoch: int
) -> None:
    order = SampleOrder(samples, shuffle, seed=7)
    ranks = dealt(order, world, micro_batch, False, epoch)
    flat = [index for rank in ranks for batch in rank for index in batch]
    assert set(flat) == set(range(samples))
    assert len(flat) - samples == -samples % world  # ranks get equally many, so this is the least
    shapes = [[len(batch) for batch in rank] for rank in ranks]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(size == micro_batch for size in shapes[0][:-1])
    if samples % world == 0:
        assert sorted(flat) == list(range(samples))


@given(sizes, small, small)
def test_dropped_tail_leaves_full_batches_only(samples: int, world: int, micro_batch: int) -> None:
    ranks = dealt(SampleOrder(samples), world, micro_batch, True)
    flat = [index for rank in ranks for batch in rank for index in batch]
    assert len(flat) == len(set(flat)) == samples - samples % (world * micro_batch)
    assert all(len(batch) == micro_batch for rank in ranks for batch in rank)


@given(sizes, small, small, small, small, st.data())
def test_resume_with_other_ranks_hands_out_exactly_the_rest(
    samples: int, world: int, micro_batch: int, new_world: int, new_micro_batch: int, data: st.DataObject
) -> None:
    order = SampleOrder(samples, seed=3)
    steps = data.draw(st.integers(0, samples // (world * micro_batch)))
    before = [index for rank in dealt(order, world, micro_batch, True, 1) for batch in rank[:steps] for index in batch]
    position = steps * world * micro_batch
    after = [
        index for rank in dealt(order, new_world, new_micro_batch, False, 1, position) for batch in rank for index in batch
    ]
    rest = samples - position
    filled_up = -rest % new_world
    assert len(after) == rest + filled_up
    assert set(before) | set(after) == set(range(samples))
    if not filled_up:
        assert sorted(before + after) == list(range(samples))


@given(st.integers(1, 4), st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]), st.sampled_from([(1, 8), (2, 4), (4, 2)]))
def test_a_step_is_the_same_samples_however_it_is_split(epoch: int, first: tuple[int, int], second: tuple[int, int]) -> None:
    order = SampleOrder(64)

    def steps(world: int, micro_batch: int, accumulation: int) -> list[set[int]]:
        ranks = dealt(order, world, micro_batch, True, epoch)
        windows = [{index for rank in ranks for index in rank[at]} for at in range(len(ranks[0]))]
        return [set().union(*windows[at : at + accumulation]) for at in range(0, len(windows), accumulation)]

    assert steps(*first, accumulation=2) == steps(*second, accumulation=2)
    assert steps(first[0], first[1], 2) == steps(1, 4, 4)


def test_epochs_and_seeds_differ_and_are_stable() -> None:
    orders = [tuple(SampleOrder(50, seed=seed).epoch(epoch).tolist()) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9
    assert torch.equal(SampleOrder(50, seed=1).epoch(2), SampleOrder(50, seed=1).epoch(2))
    assert SampleOrder(4, shuffle=False).epoch(9).tolist() == [0, 1, 2, 3]
    assert mixed_seed(0, 1) == 813518155  # saved positions depend on it: it must never change
    assert 0 <= mixed_seed(2**70, 1) < 2**32


@pytest.mark.parametrize("size", [0, -1])
def test_micro_batch_size_is_checked(size: int) -> None:
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu.*at least 1"):
        Share(size, Axis("data", (0,), 0))
