"""What a process leaves behind when it ends, and limits that only a process of its own can have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import shardwise
from shardwise.tiers import DiskTier

ROOTS = os.pathsep.join([str(Path(shardwise.__file__).parents[1]), str(Path(__file__).parents[2])])

COMMON = """
import errno, os, resource, sys, torch
from shardwise.errors import UsageError
from shardwise.tiers import DiskTier, StorageError
from tests.unit.tiers_support import Gated, Without, random_bytes
folder = sys.argv[1]
named = DiskTier(folder, system=Without(nameless=False, unlink=False))
nameless = DiskTier(folder)
unlinked = DiskTier(folder, system=Without(nameless=False))
for tier in (named, nameless, unlinked):
    tier.start_write(tier.reserve(100_003), random_bytes(100_003)).wait()
"""

KILLED = (
    COMMON
    + """
print("ready", flush=True)
sys.stdin.read()
"""
)

ENDS = (
    COMMON
    + """
held = nameless.reserve(1000)
child = os.fork()
if not child:
    try:
        nameless.start_write(held, random_bytes(1000))
    except UsageError as error:
        os._exit(7 if "used in a forked child" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for tier in (nameless, DiskTier(folder, system=Without(allocate=False))):
    try:
        tier.reserve(2_000_000)
    except StorageError as error:
        assert error.errno == errno.EFBIG, error
        assert f"bytes for the swap file in {folder}: found File too large" in str(error), error
    else:
        raise AssertionError("no limit")
    tier.start_write(tier.reserve(1000), random_bytes(1000)).wait()

named._file._system.takes_unlink = True
slow = Gated()
gated = DiskTier(folder, system=slow)
gated.start_write(gated.reserve(10), random_bytes(10))
slow.next()
for tier in (named, nameless):
    for _ in range(8):
        tier.start_write(tier.reserve(9000), random_bytes(9000))
slow.let()
print("done", flush=True)
"""
)


def script(text: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", text, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOTS, "OMP_NUM_THREADS": "1"},
    )


def test_nothing_outlives_a_kill_but_what_the_next_start_removes(tmp_path: Path) -> None:
    with script(KILLED, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (left,) = tmp_path.iterdir()
        with DiskTier(tmp_path):
            assert left.exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert [left] == list(tmp_path.iterdir())
    assert left.stat().st_size > 100_000
    with DiskTier(tmp_path):
        assert not list(tmp_path.iterdir())


def test_a_process_ends_with_transfers_in_flight_and_leaves_nothing(tmp_path: Path) -> None:
    with script(ENDS, tmp_path) as process:
        out, err = process.communicate(timeout=50)
    assert (process.returncode, out, err) == (0, "done\n", "")
    assert not list(tmp_path.iterdir())
