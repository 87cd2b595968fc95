"""The memory table shows the numbers it was given, for few and for many ranks."""

from __future__ import annotations

import pytest

from shardwise.errors import UsageError
from shardwise.observe import memory_table
from shardwise.observe.memory import format_bytes


def report(resting: int, gradients: int = 3_000_000, optimizer: int = 6_000_000) -> dict[str, int]:
    return {
        "parameters_resting": resting,
        "parameters_live_peak": 4_000_000,
        "gradients": gradients,
        "optimizer": optimizer,
        "padding": 512,
        "unsharded_parameters": 6_000_000,
        "unsharded_gradients": 6_000_000,
        "unsharded_optimizer": 12_000_000,
    }


def cells(table: str, row: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.strip().startswith(row))
    return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]


def test_each_rank_has_a_column_and_savings_are_those_of_the_fullest_rank() -> None:
    table = memory_table([report(3_000_000), report(2_400_000)], measured=[391_000_000, 389_000_000])
    assert cells(table, "memory of") == ["memory of 2 ranks", "rank 0", "rank 1", "unsharded", "saved"]
    assert cells(table, "parameters, at rest") == ["parameters, at rest", "3.0 MB", "2.4 MB", "6.0 MB", "50%"]
    assert cells(table, "sum of these")[1:] == ["12.0 MB", "11.4 MB", "24.0 MB", "50%"]
    assert cells(table, "of it padding")[1:] == ["512 B", "512 B"]
    assert cells(table, "whole process")[1:] == ["391.0 MB", "389.0 MB"]


def test_columns_are_aligned() -> None:
    lines = memory_table([report(3_000_000), report(123)]).splitlines()
    end = lines[0].index("rank 1") + len("rank 1")
    assert all(line[end - 1] in "B1" and line[end : end + 2] in ("", "  ") for line in lines if not line.startswith("-"))


def test_many_ranks_become_least_and_most() -> None:
    table = memory_table([report(1_000_000 * rank) for rank in range(1, 9)])
    assert cells(table, "memory of") == ["memory of 8 ranks", "least", "most", "unsharded", "saved"]
    assert cells(table, "parameters, at rest")[1:3] == ["1.0 MB", "8.0 MB"]


def test_one_rank_saves_nothing_and_an_empty_model_divides_by_nothing() -> None:
    assert cells(memory_table([report(6_000_000)]), "parameters, at rest")[-1] == "0%"
    nothing = memory_table([dict.fromkeys(report(0), 0)])
    assert cells(nothing, "parameters, at rest") == ["parameters, at rest", "0 B"]


def test_measurements_that_do_not_belong_are_refused() -> None:
    with pytest.raises(UsageError, match="1 reports and 2 measurements"):
        memory_table([report(1)], measured=[1, 2])
    with pytest.raises(UsageError, match="0 reports"):
        memory_table([])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (13_240_000, "13.2 MB"), (2e9, "2.0 GB"), (5e15, "5000.0 TB")],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text
