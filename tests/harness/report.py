"""What happened on each rank of one call, and how that is told to a reader.

Owns plain records and their text. Refuses to know processes.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["RankReport", "RanksFailed", "describe_exit", "render"]

Kind = Literal["passed", "skipped", "raised", "hung", "died", "unclean"]
WORKER_FILE = str(Path(__file__).with_name("worker.py"))
_LINES_OF_OUTPUT = 120


@dataclass
class RankReport:
    """One rank's part in a call.

    Args:
        rank: its rank.
        pid: process id of the worker that ran it.
        kind: how it ended; `unclean` is a body that passed and left something behind in its worker.
        seconds: when it ended, counted from the start of the call.
        title: one line, such as "raised AssertionError".
        text: traceback, or the reason.
        output: what the process wrote to stdout and stderr during the call.
        result: what the function returned.
    """

    rank: int
    pid: int
    kind: Kind
    seconds: float
    title: str
    text: str = ""
    output: str = ""
    result: Any = None

    @property
    def failed(self) -> bool:
        """Whether the call failed on this rank."""
        return self.kind not in ("passed", "skipped")


class RanksFailed(AssertionError):  # noqa: N818 - it reads as the sentence it reports
    """At least one rank failed. `reports` has all of them, in rank order; the message has the first failure first."""

    def __init__(self, what: str, reports: list[RankReport]) -> None:
        super().__init__(render(what, reports))
        self.reports = reports


def describe_exit(code: int | None) -> str:
    """How a process ended, in words: `died with signal 9 (SIGKILL)`, `exited with code 3`."""
    if code is None:
        return "lost its connection to the test session"
    if code < 0:
        return f"died with signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def render(what: str, reports: list[RankReport]) -> str:
    """The message of a failed call: a summary line, then every failed rank, the first to fail first, then the others."""
    failed = sorted((report for report in reports if report.failed), key=lambda report: report.seconds)
    fine = [report.rank for report in reports if not report.failed]
    summary = "; ".join(f"rank {report.rank} {report.title}" for report in failed)
    lines = [f"{what} failed on {len(failed)} of {len(reports)} ranks: {summary}"]
    if fine:
        lines.append(f"finished without failure: {', '.join(f'rank {rank}' for rank in fine)}")
    for report in failed + [report for report in reports if not report.failed]:
        lines += _section(report)
    return "\n".join(lines)


def _section(report: RankReport) -> list[str]:
    output = _without_own_frames(report.output).rstrip().splitlines()
    if not report.failed and not output:
        return []
    lines = ["", f"===== rank {report.rank} {report.title} (after {report.seconds:.2f} s, pid {report.pid}) ====="]
    if report.text:
        lines.append(report.text.rstrip())
    if output:
        lines.append(f"----- rank {report.rank}: stdout and stderr -----")
        if len(output) > _LINES_OF_OUTPUT:
            lines.append(f"[{len(output) - _LINES_OF_OUTPUT} lines left out]")
        lines += output[-_LINES_OF_OUTPUT:]
    return lines


def _without_own_frames(output: str) -> str:
    """Cuts from faulthandler's stacks the control thread, and what lies below the body of the test."""
    kept, thread = [], False
    for block in output.split("\n\n"):
        if "most recent call first" not in block:
            kept.append(block)
        elif "in _obey" not in block:
            kept.append(block.split(f'\n  File "{WORKER_FILE}"')[0])
            thread = True
        else:
            kept.append(block.split("\nThread ")[0] if not block.startswith("Thread ") else "")
    return "\n\n".join(block for block in kept if block) if thread else output
