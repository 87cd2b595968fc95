"""Starts `shardwise run` as a user would, and looks for what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0
GONE_S = 10.0  # what the launcher promises


@dataclass
class Finished:
    code: int
    out: str
    err: str
    seconds: float


def write_script(folder: Path, body: str, name: str = "script.py") -> Path:
    """A rank's program without torch; `rank` is known, and `nap()` is a time in which the launcher should end the rank."""
    head = "import os, sys, time, signal, subprocess\nrank = int(os.environ['RANK'])\ndef nap(): time.sleep(120)\n"
    path = folder / name
    path.write_text(head + textwrap.dedent(body))
    return path


def clean_environment(**more: str) -> dict[str, str]:
    gone = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in gone and not name.startswith("TORCHELASTIC")}
    return {**kept, **more}


def processes_with(token: str) -> list[int]:
    """Living processes whose command line has `token`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                alive = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
            except OSError:
                continue
            if alive and token.encode() in words:
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Launch:
    """A running `shardwise run ...`; `token` is in the command line of every process that the job has."""

    def __init__(self, *arguments: str | Path, token: str, cwd: Path | None = None, **environment: str) -> None:
        self.token = token
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "run", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=clean_environment(**environment),
        )

    def finish(self) -> Finished:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return Finished(self.process.returncode, out, err, time.monotonic() - self.began)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)
        for pid in processes_with(self.token):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def launched(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Iterator[Launch]:
    """The word TOKEN among the arguments is replaced by one that no other process has."""
    token = f"token-{uuid.uuid4().hex}"
    words = [token if word == "TOKEN" else word for word in arguments]
    launch = Launch(*words, token=token, cwd=cwd, **environment)
    try:
        yield launch
    finally:
        launch.kill()


def run(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Finished:
    """Run to the end, and be sure that nothing is left."""
    with launched(*arguments, cwd=cwd, **environment) as launch:
        done = launch.finish()
        assert processes_with(launch.token) == []
    return done
