"""Progress of work on bytes: a bar for a terminal, lines for a log, silence if it is short."""

from __future__ import annotations

import io

from shardwise.observe import WorkProgress
from tests.unit.test_observe_progress import Clock, Terminal


def test_a_log_gets_a_line_every_few_seconds_and_short_work_is_silent() -> None:
    file, clock = io.StringIO(), Clock()
    with WorkProgress("reading", 10_000_000, file=file, clock=clock) as progress:
        progress(1_000_000)
        assert file.getvalue() == ""
        for _ in range(5):
            clock.now += 1
            progress(1_000_000)
    assert file.getvalue() == "reading 4.0 MB of 10.0 MB  1.3 MB/s  4 s left\n"


def test_without_a_total_there_is_no_time_left() -> None:
    file, clock = io.StringIO(), Clock()
    with WorkProgress("reading", file=file, clock=clock) as progress:
        clock.now += 4
        progress(8_000)
        progress.begin(16_000)
        clock.now += 4
        progress(0)
    assert file.getvalue() == "reading 8.0 kB  2.0 kB/s\nreading 8.0 kB of 16.0 kB  1.0 kB/s  8 s left\n"


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    file, clock = Terminal(), Clock()
    with WorkProgress("reading", 100, file=file, clock=clock) as progress:
        clock.now += 1
        progress(50)
    assert "reading" in file.getvalue()
    assert "\x1b" in file.getvalue()
    progress(50)  # afterwards it is only counted
