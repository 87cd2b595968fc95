"""The life of one rank: import, build, run steps when asked, tell what was measured.

Owns the clocks and counters inside a process. Refuses to know other systems and what becomes of the numbers. Whatever a system
prints goes to a log file.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import POOL, Task
from bench.memory import own_peak, reset_own_peak
from bench.systems import COMMON_IMPORTS, System, Trainer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Inspection", "Rank", "Steps", "Stay", "live"]


@dataclass(frozen=True)
class Stay:
    """Where a rank lives.

    Args:
        rank: its number.
        world: ranks of its system, 1 for a system that is alone.
        shares: ranks whose micro-batches it takes.
        store: file through which the ranks find each other.
        log: file that gets all that is printed.
    """

    rank: int
    world: int
    shares: tuple[int, ...]
    store: Path
    log: Path


@dataclass(frozen=True)
class Steps:
    """What some steps were like on one rank. Times are seconds of a clock that all processes of the machine share."""

    started: float
    computed: list[float]
    ended: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Inspection:
    """What one step on one rank sent, and for how long.

    Args:
        dispatched: calls and payload bytes of torch.distributed's collectives by kind.
        counted: the same as the system counts them; None if it does not.
        in_flight: seconds for which some collective of gloo was under way, waiting for others included.
    """

    dispatched: dict[str, tuple[int, int]]
    counted: dict[str, tuple[int, int]] | None
    in_flight: float | None


def live(kind: type[Rank], system: System, task: Task, stay: Stay, line: Connection) -> None:
    """Answer requests `(name, arguments...)` with `("ok", result)` or `("error", text)` until the other end hangs up.

    Args:
        kind: what answers; requests are its methods.
        system: what trains.
        task: what is trained.
        stay: where this rank lives.
        line: to whom asks.
    """
    _redirect(stay.log)
    rank: Rank | None = None
    while True:
        try:
            request, *arguments = line.recv()
        except EOFError:
            return
        try:
            if rank is None:
                rank = kind(system, task, stay)
            line.send(("ok", getattr(rank, request)(*arguments)))
        except BaseException as error:  # noqa: BLE001 - told to whoever asked, who ends this process
            import traceback

            traceback.print_exc()
            name = type(error).__name__
            line.send(("error", name, str(error)))


class Rank:
    """What a rank can be asked to do."""

    def __init__(self, system: System, task: Task, stay: Stay) -> None:
        self._system, self._task, self._stay = system, task, stay
        self._before: int | None = None
        self._trainer: Trainer | None = None
        self._batches: Any = None

    def prepare(self) -> None:
        """Import everything, and begin to count memory."""
        os.environ.update(RANK=str(self._stay.rank), LOCAL_RANK=str(self._stay.rank), WORLD_SIZE=str(self._stay.world))
        os.environ.update(LOCAL_SIZE=str(self._stay.world), LOCAL_WORLD_SIZE=str(self._stay.world), DS_ACCELERATOR="cpu")
        for module in (*COMMON_IMPORTS, *self._system.imports):
            importlib.import_module(module)
        import torch

        torch.set_num_threads(1)
        gc.collect()
        self._before = reset_own_peak()

    def connect(self) -> None:
        """Start the process group, and meet the others."""
        import torch.distributed as dist

        if not self._system.alone:
            where = f"file://{self._stay.store}"
            dist.init_process_group("gloo", init_method=where, rank=self._stay.rank, world_size=self._stay.world)
            dist.barrier()

    def build(self) -> float:
        """Make the model trainable; the seconds that took, the construction of the plain model left out."""
        import torch

        from bench.gpt import GPT, batches

        torch.manual_seed(0)
        model = GPT(self._task.case.shape, self._task.case.tokens)
        self._batches = batches(self._task.case, self._task.world)
        start = time.perf_counter()
        self._trainer = self._system.setup(self._task, model)
        return time.perf_counter() - start

    def run(self, first: int, count: int) -> Steps:
        """Train `count` steps, the first of which is step number `first`."""
        started = time.perf_counter()
        computed: list[float] = []
        ended: list[float] = []
        losses: list[float] = []
        for step in range(first, first + count):
            loss, between = self._step(step)
            computed.append(between)
            ended.append(time.perf_counter())
            losses.append(loss.item())
        return Steps(started, computed, ended, losses)

    def inspect(self, first: int) -> Inspection:
        """Train two steps slowly, and see what they send."""
        from torch.profiler import ProfilerActivity, profile

        trainer = self._built()
        watch, seen = _watcher()
        before = trainer.traffic()
        with watch:
            self._step(first)
        after = trainer.traffic()
        counted = None if before is None or after is None else _difference(before, after)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self._step(first + 1)
        events = profiler.events() or ()
        spans = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith("gloo:")]
        return Inspection(seen, counted, covered(spans) * 1e-6 if spans else None)

    def peak(self) -> int | None:
        """Most bytes this process held beyond what it held before it built anything."""
        peak = own_peak()
        return None if peak is None or self._before is None else peak - self._before

    def _built(self) -> Trainer:
        assert self._trainer is not None, "build comes first"
        return self._trainer

    def _step(self, number: int) -> tuple[Tensor, float]:
        """The loss, and when the backward had ended."""
        trainer = self._built()
        micro = self._batches[number % POOL][:, list(self._stay.shares)].flatten(0, 1)
        loss = trainer.compute([(text[:, :-1], text[:, 1:]) for text in micro])
        between = time.perf_counter()
        trainer.update()
        return loss, between


def _redirect(log: Path) -> None:
    """Send what this process prints, also from C++, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _watcher() -> tuple[Any, dict[str, tuple[int, int]]]:
    """A context that sees every collective that passes torch's dispatcher, and where it counts them.

    The payload of a collective is its full tensor: whichever of its inputs and outputs is larger.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode  # documented as the way to see all calls, though named so

    seen: dict[str, tuple[int, int]] = {}

    def size(argument: Any) -> int:
        if isinstance(argument, torch.Tensor):
            return argument.numel() * argument.element_size()
        return sum(size(item) for item in argument) if isinstance(argument, (list, tuple)) else 0

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.split(".")[0]
            if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait_tensor", "barrier", "monitored")):
                calls, total = seen.get(name, (0, 0))
                seen[name] = calls + 1, total + max((size(argument) for argument in args), default=0)
            return func(*args, **(kwargs or {}))

    return Watcher(), seen


def _difference(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    rows = {kind: (a - before.get(kind, (0, 0))[0], b - before.get(kind, (0, 0))[1]) for kind, (a, b) in after.items()}
    return {kind: row for kind, row in rows.items() if any(row)}


def covered(spans: Iterable[Sequence[float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(map(tuple, spans)):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
