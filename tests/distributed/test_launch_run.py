"""`shardwise run` when all goes well: environment, output, ports, plans. The programs have no torch, so a test costs little."""

from __future__ import annotations

import json
import os
import pty
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.hardware import usable_cores
from tests.distributed.launch_support import clean_environment, launched, processes_with, run, wait_until, write_script

SHOW = """
    import json
    names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    names += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "EXTRA"]
    print(json.dumps({n: os.environ.get(n) for n in names} | {"argv": sys.argv[1:], "main": __name__, "path0": sys.path[0],
          "leak": [n for n in os.environ if n.startswith(("SHARDWISE", "TORCHELASTIC"))]}))
"""


def shown(out: str) -> list[dict[str, object]]:
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda row: str(row["RANK"]))


def test_every_rank_sees_its_place_its_arguments_and_nothing_of_an_outer_job(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "WORLD_SIZE": "9"}
    done = run("--nproc", "2", "--env", "EXTRA=a=b", script, "--nproc", "x", "TOKEN", **outer)
    assert (done.code, done.err) == (0, "")
    rows = shown(done.out)
    assert [(row["RANK"], row["LOCAL_RANK"]) for row in rows] == [("0", "0"), ("1", "1")]
    for row in rows:
        assert (row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"], row["NODE_RANK"], row["EXTRA"]) == ("2", "2", "0", "a=b")
        assert row["MASTER_ADDR"] == "127.0.0.1"
        assert row["MASTER_PORT"] == rows[0]["MASTER_PORT"]
        assert row["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
        assert row["argv"][:2] == ["--nproc", "x"]  # pyright: ignore[reportIndexIssue]
        assert (row["main"], row["path0"], row["leak"]) == ("__main__", str(tmp_path), [])


def test_threads_the_user_chose_are_kept(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print(os.environ['OMP_NUM_THREADS'])")
    assert run("--nproc", "1", script, OMP_NUM_THREADS="3").out == "3\n"
    assert run("--nproc", "1", "--omp-threads", "5", script, OMP_NUM_THREADS="3").out == "5\n"


def test_module_and_executable(tmp_path: Path) -> None:
    write_script(tmp_path, "print('module', rank, __spec__.name, sys.argv[1:])", "some_module.py")
    done = run("--nproc", "1", "-m", "some_module", "--flag", cwd=tmp_path)
    assert (done.code, done.out) == (0, "module 0 some_module ['--flag']\n")
    done = run("--nproc", "2", "--no-python", "sh", "-c", "echo shell $RANK; exit $RANK", cwd=tmp_path)
    assert done.code == 1
    assert "shell 0" in done.out
    assert "rank 1 of 2 exited with code 1" in done.err


def test_classes_of_the_script_survive_spawned_workers(tmp_path: Path) -> None:
    """Workers started by `spawn` import the script again and unpickle what lies in `__main__`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "class Box:\n    value = 5\n"
        "def work(box, queue): queue.put(box.value)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn'); queue = context.Queue()\n"
        "    worker = context.Process(target=work, args=(Box(), queue)); worker.start()\n"
        "    print(queue.get(timeout=30)); worker.join()\n"
    )
    done = run("--nproc", "1", script)
    assert (done.code, done.out, done.err) == (0, "5\n", "")


def test_two_jobs_at_once_meet_on_ports_of_their_own(tmp_path: Path) -> None:
    """Rank 0 listens as torch's store does, rank 1 connects; both jobs are alive at the same time."""
    body = """
        import pathlib, socket
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        here, other = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
        if rank == 0:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", address[1])); server.listen()
            here.write_text(str(address[1]))
            peer, _ = server.accept()
            peer.sendall(b"hello")
        deadline = time.monotonic() + 20
        while not (here.exists() and other.exists()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if rank == 1:
            print(socket.create_connection(address, timeout=20).recv(5).decode())
    """
    script = write_script(tmp_path, body)
    first, second = tmp_path / "first", tmp_path / "second"
    with launched("--nproc", "2", script, first, second) as one, launched("--nproc", "2", script, second, first) as two:
        done = [one.finish(), two.finish()]
    assert [(job.code, job.out, job.err) for job in done] == [(0, "hello\n", "")] * 2
    assert first.read_text() != second.read_text()


def test_a_busy_port_is_refused_at_once_with_its_number(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('started')")
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = run("--nproc", "2", "--master-port", str(port), script)
    assert (done.code, done.out) == (2, "")
    assert f"port {port} is in use" in done.err
    assert "Traceback" not in done.err


def test_a_port_that_another_job_holds_is_refused(tmp_path: Path) -> None:
    with launched("--nproc", "1", write_script(tmp_path, "print(os.environ['MASTER_PORT'], flush=True); nap()")) as job:
        assert job.process.stdout is not None
        port = job.process.stdout.readline().strip()
        done = run("--nproc", "1", "--master-port", port, write_script(tmp_path, "", "other.py"))
        assert (done.code, f"port {port} is in use" in done.err) == (2, True)


def test_a_dry_run_starts_nothing_and_prints_lines_that_do_the_same(tmp_path: Path) -> None:
    script = write_script(tmp_path, SHOW)
    done = run("--nproc", "2", "--dry-run", "--env", "EXTRA=a b", script, "two words")
    assert (done.code, done.err) == (0, "")
    assert str(script) in done.out
    comments, commands = done.out.splitlines()[::2], done.out.splitlines()[1::2]
    assert [line.split()[:3] for line in comments] == [["#", "rank", "0"], ["#", "rank", "1"]]
    for rank, line in enumerate(commands):
        out = subprocess.run(
            shlex.split(line), capture_output=True, text=True, timeout=30, env=clean_environment(), check=True
        ).stdout
        (row,) = shown(out)
        assert (row["RANK"], row["WORLD_SIZE"], row["EXTRA"], row["argv"]) == (str(rank), "2", "a b", ["two words"])


def test_log_files_and_prefixes(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('hello from', rank); print('problem', rank, file=sys.stderr)")
    for section in (1, 2):
        done = run("--nproc", "2", "--log-dir", tmp_path / "logs", script, "word")
        assert (done.code, done.out, done.err) == (0, "hello from 0\n", "problem 0\n")
        for rank in (0, 1):
            text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
            assert (
                text.count(f"hello from {rank}\n")
                == text.count(f"problem {rank}\n")
                == text.count("script.py word\n")
                == section
            )
    done = run("--nproc", "2", "--prefix", script)
    assert sorted(done.out.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert sorted(done.err.splitlines()) == ["[rank 0] problem 0", "[rank 1] problem 1"]


@pytest.mark.parametrize("logged", [False, True])
def test_on_a_terminal_rank_0_keeps_a_live_progress_bar(tmp_path: Path, logged: bool) -> None:
    script = write_script(
        tmp_path, "sys.stdout.write(f'{sys.stdout.isatty()} ') if rank == 0 else None; print('a\\rb\\x1b[2K\\rlast')"
    )
    options = ["--log-dir", str(tmp_path / "logs")] if logged else []
    terminal, slave = pty.openpty()
    command = [sys.executable, "-m", "shardwise", "run", "--nproc", "2" if logged else "1", *options, str(script)]
    done = subprocess.run(command, stdout=slave, stderr=slave, stdin=slave, timeout=60, env=clean_environment(), check=False)
    os.close(slave)
    shown_text = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert shown_text == "True a\rb\x1b[2K\rlast\r\n"
    if logged:
        assert (tmp_path / "logs" / "rank0.log").read_text().splitlines()[1:] == ["last"]


@pytest.mark.slow
def test_background_processes_of_a_finished_job_are_ended_and_named(tmp_path: Path) -> None:
    """One in the rank's own session, one that left it; both ignore SIGTERM."""
    body = """
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
        stay = [sys.executable, "-c", code, sys.argv[1]]
        for new_session in (False, True):
            subprocess.Popen(stay, start_new_session=new_session, stdout=subprocess.PIPE).stdout.readline()
    """
    done = run("--nproc", "1", write_script(tmp_path, body), "TOKEN")
    assert done.code == 0
    assert done.err.count("python") == 2
    assert "ended background processes" in done.err


def test_signals_for_the_program_are_passed_on(tmp_path: Path) -> None:
    body = """
        import signal
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        open(f"{sys.argv[1]}{rank}", "w").close()
        while not got: time.sleep(0.02)
        print("got it", rank)
    """
    with launched("--nproc", "2", write_script(tmp_path, body), tmp_path / "ready") as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        os.kill(job.process.pid, 10)
        done = job.finish()
    assert (done.code, sorted(done.out.splitlines())) == (0, ["got it 0", "got it 1"])


def test_the_launcher_never_imports_torch(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    check = (
        "import sys\nfrom shardwise.cli import main\n"
        f"code = main(['run', '--nproc', '1', {str(script)!r}])\n"
        "print(code, sorted({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, env=clean_environment(), check=True
    )
    assert done.stdout == "0 []\n"
    assert processes_with(str(script)) == []
