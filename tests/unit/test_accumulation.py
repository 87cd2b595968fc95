"""The one accumulation rule: when a step is due, and what each backward counts for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.accumulation import Window
from shardwise.errors import UsageError

FEW = settings(max_examples=40, deadline=None)


@FEW
@given(st.integers(1, 9), st.integers(1, 40))
def test_every_nth_step_is_the_boundary(length: int, calls: int) -> None:
    window = Window(length)
    for call in range(1, calls + 1):
        due = call % length == 0
        assert window.at_boundary is due
        assert window.last_backward is due
        window.add_backward(divide=True)
        assert window.add_step() is due
        if due:
            window.restart()


@FEW
@given(st.integers(1, 6), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_backwards_do_not_move_the_boundary(length: int, backwards: list[int]) -> None:
    """The window is counted in calls of `step()`, however many backwards each had."""
    window = Window(length)
    for call, number in enumerate(backwards, start=1):
        for _ in range(number):
            assert window.add_backward(divide=True) == 1.0
        due = call % length == 0
        assert window.add_step() is due
        if due:
            window.restart()
            assert (window.backwards, window.since_step, window.steps, window.divided) == (0, 0, 0, None)


@FEW
@given(st.integers(1, 8), st.lists(st.booleans(), min_size=1, max_size=10))
def test_every_loss_counts_as_its_caller_said(length: int, kinds: list[bool]) -> None:
    """weight / divisor is 1 / length for losses to be divided and 1 for the others, in any mixture and order."""
    window = Window(length)
    weights = [window.add_backward(divide=kind) for kind in kinds]
    for kind, weight in zip(kinds, weights, strict=True):
        assert weight / window.divisor == pytest.approx(1 / length if kind else 1.0, rel=1e-12)
    assert weights[0] == 1.0


def test_losses_of_one_kind_are_never_multiplied() -> None:
    """So that sums are exact: the division happens once, at the end."""
    for divide in (True, False):
        window = Window(3)
        assert [window.add_backward(divide=divide) for _ in range(5)] == [1.0] * 5
        assert window.divisor == (3 if divide else 1)


def test_the_divisor_of_an_empty_window() -> None:
    assert Window(4).divisor == 1


def test_a_forced_boundary_decides() -> None:
    window = Window(2)
    window.forced = False
    for _ in range(5):
        assert not window.at_boundary
        assert not window.last_backward
        assert not window.add_step()
    window.forced = True
    assert window.at_boundary
    assert window.last_backward
    assert window.add_step()


def test_a_forced_boundary_outlives_the_window() -> None:
    window = Window(1)
    window.forced = False
    window.restart()
    assert not window.at_boundary


def test_forgotten_backwards_leave_the_count_of_steps() -> None:
    window = Window(3)
    window.add_backward(divide=True)
    assert not window.add_step()
    window.add_backward(divide=True)
    window.forget_backwards()
    assert (window.steps, window.backwards, window.since_step, window.divided) == (1, 0, 0, None)
    assert not window.add_step()
    assert window.add_step(), "the third call, as if nothing had been forgotten"


def test_unmanaged_every_step_is_the_boundary_and_no_backward_is_known_to_be_the_last() -> None:
    window = Window(4, managed=False)
    assert window.at_boundary
    assert not window.last_backward
    assert window.add_step()
    window.forced = True
    assert window.last_backward


def test_a_plain_backward_is_not_divided() -> None:
    window = Window(4)
    window.add_plain_backward()
    window.add_plain_backward()
    assert window.divisor == 1
    assert window.backwards == window.since_step == 2


def test_a_plain_backward_after_a_divided_one_is_refused() -> None:
    window = Window(4)
    window.add_backward(divide=True)
    with pytest.raises(UsageError, match="scale_wrt_gas=False"):
        window.add_plain_backward()


def test_kinds_mix_freely_without_accumulation() -> None:
    window = Window(1)
    window.add_backward(divide=True)
    window.add_plain_backward()
    assert window.add_backward(divide=True) == 1.0
    assert window.divisor == 1


def test_backwards_since_the_last_step() -> None:
    window = Window(3)
    window.add_backward(divide=True)
    assert window.since_step == 1
    assert not window.add_step()
    assert (window.since_step, window.backwards, window.steps) == (0, 1, 1)
