"""Starts the ranks of one machine, watches them, and sees to it that none is left.

Why not torch's elastic agent for this: measured with torch 2.13, importing it costs 3.4 s before the first rank starts (this
file: nothing, the launcher never imports torch); after a rank fails, the agent waits a fixed 30 s for one that does not
answer SIGTERM; when the agent is killed, its ranks live on; background processes of a rank are not ended; and its report puts
its own traceback last instead of the rank's. The ranks still meet through torch.distributed alone, `torchrun` starts the
same scripts, and joining several machines and restarting them stays the business of torch's rendezvous.

The guarantees: a rank that raises, is killed or exits with a code other than 0 ends the job, and so does a signal to the
launcher. Every process the job started is gone within 10 s of a failure (`_OWN_END` + `_FAILURE_GRACE` + the sweep), unless the
kernel itself cannot end it, which is said. A launcher that is killed is replaced by `guard`.

Owns processes and signals. Refuses to know what the ranks compute, and how a failure is worded.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from shardwise.cli import guard, processes
from shardwise.cli.child import RECORD_VARIABLE
from shardwise.cli.failure import Ending, JobEnding, RecordStream
from shardwise.cli.output import OutputPlan
from shardwise.cli.plan import RankCommand
from shardwise.errors import LaunchError, explain

__all__ = ["Supervisor"]

# Seconds. Together they stay under the 10 s promised in the documentation.
_OWN_END = 2.0  # for a rank that has raised, to end by itself
_FAILURE_GRACE = 4.0  # for the other ranks, between SIGTERM and SIGKILL
_KILL_PATIENCE = 2.0  # for the kernel, after SIGKILL
_LEFTOVER_PATIENCE = 1.0  # for background processes of ranks that have ended, before each of SIGTERM and SIGKILL
_TICK = 0.5
_REAP_EVERY = 10.0

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_IMPATIENT_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(slots=True)
class _Rank:
    """A started rank: its process, its pipe, and how it ended."""

    process: subprocess.Popen[bytes]
    ending: Ending
    pipe: int
    records: RecordStream = field(default_factory=RecordStream)

    @property
    def alive(self) -> bool:
        return self.ending.code is None

    def signal(self, number: int) -> None:
        """To the rank alone: its workers are its own business as long as it has time to end in good order."""
        if self.alive:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, number)


class Supervisor:
    """One attempt at running the ranks of this machine.

    Args:
        commands: what to start.
        output: where their output goes.
        grace: seconds between a stop asked for from outside and SIGKILL.
        say: takes lines for the user.
    """

    def __init__(
        self, commands: Sequence[RankCommand], output: OutputPlan, *, grace: float, say: Callable[[str], None]
    ) -> None:
        self._commands = commands
        self._output = output
        self._grace = grace
        self._say = say
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._deadline: float | None = None  # when what still runs is killed; None while nothing has been stopped
        self._killed = False
        self._next_reap = 0.0
        self._ending = JobEnding(ranks=[], began=time.monotonic())

    def run(self, base: Mapping[str, str]) -> JobEnding:
        """Start everything, wait, clean up.

        Args:
            base: the environment the ranks inherit.

        Raises:
            LaunchError: a rank could not be started; the ones before it have been ended.
        """
        processes.adopt_orphans()
        with self._listening():
            try:
                self._start_all(base)
                self._watch()
            finally:
                self._end_everything()
        return self._ending

    # Starting

    def _start_all(self, base: Mapping[str, str]) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__]
        try:
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
        except OSError as error:
            raise LaunchError(explain("the launcher could not start its guard process", found=str(error))) from None
        for command in self._commands:
            self._start(command, command.environment(base))
        self._output.start()

    def _start(self, command: RankCommand, environment: dict[str, str]) -> None:
        source, target = os.pipe()
        for end in (source, target):
            os.set_blocking(end, False)
        mode = "print" if self._output.errors_are_logged else "quiet"
        streams = self._output.open(command.rank)
        try:
            process = subprocess.Popen(
                command.argv,
                env={**environment, RECORD_VARIABLE: f"{target}:{mode}"},
                stdin=streams.stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                pass_fds=(target,),
                start_new_session=True,  # a group to end as one; and Ctrl-C reaches the ranks once, through the launcher
            )
        except OSError as error:
            os.close(source)
            raise LaunchError(explain(f"rank {command.rank} could not be started", found=str(error))) from None
        finally:
            os.close(target)
            streams.close()
        self._note_for_guard(str(process.pid))
        rank = _Rank(process, Ending(command.rank, command.machine, process.pid), source)
        self._ranks.append(rank)
        self._ending.ranks.append(rank.ending)
        self._selector.register(source, selectors.EVENT_READ, rank)

    def _note_for_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(f"{line}\n".encode())

    # Watching

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Signals are only noted in a list, on which the loop acts; a byte in a pipe wakes it for each, also for SIGCHLD."""
        source, target = os.pipe()
        for end in (source, target):
            os.set_blocking(end, False)
        self._selector.register(source, selectors.EVENT_READ, None)
        before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, *_FORWARDED_SIGNALS, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(target, warn_on_full_buffer=False)
        for number, handler in before.items():
            if handler is not signal.SIG_IGN or number == signal.SIGCHLD:  # nohup and the like stay in force
                signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(wakeup)
            self._selector.close()
            os.close(source)
            os.close(target)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _watch(self) -> None:
        while any(rank.alive for rank in self._ranks):
            self._wait()
            self._observe()
            self._obey_signals()
            if self._deadline is None:
                self._look_for_failure()
            elif time.monotonic() >= self._deadline:
                if self._killed:
                    return  # not even SIGKILL helped
                self._kill()

    def _wait(self) -> None:
        timeout = _TICK if self._deadline is None else min(_TICK, max(0.0, self._deadline - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                self._hear(key.data)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 65536)  # the wake-up bytes say nothing

    def _hear(self, rank: _Rank) -> bool:
        """Take what is in the rank's pipe; False when there is nothing."""
        try:
            data = os.read(rank.pipe, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(rank.pipe)
            return False
        rank.records.feed(data)
        rank.ending.error, rank.ending.crash = rank.records.error, rank.records.crash
        return True

    def _observe(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            code = _ended(rank.process) if rank.alive else None
            if code is not None:
                while rank.pipe in self._selector.get_map() and self._hear(rank):
                    pass  # what the rank wrote just before its end may still be in the pipe
                rank.ending.code, rank.ending.time = code, now
                rank.ending.asked = self._deadline is not None
        if now >= self._next_reap:
            self._next_reap = now + _REAP_EVERY
            processes.reap(self._own())

    def _own(self) -> set[int]:
        own = {rank.process.pid for rank in self._ranks}
        return own | {self._guard.pid} if self._guard is not None else own

    # Stopping

    def _look_for_failure(self) -> None:
        failed = [rank for rank in self._ranks if rank.ending.failed]
        ended = any(not rank.alive for rank in failed)
        first = min((rank.ending.failure_time for rank in failed), default=float("inf"))
        if ended or time.monotonic() >= first + _OWN_END:
            self._stop(signal.SIGTERM, min(_FAILURE_GRACE, self._grace))

    def _obey_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number in _FORWARDED_SIGNALS:
                self._signal_all(number)
            elif self._ending.stop_signal is None:
                self._stop_for(number)
            elif number in _IMPATIENT_SIGNALS:  # not SIGTERM: a scheduler may send it twice, and the ranks may be saving
                self._kill()

    def _stop_for(self, number: int) -> None:
        self._ending.stop_signal = number
        if self._deadline is not None:  # a failure is being cleaned up already
            return
        self._stop(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, self._grace)
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        self._say(f"shardwise run: {signal.Signals(number).name}: stopping {len(self._ranks)} ranks{again}")

    def _stop(self, number: int, grace: float) -> None:
        self._ending.stop_time = time.monotonic()
        self._deadline = self._ending.stop_time + grace
        self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def _kill(self) -> None:
        self._killed = True
        self._deadline = time.monotonic() + _KILL_PATIENCE
        for rank in self._ranks:
            # The leader is not reaped before the very end, so the number cannot have become a stranger's.
            with contextlib.suppress(OSError):
                os.killpg(rank.process.pid, signal.SIGKILL)

    # Cleaning up

    def _end_everything(self) -> None:
        if any(rank.alive for rank in self._ranks) and not self._killed:
            self._kill()  # only after an error of the launcher itself
        self._end_leftovers()
        self._output.close()
        self._dismiss_guard()
        for rank in self._ranks:
            os.close(rank.pipe)
            if not rank.alive:
                rank.process.wait()

    def _end_leftovers(self) -> None:
        """Background processes of the ranks: a moment to end by themselves, then SIGTERM, then SIGKILL."""
        own = self._own()
        steps = [signal.SIGKILL] if self._killed else [None, signal.SIGTERM, signal.SIGKILL]
        for step in steps:
            left = self._leftovers(own)
            if left and step is not None:
                processes.end(left, step)
            until = time.monotonic() + _LEFTOVER_PATIENCE
            while left and time.monotonic() < until:
                time.sleep(0.02)
                self._observe()
                left = self._leftovers(own)
                if step is signal.SIGKILL:
                    processes.end(left, step)  # some may have been born meanwhile
            if not left:
                return
            if step is None:
                self._ending.background += [f"{process.name} (pid {process.pid})" for process in left]
        self._ending.leftovers += [f"{process.name} (pid {process.pid})" for process in self._leftovers(own)]

    def _leftovers(self, own: set[int]) -> list[processes.Process]:
        alive = {rank.process.pid for rank in self._ranks if rank.alive}
        return processes.job_processes({rank.process.pid for rank in self._ranks}, own - alive)

    def _dismiss_guard(self) -> None:
        if self._guard is None:
            return
        self._note_for_guard("done")
        with contextlib.suppress(OSError):
            assert self._guard.stdin is not None
            self._guard.stdin.close()
        try:
            self._guard.wait(_KILL_PATIENCE)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, minus the signal's number for a killed process, None for a living one. The process is not reaped."""
    if not hasattr(os, "waitid"):
        return process.poll()
    try:
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
