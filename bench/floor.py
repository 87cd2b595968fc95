"""What a step of a case costs where nothing is shared at all: forward and backward in as many processes as there are ranks.

    python -m bench.floor --case comm --world 2

The processes run side by side, one thread each, and exchange nothing; they slow each other down only by sharing the machine's
memory and caches. No way to train data-parallel on these cores is faster than this plus an optimizer step.

Owns these processes and their clock. Refuses to know any system.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.cases import CASES, WARM_UP, Task, make_task

__all__ = ["main"]

ANSWER_WITHIN_S = 600.0


def compute(task: Task, rank: int, together: Any, results: Any) -> None:
    """Forward and backward, again and again; puts the median in seconds."""
    import torch

    from bench.gpt import GPT, batches

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(task.case.shape, task.case.tokens)
    data = batches(task.case, task.world)
    times: list[float] = []
    together.wait(ANSWER_WITHIN_S)
    for step in range(WARM_UP + task.case.steps):
        begin = time.perf_counter()
        for micro in data[step % len(data), :, rank]:
            model(micro[:, :-1], micro[:, 1:]).backward()
        times.append(time.perf_counter() - begin)
        model.zero_grad(set_to_none=True)
    results.put(statistics.median(times[WARM_UP:]))


def measure(task: Task, processes: int) -> float:
    """The slowest process's median, in seconds, of so many processes side by side."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(processes), context.Queue()
    started = [context.Process(target=compute, args=(task, rank, together, results), daemon=True) for rank in range(processes)]
    for process in started:
        process.start()
    try:
        return max(results.get(timeout=ANSWER_WITHIN_S) for _ in started)
    finally:
        for process in started:
            process.terminate()
            process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), default="comm", help="which load (default: comm)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default: 2)")
    asked = parser.parse_args(arguments)
    task = make_task(asked.case, asked.world, "fp32", rounds=1)
    print(f"{task.title}\nforward and backward, nothing exchanged, median of {task.case.steps}:")
    for processes in sorted({1, asked.world}):
        name = "one process alone" if processes == 1 else f"{processes} processes side by side"
        print(f"  {name:28}{measure(task, processes) * 1e3:6.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
