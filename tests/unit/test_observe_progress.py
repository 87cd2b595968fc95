"""The progress of training: a bar for a terminal, lines for a log, silence when asked for."""

from __future__ import annotations

import io
import re

import pytest
import torch

from shardwise.observe import TrainingProgress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Unread:
    """A loss that must not be looked at."""

    def __float__(self) -> float:
        raise AssertionError("the loss was read although no line was due")


def train(progress: TrainingProgress, clock: Clock, steps: int, seconds: float = 0.5) -> None:
    for step in range(steps):
        clock.now += seconds
        progress.advance(loss=torch.tensor(5.0 - step), tokens=1000, learning_rate=3e-3, gradient_norm=0.84)


def test_log_gets_whole_lines_every_few_seconds_and_the_last_step() -> None:
    file, clock = io.StringIO(), Clock()
    with TrainingProgress(20, file=file, memory=lambda: 391_000_000, clock=clock) as progress:
        train(progress, clock, 20)
    lines = file.getvalue().splitlines()
    assert [int(re.match(r"step +(\d+)/20", line)[1]) for line in lines] == [1, 7, 13, 19, 20]  # type: ignore[index]
    assert lines[0] == "step  1/20  loss 5.000  2,000 tok/s  lr 3.0e-03  norm 0.84  391.0 MB/rank  0:10 left"
    assert lines[-1].endswith("0:00 left")
    assert "\x1b" not in file.getvalue()


def test_speed_is_recent() -> None:
    file, clock = io.StringIO(), Clock()
    with TrainingProgress(200, file=file, memory=lambda: 0, clock=clock) as progress:
        train(progress, clock, 100, seconds=0.1)
        train(progress, clock, 100, seconds=1.0)
    lines = file.getvalue().splitlines()
    assert "10,000 tok/s" in lines[1]
    assert "1,000 tok/s" in lines[-1]


def test_terminal_of_80_columns_shows_every_number_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    file, clock = Terminal(), Clock()
    with TrainingProgress(480, file=file, memory=lambda: 391_000_000, clock=clock) as progress:
        train(progress, clock, 3)
        progress.note("a note")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    last = shown.replace("\r", "\n").rstrip().splitlines()[-1]
    for part in ("3/480", "━", "loss 3.000", "2,000 tok/s", "lr 3.0e-03", "norm 0.84", "391.0 MB/rank", "3:58"):
        assert part in last
    assert len(last) <= 80
    assert "a note" in shown
    assert file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_disabled_writes_nothing_and_reads_nothing() -> None:
    file = io.StringIO()
    with TrainingProgress(2, enabled=False, file=file, memory=lambda: 1 // 0) as progress:
        progress.advance(loss=Unread(), tokens=1, learning_rate=1.0)
        progress.note("unheard")
    assert file.getvalue() == ""


def test_loss_is_read_only_when_a_line_is_due() -> None:
    file, clock = io.StringIO(), Clock()
    with TrainingProgress(3, file=file, memory=lambda: 0, clock=clock) as progress:
        progress.advance(loss=1.0, tokens=1, learning_rate=1.0)
        clock.now += 0.01
        progress.advance(loss=Unread(), tokens=1, learning_rate=1.0)
    assert len(file.getvalue().splitlines()) == 1


def test_unknown_norm_is_a_dash_and_close_is_repeatable() -> None:
    file = io.StringIO()
    progress = TrainingProgress(1, file=file, memory=lambda: 0)
    progress.advance(loss=1.0, tokens=1, learning_rate=1.0)
    progress.close()
    progress.close()
    assert "norm -" in file.getvalue()
