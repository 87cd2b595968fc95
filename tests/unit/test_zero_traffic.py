"""Uses of a unit and what follows from them: pure counting, for any order of events."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.zero.traffic import BackwardPass, Traffic, Use
from shardwise.zero.unit import Unit

FEW = settings(max_examples=60, deadline=None)


def traffic(trainable: int = 2) -> Traffic:
    """Counters of a unit that need no unit."""
    return Traffic(cast("Unit", None), (), trainable)


def deliver(counters: Traffic, *numbers: int) -> None:
    counters.delivered.update(numbers)


def test_at_rest_nothing_is_ready_and_nothing_needed() -> None:
    counters = traffic()
    assert not counters.ready
    assert counters.done


def test_one_forward_and_its_backward() -> None:
    counters = traffic()
    use = counters.opened()
    assert not counters.done, "its backward will read the weights"
    assert not counters.ready
    counters.begin(use)
    assert not counters.ready
    assert not counters.done
    deliver(counters, 0)
    counters.end(use)
    assert counters.ready
    assert not counters.done, "a parameter's gradient is still to come, and may be computed from weights"
    deliver(counters, 1)
    assert counters.done


def test_gradients_alone_do_not_end_a_use() -> None:
    """A frozen weight may still be read for the gradient of an input."""
    counters = traffic()
    use = counters.opened()
    counters.begin(use)
    deliver(counters, 0, 1)
    assert not counters.done
    counters.end(use)
    assert counters.done


def test_two_uses_are_reduced_once() -> None:
    counters = traffic(1)
    first, second = counters.opened(), counters.opened()
    counters.begin(second)
    counters.end(second)
    deliver(counters, 0)
    assert not counters.ready
    assert not counters.done
    counters.begin(first)
    counters.end(first)
    assert counters.ready
    assert counters.done


def test_a_retained_graph_runs_again() -> None:
    counters = traffic(1)
    use = counters.opened()
    counters.begin(use)
    counters.end(use)
    deliver(counters, 0)
    assert counters.ready
    counters.forget_pass()
    assert not counters.ready
    counters.begin(use)
    assert not counters.ready
    assert not counters.done
    counters.end(use)
    deliver(counters, 0)
    assert counters.ready
    assert counters.done


def test_beginning_twice_counts_once() -> None:
    """Each output of a unit may report that its backward begins."""
    counters = traffic(0)
    use = counters.opened()
    counters.begin(use)
    counters.begin(use)
    assert counters.running == [use]
    counters.end(use)
    counters.end(use)
    assert counters.outstanding == 0
    assert counters.ready


def test_inputs_are_counted_anew_in_every_pass() -> None:
    use = Use(traffic(), inputs=3)
    counters = use.traffic
    counters.begin(use)
    use.unknown -= 2
    counters.forget_pass()
    counters.begin(use)
    assert use.unknown == 3


def test_a_forward_that_a_checkpoint_will_repeat_holds_the_weights() -> None:
    counters = traffic(0)
    counters.shadows = 1
    assert not counters.done
    counters.touched = True
    assert not counters.ready
    counters.shadows = 0
    assert counters.ready
    assert counters.done


def test_a_running_forward_holds_the_weights() -> None:
    counters = traffic()
    counters.active = 1
    assert not counters.done
    counters.active = 0
    assert counters.done


def test_the_end_of_a_pass_ends_what_it_reached_and_only_that() -> None:
    counters = traffic()
    reached, other = counters.opened(), counters.opened()
    counters.begin(reached)
    deliver(counters, 0)
    counters.forget_pass()
    assert not reached.open
    assert other.open
    assert counters.outstanding == 1
    assert not counters.delivered
    assert not counters.touched
    assert not counters.running


def test_new_weights_end_all_graphs() -> None:
    counters = traffic()
    use = counters.opened()
    counters.opened()
    counters.begin(use)
    counters.shadows = 2
    counters.forget_graphs()
    assert (counters.outstanding, counters.shadows, counters.running) == (0, 0, [])
    counters.end(use)  # a late hook of a graph that is gone
    assert counters.outstanding == 0


def test_a_unit_that_a_pass_has_not_reached_is_done_without_gradients() -> None:
    assert traffic(5).done


@FEW
@given(st.lists(st.sampled_from(["open", "begin", "end", "pass", "deliver"]), max_size=60), st.randoms(use_true_random=False))
def test_counters_agree_with_the_uses_whatever_happens(events: list[str], random: Any) -> None:
    counters, uses = traffic(1), list[Use]()
    for event in events:
        use = random.choice(uses) if uses else None
        if event == "open":
            uses.append(counters.opened())
        elif event == "begin" and use is not None:
            counters.begin(use)
        elif event == "end" and use is not None:
            counters.end(use)
        elif event == "pass":
            counters.forget_pass()
        elif event == "deliver":
            deliver(counters, 0)
        assert counters.outstanding == sum(use.open for use in uses)
        assert all(use.open for use in counters.running)
        assert len(set(map(id, counters.running))) == len(counters.running)
        if counters.ready or (counters.done and counters.touched):
            assert not any(use.open for use in uses)


def test_a_pass_is_what_it_was_opened_as() -> None:
    opened = BackwardPass(reduce=True, explicit=False)
    assert opened.cursor == 0
    assert opened.reduce
    assert not opened.explicit
