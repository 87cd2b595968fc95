"""Session-wide settings of the tests."""

from __future__ import annotations

import os

# One thread per process: the ranks of a test share the cores of one machine. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.harness.worker import ASSERTING_MODULES

pytest.register_assert_rewrite(*ASSERTING_MODULES)


def pytest_unconfigure() -> None:
    """End the workers with the session."""
    from tests.harness import close_pool

    close_pool()
