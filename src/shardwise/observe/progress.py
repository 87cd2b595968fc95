"""One progress line for a training run: a live bar on a terminal, plain lines in a log, nothing when told so.

Owns what the line shows and how often. Refuses to know ranks and engines: the caller makes it on one rank and feeds it numbers.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Protocol, SupportsFloat

from shardwise.device import read_memory
from shardwise.observe.memory import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Reading", "TrainingProgress"]

_WINDOW = 30
"""Steps over which the speed is averaged: long enough to be calm, short enough to show a slowdown."""

_BAR_INTERVAL = 0.1
_LINE_INTERVAL = 3.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one moment of training looks like. `speed` is tokens per second over all ranks, `left` is seconds to go."""

    step: int
    loss: float
    speed: float
    learning_rate: float
    gradient_norm: float | None
    memory: int
    left: float

    def fields(self) -> list[str]:
        """The numbers as short texts, in the order they are shown."""
        norm = "-" if self.gradient_norm is None else f"{self.gradient_norm:.2f}"
        return [
            f"loss {self.loss:.3f}",
            f"{self.speed:,.0f} tok/s",
            f"lr {self.learning_rate:.1e}",
            f"norm {norm}",
            f"{format_bytes(self.memory)}/rank",
        ]


class _Face(Protocol):
    """How readings reach the reader."""

    interval: float

    def show(self, reading: Reading) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class TrainingProgress:
    """Shows how training goes. A context manager; also usable with an explicit `close()`.

    Args:
        total: number of steps to come.
        enabled: False shows nothing at all, which is what every rank but the first wants.
        file: where to write; standard output if left out. A terminal gets a live bar, anything else a line every few seconds.
        memory: bytes in use by this rank, asked when a line is drawn; the process's physical memory if left out.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        *,
        enabled: bool = True,
        file: IO[str] | None = None,
        memory: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._memory = memory or (lambda: read_memory().current)
        self._clock = clock
        self._face: _Face | None = _face(total, file or sys.stdout) if enabled else None
        self._step = 0
        self._shown_at = float("-inf")
        self._history: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_WINDOW)

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def advance(
        self, *, loss: SupportsFloat, tokens: int, learning_rate: float, gradient_norm: SupportsFloat | None = None
    ) -> None:
        """Count one step.

        Args:
            loss: this step's loss; a 0-d tensor is read (and its device waited for) only when a line is due.
            tokens: tokens this step processed on all ranks together.
            learning_rate: of this step.
            gradient_norm: before clipping; left out when unknown.
        """
        self._step += 1
        now = self._clock()
        self._history.append((now, self._history[-1][1] + tokens))
        face = self._face
        if face is None or (now - self._shown_at < face.interval and self._step < self._total):
            return
        self._shown_at = now
        speed, left = self._pace()
        norm = None if gradient_norm is None else float(gradient_norm)
        face.show(Reading(self._step, float(loss), speed, learning_rate, norm, self._memory(), left))

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._face is not None:
            self._face.note(text)

    def close(self) -> None:
        """Leave the terminal as it was found. Safe to call twice."""
        face, self._face = self._face, None
        if face is not None:
            face.close()

    def _pace(self) -> tuple[float, float]:
        (start, before), (end, after) = self._history[0], self._history[-1]
        seconds, steps = max(end - start, 1e-9), len(self._history) - 1
        return (after - before) / seconds, seconds / steps * (self._total - self._step)


def _face(total: int, file: IO[str]) -> _Face:
    from rich.console import Console

    console = Console(file=file, highlight=False, soft_wrap=False)
    return _Bar(total, console) if console.is_terminal and not console.is_dumb_terminal else _Lines(total, file)


class _Lines:
    """For a log: one self-contained line now and then."""

    interval = _LINE_INTERVAL

    def __init__(self, total: int, file: IO[str]) -> None:
        self._total = total
        self._file = file

    def show(self, reading: Reading) -> None:
        count = f"{reading.step:{len(str(self._total))}}/{self._total}"
        self.note("  ".join([f"step {count}", *reading.fields(), f"{_clock_text(reading.left)} left"]))

    def note(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()


class _Bar:
    """For a terminal: one line that redraws itself, by rich."""

    interval = _BAR_INTERVAL

    def __init__(self, total: int, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        # The numbers keep their width and the bar takes what is left, so an 80-column terminal shows all of them.
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            refresh_per_second=8,
        )
        self._task = self._progress.add_task("", total=total, numbers="")
        self._progress.start()

    def show(self, reading: Reading) -> None:
        numbers = " ".join([*reading.fields(), _clock_text(reading.left)])
        self._progress.update(self._task, completed=reading.step, numbers=numbers)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        self._progress.stop()


def _clock_text(seconds: float) -> str:
    """Minutes and seconds, as in `1:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
