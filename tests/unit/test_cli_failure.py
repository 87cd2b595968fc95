"""Who is to blame for the end of a job, and how that is said."""

from __future__ import annotations

import json
import signal

from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.child import RECORD_MARK
from shardwise.cli.failure import Ending, ErrorRecord, JobEnding, RecordStream, blame, exit_code, report
from shardwise.cli.output import _Lines
from shardwise.cli.processes import _parse_stat


def ending(
    rank: int, code: int | None = 0, time: float = 10.0, *, asked: bool = False, error: ErrorRecord | None = None
) -> Ending:
    return Ending(rank, "host", 100 + rank, None if code is None else time, code, asked, error)


def raised(time: float, kind: str = "ValueError", line: str = "no good") -> ErrorRecord:
    return ErrorRecord(time, kind, line, f"Traceback\n{kind}: {line}\n")


def job(*ranks: Ending, stop: int | None = None, stop_time: float | None = None) -> JobEnding:
    return JobEnding(list(ranks), began=0.0, stop_signal=stop, stop_time=stop_time)


def test_success_says_nothing() -> None:
    good = job(ending(0), ending(1))
    assert (blame(good), exit_code(good), report(good)) == (None, 0, "")


def test_the_first_exception_is_blamed_even_if_its_process_ends_last() -> None:
    bad = job(ending(0, 1, 5.0, error=raised(4.9, "ConnectionError", "peer gone")), ending(1, 1, 6.0, error=raised(4.8)))
    assert blame(bad) is bad.ranks[1]
    text = report(bad)
    assert "rank 1 of 2 raised ValueError after 4.8 s" in text
    assert "  rank 0: then raised ConnectionError: peer gone\n" in text
    assert text.endswith("ValueError: no good\n")
    assert text.count("Traceback") == 1


def test_a_silent_death_comes_before_the_exception_it_caused() -> None:
    """The death is seen at 5.02 s; the other rank noticed it at 5.01 s."""
    bad = job(ending(0, 1, 5.1, error=raised(5.01, "ConnectionError")), ending(1, -9, 5.02))
    assert blame(bad) is bad.ranks[1]
    assert exit_code(bad) == 137
    assert "signal 9 (SIGKILL): often out of memory" in report(bad)


def test_ranks_that_were_told_to_stop_are_not_blamed() -> None:
    bad = job(ending(0, -15, asked=True), ending(1, 3), ending(2, -9, asked=True), stop_time=9.0)
    assert blame(bad) is bad.ranks[1]
    assert exit_code(bad) == 3
    assert "rank 0" not in report(bad)


def test_a_rank_that_raised_and_had_to_be_stopped_counts_as_failed() -> None:
    bad = job(ending(0, -15, asked=True), ending(1, -9, asked=True, error=raised(3.0)), stop_time=5.0)
    assert (blame(bad), exit_code(bad)) == (bad.ranks[1], 1)


def test_a_signal_to_the_launcher_is_no_rank_s_fault() -> None:
    stopped = job(ending(0, 1, error=raised(9.5, "KeyboardInterrupt", "")), ending(1, 0), stop=signal.SIGINT, stop_time=9.0)
    assert (blame(stopped), exit_code(stopped)) == (None, 130)
    assert "Traceback" not in report(stopped)
    failed_to_save = job(ending(0, 1, error=raised(9.5, "OSError", "disk full")), stop=signal.SIGTERM, stop_time=9.0)
    assert exit_code(failed_to_save) == 143
    assert "rank 0: raised OSError while stopping" in report(failed_to_save)
    before = job(ending(0, 1, error=raised(8.0)), stop=signal.SIGTERM, stop_time=9.0)
    assert exit_code(before) == 1


def test_equal_errors_are_put_together_and_early_leavers_mentioned() -> None:
    bad = job(ending(0, 0, 2.0), *[ending(rank, 1, 5.0, error=raised(4.0 + rank)) for rank in (1, 2, 3)])
    text = report(bad)
    assert "  ranks 2, 3: the same error\n" in text
    assert "  rank 0: had left with code 0, 3.0 s earlier\n" in text


def test_what_could_not_be_ended_is_said() -> None:
    bad = job(ending(0, 1), ending(1, None))
    bad.leftovers.append("python (pid 7)")
    assert "still running, and the kernel does not let it go: python (pid 7)" in report(bad)


RECORD = {"time": 1.5, "type": "ValueError", "line": "x", "text": "a\nb\n"}


@given(st.lists(st.integers(1, 40), max_size=8))
def test_records_arrive_in_any_pieces(cuts: list[int]) -> None:
    second = {**RECORD, "type": "Later"}
    data = b"Fatal Python error\n" + f"{RECORD_MARK}{json.dumps(RECORD)}\n{RECORD_MARK}{json.dumps(second)}\n".encode()
    stream = RecordStream()
    for cut in cuts:
        stream.feed(data[:cut])
        data = data[cut:]
    stream.feed(data)
    assert stream.error == ErrorRecord(1.5, "ValueError", "x", "a\nb\n")
    assert stream.crash == "Fatal Python error\n"


def test_a_record_that_is_no_record_is_dropped() -> None:
    stream = RecordStream()
    stream.feed(f"{RECORD_MARK}{{\n{RECORD_MARK}[]\n{RECORD_MARK}{{}}\n".encode())
    assert (stream.error, stream.crash) == (None, "")


@given(st.lists(st.integers(1, 12), max_size=8))
def test_lines_are_tagged_whatever_the_pieces(cuts: list[int]) -> None:
    data, got = b"first\n\nthird is unfinished", []
    lines = _Lines(got.append, b"[0] ")
    for cut in cuts:
        if data[:cut]:
            lines(data[:cut])
        data = data[cut:]
    if data:
        lines(data)
    lines(b"")
    assert b"".join(got) == b"[0] first\n[0] \n[0] third is unfinished\n"


def test_a_progress_bar_in_a_file_leaves_its_last_state() -> None:
    got: list[bytes] = []
    _Lines(got.append, plain=True)(b"10%\r\x1b[2K\x1b[1;32m20%\x1b[0m\r30%\r\nplain\n")
    assert b"".join(got) == b"30%\nplain\n"


def test_a_process_name_may_hold_anything() -> None:
    process = _parse_stat(b"12 (a) b (c)) S 3 4 5 6 7\n")
    assert (process.pid, process.name, process.parent, process.session, process.alive) == (12, "a) b (c)", 3, 5, True)
    assert not _parse_stat(b"1 (x) Z 0 1 1 0\n").alive
