"""What a measurement of a disk looks like as text.

Owns the words and the columns. Refuses to know how it was measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from shardwise.errors import ConfigError, explain
from shardwise.tiers.measure import Measurement, Progress, Speed, measure_disk

__all__ = ["main", "parse_size", "render"]

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def main(directory: str | Path, size_text: str = "1GiB", progress: Progress | None = None) -> str:
    """Measure the disk under a folder and report.

    Args:
        directory: made when missing.
        size_text: how much is written and read for each number; see `parse_size`.
        progress: called before each step with the steps done, the steps in all, and what comes now.

    Raises:
        ConfigError: the size cannot be read.
        StorageError: too little room, or the disk fails.
    """
    return render(measure_disk(directory, parse_size(size_text), progress=progress))


def parse_size(text: str) -> int:
    """A number of bytes as people write it.

    >>> parse_size("512 MiB"), parse_size("2GB"), parse_size("4096")
    (536870912, 2000000000, 4096)

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(explain("this is no size", expected='a number with a unit, as "1GiB" or "500MB"', found=repr(text)))
    return int(float(match[1]) * _UNITS[match[2]])


def render(found: Measurement) -> str:
    """The measurement as a table, and the configuration that goes with it."""
    how = "past the system's cache" if found.direct else "through the system's cache: its speed counts as much as the disk's"
    rows = [["", "read", "of plain", "write", "of plain"], _row("plain, one thread", found.plain, found.plain)]
    for trial in sorted(found.trials, key=lambda trial: (trial.settings.buffer_size, trial.settings.threads)):
        settings = trial.settings
        name = f"{settings.threads} x {settings.block_bytes >> 20} MiB, buffers of {settings.buffer_size >> 20} MiB"
        rows.append(_row(name + (" *" if trial is found.best else ""), trial.speed, found.plain))
    memory = found.best.settings.buffer_count * found.best.settings.buffer_size
    lines = [
        f"disk under {found.directory}: {found.nbytes / 1e9:.2f} GB each way, {how}",
        "",
        *_columns(rows),
        "",
        "Rows: threads x bytes per request of the disk tier, and its buffers. Columns: the best of the rounds.",
        f"Recommended (*), in a pipeline that writes everything back: {_rate(found.streamed)}, read and written together.",
        f"Its buffers take {memory >> 20} MiB of host memory per process:",
        "",
        json.dumps(found.config(), indent=2),
    ]
    return "\n".join(lines)


def _row(name: str, speed: Speed, plain: Speed) -> list[str]:
    return [name, _rate(speed.read), f"{speed.read / plain.read:.0%}", _rate(speed.write), f"{speed.write / plain.write:.0%}"]


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
    return lines
