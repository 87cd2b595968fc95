"""The accumulation rule as pure counting: for any sequence of calls, what is summed and when a step is due."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.accumulation import Window
from shardwise.errors import UsageError

LENGTHS = st.integers(1, 5)
BACKWARDS = st.lists(st.booleans(), min_size=1, max_size=8)


@given(LENGTHS, st.integers(1, 30))
def test_every_length_th_step_is_the_boundary(length: int, calls: int) -> None:
    window = Window(length)
    boundaries = []
    for call in range(1, calls + 1):
        assert window.at_boundary == (call % length == 0)
        assert window.last_backward == window.at_boundary
        window.add_backward(divide=True)
        if window.add_step():
            boundaries.append(call)
            window.restart()
    assert boundaries == list(range(length, calls + 1, length))


@given(LENGTHS, BACKWARDS)
def test_a_window_sums_what_each_backward_contributes(length: int, divided: list[bool]) -> None:
    """Each gradient times its weight, divided at the end, is the gradient or a `length`-th of it, as that call asked."""
    window = Window(length)
    weights = [window.add_backward(divide=divide) for divide in divided]
    for weight, divide in zip(weights, divided, strict=True):
        assert weight / window.divisor == pytest.approx(1 / length if divide else 1.0)
    assert weights[0] == 1.0, "the first one settles the divisor, so that uniform windows are never scaled"
    assert window.backwards == len(divided)


@given(LENGTHS, st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_forced_boundary_decides_alone(length: int, forced: list[bool]) -> None:
    for managed in (True, False):
        window = Window(length, managed)
        for boundary in forced:
            window.forced = boundary
            assert window.at_boundary == window.last_backward == boundary
            window.add_backward(divide=True)
            assert window.add_step() == boundary
            if boundary:
                window.restart()
            assert window.forced == boundary, "it stays in force until the next call"


@given(LENGTHS)
def test_without_managing_every_step_is_a_boundary_and_no_backward_is_known_to_be_the_last(length: int) -> None:
    window = Window(length, managed=False)
    for _ in range(4):
        assert window.at_boundary
        assert not window.last_backward
        window.add_backward(divide=True)
        window.add_backward(divide=True)
        assert window.add_step()
        window.restart()


def test_plain_backwards_cannot_join_losses_that_will_be_divided() -> None:
    window = Window(2)
    window.add_plain_backward()
    window.add_plain_backward()
    assert window.divisor == 1
    assert window.add_backward(divide=True) == 0.5
    window.restart()
    window.add_backward(divide=True)
    with pytest.raises(UsageError, match="scale_wrt_gas=False"):
        window.add_plain_backward()
    same = Window(1)
    same.add_backward(divide=True)
    same.add_plain_backward()


@given(LENGTHS, st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_backwards_since_the_last_step_are_counted(length: int, bursts: list[int]) -> None:
    window = Window(length)
    for _, burst in pairwise([0, *bursts]):
        for _ in range(burst):
            window.add_backward(divide=False)
        assert window.since_step == burst
        if window.add_step():
            window.restart()
        assert window.since_step == 0
