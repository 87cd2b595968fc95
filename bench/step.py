"""Time and memory of one training step: plain PyTorch, DDP, FSDP2 and Shardwise, side by side.

    python -m bench.step            (or: make bench)

Every variant has its own processes, one per rank with one thread each, on the CPU; all stay alive and take turns, a few steps
each, in an order that rotates, so that whatever else the machine does hits all alike. Compare the rows of one run with each
other; times of different runs or machines are not comparable. The losses show that all rows compute the same.

Memory is the most that all ranks of a variant held at once beyond what they held before they built the model: private memory,
and shared memory counted once. It is sampled in a round of its own, which is not timed; Linux only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.variants import VARIANTS, Task, Variant

ANSWER_WITHIN_S = 180.0


@dataclass
class Rank:
    """A worker process and the line to it."""

    process: Any
    line: Connection

    def ask(self, steps: int) -> None:
        self.line.send(steps)

    def answer(self) -> Any:
        """What the worker sent; its death or silence is an error."""
        if not self.line.poll(ANSWER_WITHIN_S):
            raise SystemExit(f"a worker did not answer within {ANSWER_WITHIN_S:.0f} s")
        try:
            return self.line.recv()
        except EOFError:
            raise SystemExit("a worker died; its error is above") from None


@dataclass
class Runner:
    """The ranks of one variant, and what was measured."""

    variant: Variant
    ranks: list[Rank]
    times: list[float] = field(default_factory=list)
    loss: float = float("nan")
    memory: int | None = None

    def run(self, steps: int) -> None:
        """Train some steps on all ranks; a step takes as long as its slowest rank."""
        for rank in self.ranks:
            rank.ask(steps)
        answers = [rank.answer() for rank in self.ranks]
        self.times += [max(step) for step in zip(*(times for times, _ in answers), strict=True)]
        self.loss = statistics.mean(loss for _, loss in answers)

    def measure_memory(self, before: int | None, steps: int) -> None:
        """Run some steps and record the most memory seen while they ran."""
        sampler = MemorySampler([rank.process.pid for rank in self.ranks])
        with sampler:
            self.run(steps)
        self.times.clear()
        if before is not None and sampler.peak is not None:
            self.memory = sampler.peak - before


class MemorySampler(threading.Thread):
    """Watches the memory of some processes for as long as it is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._done = threading.Event()
        self.peak = held_by(pids)

    def __enter__(self) -> MemorySampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.005):
            now = held_by(self._pids)
            if now is not None and self.peak is not None:
                self.peak = max(self.peak, now)


def held_by(pids: Sequence[int]) -> int | None:
    """Private and proportional shared memory of some processes together, in bytes; None where the system does not tell."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            return None
        lines = (line.split() for line in text.splitlines())
        total += sum(int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return total * 1024


def worker(variant: Variant, task: Task, rank: int, store: str, line: Connection) -> None:
    """The life of one rank: build, then run as many steps as asked until there is nobody to ask."""
    import torch
    import torch.distributed as dist

    from bench.variants import build

    torch.set_num_threads(task.ranks if variant.alone else 1)
    if not variant.alone:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=task.ranks)
    line.send("ready")
    line.recv()
    step = build(variant, task, rank)
    line.send("built")
    while True:
        try:
            steps = line.recv()
        except EOFError:
            return
        times, loss = [], torch.zeros(())
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            times.append(time.perf_counter() - start)
        line.send((times, loss.item()))


def start(variant: Variant, task: Task, folder: Path, cleanup: ExitStack) -> Runner:
    """Start the processes of a variant, and warm them up."""
    context = multiprocessing.get_context("spawn")
    ranks: list[Rank] = []
    for rank in range(1 if variant.alone else task.ranks):
        ours, theirs = context.Pipe()
        store = folder / variant.name.replace(" ", "_")
        process = context.Process(target=worker, args=(variant, task, rank, str(store), theirs), daemon=True)
        process.start()
        theirs.close()
        cleanup.callback(process.terminate)
        ranks.append(Rank(process, ours))
    runner = Runner(variant, ranks)
    for rank in ranks:
        rank.answer()
    before = held_by([rank.process.pid for rank in ranks])
    for rank in ranks:
        rank.line.send("build")
    for rank in ranks:
        rank.answer()
    runner.measure_memory(before, steps=2)
    return runner


def report(runners: Sequence[Runner], task: Task) -> str:
    """The table: one row per variant."""
    base = statistics.median(runners[0].times)
    lines = [
        f"{task.ranks} ranks, {task.layers} blocks of width {task.width}, {task.batch} x {task.context} bytes per rank",
        "",
        f"{'':22}{'median':>10}{'fastest':>10}{'relative':>10}{'memory':>12}{'loss':>10}",
    ]
    for runner in runners:
        median, fastest = statistics.median(runner.times), min(runner.times)
        memory = "-" if runner.memory is None else f"{runner.memory / 1e6:.0f} MB"
        times = f"{median * 1e3:7.0f} ms{fastest * 1e3:7.0f} ms{median / base:9.2f}x"
        lines.append(f"{runner.variant.name:22}{times}{memory:>12}{runner.loss:10.4f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare one training step of PyTorch, DDP, FSDP2 and Shardwise.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=6, help="turns each variant gets")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    args = parser.parse_args()
    task = Task(args.ranks, args.layers, args.width, args.context, args.batch)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        runners: list[Runner] = []
        for variant in VARIANTS:
            print(f"starting {variant.name}", flush=True)
            runners.append(start(variant, task, folder, cleanup))
        for turn in range(args.rounds):
            print(f"round {turn + 1} of {args.rounds}", flush=True)
            for runner in (*runners[turn % len(runners) :], *runners[: turn % len(runners)]):
                runner.run(args.steps)
        print(f"\n{report(runners, task)}")


if __name__ == "__main__":
    main()
