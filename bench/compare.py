"""Time, memory and traffic of a training step: plain PyTorch, DDP, FSDP2, DeepSpeed and Shardwise, side by side.

    python -m bench.compare --case comm --world 2 --rounds 3            (or: make bench)

Every system trains the same GPT on the same data with AdamW, gradients clipped to norm 1, on the CPU: one process per rank, one
thread per process. Systems take turns, a few steps each, in an order that rotates, so that whatever else the machine does hits
all alike. Their processes stay alive between turns while memory allows, and are started anew otherwise. Compare the rows of one
run with each other; times of different runs or machines are not comparable.

What the columns say:
  median, fastest   of all timed steps; a step ends when its slowest rank ends
  first step, init  the very first step; from the plain model to one that can train, imports left out
  memory, rank      most that one rank held beyond its imports, pages it shares with others included
  memory, all       most that all ranks held together beyond their imports, shared pages counted once (sampled)
  sent, messages    a step's collectives on one rank, each counted as its full tensor, whatever carries it
  by                who carried them: gloo through torch.distributed, or memory that the ranks share
  loss              after the first turn; must be that of plain PyTorch over the micro-batches of all ranks, or the run fails
In bf16 also: up to the end of the backward, from there to the end of the step, and for how long collectives were under way.

The single process takes the micro-batches of one rank only: it shows what a step costs where nothing is shared.
Unless told otherwise bf16 runs a model of 2 blocks, as most CPUs emulate it slowly.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from bench.cases import CASES, WARM_UP, Task, make_task
from bench.crew import Crew, CrewError
from bench.memory import Sampler, available, held_by
from bench.results import Row, Run
from bench.systems import REFERENCE, SYSTEMS, System, named
from bench.tables import render
from bench.worker import Inspection, Steps

__all__ = ["compare", "machine", "main"]

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative. Twelve steps of Adam make rounding errors of 1e-7 grow; bf16 recipes differ in what they keep in float32."""

SPARE = 4 << 30
"""Bytes of memory that are left alone when processes are kept alive."""


class Turns:
    """Runs systems in turns and fills one row for each.

    Args:
        task: what to do.
        folder: an empty one, for logs and stores.
        say: where progress goes.
    """

    def __init__(self, task: Task, folder: Path, say: Callable[[str], None]) -> None:
        self._task = task
        self._folder = folder
        self._say = say
        self._alive: dict[str, Crew] = {}
        self._started = 0
        self._largest = 0  # what the crew that took most memory took

    def reference(self) -> list[float]:
        """Losses of plain PyTorch, as many as the first turn has steps."""
        self._say("reference: plain PyTorch over the micro-batches of all ranks")
        crew = self._start(REFERENCE)
        crew.ask("build")
        [steps] = crew.ask("run", 0, 1 + WARM_UP + self._task.case.steps)
        crew.close()
        return steps.losses

    def take(self, system: System, row: Row) -> None:
        """One turn of a system."""
        crew = self._alive.pop(system.name, None)
        try:
            first = crew is None
            if crew is None:
                crew = self._start(system)
                self._settle(crew, row)
            else:
                self._steps(crew, 1)
            answers = self._steps(crew, self._task.case.steps)
            self._record(answers, row)
            if first and row.fresh == 1:
                row.losses += _mean_losses(answers)
                row.peak_rank = max((peak for peak in crew.ask("peak") if peak is not None), default=None)
                self._inspect(crew, row)
            median = statistics.median(row.steps_s[-self._task.case.steps :])
            self._say(f"  {system.title}: {median * 1e3:.0f} ms")
            self._keep(crew)
        except CrewError as error:
            row.status, row.reason = ("refused" if error.refused else "failed"), str(error)
            self._say(f"  {system.title}: {row.status}: {row.reason}")
        except BaseException:
            if crew is not None:
                crew.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for crew in self._alive.values():
            crew.close()
        self._alive.clear()

    def _start(self, system: System) -> Crew:
        self._started += 1
        folder = self._folder / f"{self._started}-{system.name}"
        folder.mkdir()
        crew = Crew(system, self._task, folder)
        crew.ask("prepare")
        return crew

    def _settle(self, crew: Crew, row: Row) -> None:
        """Build, first step, warm-up. Only the first processes of a system fill the row."""
        row.fresh += 1
        before = held_by(crew.pids)
        crew.ask("connect")
        init = max(crew.ask("build"))
        [first] = [_durations(self._steps(crew, 1, row))]
        with Sampler(crew.pids) as sampler:
            self._steps(crew, WARM_UP, row)
        if row.fresh == 1:
            row.init_s, row.first_step_s = init, first[0]
            if before is not None and sampler.peak is not None:
                row.peak_all = sampler.peak - before
                self._largest = max(self._largest, sampler.peak)

    def _steps(self, crew: Crew, count: int, row: Row | None = None) -> list[Steps]:
        answers: list[Steps] = crew.ask("run", crew.step, count)
        crew.step += count
        if row is not None and row.fresh == 1:
            row.losses += _mean_losses(answers)
        return answers

    def _record(self, answers: list[Steps], row: Row) -> None:
        row.steps_s += _durations(answers)
        begins = [max(a.started for a in answers), *(max(step) for step in zip(*(a.ended[:-1] for a in answers), strict=True))]
        computed = [max(step) for step in zip(*(a.computed for a in answers), strict=True)]
        row.backward_s += [middle - begin for begin, middle in zip(begins, computed, strict=True)]

    def _inspect(self, crew: Crew, row: Row) -> None:
        found: list[Inspection] = crew.ask("inspect", crew.step)
        crew.step += 2
        first = found[0]
        if not crew.system.alone:
            row.by_kind = first.dispatched if first.counted is None else first.counted
            row.counted_by = "torch's dispatcher" if first.counted is None else "its counters"
            row.messages = sum(calls for calls, _ in row.by_kind.values())
            row.payload = sum(total for _, total in row.by_kind.values())
            through_torch = sum(total for _, total in first.dispatched.values())
            row.carrier = "gloo" if 2 * through_torch >= row.payload else "shared memory"
        spans = [each.in_flight for each in found if each.in_flight is not None]
        row.in_flight_s = statistics.mean(spans) if spans else None

    def _keep(self, crew: Crew) -> None:
        """Leave processes alive for their next turn if another system, as large as the largest, still fits beside them."""
        free = available()
        if free is None or free < SPARE + 1.5 * self._largest:
            crew.close()
        else:
            self._alive[crew.system.name] = crew


def compare(task: Task, systems: Sequence[System], command: str, say: Callable[[str], None] = print) -> Run:
    """Run everything.

    Args:
        task: what to do.
        systems: who takes part.
        command: for the record.
        say: where progress goes, line by line.
    """
    rows = [Row(s.name, s.title, "not installed" if s.missing else "ok", s.missing or "") for s in systems]
    run = Run(task, command, machine(), rows, tolerance=TOLERANCE[task.precision], import_s=_import_seconds())
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(task, Path(folder), say)
        try:
            run.reference = turns.reference()
            for number in range(task.rounds):
                say(f"round {number + 1} of {task.rounds}, {task.case.steps} steps each")
                line = [(system, row) for system, row in zip(systems, rows, strict=True) if row.status == "ok"]
                start = number * len(line) // task.rounds
                for system, row in (*line[start:], *line[:start]):
                    turns.take(system, row)
        finally:
            turns.close()
    for row in rows:
        if row.name == "single":
            row.losses.clear()  # of the micro-batches of one rank; there is nothing to compare them with
    return run


def _durations(answers: Sequence[Steps]) -> list[float]:
    """Seconds of each step, from the end of the one before to the end on the slowest rank."""
    ends = [max(step) for step in zip(*(answer.ended for answer in answers), strict=True)]
    begins = [max(answer.started for answer in answers), *ends[:-1]]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def _mean_losses(answers: Sequence[Steps]) -> list[float]:
    return [statistics.mean(step) for step in zip(*(answer.losses for answer in answers), strict=True)]


def _import_seconds() -> float | None:
    """What `from shardwise import initialize` takes in a process that has imported torch: the least of four.

    Not `import shardwise`, which takes next to nothing, as the package loads its parts when they are first named. With compiled
    bytecode, as of installed packages.
    """
    code = "import time, torch; t = time.perf_counter(); from shardwise import initialize; print(time.perf_counter() - t)"
    found: list[float] = []
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(4):
            command = [sys.executable, "-c", code]
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if result.returncode == 0:
                found.append(float(result.stdout))
    return min(found, default=None)


def machine() -> dict[str, str]:
    """What this machine and its software are, for the record."""
    facts = {"python": platform.python_version(), "system": platform.system(), "cores": str(os.cpu_count())}
    for package in ("torch", "deepspeed", "shardwise"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed" if package == "deepspeed" else "from the working tree"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts["processor"] = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        facts["processor"] = platform.machine()
    return facts


def _plan(task: Task, systems: Sequence[System]) -> str:
    """What would run."""
    lines = [task.title, f"{task.rounds} rounds of {task.case.steps} timed steps each; first: the reference, one process"]
    for system in systems:
        processes = "1 process" if system.alone else f"{task.world} processes"
        lines.append(f"  {system.name:18}{system.title:32}{system.missing or processes}")
    return "\n".join(lines)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    cases = "\n".join(f"  {c.name:8} {c.about}" for c in CASES.values())
    names = ", ".join(system.name for system in SYSTEMS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        epilog=f"cases:\n{cases}\n\nsystems: {names}\n(a name without its number means all of them: --systems ddp deepspeed)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", choices=CASES, default="comm", help="which load (default: comm)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that each system gets (default: 3)")
    parser.add_argument("--precision", choices=TOLERANCE, default="fp32", help="(default: fp32)")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="who takes part (default: all)")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps in a turn (default: by case)")
    parser.add_argument("--layers", type=int, metavar="N", help="blocks of the model (default: by case)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save (default: results/CASE-WORLD-PRECISION.json)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    args = parser.parse_args(words)
    if min(args.world, args.rounds, args.steps or 1, args.layers or 1) < 1:
        parser.error("--world, --rounds, --steps and --layers are 1 or more")
    unknown = [name for name in args.systems or () if not named([name])]
    if unknown:
        parser.error(f"no system is called {', '.join(unknown)}; there are: {names}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, save. Returns 1 if losses disagree or a system broke."""
    args = _parse(words)
    systems = named(args.systems) if args.systems else list(SYSTEMS)
    task = make_task(args.case, args.world, args.precision, args.rounds, args.steps, args.layers)
    if args.dry_run:
        print(_plan(task, systems))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    typed = sys.argv[1:] if words is None else list(words)
    run = compare(task, systems, " ".join(["python -m bench.compare", *typed]), lambda text: print(text, flush=True))
    file = args.json or Path("results") / f"{args.case}-{args.world}-{args.precision}.json"
    run.save(file)
    print(f"\n{render(run)}\n\nsaved to {file}")
    failed = [f"{row.title} failed: {row.reason}" for row in run.rows if row.status == "failed"]
    wrong = run.disagreements()
    for line in (*failed, *wrong):
        print(f"ERROR: {line}", file=sys.stderr)
    if wrong:
        print("ERROR: the systems do not compute the same, so their times must not be compared", file=sys.stderr)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
