"""Files that a killed process left behind.

Owns the names of swap files, for file systems where one needs a name, and the decision whose file may go. The name says which
machine, process and moment it belongs to; only a file whose process is certainly gone is a leftover. Refuses to know contents.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

__all__ = ["Owner", "leftovers_in", "new_name", "this_process"]

_PREFIX = "shardwise-swap"
_SERIALS = itertools.count(1)


class Owner(NamedTuple):
    """The process that made a file."""

    machine: str
    """Host and process-id namespace: pids of another container on the same host mean nothing here."""
    pid: int
    started: int
    """When it started, in the system's ticks since boot; 0 where the system does not say."""


def this_process() -> Owner:
    """The calling process."""
    pid = os.getpid()
    return Owner(_machine(), pid, _started(pid) or 0)


def new_name(owner: Owner) -> str:
    """A file name that no other process uses, and this one has not used before."""
    return f"{_PREFIX}.{owner.machine}.{owner.pid}.{owner.started}.{next(_SERIALS)}"


def leftovers_in(directory: Path) -> list[Path]:
    """Swap files in a folder whose process is gone; never those of other machines, nor where it cannot be told."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.name.startswith(_PREFIX + ".")]
    except OSError:
        return []
    owners = [(name, _owner_in(name)) for name in sorted(names)]
    return [directory / name for name, owner in owners if owner is not None and _gone(owner)]


def _owner_in(name: str) -> Owner | None:
    fields = name.split(".")
    if len(fields) != 5:
        return None
    with suppress(ValueError):
        return Owner(fields[1], int(fields[2]), int(fields[3]))
    return None


def _gone(owner: Owner) -> bool:
    """Whether the process has certainly ended: no such pid, or another process has that pid now."""
    if owner.machine != _machine() or owner.pid <= 0:
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it runs, as another user
        pass
    started = _started(owner.pid)
    return started is not None and owner.started not in (0, started)


def _started(pid: int) -> int | None:
    """Start of a process in ticks since boot, as proc(5) has it in field 22 of `stat`; None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything, parentheses and spaces too.
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


@cache
def _machine() -> str:
    namespace = 0
    with suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    return blake2b(f"{os.uname().nodename}|{namespace}".encode(), digest_size=6).hexdigest()
