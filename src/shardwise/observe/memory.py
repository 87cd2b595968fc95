"""The memory table: what each rank held, beside what it would have held without sharding.

Owns the layout of the table. Refuses to know where the byte counts come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.errors import UsageError, explain

__all__ = ["format_bytes", "memory_table"]

_MOST_RANK_COLUMNS = 4
"""Up to this many ranks get a column each; more are shown as the smallest and the largest of them."""

_STATE = ("parameters", "gradients", "optimizer")


def format_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1000.

    >>> format_bytes(13_240_000)
    '13.2 MB'
    >>> format_bytes(512)
    '512 B'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def memory_table(reports: Sequence[Mapping[str, int]], measured: Sequence[int] = ()) -> str:
    """The memory of one run as text, a row per kind of state and a column per rank.

    Args:
        reports: one per rank, in rank order, as `engine.memory_report()` gives them. Bytes under the keys
            `parameters_resting`, `parameters_live_peak`, `gradients`, `optimizer`, `padding`, `unsharded_parameters`,
            `unsharded_gradients` and `unsharded_optimizer`.
        measured: one per rank, peak bytes of the whole process as the operating system sees it. Left out when empty.

    Raises:
        UsageError: no report, or not as many measurements as reports.
    """
    if not reports or (measured and len(measured) != len(reports)):
        raise UsageError(
            explain(
                "the memory table needs one report, and one measurement if any, from every rank",
                found=f"{len(reports)} reports and {len(measured)} measurements",
                do="gather both from all ranks first",
            )
        )
    whole = {kind: max(report[f"unsharded_{kind}"] for report in reports) for kind in _STATE}
    resting = [[report["parameters_resting"], report["gradients"], report["optimizer"]] for report in reports]
    rows = [
        _row("parameters, at rest", [held[0] for held in resting], whole["parameters"]),
        _row("gradients", [held[1] for held in resting], whole["gradients"]),
        _row("optimizer state", [held[2] for held in resting], whole["optimizer"]),
        _row("sum of these", [sum(held) for held in resting], sum(whole.values())),
        _row("  of it padding", [report["padding"] for report in reports]),
        _row("gradients on their way", [report.get("gradients_in_flight", 0) for report in reports]),
        _row("parameters, gathered at peak", [report["parameters_live_peak"] for report in reports]),
    ]
    if any(measured):
        rows.append(_row("whole process, measured peak", measured))
    return _aligned([_header(len(reports)), *rows])


def _header(ranks: int) -> list[str]:
    columns = [f"rank {rank}" for rank in range(ranks)] if ranks <= _MOST_RANK_COLUMNS else ["least", "most"]
    return [f"memory of {ranks} rank{'s' * (ranks > 1)}", *columns, "unsharded", "saved"]


def _row(name: str, held: Sequence[int], unsharded: int | None = None) -> list[str]:
    shown = held if len(held) <= _MOST_RANK_COLUMNS else (min(held), max(held))
    cells = [format_bytes(count) for count in shown]
    if not unsharded:
        return [name, *cells, "", ""]
    return [name, *cells, format_bytes(unsharded), f"{round(100 * (1 - max(held) / unsharded))}%"]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(line.rstrip() for line in lines)
