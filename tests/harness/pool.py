"""The worker processes of a pytest session, and one call on some of them.

Owns processes, pipes, time limits. Workers are forked from one server process that has imported torch and started nothing,
so a new worker costs milliseconds and a broken one can be thrown away without regret.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.report import RankReport, RanksFailed, describe_exit
from tests.harness.worker import Call, Outcome, Target, current_filters, main

__all__ = ["Options", "Pool", "close_pool", "the_pool"]

ROOT = Path(__file__).parents[2]
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "shardwise.entry"]
"""What the server imports once. torch._dynamo comes in with the first optimizer anyway, and takes as long as torch."""

START_LIMIT = 120.0
GRACE = 5.0
"""Seconds the other ranks get to finish by themselves after the first failure."""
SLACK = 5.0
"""Seconds past its time limit after which a worker that did not end itself is killed."""


@dataclass(frozen=True)
class Options:
    """How a call is run; see `tests.harness.ranks`."""

    timeout: float = 60.0
    disposable: bool = False
    dies: frozenset[int] = frozenset()
    group: bool = True


class Worker:
    """One worker process and the two pipes to it."""

    def __init__(self, context: Any, log: Path) -> None:
        self.log = log
        self.connection, theirs = context.Pipe()
        their_control, self.control = context.Pipe(duplex=False)
        self.process = context.Process(target=main, args=(theirs, their_control, str(log), str(ROOT)), daemon=True)
        with _worker_environment():
            self.process.start()
        theirs.close()
        their_control.close()
        self.ready = False
        self.read_from = 0

    def output(self) -> str:
        """What the process wrote since the last call began."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self.read_from)
            return file.read().decode(errors="replace")

    def await_ready(self) -> None:
        """Block until the process can take a call."""
        if not self.ready:
            if not self.connection.poll(START_LIMIT):
                raise RuntimeError(f"a test worker did not start within {START_LIMIT:.0f} s:\n{self.output()}")
            try:
                self.connection.recv_bytes()
            except EOFError:
                raise RuntimeError(f"a test worker could not start:\n{self.output()}") from None
            self.ready = True

    def kill(self) -> None:
        """End the process and everything it started, now."""
        # Only a process that is still ours to wait for has a group that is surely its own.
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.control.close()


class Pool:
    """Workers that are reused from call to call, as many as the largest call needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._directory = Path(tempfile.mkdtemp(prefix="shardwise-tests-"))
        self._numbers = itertools.count()
        self._idle: list[Worker] = []

    def run(
        self, target: Target, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> list[RankReport]:
        """Run `target` on `world_size` ranks.

        Returns:
            one report per rank, in rank order; all passed, skipped, or died as expected.

        Raises:
            RanksFailed: otherwise.
        """
        calls = self._calls(target, world_size, pickle.dumps((args, kwargs)), options)
        workers = self._take(world_size)
        run = _Run(workers, options)
        try:
            reports = run.finish(calls)
        finally:
            for worker in workers:
                self._put_back(worker, reusable=worker in run.reusable and not options.disposable)
        if any(report.failed for report in reports) or len({report.kind == "skipped" for report in reports}) > 1:
            raise RanksFailed(f"{target.module}.{target.qualname}", reports)
        return reports

    def close(self) -> None:
        """End all workers."""
        for worker in self._idle:
            worker.kill()
        self._idle.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _calls(self, target: Target, world_size: int, arguments: bytes, options: Options) -> list[Call]:
        store = str(self._directory / f"store-{next(self._numbers)}")
        filters = current_filters()
        return [
            Call(target, arguments, rank, world_size, store, options.timeout, options.group, list(sys.path), filters)
            for rank in range(world_size)
        ]

    def _take(self, count: int) -> list[Worker]:
        for dead in [worker for worker in self._idle if not worker.process.is_alive()]:
            self._put_back(dead, reusable=False)
        while len(self._idle) < count:
            self._idle.append(Worker(self._context, self._directory / f"worker-{next(self._numbers)}.log"))
        taken, self._idle = self._idle[:count], self._idle[count:]
        for worker in taken:
            worker.await_ready()
        return taken

    def _put_back(self, worker: Worker, *, reusable: bool) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        if reusable:
            self._idle.insert(0, worker)
        else:
            worker.kill()


class _Run:
    """One call in progress: which ranks still run, which wait to be released, what each did."""

    def __init__(self, workers: list[Worker], options: Options) -> None:
        self.reusable: list[Worker] = []
        self._workers = workers
        self._options = options
        self._reports: dict[int, RankReport] = {}
        self._running = set(range(len(workers)))
        self._settling: set[int] = set()
        self._unreleased: set[int] = set()
        self._started = time.monotonic()
        self._first_failure: float | None = None

    def finish(self, calls: list[Call]) -> list[RankReport]:
        """Send the calls and see them through to the end of every rank."""
        for worker, call in zip(self._workers, calls, strict=True):
            worker.read_from = worker.log.stat().st_size
            with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed below, with its exit code
                worker.connection.send_bytes(pickle.dumps(call))
        while self._running or self._settling:
            ready = self._await_events()
            for rank in ready:
                self._read(rank)
            if not ready:
                self._give_up()
            self._release()
        for rank, worker in enumerate(self._workers):
            if self._reports[rank].failed:
                self._reports[rank].output = worker.output()
        return [self._reports[rank] for rank in range(len(self._workers))]

    def _await_events(self) -> list[int]:
        """Ranks that sent something or died; empty when the time is over."""
        limit = self._started + self._options.timeout + SLACK  # by now every body has ended, or its worker has
        if self._first_failure is not None:
            limit = min(limit, self._first_failure + GRACE)
        alive = self._running | self._settling
        handles: dict[Any, int] = {self._workers[rank].connection: rank for rank in alive}
        handles |= {self._workers[rank].process.sentinel: rank for rank in alive}
        ready = wait(list(handles), timeout=max(0.0, limit - time.monotonic()))
        return sorted({handles[handle] for handle in ready})

    def _read(self, rank: int) -> None:
        connection: Connection = self._workers[rank].connection
        try:
            if not connection.poll():
                raise EOFError
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._died(rank)
            return
        if isinstance(message, Outcome):
            self._ended(rank, message)
        else:
            self._settled(rank, message)

    def _ended(self, rank: int, outcome: Outcome) -> None:
        self._running.discard(rank)
        self._settling.add(rank)
        report = RankReport(
            rank,
            self._workers[rank].process.pid,
            outcome.kind,  # pyright: ignore[reportArgumentType]
            outcome.at - self._started,
            outcome.title,
            outcome.text,
        )
        if outcome.kind == "passed":
            self._unreleased.add(rank)
            report.result = pickle.loads(outcome.result or b"")
        if rank in self._options.dies:
            report = RankReport(rank, report.pid, "raised", report.seconds, "did not die, but should have", report.text)
        self._record(report)

    def _settled(self, rank: int, problems: list[str]) -> None:
        self._settling.discard(rank)
        report = self._reports[rank]
        if not problems:
            self.reusable.append(self._workers[rank])
            return
        text = "\n".join(problems)
        if report.failed:
            report.text += f"\nleft behind in the worker: {text}"
        else:
            self._record(RankReport(rank, report.pid, "unclean", self._now(), "left its worker unclean", text))

    def _died(self, rank: int, title: str = "") -> None:
        worker = self._workers[rank]
        worker.process.join(SLACK)
        output = worker.output()
        timed_out = "Timeout (" in output and worker.process.exitcode == 1
        kind = "hung" if timed_out or title else "died"
        if timed_out:
            title = f"still ran at the time limit of {self._options.timeout:g} s"
        before = self._reports.get(rank)
        if before is not None and rank in self._settling:
            title = f"{title or describe_exit(worker.process.exitcode)}, after its body had {before.kind}"
        self._running.discard(rank)
        self._settling.discard(rank)
        self._unreleased.discard(rank)
        pid = worker.process.pid
        if kind == "died" and rank in self._options.dies:
            self._reports[rank] = RankReport(rank, pid, "passed", self._now(), "died, as it should")
            return
        text = before.text if before is not None else ""
        self._record(RankReport(rank, pid, kind, self._now(), title or describe_exit(worker.process.exitcode), text))

    def _give_up(self) -> None:
        """The time is over: have every rank that is left write its stack and end, or end it."""
        waited = f"{GRACE:g} s after the first failure" if self._first_failure is not None else "past its time limit"
        left = sorted(self._running | self._settling)
        for rank in left:
            with contextlib.suppress(OSError):
                self._workers[rank].control.send_bytes(b"dump")
        for rank in left:
            worker = self._workers[rank]
            worker.process.join(2.0)
            if worker.process.is_alive():
                os.killpg(worker.process.pid, signal.SIGKILL)
            self._died(rank, f"still ran {waited}")

    def _release(self) -> None:
        """Let ranks that passed leave the group, once no rank can still need it."""
        if self._running and self._first_failure is None:
            return
        for rank in self._unreleased:
            with contextlib.suppress(OSError):
                self._workers[rank].connection.send_bytes(b"release")
        self._unreleased.clear()

    def _record(self, report: RankReport) -> None:
        self._reports[report.rank] = report
        if report.failed and self._first_failure is None:
            self._first_failure = time.monotonic()

    def _now(self) -> float:
        return time.monotonic() - self._started


_the_pool: list[Pool] = []


def the_pool() -> Pool:
    """The pool of this session, made on first use."""
    if not _the_pool:
        _the_pool.append(Pool())
    return _the_pool[0]


def close_pool() -> None:
    """End the workers of this session. A later call makes a new pool."""
    while _the_pool:
        _the_pool.pop().close()


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """The environment that the fork server, and so every worker, starts with."""
    saved = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME=loopback,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
