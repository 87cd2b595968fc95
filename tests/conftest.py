"""Session-wide settings of the tests."""

from __future__ import annotations

import os
import signal

# A shell that starts tests in the background has them ignore SIGINT, and all that they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per process: the ranks of a test share the cores of one machine. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.harness.worker import ASSERTING_MODULES

pytest.register_assert_rewrite(*ASSERTING_MODULES)


@pytest.fixture(autouse=True)
def each_test_starts_without_a_process_group() -> Iterator[None]:
    """`shardwise.initialize` starts one where there is none, also in the session's own process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_unconfigure() -> None:
    """End the workers with the session."""
    from tests.harness import close_pool

    close_pool()
