"""A run as a picture: two bars per system, time and memory.

Owns how it is drawn, as SVG text that needs no library. Refuses to know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from bench.results import Row, Run

__all__ = ["draw"]

WIDTH, LEFT, BAR, GAP, TOP = 760, 214, 168, 72, 78
ROW = 26
OURS, THEIRS, FAINT, DARK = "#4c78a8", "#b3b3b3", "#555", "#222"

Quantity = Callable[[Row], "float | None"]
PANELS: tuple[tuple[str, str, float, Quantity, Quantity], ...] = (
    ("step time, median (line: fastest)", "ms", 1e3, lambda row: row.median_s, lambda row: row.minimum_s),
    ("peak memory of a rank", "MB", 1e-6, lambda row: row.peak_rank, lambda row: None),
)


def draw(run: Run) -> str:
    """The text of an SVG file."""
    rows = run.rows
    height = TOP + ROW * len(rows) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(run.task.title, quote=True)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 28, f"{run.task.case.name}, {run.task.world} ranks, {run.task.precision}", size=16, weight=600),
    ]
    for number, row in enumerate(rows):
        ours = row.name.startswith("shardwise")
        parts.append(_text(LEFT - 10, TOP + ROW * number + 15, row.title, anchor="end", weight=600 if ours else 400))
        if row.status != "ok":
            parts.append(_text(LEFT, TOP + ROW * number + 15, row.status, fill=FAINT))
    for number, (title, unit, scale, quantity, mark) in enumerate(PANELS):
        x = LEFT + number * (BAR + GAP + 38)
        parts.append(_text(x, TOP - 14, title, fill=FAINT))
        longest = max((value for row in rows if (value := quantity(row)) is not None), default=1.0)
        for line, row in enumerate(rows):
            value, least = quantity(row), mark(row)
            if value is None:
                continue
            y, length = TOP + ROW * line, BAR * value / longest
            colour = OURS if row.name.startswith("shardwise") else THEIRS
            parts.append(f'<rect x="{x}" y="{y + 3}" width="{length:.1f}" height="16" fill="{colour}"/>')
            if least is not None:
                at = x + BAR * least / longest
                parts.append(f'<rect x="{at:.1f}" y="{y + 1}" width="2" height="20" fill="{DARK}"/>')
            parts.append(_text(x + length + 6, y + 15, f"{value * scale:.0f} {unit}"))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = DARK, size: int = 12, weight: int = 400) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(words)}</text>'
