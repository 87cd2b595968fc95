"""What a run of `bench.compare` found, in memory and as JSON.

Owns the format of the saved files. Refuses to know how anything was measured or is shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import Case, Shape, Task

__all__ = ["FORMAT", "Row", "Run", "read_run"]

FORMAT = 1


@dataclass
class Row:
    """What was measured of one system. Seconds and bytes; None where it could not be had.

    Args:
        status: "ok", "not installed", "refused" (the system said no) or "failed".
        reason: why it is not "ok".
        steps_s: the timed steps of all rounds.
        backward_s: the part of each of them up to the end of the last backward, on the slowest rank.
        first_step_s: the very first step, which may compile, allocate and learn.
        init_s: from the plain model to one that can train.
        peak_rank: most that one rank held beyond its imports, shared pages included.
        peak_all: most that all ranks held together beyond their imports, shared pages counted once; sampled.
        messages: collectives of a step on one rank.
        payload: bytes of a step's collectives on one rank, each counted as its full tensor.
        by_kind: calls and bytes by kind of collective.
        counted_by: who counted them.
        carrier: "gloo", or "shared memory" where most of the bytes do not pass torch.distributed.
        in_flight_s: for how long in a step some collective of gloo was under way, waiting for others included.
        losses: mean over ranks at each step, from the first on.
        fresh: how many of its turns began with new processes.
    """

    name: str
    title: str
    status: str = "ok"
    reason: str = ""
    steps_s: list[float] = field(default_factory=list[float])
    backward_s: list[float] = field(default_factory=list[float])
    first_step_s: float | None = None
    init_s: float | None = None
    peak_rank: int | None = None
    peak_all: int | None = None
    messages: int | None = None
    payload: int | None = None
    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])
    counted_by: str = ""
    carrier: str = ""
    in_flight_s: float | None = None
    losses: list[float] = field(default_factory=list[float])
    fresh: int = 0

    @property
    def median_s(self) -> float | None:
        """Median step time."""
        return statistics.median(self.steps_s) if self.steps_s else None

    @property
    def minimum_s(self) -> float | None:
        """Fastest step."""
        return min(self.steps_s) if self.steps_s else None

    @property
    def update_s(self) -> float | None:
        """Median time from the end of the backward to the end of the step: clipping, optimizer, and what they wait for."""
        return statistics.median(s - b for s, b in zip(self.steps_s, self.backward_s, strict=True)) if self.steps_s else None


@dataclass
class Run:
    """One run of the benchmark.

    Args:
        task: what was trained.
        command: what was typed.
        machine: what it ran on: processor, cores, versions.
        reference: losses of plain PyTorch over the micro-batches of all ranks.
        tolerance: how far losses may differ from them, relatively.
        import_s: what `from shardwise import initialize` takes beyond `import torch`.
    """

    task: Task
    command: str
    machine: dict[str, str]
    rows: list[Row]
    reference: list[float] = field(default_factory=list[float])
    tolerance: float = 0.0
    import_s: float | None = None

    def row(self, name: str) -> Row | None:
        """The row of a system that was measured; None if there is none."""
        return next((row for row in self.rows if row.name == name and row.status == "ok"), None)

    def ratio(self, ours: str, theirs: str, quantity: Callable[[Row], float | None]) -> float | None:
        """A quantity of one system over that of another; None unless both have it."""
        one, other = self.row(ours), self.row(theirs)
        above = None if one is None else quantity(one)
        below = None if other is None else quantity(other)
        return above / below if above is not None and below else None

    def disagreements(self) -> list[str]:
        """A line for each system whose losses are not those of the reference."""
        lines: list[str] = []
        for row in self.rows:
            for step, (found, expected) in enumerate(zip(row.losses, self.reference, strict=False)):
                if not abs(found - expected) <= self.tolerance * abs(expected):
                    lines.append(f"{row.title}: loss {found:.6f} at step {step}, where plain PyTorch has {expected:.6f}")
                    break
        return lines

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **asdict(self)}
        for row, raw in zip(self.rows, content["rows"], strict=True):
            raw.update(median_s=row.median_s, minimum_s=row.minimum_s, update_s=row.update_s)
        file.write_text(json.dumps(content, indent=1) + "\n")


def read_run(file: Path) -> Run:
    """Read what `Run.save` wrote.

    Raises:
        SystemExit: the file is something else.
    """
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
        if raw.pop("format") != FORMAT:
            raise ValueError("another format")
        case = raw["task"].pop("case")
        shape = Shape(**case.pop("shape"))
        task = Task(case=Case(**case, shape=shape), **raw.pop("task"))
        rows = [_read_row(row) for row in raw.pop("rows")]
        return Run(task=task, rows=rows, **raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file} was not written by this version of bench.compare ({type(error).__name__}: {error})") from None


def _read_row(raw: dict[str, Any]) -> Row:
    for derived in ("median_s", "minimum_s", "update_s"):
        raw.pop(derived)
    raw["by_kind"] = {kind: (calls, total) for kind, (calls, total) in raw["by_kind"].items()}
    return Row(**raw)
