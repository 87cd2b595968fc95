"""Who failed first, and how to say it.

Owns the choice of the rank to blame among several that ended badly, the exit code of the job, and the text of the report. Works
on plain records of what happened; refuses to know processes and signals in flight.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.cli.child import RECORD_MARK

__all__ = ["Ending", "ErrorRecord", "JobEnding", "RecordStream", "blame", "exit_code", "report"]

_RULE = 88
# A rank that dies without a word is seen a moment after it died; in that moment another may already have raised because of it.
_SILENT_DEATH_LEAD = 0.25
_SIGNAL_HINTS = {
    signal.SIGKILL: "often out of memory: the kernel ends the largest process, or the container's limit was reached "
    "(see `dmesg`, or the job's memory limit). Fewer ranks, a smaller micro batch or a higher stage need less",
    signal.SIGSEGV: "a crash in native code (an extension, a driver, or a library that does not match)",
    signal.SIGBUS: "often no room left in shared memory (/dev/shm); DataLoader workers use it",
    signal.SIGABRT: "native code gave up; its last words are in the output above",
    signal.SIGILL: "an instruction this processor does not know: a binary built for another machine",
    signal.SIGTERM: "sent from outside this job",
    signal.SIGINT: "sent from outside this job",
}


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An uncaught exception as the rank reported it: moment (monotonic seconds), class name, first line, whole traceback."""

    time: float
    kind: str
    line: str
    text: str

    def is_like(self, other: ErrorRecord) -> bool:
        """True when only the moment differs."""
        return (self.kind, self.text) == (other.kind, other.text)


class RecordStream:
    """Takes the bytes of a rank's pipe apart: records of exceptions, and the stacks the fault handler wrote."""

    def __init__(self) -> None:
        self._rest = b""
        self.error: ErrorRecord | None = None
        self.crash = ""

    def feed(self, data: bytes) -> None:
        """Take more bytes; of several exceptions the first one counts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith(RECORD_MARK):
                self.error = self.error or _parse_record(text[1:])
            else:
                self.crash += text + "\n"


def _parse_record(text: str) -> ErrorRecord | None:
    try:
        fields = json.loads(text)
        return ErrorRecord(float(fields["time"]), str(fields["type"]), str(fields["line"]), str(fields["text"]))
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class Ending:
    """How one rank ended.

    Args:
        rank, machine, pid: who.
        time: when it was seen to have ended, monotonic seconds; None for one that could not be ended.
        code: its exit code, or minus the signal that ended it; None as for `time`.
        asked: the launcher had told it to stop before.
        error, crash: what its pipe said.
    """

    rank: int
    machine: str
    pid: int
    time: float | None = None
    code: int | None = None
    asked: bool = False
    error: ErrorRecord | None = None
    crash: str = ""

    @property
    def failed(self) -> bool:
        """True when it ended, or is about to end, badly by its own doing."""
        return self.error is not None or (self.code not in (None, 0) and not self.asked)

    @property
    def failure_time(self) -> float:
        """The moment to compare with other ranks' failures."""
        if self.error is not None:
            return self.error.time
        return (self.time if self.time is not None else float("inf")) - _SILENT_DEATH_LEAD


@dataclass(slots=True)
class JobEnding:
    """How the job ended: its ranks, the signal that stopped the launcher if any, when it began and began to stop.

    `background`: processes that ranks had left running and that had to be ended; `leftovers`: what could not be ended.
    """

    ranks: list[Ending]
    began: float
    stop_signal: int | None = None
    stop_time: float | None = None
    background: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


def blame(job: JobEnding) -> Ending | None:
    """The rank that failed first, or None. Failures after a stop that was asked for from outside are consequences."""
    limit = job.stop_time if job.stop_signal is not None and job.stop_time is not None else float("inf")
    failed = [rank for rank in job.ranks if rank.failed and rank.failure_time <= limit]
    return min(failed, key=lambda rank: (rank.failure_time, rank.rank), default=None)


def exit_code(job: JobEnding) -> int:
    """The code the launcher ends with: the blamed rank's own, or 128 + signal, as shells count."""
    culprit = blame(job)
    if culprit is not None:
        # One that raised and then had to be stopped ends with our signal; what it would have ended with is 1.
        return 1 if culprit.asked else _shell_code(culprit.code) or 1
    if job.stop_signal is not None:
        return 128 + job.stop_signal
    return 1 if any(rank.code != 0 for rank in job.ranks) else 0


def _shell_code(code: int | None) -> int:
    return 0 if code is None else 128 - code if code < 0 else code


def report(job: JobEnding) -> str:
    """What to print when the job is over: empty for success; the blamed rank's traceback comes last."""
    lines: list[str] = []
    culprit = blame(job)
    if culprit is not None:
        seen = culprit.error.time if culprit.error is not None else culprit.time or job.began
        lines.append(
            f"shardwise run: rank {culprit.rank} of {len(job.ranks)} {_deed(culprit)}"
            f" after {seen - job.began:.1f} s; all ranks were stopped."
        )
        lines += _others(job, culprit)
    elif job.stop_signal is not None:
        lines.append(f"shardwise run: stopped by {_signal_name(job.stop_signal)}; all ranks have ended.")
        lines += [
            f"  rank {rank.rank}: {_deed(rank)} while stopping"
            for rank in job.ranks
            if rank.error is not None and not _is_interrupt(rank)
        ]
    if job.background:
        lines.append(f"shardwise run: ended background processes that the ranks had left: {', '.join(job.background)}")
    lines += [f"  still running, and the kernel does not let it go: {name}" for name in job.leftovers]
    if culprit is not None:
        lines += _last_words(culprit)
    return "\n".join(lines) + "\n" if lines else ""


def _is_interrupt(rank: Ending) -> bool:
    return rank.error is not None and rank.error.kind == "KeyboardInterrupt"


def _deed(rank: Ending) -> str:
    if rank.error is not None and rank.error.kind == "SystemExit":
        return f"called sys.exit({rank.error.line!r})"
    if rank.error is not None:
        return f"raised {rank.error.kind}"
    if rank.code is not None and rank.code < 0:
        return f"was killed by signal {-rank.code} ({_signal_name(-rank.code)})"
    return f"exited with code {rank.code}"


def _others(job: JobEnding, culprit: Ending) -> list[str]:
    """A line for each other rank that has something to say; equal ones together."""
    said: dict[str, list[int]] = {}
    for rank in job.ranks:
        if rank is not culprit:
            said.setdefault(_remark(rank, culprit), []).append(rank.rank)
    return [f"  {_ranks(ranks)}: {remark}" for remark, ranks in said.items() if remark]


def _remark(rank: Ending, culprit: Ending) -> str:
    if rank.error is not None and culprit.error is not None and rank.error.is_like(culprit.error):
        return "the same error"
    if rank.error is not None:
        return f"then {_deed(rank)}" + (f": {rank.error.line}" if rank.error.line and rank.error.kind != "SystemExit" else "")
    if rank.code == 0 and rank.time is not None:
        before = culprit.failure_time - rank.time
        return f"had left with code 0, {before:.1f} s earlier" if before > 0 else ""
    return f"then {_deed(rank)}" if rank.failed else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _last_words(culprit: Ending) -> list[str]:
    title = f"---- rank {culprit.rank} on {culprit.machine} (pid {culprit.pid}) "
    lines = [title + "-" * max(0, _RULE - len(title))]
    if culprit.crash:
        lines.append(culprit.crash.rstrip("\n"))
    if culprit.error is not None:
        lines.append(culprit.error.text.rstrip("\n"))
    elif culprit.code is not None and culprit.code < 0:
        hint = _SIGNAL_HINTS.get(signal.Signals(-culprit.code)) if -culprit.code in set(signal.Signals) else None
        lines.append(f"signal {-culprit.code} ({_signal_name(-culprit.code)})" + (f": {hint}." if hint else "."))
    else:
        lines.append(f"exit code {culprit.code}; the rank left without an uncaught exception (what it printed is above).")
    return lines


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
