"""`shardwise run`: from a request to an exit code.

Owns the order of the steps: check the program, hold a port, make the plan, run it, report. Environment variables are read here
and handed on. Refuses to know how each step is done.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence

from shardwise.cli.failure import exit_code, report
from shardwise.cli.hardware import default_processes, usable_cores
from shardwise.cli.output import OutputPlan
from shardwise.cli.parser import RunRequest, parse_run
from shardwise.cli.plan import Job, Machine, describe, rank_commands
from shardwise.cli.ports import HeldPort
from shardwise.cli.supervise import Supervisor

__all__ = ["main", "run"]

_SHOW_CURSOR = "\x1b[?25h"


def main(argv: Sequence[str]) -> int:
    """`shardwise run ARGV`; the exit code of the job.

    Raises:
        LaunchError: nothing was started.
    """
    return run(parse_run(argv))


def run(request: RunRequest) -> int:
    """Run a job on this machine and return its exit code.

    Raises:
        LaunchError: nothing was started.
    """
    program = request.program.check()
    nproc = request.nproc or default_processes()
    with HeldPort(request.master_port) as held:
        job = Job(
            program=program,
            machines=(Machine(platform.node() or "localhost", nproc),),
            master_addr="127.0.0.1",
            master_port=held.port,
            cores=usable_cores(),
            omp_threads=request.omp_threads,
            extra=request.env,
        )
        commands = rank_commands(job, os.environ)
        if request.dry_run:
            print(describe(commands))
            return 0
        title = " ".join([program.target, *program.arguments])
        output = OutputPlan(prefix=request.prefix, log_dir=request.log_dir, title=f"shardwise run: {title}")
        ending = Supervisor(commands, output, grace=request.grace, say=_say).run(os.environ)
    text, code = report(ending), exit_code(ending)
    if code:
        _restore_terminal()
    if text:
        _say(text.rstrip("\n"))
    return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _restore_terminal() -> None:
    """A rank that was stopped while it drew a progress bar may have left the cursor hidden."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
                stream.flush()
