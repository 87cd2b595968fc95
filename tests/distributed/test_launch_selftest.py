"""The installed self-test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.launch_support import clean_environment


@pytest.mark.slow
def test_the_selftest_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "selftest"],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agree") == 4
    assert done.stdout.endswith("PASS\n")
