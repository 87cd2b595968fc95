"""Which processes belong to a job, read from the kernel.

Owns the view of the process table: who lives in a rank's session, and who was adopted by the launcher after its parent died.
Works on Linux; elsewhere the lists are empty and only the ranks' own process groups can be ended. Refuses to know ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "adopt_orphans", "end", "job_processes", "reap"]

_PROC = Path("/proc")
_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True, slots=True)
class Process:
    """A row of the process table; `alive` is False for a zombie."""

    pid: int
    parent: int
    session: int
    alive: bool
    name: str


def adopt_orphans() -> bool:
    """From now on this process becomes the parent of descendants whose own parent dies; False where that is not possible.

    A background process that a rank started in a session of its own is otherwise out of reach once the rank is gone.
    """
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _process_table() -> list[Process]:
    if sys.platform != "linux":
        return []
    rows: list[Process] = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                rows.append(_parse_stat((entry / "stat").read_bytes()))
    return rows


def _parse_stat(line: bytes) -> Process:
    """One /proc/PID/stat; the name in parentheses may itself hold spaces and parentheses."""
    head, _, tail = line.rpartition(b")")
    pid, _, name = head.partition(b" (")
    state, parent, _group, session = tail.split()[:4]
    return Process(int(pid), int(parent), int(session), state not in {b"Z", b"X"}, name.decode(errors="replace"))


def job_processes(sessions: Set[int], own: Set[int]) -> list[Process]:
    """Living processes of the job, besides the ones in `own`.

    Args:
        sessions: session ids of the ranks, whose leaders must not have been reaped yet (else the number may be a stranger's).
        own: children the caller knows and handles by itself.
    """
    table = _process_table()
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    members = {process.pid: process for process in table if process.session in sessions}
    members.update({process.pid: process for process in children.get(os.getpid(), [])})
    pending = list(members.values())
    while pending:
        for process in children.get(pending.pop().pid, []):
            if process.pid not in members:
                members[process.pid] = process
                pending.append(process)
    return [process for process in members.values() if process.alive and process.pid not in own]


def end(processes: Iterable[Process], signum: signal.Signals) -> None:
    """Send a signal to each; one that is gone already is no error."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signum)


def reap(own: Set[int]) -> None:
    """Collect adopted processes that have ended, so that they do not stay as zombies while the job runs."""
    for process in _process_table():
        if process.parent == os.getpid() and not process.alive and process.pid not in own:
            with contextlib.suppress(OSError):
                os.waitpid(process.pid, os.WNOHANG)
