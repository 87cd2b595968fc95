"""A run as tables of text.

Owns how numbers look. Refuses to know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.goals import judge
from bench.results import Row, Run

__all__ = ["grid", "goal_rows", "headings", "measured_rows", "ratio_rows", "render"]

PEERS = ("single", "ddp", "zero-redundancy", "fsdp2", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def headings(run: Run) -> list[str]:
    """Columns of `measured_rows`."""
    parts = ["backward", "update", "in flight"] if run.task.precision == "bf16" else []
    names = ["median", "fastest", *parts, "first step", "init", "memory, rank", "memory, all", "sent", "messages", "by", "loss"]
    return ["system", *names]


def measured_rows(run: Run) -> list[list[str]]:
    """One row per system; of one that could not run, only why."""
    return [_measured(row, run) if row.status == "ok" else [row.title, f"{row.status}: {row.reason}"] for row in run.rows]


def _measured(row: Row, run: Run) -> list[str]:
    median, update = row.median_s, row.update_s
    backward = None if median is None or update is None else median - update
    parts = [_ms(backward), _ms(update), _ms(row.in_flight_s)] if run.task.precision == "bf16" else []
    last = min(len(row.losses), len(run.reference)) - 1
    loss = f"{row.losses[last]:.5f}" if last >= 0 else "-"
    if row.name == "single" and run.reference:  # its own micro-batches are those of one rank; the reference has all of them
        loss = f"{run.reference[-1]:.5f}"
    cells = [_ms(median), _ms(row.minimum_s), *parts, _ms(row.first_step_s), _ms(row.init_s)]
    cells += [_mb(row.peak_rank), _mb(row.peak_all), _mb(row.payload), "-" if row.messages is None else str(row.messages)]
    return [row.title, *cells, row.carrier or "-", loss]


def ratio_rows(run: Run) -> list[list[str]]:
    """Step time and peak memory of each Shardwise row over those of each peer; the first row has the peers' names."""
    peers = [name for name in PEERS if run.row(name) is not None]
    rows = [["over", *peers]]
    for row in run.rows:
        if row.name.startswith("shardwise") and row.status == "ok":
            for what, quantity in (("time", lambda r: r.median_s), ("memory", lambda r: r.peak_rank)):
                ratios = [run.ratio(row.name, peer, quantity) for peer in peers]
                rows.append([f"{row.name}, {what}", *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return rows if len(rows) > 1 and peers else []


def goal_rows(run: Run) -> list[list[str]]:
    """The goals, with headings; nothing where this run cannot tell about any."""
    verdicts = judge(run)
    rows = [
        [v.what, f"<= {v.limit:.2f}{v.unit}", "-" if v.found is None else f"{v.found:.2f}{v.unit}", v.word] for v in verdicts
    ]
    return [["goal", "limit", "found", ""], *rows] if rows else []


def render(run: Run) -> str:
    """Everything, for a terminal."""
    parts = [run.task.title, grid([headings(run), *measured_rows(run)])]
    parts += [grid(rows) for rows in (ratio_rows(run), goal_rows(run)) if rows]
    return "\n\n".join(parts)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left. A row of two cells in a wider table runs on to the right."""
    widest = max(map(len, rows))
    full = [row for row in rows if len(row) == widest]
    widths = [max(len(row[column]) for row in full) for column in range(widest)]
    widths[0] = max(len(row[0]) for row in rows)
    lines: list[str] = []
    for row in rows:
        if len(row) < widest:
            lines.append(f"{row[0]:<{widths[0]}}  {row[1]}")
        else:
            cells = [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f} MB"
