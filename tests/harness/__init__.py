"""Run test functions on several ranks, in worker processes that live for the whole pytest session.

    from tests.harness import ranks

    @ranks(2)                                  # or @ranks(1, 2, 3): one test per world size
    @pytest.mark.parametrize("stage", [0, 1])
    def test_sum(stage: int) -> None:          # the body runs on every rank, with a fresh gloo group
        ...

Owns the worker processes and the report of what every rank did. Refuses to know Shardwise.
"""

from __future__ import annotations

from tests.harness.decorator import ranks, run_on_ranks
from tests.harness.pool import close_pool
from tests.harness.report import RankReport, RanksFailed

__all__ = ["RankReport", "RanksFailed", "close_pool", "ranks", "run_on_ranks"]
