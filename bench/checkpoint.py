"""Saving and loading a model with its Adam state: torch.save, torch's DCP, DeepSpeed and Shardwise, side by side.

    python -m bench.checkpoint                                  # 120 M parameters, two ranks

Every way saves the same model, in fp32, with AdamW's two moments: 12 bytes a parameter, a part of them on each rank. The ways
take turns in an order that rotates; their processes stay alive between turns while memory allows. All write to the same
directory, whose disk decides much: compare the rows of one run with each other.

The first save of new processes is not timed, as buffers are made in it that stay; it is the one whose memory counts.

What the columns say (medians over turns; the slowest rank counts):
  save        until the call returns. For a save in the background, that is how long training stalls
  on disk     until all is written and every file is synced, counted from the same start
  load cold   with none of the files in the page cache
  load warm   right after that
  memory      most that one rank held beyond what it held before, while it saved and while it loaded
  files       bytes on disk

After each load the state must be what it was when it was saved, or the run fails. torch.save writes what each rank has, and
loads only on as many ranks; nothing says where it belongs. It stands for what the disk and torch's format allow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

from bench.cases import CASES, Shape, Task
from bench.compare import SPARE, machine
from bench.crew import Crew, CrewError
from bench.memory import available, held_by
from bench.savers import WAYS, Measured, SavingRank, Way, named
from bench.tables import grid

__all__ = ["Row", "main", "shape_for"]


@dataclass
class Row:
    """What was measured of one way: seconds and bytes of each turn; see the module's text for the meaning."""

    name: str
    title: str
    status: str = "ok"
    reason: str = ""
    save_s: list[float] = field(default_factory=list[float])
    disk_s: list[float] = field(default_factory=list[float])
    cold_s: list[float] = field(default_factory=list[float])
    warm_s: list[float] = field(default_factory=list[float])
    save_peak: list[int] = field(default_factory=list[int])
    load_peak: list[int] = field(default_factory=list[int])
    nbytes: int = 0


def shape_for(parameters: int) -> Shape:
    """A GPT with about this many parameters: 12 blocks, and about two thirds of the numbers in them."""
    width = max(16, round(sqrt(parameters / 200) / 16) * 16)
    vocabulary = max(16, round((parameters - 144 * width**2) / (2 * width)))
    return Shape(vocabulary, width, layers=12, heads=4)


class Turns:
    """Runs ways in turns and fills one row for each.

    Args:
        task: what is saved.
        folder: where everything is written.
        say: where progress goes.
    """

    def __init__(self, task: Task, folder: Path, say: Callable[[str], None]) -> None:
        self._task = task
        self._folder = folder
        self._say = say
        self._alive: dict[str, Crew] = {}
        self._count = 0
        self._largest = 0

    def take(self, way: Way, row: Row) -> None:
        """One turn: save, load twice."""
        crew = self._alive.pop(way.system.name, None)
        self._count += 1
        try:
            if crew is None:
                crew = self._start(way, row)
            with tempfile.TemporaryDirectory(dir=self._folder) as directory:
                self._turn(crew, Path(directory), row)
            self._say(
                f"  {row.title}: save {row.save_s[-1]:.2f} s, on disk {row.disk_s[-1]:.2f} s, load {row.cold_s[-1]:.2f} s"
            )
            self._keep(crew)
        except CrewError as error:
            row.status, row.reason = ("refused" if error.refused else "failed"), str(error)
            self._say(f"  {row.title}: {row.status}: {row.reason}")
        except BaseException:
            if crew is not None:
                crew.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for crew in self._alive.values():
            crew.close()
        self._alive.clear()

    def _start(self, way: Way, row: Row) -> Crew:
        folder = self._folder / f"{self._count}-{way.system.name}"
        folder.mkdir()
        crew = Crew(way.system, self._task, folder, SavingRank)
        for request in ("prepare", "connect", "build", "train"):
            crew.ask(request)
        with tempfile.TemporaryDirectory(dir=self._folder) as directory:
            row.save_peak.append(_peak(crew.ask("save", Path(directory))))
            crew.ask("wait")
        return crew

    def _turn(self, crew: Crew, path: Path, row: Row) -> None:
        before = crew.ask("fingerprint")
        saved: list[Measured] = crew.ask("save", path)
        crew.ask("wait")
        row.nbytes = _sync(path)
        row.disk_s.append(time.perf_counter() - min(each.started for each in saved))
        row.save_s.append(_seconds(saved))
        _evict(path)
        loads: list[list[Measured]] = []
        for seconds in (row.cold_s, row.warm_s):
            loads.append(crew.ask("load", path))
            seconds.append(_seconds(loads[-1]))
            if crew.ask("fingerprint") != before:
                raise CrewError("what was loaded is not what was saved")
        row.load_peak.append(max(map(_peak, loads)))

    def _keep(self, crew: Crew) -> None:
        self._largest = max(self._largest, held_by(crew.pids) or 0)
        free = available()
        if free is None or free < SPARE + 2 * self._largest:
            crew.close()
        else:
            self._alive[crew.system.name] = crew


def _seconds(measured: Sequence[Measured]) -> float:
    return max(each.ended for each in measured) - min(each.started for each in measured)


def _peak(measured: Sequence[Measured]) -> int:
    return max(each.peak or 0 for each in measured)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _sync(path: Path) -> int:
    """See that all is on disk; returns the bytes of all files."""
    for each in (*_files(path), *(p for p in path.rglob("*") if p.is_dir()), path):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return sum(file.stat().st_size for file in _files(path))


def _evict(path: Path) -> None:
    """Take the files out of the page cache."""
    if hasattr(os, "posix_fadvise"):
        for file in _files(path):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run(task: Task, ways: Sequence[Way], folder: Path, say: Callable[[str], None] = print) -> list[Row]:
    """Run everything; one row per way."""
    rows = [
        Row(w.system.name, w.system.title, "not installed" if w.system.missing else "ok", w.system.missing or "") for w in ways
    ]
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        turns = Turns(task, Path(directory), say)
        try:
            for number in range(task.rounds):
                say(f"round {number + 1} of {task.rounds}")
                line = [(way, row) for way, row in zip(ways, rows, strict=True) if row.status == "ok"]
                start = number * len(line) // task.rounds
                for way, row in (*line[start:], *line[:start]):
                    turns.take(way, row)
        finally:
            turns.close()
    return rows


def render(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [["way", "save", "on disk", "load cold", "load warm", "memory, save", "memory, load", "files"]]
    for row in rows:
        if row.status != "ok":
            lines.append([row.title, f"{row.status}: {row.reason}"])
            continue
        times = [f"{statistics.median(each):.2f} s" for each in (row.save_s, row.disk_s, row.cold_s, row.warm_s)]
        peaks = [f"{max(each) / 1e6:.0f} MB" for each in (row.save_peak, row.load_peak)]
        lines.append([row.title, *times, *peaks, f"{row.nbytes / 1e6:.0f} MB"])
    return grid(lines)


def _task(parameters: int, world: int, rounds: int) -> Task:
    case = replace(CASES["comm"], name="checkpoint", steps=1, shape=shape_for(parameters))
    return Task(case, world, "fp32", rounds)


def _number(text: str) -> int:
    """A number such as 120M or 100k."""
    units = {"k": 10**3, "M": 10**6, "G": 10**9}
    try:
        return int(float(text.rstrip("kMG")) * units.get(text[-1:], 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 120M") from None


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(way.system.name for way in WAYS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.checkpoint",
        description=__doc__,
        epilog=f"ways: {names}\n(a name without its last part means all of them: --ways torch shardwise)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", type=_number, default="120M", metavar="N", help="about how many parameters (default: 120M)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that each way gets (default: 3)")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="who takes part (default: all)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write checkpoints (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save (default: results/checkpoint-WORLD.json)")
    args = parser.parse_args(words)
    if min(args.world, args.rounds, args.params) < 1:
        parser.error("--params, --world and --rounds are 1 or more")
    unknown = [name for name in args.ways or () if not named([name])]
    if unknown:
        parser.error(f"no way is called {', '.join(unknown)}; there are: {names}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, save. Returns 1 if something broke."""
    args = _parse(words)
    task = _task(args.params, args.world, args.rounds)
    os.environ["OMP_NUM_THREADS"] = "1"
    typed = sys.argv[1:] if words is None else list(words)
    title = f"{task.parameters / 1e6:.1f} M parameters with AdamW's state, fp32, {task.world} ranks, {task.rounds} turns"
    print(title, flush=True)
    rows = run(task, named(args.ways) if args.ways else WAYS, args.dir.resolve(), lambda text: print(text, flush=True))
    file = args.json or Path("results") / f"checkpoint-{task.world}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"command": " ".join(["python -m bench.checkpoint", *typed]), "title": title, "machine": machine()}
    file.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    print(f"\n{title}\n\n{render(rows)}\n\nsaved to {file}")
    failed = [row for row in rows if row.status == "failed"]
    for row in failed:
        print(f"ERROR: {row.title} failed: {row.reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
