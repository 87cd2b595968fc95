"""The predictor: what is expected after which history."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.events import Event, Follower

A, B, C, D, S = (Event("", "all_gather", name) for name in "ABCDS")


def surprises(follower: Follower, events: list[Event]) -> int:
    """Feed the events; how many were not the expected ones."""
    count = 0
    for event in events:
        if not follower.follow(event):
            count += 1
            follower.append(event)
    return count


def test_events_are_told_apart_by_everything_in_them() -> None:
    base = Event("forward", "all_gather", "layers.3", 12, torch.float32)
    others = [
        base._replace(phase="backward"),
        base._replace(kind="broadcast"),
        base._replace(name="layers.4"),
        base._replace(elements=13),
        base._replace(dtype=torch.bfloat16),
        base._replace(source=0),
    ]
    assert len({event.label for event in [base, *others]}) == len({event.digest for event in [base, *others]}) == 7
    assert base.label == "'layers.3' (all_gather of 12 x float32, phase 'forward')"
    assert base.digest == Event("forward", "all_gather", "layers.3", 12, torch.float32).digest


def test_a_new_history_expects_nothing() -> None:
    follower = Follower()
    assert follower.expected() is None
    assert surprises(follower, [A, B, C]) == 3
    assert follower.expected() is None
    assert follower.count == 3


def test_what_followed_before_is_expected_again() -> None:
    follower = Follower()
    surprises(follower, [A, B, C, A])
    assert follower.expected() == B
    assert not follower.follow(C)
    assert follower.count == 4  # refused events leave no trace
    assert follower.follow(B)
    assert follower.expected() == C


def test_a_periodic_loop_is_never_surprising_after_its_second_period() -> None:
    micro = [A, B, C, B, A]
    period = micro * 4 + [S, D]
    follower = Follower()
    first, second = surprises(follower, period), surprises(follower, period)
    assert 4 <= second + 3 < first < len(period)
    assert surprises(follower, period * 50) == 0


def test_a_loop_is_found_again_after_an_interruption() -> None:
    train, evaluate = [A, B, C, S], [A, B, A, B, D]
    follower = Follower()
    surprises(follower, (train * 10 + evaluate) * 2)
    assert surprises(follower, train * 10 + evaluate) <= 4


def test_old_events_are_forgotten_and_numbers_stay() -> None:
    follower = Follower(limit=10)
    surprises(follower, [A, B, C] * 100)
    assert follower.count == 300
    assert follower.at(299) == C
    assert follower.at(298) == B
    assert follower.at(5) is None
    assert follower.at(300) is None
    assert surprises(follower, [A, B, C] * 10) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([A, B, C, D]), max_size=120), st.integers(2, 20))
def test_equal_histories_expect_the_same(events: list[Event], limit: int) -> None:
    """One rank gets every event by agreement, the other follows where it can: they must not differ afterwards."""
    agreed, followed = Follower(limit), Follower(limit)
    for event in events:
        assert agreed.expected() == followed.expected()
        agreed.append(event)
        if not followed.follow(event):
            followed.append(event)
        assert agreed.count == followed.count
    assert [agreed.at(index) for index in range(agreed.count)] == [followed.at(index) for index in range(agreed.count)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
def test_every_period_is_learnt(seed: int, length: int, repeats: int) -> None:
    source = random.Random(seed)
    micro = [source.choice([A, B, C, D]) for _ in range(length)]
    period = micro * repeats + [S]
    follower = Follower()
    surprises(follower, period * 6)
    assert surprises(follower, period * 4) == 0
