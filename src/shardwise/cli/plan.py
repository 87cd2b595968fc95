"""What a job is: which processes run where, with which environment.

Owns the arithmetic from a request to one command per rank, as plain data that can be printed (`--dry-run`), tested without
starting anything, and later handed to another machine. Refuses to know how processes are started and watched.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from shardwise.cli import child
from shardwise.errors import LaunchError, explain

__all__ = ["LAUNCHER_VARIABLES", "Job", "Machine", "Program", "RankCommand", "describe", "rank_commands"]

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables the launcher sets for every rank; a user cannot set them with `--env`."""

_LOOPBACK_INTERFACES = ("lo", "lo0")


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank runs.

    Args:
        kind: "script" (a Python file), "module" (`python -m`) or "command" (any executable).
        target: the file, module or executable.
        arguments: what follows it, unchanged.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()

    def check(self) -> Program:
        """This program, found and permitted.

        Raises:
            LaunchError: it does not exist or may not be read or executed.
        """
        {"script": _check_script, "module": _check_module, "command": _check_command}[self.kind](self.target)
        return self

    def argv(self) -> tuple[str, ...]:
        """The command line of one rank."""
        if self.kind == "command":
            return (shutil.which(self.target) or self.target, *self.arguments)
        return (sys.executable, child.__file__, self.kind, self.target, *self.arguments)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(explain(f"{target} is a directory without a __main__.py", do="name a Python file"))
    if not path.exists():
        raise LaunchError(explain(f"there is no file {target}", found=_neighbours(path), do=_advice_for_missing(target)))
    if not os.access(path, os.R_OK):
        raise LaunchError(explain(f"{target} may not be read by this user", do=f"check its permissions (ls -l {target})"))


def _neighbours(path: Path) -> str:
    """The nearest names beside a missing file, as words for a message."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"no directory {path.parent} either"
    close = get_close_matches(path.name, names, n=2)
    return f"{' and '.join(close)} beside it" if close else ""


def _advice_for_missing(target: str) -> str:
    if "/" not in target and not target.endswith(".py"):
        if shutil.which(target):
            return f"to run the executable {target}, add --no-python"
        return "to run a module, add -m; options of the launcher go before the script"
    return f"paths are relative to {Path.cwd()}"


def _check_module(target: str) -> None:
    if target.endswith(".py") and Path(target).exists():
        raise LaunchError(explain(f"{target} is a file, not a module", do="leave -m out, or name the module with dots"))
    top = target.partition(".")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.remove(here)
    if not found:
        raise LaunchError(explain(f"there is no module {target}", do=f"install it, or run from its folder (now {here})"))


def _check_command(target: str) -> None:
    if shutil.which(target):
        return
    path = Path(target)
    if path.exists():
        raise LaunchError(
            explain(f"{target} may not be executed", do=f"chmod +x {target}, or leave --no-python out for a Python file")
        )
    raise LaunchError(explain(f"there is no executable {target}", do="give a path, or a name on PATH"))


@dataclass(frozen=True, slots=True)
class Machine:
    """One computer of a job: its name and how many ranks it runs."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class Job:
    """A whole job. Ranks are numbered along `machines` in order.

    Args:
        program: what each rank runs.
        machines: who runs it; today exactly one, this machine.
        master_addr, master_port: where rank 0 offers the store on which the ranks meet.
        cores: cores per machine, divided among its ranks for OMP_NUM_THREADS.
        omp_threads: threads per rank as the user asked, or None.
        extra: variables the user adds; they win over everything except `LAUNCHER_VARIABLES`.
    """

    program: Program
    machines: tuple[Machine, ...]
    master_addr: str
    master_port: int
    cores: int
    omp_threads: int | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return sum(machine.slots for machine in self.machines)


@dataclass(frozen=True, slots=True)
class RankCommand:
    """One rank: where it runs, its command line, and the variables that differ from the launcher's own environment."""

    rank: int
    local_rank: int
    machine: str
    argv: tuple[str, ...]
    variables: Mapping[str, str]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process, from the launcher's `base`.

        What an outer torchrun left is taken out: it would send the ranks to that job's store.
        """
        kept = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
        return {**kept, **self.variables}


def rank_commands(job: Job, base: Mapping[str, str]) -> tuple[RankCommand, ...]:
    """One command per rank, in rank order.

    Args:
        job: the job.
        base: the launcher's environment; a variable the user has set there is kept where it is only a default of ours.
    """
    commands: list[RankCommand] = []
    argv = job.program.argv()
    for node, machine in enumerate(job.machines):
        shared = {**_defaults(job, machine, base), **job.extra}
        for local_rank in range(machine.slots):
            rank = len(commands)
            values = (rank, local_rank, node, job.world_size, machine.slots, job.master_addr, job.master_port)
            own = dict(zip(LAUNCHER_VARIABLES, map(str, values), strict=True))
            commands.append(RankCommand(rank, local_rank, machine.name, argv, {**own, **shared}))
    return tuple(commands)


def _defaults(job: Job, machine: Machine, base: Mapping[str, str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    if job.omp_threads is not None:
        chosen["OMP_NUM_THREADS"] = str(job.omp_threads)
    elif not base.get("OMP_NUM_THREADS"):
        # Each rank would otherwise start a thread per core, and N x cores threads fight over the cores.
        chosen["OMP_NUM_THREADS"] = str(max(1, job.cores // machine.slots))
    interface = _loopback_interface()
    if len(job.machines) == 1 and interface and not base.get("GLOO_SOCKET_IFNAME"):
        # On one machine nothing needs to listen on a network, and gloo needs no host name that resolves.
        chosen["GLOO_SOCKET_IFNAME"] = interface
    return chosen


def _loopback_interface() -> str | None:
    import socket

    try:
        names = {name for _, name in socket.if_nameindex()}
    except OSError:
        return None
    return next((name for name in _LOOPBACK_INTERFACES if name in names), None)


def describe(commands: Sequence[RankCommand]) -> str:
    """The commands as shell lines, one per rank, that would start the same ranks by hand."""
    lines: list[str] = []
    for command in commands:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.variables.items())
        lines.append(f"# rank {command.rank} on {command.machine}\nenv {variables} {shlex.join(command.argv)}")
    return "\n".join(lines)
