"""The loss scale against a second, independent account of the rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import NonFiniteError
from shardwise.optim import LossScale


def fp16(**changes: Any) -> Any:
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    section |= {"consecutive_hysteresis": False, "min_loss_scale": 1}
    return SimpleNamespace(**{**section, **changes})


def expected_trace(trace: list[bool], power: int, window: int, hysteresis: int, consecutive: bool, minimum: int) -> list[float]:
    """Scale after every step, told by looking back over the history instead of keeping counters."""
    scale, scales = max(2.0**power, minimum), []
    tolerated = 0  # overflows since the hysteresis was last full
    since = 0  # clean steps since the last overflow or doubling
    for overflow in trace:
        if overflow:
            since = 0
            tolerated += 1
            if tolerated >= hysteresis:
                scale = max(scale / 2, minimum)
        else:
            since += 1
            if consecutive:
                tolerated = 0
            if since == window:
                scale, since, tolerated = scale * 2, 0, 0
        scales.append(scale)
    return scales


@given(
    trace=st.lists(st.booleans(), max_size=60),
    power=st.integers(0, 20),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([1, 4, 1024]),
)
def test_trace(trace: list[bool], power: int, window: int, hysteresis: int, consecutive: bool, minimum: int) -> None:
    section = fp16(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    scale, scales = LossScale.from_config(section), []
    for number, overflow in enumerate(trace):
        scale.stuck = 0  # giving up is tested below
        if number == len(trace) // 2:
            saved = scale.state_dict()
            scale = LossScale.from_config(section)
            scale.load_state_dict(saved)
        scale.update(overflow)
        scales.append(scale.scale)
    assert scales == expected_trace(trace, power, window, hysteresis, consecutive, minimum)


@pytest.mark.parametrize(
    ("section", "scale", "dynamic"),
    [
        (None, 1.0, False),
        (fp16(enabled=False), 1.0, False),
        (fp16(loss_scale=128.0), 128.0, False),
        (fp16(initial_scale_power=8), 256.0, True),
    ],
)
def test_from_config(section: Any, scale: float, dynamic: bool) -> None:
    made = LossScale.from_config(section)
    assert (made.scale, made.dynamic) == (scale, dynamic)
    for _ in range(3):
        made.update(False)
        made.update(True)
    assert made.scale == (64.0 if dynamic else scale)


def test_giving_up_names_the_parameter() -> None:
    scale = LossScale.from_config(fp16(initial_scale_power=1, hysteresis=1, min_loss_scale=2))
    for _ in range(9):
        scale.update(True, "parameter 'a'")
    with pytest.raises(NonFiniteError, match=r"10 steps in a row.*minimum \(2\).*first bad one in parameter 'b'"):
        scale.update(True, "parameter 'b'")


def test_only_skips_in_a_row_at_the_minimum_count() -> None:
    scale = LossScale.from_config(fp16(initial_scale_power=3, hysteresis=1))
    for _ in range(3 + 9):
        scale.update(True)
    assert scale.scale == 1.0
    scale.update(False)
    for _ in range(9):
        scale.update(True)
    with pytest.raises(NonFiniteError):
        scale.update(True)


def test_the_scale_stays_finite_when_no_gradient_ever_overflows() -> None:
    scale = LossScale.from_config(fp16(loss_scale_window=1))
    for _ in range(2000):
        scale.update(False)
    assert scale.scale == 2.0**126


def test_a_constant_scale_ignores_a_saved_dynamic_one() -> None:
    scale = LossScale.constant()
    scale.load_state_dict(LossScale.from_config(fp16()).state_dict())
    assert scale.scale == 1.0
