"""Learning-rate formulas at points worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.schedules import OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay, group_weights

# Steps taken -> learning rate of the next step. A warm-up's clock lags the count of steps by one.
WARMUPS = [
    (Warmup(0.0, 1.0, 4, linear=True), [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]),
    (Warmup(0.2, 1.0, 4, linear=True), [0.2, 0.2, 0.4, 0.6, 0.8, 1, 1]),
    (Warmup(0.0, 1.0, 8), [0, 0, 1 / 3, math.log(3) / math.log(8), 2 / 3, math.log(5) / math.log(8)]),
    (Warmup(0.0, 1.0, 0), [0, 0, 1, 1]),
    (Warmup(0.0, 1.0, 1, linear=True), [0, 0, 0.5, 1, 1]),
    (WarmupDecay(0.0, 1.0, 2, True, total=6), [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0]),
    (WarmupDecay(0.5, 1.0, 2, True, total=4), [0.5, 0.5, 0.75, 1, 0.75, 0.5, 0.5]),
    (WarmupDecay(0.0, 1.0, 4, True, total=2), [0, 0, 0.25, 0.5, 0.75, 0, 0]),
]


@pytest.mark.parametrize(("schedule", "expected"), WARMUPS)
def test_warmups(schedule: Warmup, expected: list[float]) -> None:
    assert [schedule.lr(step) for step in range(len(expected))] == pytest.approx(expected)


def test_warmup_cosine() -> None:
    schedule = WarmupCosine(2.0, 0.1, 2, total=6, end_ratio=0.2, linear=True)

    def cosine(part: float) -> float:
        return 0.2 + 0.8 * (1 + math.cos(math.pi * part)) / 2

    expected = [0.1, 0.1, 0.55, cosine(0.25), cosine(0.5), cosine(0.75), 0.2, 0.2, 0.2]
    assert [schedule.lr(step) for step in range(9)] == pytest.approx([2.0 * ratio for ratio in expected])
    assert WarmupCosine(1.0, 0.0, 9, total=3, end_ratio=0.2).lr(50) == pytest.approx(0.2)


def test_one_cycle() -> None:
    schedule = OneCycle(0.1, 0.5, 4, 2, decay_every=2, decay_rate=1.0, momentum_decay_rate=0.1)
    assert [schedule.lr(step) for step in range(11)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2, 0.1 / 2.5, 0.1 / 3]
    )
    assert [schedule.momentum(step) for step in range(9)] == pytest.approx(
        [0.9, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1]
    )
    assert OneCycle(0.1, 0.5, 4, 2).lr(100) == 0.1


def test_one_cycle_in_stairs() -> None:
    schedule = OneCycle(0.0, 1.0, 4, 6, first_stairs=2, second_stairs=3)
    assert [schedule.lr(step) for step in range(11)] == pytest.approx([0, 0, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0])


def test_range_test() -> None:
    assert [RangeTest(0.1, 2, 3.0).lr(step) for step in range(5)] == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])
    assert [RangeTest(0.1, 2, 3.0, stairs=True).lr(step) for step in range(5)] == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


@given(
    start=st.floats(0, 1),
    peak=st.floats(1, 10),
    steps=st.integers(0, 50),
    total=st.integers(1, 100),
    linear=st.booleans(),
)
def test_bounds(start: float, peak: float, steps: int, total: int, linear: bool) -> None:
    """Every warm-up begins at its start, never leaves the range, and rises without falling."""
    decay = WarmupDecay(start, peak, steps, linear, total)
    warmup = Warmup(start, peak, steps, linear)
    assert warmup.lr(0) == decay.lr(0) == start
    values = [warmup.lr(step) for step in range(120)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(peak)
    assert all(start - 1e-9 <= decay.lr(step) <= peak + 1e-9 for step in range(120))
    ratios = [WarmupCosine(peak, 0.1, steps, total, 0.01, linear).ratio(step) for step in range(120)]
    assert all(0.01 - 1e-9 <= ratio <= 1 + 1e-9 for ratio in ratios)


def test_group_weights() -> None:
    assert group_weights([0.1, 3.0, 0.01], [False, True, False]) == pytest.approx([1.0, 30.0, 0.1])
    assert group_weights([0.0, 0.0], [False, False]) == [1.0, 1.0]
    assert group_weights([0.5], [True]) == [1.0]
    assert group_weights([], []) == []
