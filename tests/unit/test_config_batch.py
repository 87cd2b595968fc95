"""Batch arithmetic: two numbers give the third, and what does not fit is told with all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import load_config
from shardwise.config.batch import ACCUMULATION, MICRO, TOTAL, resolve_batch
from shardwise.errors import ConfigError

numbers = st.integers(1, 1000)


@settings(deadline=None)
@given(micro=numbers, accumulation=numbers, ranks=numbers)
def test_any_two_numbers_give_the_third(micro: int, accumulation: int, ranks: int) -> None:
    total = micro * accumulation * ranks
    whole = {TOTAL: total, MICRO: micro, ACCUMULATION: accumulation}
    for missing in (None, TOTAL, MICRO, ACCUMULATION):
        known = {name: None if name == missing else value for name, value in whole.items()}
        batch = resolve_batch(known[TOTAL], known[MICRO], known[ACCUMULATION], ranks)
        assert batch.as_keys() == whole
        assert {name for name, text in batch.origin.items() if text == "given"} == whole.keys() - {missing}
        if missing:
            assert batch.origin[missing].startswith("derived from ")
            assert str(ranks) in batch.origin[missing]


@settings(deadline=None)
@given(total=numbers, factor=numbers, ranks=numbers, micro_is_known=st.booleans())
def test_two_numbers_resolve_exactly_when_they_divide(total: int, factor: int, ranks: int, micro_is_known: bool) -> None:
    micro, accumulation = (factor, None) if micro_is_known else (None, factor)
    if total % (factor * ranks):
        with pytest.raises(ConfigError) as caught:
            resolve_batch(total, micro, accumulation, ranks)
        message = str(caught.value)
        assert all(str(number) in message for number in (total, factor, ranks, factor * ranks))
        assert (MICRO if micro_is_known else ACCUMULATION) in message
    else:
        batch = resolve_batch(total, micro, accumulation, ranks)
        assert batch.total == batch.micro * batch.accumulation * ranks == total
        assert (batch.micro if micro_is_known else batch.accumulation) == factor


@settings(deadline=None)
@given(total=numbers, micro=numbers, accumulation=numbers, ranks=numbers)
def test_three_numbers_must_agree(total: int, micro: int, accumulation: int, ranks: int) -> None:
    product = micro * accumulation * ranks
    if total == product:
        assert resolve_batch(total, micro, accumulation, ranks).total == total
        return
    with pytest.raises(ConfigError) as caught:
        resolve_batch(total, micro, accumulation, ranks)
    message = str(caught.value)
    for part in (TOTAL, MICRO, ACCUMULATION, f"{product} = ", f"{micro} (given)", f"{total} (given)", f"x {ranks} data"):
        assert part in message


@settings(deadline=None)
@given(number=numbers, ranks=numbers)
def test_one_number_means_one_micro_batch_per_step(number: int, ranks: int) -> None:
    batch = resolve_batch(None, number, None, ranks)
    assert batch.as_keys() == {TOTAL: number * ranks, MICRO: number, ACCUMULATION: 1}
    assert batch.origin[ACCUMULATION].startswith("default")
    batch = resolve_batch(number * ranks, None, None, ranks)
    assert batch.as_keys() == {TOTAL: number * ranks, MICRO: number, ACCUMULATION: 1}
    batch = resolve_batch(None, None, number, ranks)
    assert batch.as_keys() == {TOTAL: number * ranks, MICRO: 1, ACCUMULATION: number}


def test_no_number_means_one_sample_per_micro_batch() -> None:
    config = load_config(None, world_size=3)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (3, 1, 1)
    assert config.batch_origin[MICRO].startswith("default")
    assert config.warnings == []


def test_an_indivisible_total_suggests_its_neighbours() -> None:
    with pytest.raises(ConfigError, match="Use 24 or 32"):
        resolve_batch(30, 4, None, 2)
    with pytest.raises(ConfigError, match=r"Use 8\."):
        resolve_batch(3, 4, None, 2)


def test_the_world_size_is_the_real_one() -> None:
    raw = {TOTAL: 24, MICRO: 2}
    assert load_config(raw, world_size=1).gradient_accumulation_steps == 12
    assert load_config(raw, world_size=4).gradient_accumulation_steps == 3
    assert load_config(raw, world_size=4, data_parallel_size=2).gradient_accumulation_steps == 6
    with pytest.raises(ConfigError, match="x 5 data-parallel ranks"):
        load_config(raw, world_size=5)


def test_accumulation_alone_warns_about_the_micro_batch() -> None:
    config = load_config({ACCUMULATION: 4}, world_size=2)
    assert config.train_batch_size == 8
    assert any(MICRO in line for line in config.warnings)


@pytest.mark.parametrize("name", [TOTAL, MICRO, ACCUMULATION])
@pytest.mark.parametrize("value", [0, -2, 1.5, "4", True, [4], float("inf"), float("nan")])
def test_batch_numbers_are_whole_and_positive(name: str, value: object) -> None:
    """A bad number is told once, and no arithmetic is done with it."""
    with pytest.raises(ConfigError) as caught:
        load_config({TOTAL: 6, MICRO: 2, ACCUMULATION: 3, name: value}, world_size=1)
    assert str(caught.value).startswith("the configuration has 1 problem:")
    assert f"{name}: expected a whole number >= 1, found " in str(caught.value)


def test_an_integral_float_is_a_whole_number() -> None:
    config = load_config({TOTAL: 8.0, MICRO: 2.0}, world_size=2)
    assert config.gradient_accumulation_steps == 2
    assert type(config.train_batch_size) is int


@pytest.mark.parametrize(("world", "data"), [(0, None), (-1, None), (4, 0), (4, 3), (2, 4)])
def test_impossible_worlds_are_refused(world: int, data: int | None) -> None:
    with pytest.raises(ConfigError):
        load_config(None, world_size=world, data_parallel_size=data)
