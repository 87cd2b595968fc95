"""Writes the page of measurements, and its pictures, from saved runs.

    python -m bench.report results/*.json

Owns the page's words. Every number on it is from the files, or from `bench.scale`, which gives the same anywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.plot import draw
from bench.results import Run, read_run
from bench.tables import goal_rows, headings, measured_rows, ratio_rows

__all__ = ["main", "page"]

INTRODUCTION = """# Measurements

One training step of the same GPT under PyTorch, DDP, FSDP2, DeepSpeed and Shardwise, side by side. `make bench` repeats the
first of them on your machine; read times as ratios within one table, as they depend on the machine.

All systems train on the same data with AdamW and gradients clipped to norm 1, on the CPU, one process per rank and one thread
per process. They take turns in an order that rotates. The losses of every row must be those of plain PyTorch over the same
samples, or the run fails. The single process takes the micro-batch of one rank: it shows what a step costs where nothing is
shared. Memory is the most that one rank, or all ranks together with shared pages counted once, held beyond their imports.
"Sent" counts each collective as its full tensor, whatever carries it. `python -m bench.compare --help` says the rest.
"""

FLOOR = """## What a step costs at least

Forward and backward without any exchange, in as many processes as there are ranks, which share the machine's memory and
caches. Nothing that trains data-parallel on these cores is faster than that plus an optimizer step; what a system takes beyond
it is its own.
"""

STEP = """## The optimizer step

Torch's fused kernels are used where they exist (Adam, AdamW, SGD, Adagrad in float32): one pass that unscales, clips and
updates in place. Compiling the same update as one function gains little, and its first step waits for a compiler. Where weights
have 16 bits, or a rule has no kernel, the pass goes through blocks that stay in the cache. A step can beat a copy per byte, as
it reads more than it writes.
"""

SCALE = """## Thousands of ranks

What one rank holds at rest and sends in a step, counted without devices: Shardwise's own layout and collectives, as one rank of
many, over a transport that sends nothing. Tests hold the counts against real engines, and their growth against the formulas of
the ZeRO paper ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054)).
"""

SCALE_RANKS = ("8", "64", "512", "4096")
COVER_COMPARE = "tests/unit/test_bench_compare.py::test_two_ranks_agree_with_plain_pytorch"
COVER_FLOOR = "tests/unit/test_bench_floor.py::test_processes_that_only_compute"
COVER_STEP = "tests/unit/test_bench_floor.py::test_the_step_beside_a_copy"
COVER_SCALE = "tests/unit/test_bench_scale.py::test_it_prints_a_table_for_each_stage"


def page(runs: Sequence[Run], scale: str, images: str, floor: str = "", step: str = "") -> str:
    """The text of the page.

    Args:
        runs: in the order in which they shall stand.
        scale: what `bench.scale` prints.
        images: where the pictures are, seen from the page.
        floor: what `bench.floor` printed; its section is left out if that is nothing.
        step: what `bench.optimizer` printed; likewise.
    """
    parts = [INTRODUCTION]
    if not runs:
        parts.append(
            "No run has been saved yet: `python -m bench.compare` saves one, `python -m bench.report` writes it here.\n"
        )
    parts += [_section(run, images) for run in runs]
    if floor:
        parts += [FLOOR, _command("python -m bench.floor --case comm --world 2", COVER_FLOOR), _verbatim(floor)]
    if step:
        parts += [STEP, _command("python -m bench.optimizer", COVER_STEP), _verbatim(step)]
    parts += [SCALE, _command(f"python -m bench.scale --ranks {' '.join(SCALE_RANKS)}", COVER_SCALE)]
    parts.append(_verbatim(scale))
    return "\n".join(parts)


def _section(run: Run, images: str) -> str:
    task = run.task
    kind, _, details = task.title.partition(": ")
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    picture = f"![Step time and memory of all systems: {task.title}]({images}/{_picture(run)})"
    parts = [f"## {kind.capitalize()}, {task.world} ranks, {task.precision}", f"{details}; {task.case.about}.", picture]
    parts.append(_markdown([headings(run), *measured_rows(run)]))
    for title, rows in (("Step time and memory of a rank, as ratios:", ratio_rows(run)), ("Goals:", goal_rows(run))):
        if rows:
            parts += [title, _markdown(rows)]
    parts += [f"{task.rounds} rounds. {machine}.", _command(run.command, COVER_COMPARE)]
    return "\n\n".join(parts)


def _command(words: str, covered_by: str) -> str:
    return f"<!-- covered by {covered_by} -->\n```bash\n{words}\n```\n"


def _verbatim(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; a row that is too short goes on in its last cell, and the other cells are empty."""
    width = max(map(len, rows))
    lines = ["| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|--:" * (width - 1) + "|", *lines[1:]])


def _picture(run: Run) -> str:
    return f"benchmark-{run.task.case.name}-{run.task.world}-{run.task.precision}.svg"


def _order(run: Run) -> tuple[str, int, int]:
    cases = ("comm", "compute", "accum", "tiny")
    return (run.task.precision != "fp32" and "z") or "", run.task.world, cases.index(run.task.case.name)


def main(words: Sequence[str] | None = None) -> None:
    """Write the page and the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what bench.compare has saved")
    for name, tool in (("floor", "bench.floor"), ("step", "bench.optimizer")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"what {tool} printed")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="FOLDER", help="where to write (default: docs)")
    args = parser.parse_args(words)
    runs = sorted((read_run(file) for file in args.files), key=_order)
    from bench.scale import describe  # imports torch, for which help should not wait

    images = args.docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    for run in runs:
        (images / _picture(run)).write_text(draw(run))
    floor, step = (file.read_text() if file else "" for file in (args.floor, args.step))
    (args.docs / "benchmarks.md").write_text(page(runs, describe(["--ranks", *SCALE_RANKS]), "images", floor, step))
    print(f"wrote {args.docs / 'benchmarks.md'} from {len(runs)} runs")


if __name__ == "__main__":
    main()
