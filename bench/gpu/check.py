"""One script for one accelerator: numbers, speed, memory and bandwidth in one table, in under 8 minutes.

    python -m bench.gpu.check                          (needs one GPU)
    python -m bench.gpu.check --device cpu --tiny      (exercises the code; its times mean nothing)

  numbers     ten steps of a small GPT in float32 against plain PyTorch on the same device: one rank at every stage, then two
              ranks that share the device and talk through gloo, where gloo carries tensors of the device
  speed       a GPT of 1.3 billion parameters in bf16, one rank, beside FSDP2: step time and peak memory
  bandwidth   the optimizer step of that model, as bytes it has to move per second, beside a copy on the device

Each part runs in a process of its own. One that fails, or finds no time, is told in the table and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import Shape
from bench.gpu.parts import Job, perform
from bench.tables import grid

__all__ = ["main"]

LIMIT_S = 460.0
PART_LIMIT_S = 150.0
TOLERANCE = 1e-4
MOMENTS_AND_WEIGHTS = 34
"""Bytes an AdamW step in bf16 has to move for each parameter: float32 gradient twice (once for the norm), float32 weight and
two moments read and written, bf16 weight written."""


@dataclass(frozen=True)
class Sizes:
    """How large the parts are, and which stages take part: alone, on two ranks, and in the measurement of speed."""

    numbers: Job
    speed: Job
    alone: tuple[int, ...] = (0, 1, 2, 3)
    shared: tuple[int, ...] = (0, 3)
    timed: tuple[int, ...] = (0, 3)


def sizes(tiny: bool, device: str) -> Sizes:
    """The jobs without system and stage, which differ by part."""
    small = Shape(vocabulary=256, width=64, layers=2, heads=4)
    if tiny:
        return Sizes(
            Job(small, context=16, batch=2, steps=3, warm_up=0, device=device),
            Job(small, context=16, batch=2, steps=2, warm_up=1, device=device, precision="bf16"),
            alone=(0, 3),
            shared=(3,),
            timed=(3,),
        )
    medium, large = (
        Shape(vocabulary=4096, width=512, layers=4, heads=8),
        Shape(vocabulary=50304, width=2048, layers=24, heads=16),
    )
    return Sizes(
        Job(medium, context=128, batch=4, steps=10, warm_up=0, device=device),
        Job(large, context=1024, batch=4, steps=10, warm_up=3, device=device, precision="bf16"),
    )


class Table:
    """Runs jobs in processes of their own, and collects a row for each finding."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = [["part", "system", "found", "against", "verdict"]]
        self.failed = False
        self._began = time.monotonic()

    def run(self, part: str, job: Job, *, optional: bool = False) -> dict[str, Any] | None:
        """What the job's first rank found, losses averaged over ranks; None if it failed, which then is in the table.

        Args:
            part: what it belongs to.
            job: what to do.
            optional: that it fails is news, but no fault.
        """
        print(f"{part}: {job.title}", flush=True)
        left = LIMIT_S - (time.monotonic() - self._began)
        if left < 5.0:
            self.add(part, job.title, "-", "-", "skipped: out of time")
            return None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            reason = _wait([_start(job, rank, folder) for rank in range(job.world)], folder, min(left, PART_LIMIT_S))
            if reason:
                self.add(part, job.title, "-", "-", f"{'not possible' if optional else 'FAILED'}: {reason}")
                self.failed |= not optional
                return None
            answers: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(job.world)]
        first = answers[0]
        if "losses" in first:
            first["losses"] = [statistics.mean(step) for step in zip(*(each["losses"] for each in answers), strict=True)]
        return first

    def add(self, *cells: str) -> None:
        """One row."""
        self.rows.append(list(cells))


def _start(job: Job, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    # All ranks share device 0, so each calls itself the first of its machine.
    place = {"RANK": str(rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu.check", "--part", job.as_text(), "--folder", str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **place}, stdout=log, stderr=log)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float) -> str:
    """Wait for all to end; why they did not end well, or an empty text. Nobody is left running."""
    deadline, reason = time.monotonic() + seconds, ""
    for rank, process in enumerate(ranks):
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            reason = reason or "took too long"
        if process.returncode:
            reason = reason or _last_line(folder / f"{rank}.log") or f"exit code {process.returncode}"
            deadline = min(deadline, time.monotonic() + 10.0)
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()
    return reason


def numbers(table: Table, plan: Sizes) -> None:
    """Losses against plain PyTorch."""
    job = plan.numbers
    plain = table.run("numbers", job.of("plain"))
    trials = [job.of("shardwise", stage) for stage in plan.alone]
    trials += [job.of("shardwise", stage, world=2) for stage in plan.shared]
    for trial in trials:
        found = table.run("numbers", trial, optional=trial.world > 1)
        if plain is None or found is None:
            continue
        off = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], plain["losses"], strict=True))
        good = off <= TOLERANCE
        table.failed |= not good
        table.add("numbers", trial.title, f"loss off by {off:.1e}", f"<= {TOLERANCE:.0e}", "good" if good else "FAILED")


def speed(table: Table, plan: Sizes) -> None:
    """Step time, memory, and bandwidth of the optimizer step."""
    job = plan.speed
    peer = table.run("speed", job.of("fsdp2"))
    copy = table.run("bandwidth", job.of("copy"))
    if peer is not None:
        table.add("speed", "FSDP2", _pace(peer), "-", "")
    for stage in plan.timed:
        found = table.run("speed", job.of("shardwise", stage))
        if found is None:
            continue
        title = job.of("shardwise", stage).title
        if peer is None:
            table.add("speed", title, _pace(found), "-", "")
        else:
            ratio = found["step_s"] / peer["step_s"]
            memory = f", memory {found['peak'] / peer['peak']:.2f} x" if found["peak"] and peer["peak"] else ""
            table.add("speed", title, _pace(found), "FSDP2", f"time {ratio:.2f} x{memory}")
        if copy is not None:
            rate = MOMENTS_AND_WEIGHTS * job.shape.parameters(job.context) / found["update_s"]
            part = f"{rate / copy['bytes_per_s']:.0%} of a copy"
            table.add(
                "bandwidth", f"{title}, step", f"{rate / 1e9:.0f} GB/s", f"copy {copy['bytes_per_s'] / 1e9:.0f} GB/s", part
            )


def _pace(found: dict[str, Any]) -> str:
    memory = f", peak {found['peak'] / 1e9:.2f} GB" if found["peak"] else ""
    return f"{found['step_s'] * 1e3:.0f} ms{memory}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""


def _absent(device: str) -> str | None:
    """Why nothing can be measured on a device; None if it can."""
    import torch

    if device == "cpu":
        return None
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return "there is no accelerator here: torch finds none. Nothing was measured. (--device cpu --tiny exercises the code.)"
    if device not in ("", current.type):
        return f"there is no {device} here; torch finds {current.type}. Nothing was measured."
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if something failed, 2 if there is no device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", metavar="TYPE", help="cuda, xpu, cpu (default: the accelerator that is here)")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to exercise the code")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.part:
        perform(Job.from_text(args.part), args.folder)
        return 0
    problem = _absent(args.device)
    if problem:
        print(problem)
        return 2
    if args.device == "cpu" and not args.tiny:
        parser.error("the full sizes need an accelerator: add --tiny")
    import torch

    accelerator = torch.accelerator.current_accelerator() if args.device != "cpu" else None
    device = "cpu" if accelerator is None else accelerator.type
    plan = sizes(args.tiny, device)
    table = Table()
    began = time.monotonic()
    numbers(table, plan)
    speed(table, plan)
    print(f"\n{grid(table.rows)}\n\non {device}, torch {torch.__version__}, {time.monotonic() - began:.0f} s")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
