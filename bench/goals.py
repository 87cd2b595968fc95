"""What Shardwise is meant to reach, as ratios within one run on two ranks in fp32 on the CPU.

Owns the numbers. Refuses to know how they are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.results import Row, Run

__all__ = ["GOALS", "Goal", "Verdict", "judge"]


def _time(row: Row) -> float | None:
    return row.median_s


def _memory(row: Row) -> float | None:
    return row.peak_rank


@dataclass(frozen=True)
class Goal:
    """One line of the table: a quantity of `ours` over that of `against` is to be at most `limit`."""

    case: str
    ours: str
    against: str
    limit: float
    quantity: Callable[[Any], float | None] = _time

    @property
    def what(self) -> str:
        """Time or memory."""
        return "step time" if self.quantity is _time else "peak memory of a rank"


GOALS = (
    Goal("comm", "shardwise-3", "single", 0.95),
    Goal("comm", "shardwise-3", "fsdp2", 0.33),
    Goal("comm", "shardwise-3", "deepspeed-3", 0.18),
    Goal("comm", "shardwise-3", "ddp", 0.60),
    Goal("comm", "shardwise-2", "deepspeed-2", 0.22),
    Goal("compute", "shardwise-3", "fsdp2", 0.85),
    Goal("compute", "shardwise-3", "single", 1.03),
    Goal("comm", "shardwise-3-gloo", "fsdp2", 0.75),
    Goal("comm", "shardwise-3", "fsdp2", 0.40, _memory),
    Goal("comm", "shardwise-3", "deepspeed-3", 0.36, _memory),
)
IMPORT_GOAL_S = 0.3
INIT_GOAL_S = 1.0


@dataclass(frozen=True)
class Verdict:
    """A goal and what was found; `found` is None where it was not measured."""

    what: str
    limit: float
    found: float | None
    unit: str = ""

    @property
    def word(self) -> str:
        """For a table."""
        if self.found is None:
            return "not measured"
        return "reached" if self.found <= self.limit else "missed"


def judge(run: Run) -> list[Verdict]:
    """The goals that this run can tell about."""
    task = run.task
    if (task.world, task.precision) != (2, "fp32") or task.case.name == "tiny":
        return []
    verdicts = [
        Verdict(f"{goal.ours} over {goal.against}, {goal.what}", goal.limit, run.ratio(goal.ours, goal.against, goal.quantity))
        for goal in GOALS
        if goal.case == task.case.name
    ]
    row = run.row("shardwise-3")
    verdicts.append(Verdict("from shardwise import initialize, after import torch", IMPORT_GOAL_S, run.import_s, " s"))
    verdicts.append(Verdict("shardwise-3, initialize", INIT_GOAL_S, None if row is None else row.init_s, " s"))
    return verdicts
