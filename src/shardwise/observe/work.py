"""Progress of work on bytes (a file is read, written, checked): a live bar on a terminal, plain lines elsewhere.

Owns what is shown and how often. Refuses to know what the work is. Bytes may be counted from any thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from shardwise.observe.memory import format_bytes

__all__ = ["WorkProgress"]

_LINE_INTERVAL = 3.0
_BAR_INTERVAL = 0.1


class WorkProgress:
    """Shows how far work is. A context manager; call the object, or `advance`, with bytes as they are done.

    Args:
        title: what is done, in one or two words.
        total: bytes to come; may also be given later, by `begin`.
        file: where to write; standard error if left out, as results go to standard output. A terminal gets a bar, anything else
            a line every few seconds, so that short work is silent.
        clock: seconds, monotonic.
    """

    def __init__(
        self, title: str, total: int = 0, *, file: IO[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._total = total
        self._file = file or sys.stderr
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        self._begun = self._shown_at = clock()
        self._bar: Any = None
        self._task: Any = None

    def begin(self, total: int) -> None:
        """Say how many bytes there are to come."""
        self._total = total

    def __call__(self, count: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._shown_at >= (_BAR_INTERVAL if self._bar is not None else _LINE_INTERVAL):
                self._shown_at = now
                self._show(now)

    def __enter__(self) -> WorkProgress:
        self._bar = _make_bar(self._file)
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _show(self, now: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=self._total or None)
            return
        speed = self._done / max(now - self._begun, 1e-9)
        parts = [f"{self._title} {format_bytes(self._done)}"]
        if self._total:
            left = max(self._total - self._done, 0) / max(speed, 1e-9)
            parts[0] += f" of {format_bytes(self._total)}"
            parts.append(f"{left:.0f} s left")
        self._write(f"{parts[0]}  {format_bytes(speed)}/s{'  ' + parts[1] if len(parts) > 1 else ''}")

    def _write(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()


def _make_bar(file: IO[str]) -> Any:
    """A bar by rich if the file is a terminal; None otherwise."""
    if not file.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column

    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
