"""What can be typed after `shardwise`, and what is answered when something else is."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.parser import parse_run
from shardwise.cli.plan import Program
from shardwise.errors import LaunchError


def test_options_end_where_the_script_begins() -> None:
    request = parse_run(["--nproc", "4", "--master_port=1234", "train.py", "--nproc", "x", "--", "-m"])
    assert request.program == Program("script", "train.py", ("--nproc", "x", "--", "-m"))
    assert (request.nproc, request.master_port) == (4, 1234)
    request = parse_run(["--num_gpus", "2", "--env", "A=1", "--env=B=x=y", "--", "--odd-name.py"])
    assert request.program == Program("script", "--odd-name.py")
    assert (request.nproc, request.env) == (2, {"A": "1", "B": "x=y"})


def test_defaults_and_kinds() -> None:
    request = parse_run(["train.py"])
    assert (request.nproc, request.master_port, request.omp_threads, request.log_dir) == (None, None, None, None)
    assert (request.dry_run, request.prefix, request.env) == (False, False, {})
    assert parse_run(["--nproc", "auto", "train.py"]).nproc is None
    assert parse_run(["-m", "pkg.train", "-x"]).program == Program("module", "pkg.train", ("-x",))
    assert parse_run(["--no-python", "sh"]).program == Program("command", "sh")
    assert parse_run(["--log-dir", "-logs", "--grace", "0.5", "t.py"]).log_dir == Path("-logs")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no script was named"),
        (["--nproc", "2"], "no script was named"),
        (["--nproc", "0", "t.py"], "--nproc has a wrong value: expected a whole number from 1 on, or auto, found '0'"),
        (["--nproc", "many", "t.py"], "'many'"),
        (["--nproc", "-1", "t.py"], "'-1'"),
        (["--nproc", "1.5", "t.py"], "'1.5'"),
        (["--nproc"], "--nproc needs a value"),
        (["--nprok", "2", "t.py"], "did you mean --nproc?"),
        (["--master-prot=1", "t.py"], "did you mean --master-port?"),
        (["--qqq", "t.py"], "unknown option --qqq. See shardwise run --help"),
        (["--master-port", "0", "t.py"], "a port from 1 to 65535"),
        (["--master-port", "65536", "t.py"], "a port from 1 to 65535"),
        (["--omp-threads", "0", "t.py"], "--omp-threads has a wrong value"),
        (["--grace", "-1", "t.py"], "--grace has a wrong value"),
        (["--grace", "nan", "t.py"], "--grace has a wrong value"),
        (["--env", "A", "t.py"], "NAME=VALUE"),
        (["--env", "=A", "t.py"], "NAME=VALUE"),
        (["--env", "RANK=1", "t.py"], "--env cannot set RANK"),
        (["--env", "MASTER_PORT=1", "t.py"], "--master-port"),
        (["-m", "--no-python", "t"], "exclude each other"),
    ],
)
def test_wrong_words_get_a_remedy(words: list[str], expected: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_run(words)
    assert expected in str(caught.value)


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int | str | None, str, str]:
    try:
        code: int | str | None = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_program_that_cannot_be_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    for words, expected in [
        (["trian.py"], "found train.py beside it"),
        (["nowhere/train.py"], "no directory nowhere either"),
        (["folder"], "without a __main__.py"),
        (["sh"], "add --no-python"),
        (["something"], "add -m"),
        (["-m", "train.py"], "leave -m out"),
        (["-m", "no_such_module.x"], "no module no_such_module.x"),
        (["--no-python", "no-such-program"], "no executable no-such-program"),
        (["--no-python", "./train.py"], "may not be executed"),
    ]:
        code, out, err = answer(capsys, "run", "--nproc", "1", *words)
        assert (code, out) == (2, "")
        assert err.startswith("shardwise run: ")
        assert expected in err


def test_a_script_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # a test may run as a user who may read everything
    with pytest.raises(LaunchError, match="may not be read"):
        Program("script", str(script)).check()


def test_the_executable_bit_counts(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert Program("command", str(program), ("-x",)).check().argv() == (str(program), "-x")


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "run", "--help")
    assert code == 0
    for flag in (
        "--nproc",
        "--master-port",
        "--module",
        "--no-python",
        "--log-dir",
        "--dry-run",
        "--env",
        "--omp-threads",
        "--grace",
    ):
        assert flag in out
    assert "shardwise run --nproc 4 train.py" in out
    code, out, _ = answer(capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("run", "doctor", "schema", "env", "selftest", "checkpoint", "bench"))
    assert answer(capsys)[0] == 2


def test_wrong_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "doctr", "x.json")
    assert (code, "did you mean doctor?" in err) == (2, True)
    code, _, err = answer(capsys, "doctor", "x.json", "--worldsize", "2")
    assert (code, "did you mean --world-size?" in err) == (2, True)
    code, _, err = answer(capsys, "doctor")
    assert (code, "config" in err) == (2, True)
    code, _, err = answer(capsys, "doctor", "x.json", "--world-size", "none")
    assert (code, "--world-size has a wrong value" in err) == (2, True)


def test_doctor_says_whether_a_config_is_healthy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}}))
    code, out, err = answer(capsys, "doctor", config, "--world-size", "4")
    assert (code, err) == (0, "")
    assert "resolved for 4 ranks" in out
    config.write_text(json.dumps({"train_batch_size": 8, "gradient_clipp1ng": 1.0}))
    code, out, err = answer(capsys, "doctor", config)
    assert code == 1
    assert "gradient_clipping" in out + err
    code, out, err = answer(capsys, "doctor", tmp_path / "missing.json")
    assert code == 1
    assert "missing.json" in out + err


def test_schema_env_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "schema")
    assert (code, "zero_optimization" in json.loads(out)["properties"]) == (0, True)
    code, out, _ = answer(capsys, "env")
    assert code == 0
    for name in ("shardwise", "torch", "python", "cores", "accelerator", "backend", "C++ compiler"):
        assert name in out
    assert answer(capsys, "report")[1].splitlines()[0] == out.splitlines()[0]
    code, out, _ = answer(capsys, "--version")
    assert (code, out.split()[0]) == (0, "shardwise")


def test_python_m_is_the_command_and_help_loads_nothing_heavy() -> None:
    check = (
        "import sys, runpy\nsys.argv = ['shardwise', 'run', '--help']\n"
        "try:\n    runpy.run_module('shardwise', run_name='__main__')\n"
        "except SystemExit as stop: print('code', stop.code)\n"
        "print('heavy', sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: shardwise run")
    assert done.stdout.endswith("code 0\nheavy []\n")
