"""`shardwise run` when something fails: everything is gone within 10 s, and the rank to blame is named last."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.launch_support import GONE_S, launched, processes_with, run, wait_until, write_script

# Each rank also has a worker in its session and one that left it; all carry the token.
WITH_WORKERS = """
    for new_session in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", sys.argv[1]], start_new_session=new_session)
    open(f"{sys.argv[2]}{rank}", "w").close()
    while not all(os.path.exists(f"{sys.argv[2]}{r}") for r in (0, 1)): time.sleep(0.02)
"""
FAILURES = {
    "raises": ("def deep(): raise ValueError('no good')\nif rank: deep()\nnap()", 1, "ValueError: no good"),
    "killed": ("if rank: os.kill(os.getpid(), 9)\nnap()", 137, "often out of memory"),
    "exits": ("if rank: sys.exit(7)\nnap()", 7, "exit code 7"),
    "leaves": ("if rank: os._exit(3)\nnap()", 3, "exit code 3"),
    "message": ("if rank: sys.exit('no data found')\nnap()", 1, "no data found"),
    "crashes": ("import ctypes\nif rank: ctypes.string_at(0)\nnap()", 139, "Segmentation fault"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_one_rank_fails(tmp_path: Path, kind: str) -> None:
    body, code, words = FAILURES[kind]
    script = tmp_path / "script.py"
    write_script(tmp_path, WITH_WORKERS)
    script.write_text(script.read_text() + body + "\n")
    done = run("--nproc", "2", script, "TOKEN", tmp_path / "ready")
    assert done.code == code
    assert done.seconds < GONE_S
    report = done.err[done.err.index("shardwise run: rank 1 of 2") :]
    title, last = report.split("\n---- ")
    assert "all ranks were stopped" in title
    assert last.startswith("rank 1 on ")
    assert words in last
    if kind == "raises":
        assert done.err.count("Traceback") == 1
        assert done.err.endswith("ValueError: no good\n")
        assert "child.py" not in done.err
    if kind == "message":
        assert done.err.count("no data found") == 2  # in the title, and as the last words
    if kind == "killed":
        assert "signal 9 (SIGKILL)" in last


def test_the_rank_that_raised_first_is_blamed_and_the_others_get_a_line(tmp_path: Path) -> None:
    body = """
        flag = sys.argv[2]
        if rank == 2:
            open(flag, "w").close()
            raise KeyError("the cause")
        while not os.path.exists(flag): time.sleep(0.01)
        time.sleep(0.05)
        raise ConnectionError("peer closed the connection")
    """
    done = run("--nproc", "3", write_script(tmp_path, body), "TOKEN", tmp_path / "flag")
    assert done.code == 1
    assert "rank 2 of 3 raised KeyError" in done.err
    assert done.err.endswith("KeyError: 'the cause'\n")
    assert done.err.count("Traceback") == 1


@pytest.mark.slow
def test_an_error_under_torch_distributed_is_said_once_and_last(tmp_path: Path) -> None:
    """torch.distributed puts a hook of its own in place of Python's, which prints with the rank in front of each line."""
    body = """
        import shardwise
        shardwise.init_distributed()
        if rank: raise ValueError("no good")
        nap()
    """
    done = run("--nproc", "2", write_script(tmp_path, body), "TOKEN")
    assert done.code == 1
    assert done.err.count("ValueError: no good") == 1
    assert done.err.count("Traceback") == 1
    title, last = done.err.split("\n---- ")
    assert "rank 1 of 2 raised ValueError" in title
    assert last.startswith("rank 1 on ")
    assert last.endswith("ValueError: no good\n")


def test_hooks_of_the_program_run_and_wrap_a_silent_one(tmp_path: Path) -> None:
    """Errors that the program hands to the hook itself, and goes on after, are printed as ever."""
    body = """
        before = sys.excepthook
        def hook(kind, error, trace):
            print("noticed", error, file=sys.stderr)
            before(kind, error, trace)
        sys.excepthook = hook
        if rank == 0:
            try: raise KeyError("survived")
            except KeyError: sys.excepthook(*sys.exc_info())
            raise ValueError("no good")
        nap()
    """
    done = run("--nproc", "2", write_script(tmp_path, body), "TOKEN")
    assert done.code == 1
    assert done.err.count("KeyError: 'survived'") == 1
    assert done.err.count("noticed no good\n") == 1
    assert done.err.count("ValueError: no good") == 1


def test_equal_errors_are_said_once(tmp_path: Path) -> None:
    done = run("--nproc", "3", write_script(tmp_path, "raise ValueError('same for all')"), "TOKEN")
    assert done.code == 1
    assert done.err.count("ValueError: same for all") == 1


@pytest.mark.slow
def test_a_rank_that_left_before_is_mentioned(tmp_path: Path) -> None:
    body = "if rank == 0: time.sleep(1.5); raise ConnectionError('peer is gone')"
    done = run("--nproc", "2", write_script(tmp_path, body), "TOKEN")
    assert done.code == 1
    assert "rank 1: had left with code 0" in done.err


@pytest.mark.slow
def test_ranks_that_do_not_listen_to_sigterm_are_killed(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{sys.argv[2]}{rank}", "w").close()
        while not all(os.path.exists(f"{sys.argv[2]}{r}") for r in (0, 1)): time.sleep(0.02)
        if rank: raise ValueError("no good")
        nap()
    """
    done = run("--nproc", "2", write_script(tmp_path, body), "TOKEN", tmp_path / "ready")
    assert (done.code, done.seconds < GONE_S) == (1, True)
    assert done.err.endswith("ValueError: no good\n")


@pytest.mark.slow
def test_a_rank_that_raised_but_cannot_end_is_noticed(tmp_path: Path) -> None:
    """Python waits for its threads after an exception: the process lives on, and the other ranks wait for it."""
    body = """
        import threading
        if rank:
            threading.Thread(target=nap).start()
            raise ValueError("no good")
        nap()
    """
    done = run("--nproc", "2", write_script(tmp_path, body), "TOKEN")
    assert (done.code, done.seconds < GONE_S) == (1, True)
    assert done.err.endswith("ValueError: no good\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: int) -> None:
    script = write_script(tmp_path, WITH_WORKERS + "    nap()\n")
    with launched("--nproc", "2", script, "TOKEN", tmp_path / "ready") as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        began = time.monotonic()
        os.kill(job.process.pid, number)
        done = job.finish()
        assert time.monotonic() - began < GONE_S
        assert processes_with(job.token) == []
    assert done.code == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in done.err
    assert "Traceback" not in done.err


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    body = """
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", sys.argv[1]])
        open(f"{sys.argv[2]}{rank}", "w").close()
        nap()
    """
    with launched("--nproc", "2", write_script(tmp_path, body), "TOKEN", tmp_path / "ready") as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        job.process.kill()
        assert "the launcher was killed" in job.finish().err
        wait_until(lambda: not processes_with(job.token), GONE_S)


def test_a_program_may_use_the_grace_to_save(tmp_path: Path) -> None:
    body = """
        def save(*_):
            time.sleep(0.5)
            open(f"{sys.argv[2]}saved{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"{sys.argv[2]}{rank}", "w").close()
        nap()
    """
    with launched("--nproc", "2", write_script(tmp_path, body), "TOKEN", tmp_path / "ready") as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        job.process.terminate()
        assert job.finish().code == 128 + signal.SIGTERM
    assert all((tmp_path / f"readysaved{rank}").exists() for rank in (0, 1))


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(f"{sys.argv[2]}{rank}", "w").close()
        nap()
    """
    script = write_script(tmp_path, body)
    with launched("--nproc", "2", "--grace", "100", script, "TOKEN", tmp_path / "ready") as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        began = time.monotonic()
        os.kill(job.process.pid, signal.SIGINT)
        assert job.process.stderr is not None
        assert "SIGINT: stopping 2 ranks" in job.process.stderr.readline()
        os.kill(job.process.pid, signal.SIGINT)
        assert job.finish().code == 130
        assert time.monotonic() - began < GONE_S


def test_the_traceback_is_in_the_log_file_too(tmp_path: Path) -> None:
    body = "if rank: raise ValueError('no good')\nnap()"
    script = tmp_path / "script.py"
    write_script(tmp_path, "")
    script.write_text(script.read_text() + body)
    done = run("--nproc", "2", "--log-dir", tmp_path / "logs", script, "TOKEN")
    assert done.code == 1
    assert done.err.endswith("ValueError: no good\n")
    assert (tmp_path / "logs" / "rank1.log").read_text().endswith("ValueError: no good\n")
