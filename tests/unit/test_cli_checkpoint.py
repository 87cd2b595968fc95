"""`shardwise checkpoint`: what is printed, where, and with which exit code."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import Facts, Key
from shardwise.checkpoint.safetensors import read_header
from shardwise.cli import main
from shardwise.cli.checkpoint_parser import ACTIONS
from tests.unit.checkpoint_support import TINY, damage, tiny_tensors, write_run


class Answer:
    """What a command said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str | Path) -> None:
        try:
            self.code: int | str | None = main(["checkpoint", *map(str, words)])
        except SystemExit as stop:
            self.code = stop.code
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        assert "Traceback" not in self.out + self.err


def test_inspect_shows_tensors_and_facts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"epoch": 3, "best": 0.5}, file)
    write_run(tmp_path, "first")
    write_run(tmp_path, client_state=file.getvalue())
    answer = Answer(capsys, "inspect", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    lines = {line.strip().split("  ")[0]: line for line in answer.out.splitlines()}
    assert lines["checkpoint"].endswith(f"/{TINY}")
    assert "ranks 2, stage 3" in lines["layout"]
    assert "global_steps 3, global_samples 36" in lines["progress"]
    assert lines["optimizer"].endswith("AdamW")
    assert lines["group 0"].endswith("2 parameters: lr 0.05, weight_decay 0.1")
    assert lines["schedule"].endswith("last_epoch 3")
    assert lines["loss scale"].endswith("scale 1024.0, dynamic True")
    assert lines["client state"].endswith("epoch, best")
    assert lines["embed"].split() == ["embed", "35", "140", "B", "280", "B"]
    assert "float32 [7, 5] (bfloat16 in the model; also head.weight)" in lines["weight"] + answer.out
    assert "int64 [] (buffer)" in lines["seen"]
    assert answer.out.endswith(f"other checkpoints in {tmp_path}: first\n")
    shallow = Answer(capsys, "inspect", tmp_path, "--depth", "1")
    assert "blocks" in shallow.out
    assert "linear" not in shallow.out
    assert Answer(capsys, "inspect", tmp_path, "--tag", "first").out.splitlines()[0].endswith("/first")


def test_verify_goes_on_after_a_damaged_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path, world=3)
    answer = Answer(capsys, "verify", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.endswith("everything is as it was written\n")
    for rank in (0, 2):
        damage(tmp_path / TINY / f"rank-0000{rank}.safetensors")
    answer = Answer(capsys, "verify", tmp_path / TINY)
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "DAMAGED", "ok", "DAMAGED", "2"]
    assert "rank-00000.safetensors is damaged" in lines[1]
    assert "rank-00002.safetensors is damaged" in lines[3]


def test_diff_says_what_differs_by_its_exit_code_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "same", world=3)
    answer = Answer(capsys, "diff", tmp_path / "one", tmp_path / "same")
    assert (answer.code, answer.err, answer.out.splitlines()[-1]) == (0, "", "nothing differs")
    tensors = {key: value + 1 if key.kind == "weight" else value for key, value in tiny_tensors().items()}
    del tensors[Key("buffer", "seen")]
    tensors[Key("weight", "new")] = torch.ones(2)
    tensors[Key("weight", "scale")] = torch.ones(3)
    write_run(tmp_path / "other", tensors=tensors, facts=Facts(counters={"global_steps": 4}))
    answer = Answer(capsys, "diff", tmp_path / "one", tmp_path / "other")
    assert answer.code == 1
    assert "only in A (1):\n  seen (buffer)" in answer.out
    assert "only in B (1):\n  new\n" in answer.out
    assert "of another shape (1):\n  scale: float32 [], float32 [3]" in answer.out
    assert "embed.weight: 35 of 35 differ, by up to 1 (" in answer.out
    assert "counters.global_steps: 3, 4" in answer.out
    assert answer.out.endswith("6 tensors of 13 that both have are equal\nthey differ\n")
    short = Answer(capsys, "diff", tmp_path / "one", tmp_path / "other", "--limit", "2")
    assert "and 5 more (--limit 0 shows all)" in short.out
    assert Answer(capsys, "diff", tmp_path / "one", tmp_path / "other", "--only", "optimizer").code == 1  # the step
    assert Answer(capsys, "diff", tmp_path / "one", tmp_path / "other", "--only", "random").code == 0


def test_export_writes_what_it_announces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    words = ("export", tmp_path / "run", tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "200B")
    dry = Answer(capsys, *words, "--dry-run")
    assert dry.code == 0
    assert dry.out.endswith("nothing was written (--dry-run)\n")
    assert not (tmp_path / "out").exists()
    answer = Answer(capsys, *words)
    assert (answer.code, answer.err) == (0, "")
    for path in (tmp_path / "out").iterdir():
        assert f"  {path.name}" in dry.out
        assert f"  {path.name}" in answer.out
    assert "note: tied weights are there once" in answer.out
    assert "also needs config.json" in answer.out
    again = Answer(capsys, *words)
    assert again.code == 2
    assert again.err.startswith("shardwise checkpoint export: ")
    assert "is not empty" in again.err
    assert Answer(capsys, *words, "--overwrite").code == 0
    torch_format = Answer(capsys, "export", tmp_path / "run" / TINY, tmp_path / "bin", "--format", "torch")
    assert torch_format.code == 0
    assert torch.load(tmp_path / "bin" / "pytorch_model.bin")["embed.weight"].dtype == torch.bfloat16
    assert Answer(capsys, "export", tmp_path / "run", tmp_path / "plain").code == 0
    assert read_header(tmp_path / "plain" / "model.safetensors").tensors["scale"].dtype == torch.float32


def test_list_and_clean(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert Answer(capsys, "list", tmp_path).out == f"there are no checkpoints in {tmp_path}\n"
    for tag in ("one", "two", "three"):
        write_run(tmp_path, tag)
    answer = Answer(capsys, "list", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert [line.split()[0] for line in answer.out.splitlines()] == ["checkpoint", "three", "two", "one"]
    assert answer.out.splitlines()[1].endswith("latest")
    assert Answer(capsys, "clean", tmp_path).out == f"nothing to remove in {tmp_path}\n"
    unfinished = tmp_path / f".four.writing-{_host()}-999999999-1"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors").write_text("x")
    answer = Answer(capsys, "clean", tmp_path)
    assert answer.out.splitlines() == [f"removed {unfinished.name}", f"left in {tmp_path}: three, two, one"]
    assert not unfinished.exists()
    answer = Answer(capsys, "clean", tmp_path, "--keep", "1")
    assert answer.out.splitlines() == ["removed two", "removed one", f"left in {tmp_path}: three"]


def _host() -> str:
    import socket

    return f"{socket.gethostname()}@{Path('/proc/self/ns/pid').stat().st_ino}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inspect", "nowhere"], "there is nothing at"),
        (["inspect", "run", "--tag", "x"], "no checkpoint 'x'"),
        (["inspect", "run", "--depth", "none"], "--depth has a wrong value"),
        (["verify", "nowhere"], "there is nothing at"),
        (["diff", "run", "nowhere"], "there is nothing at"),
        (["diff", "run", "run", "--limit", "few"], "--limit has a wrong value: expected a whole number, 0 for all"),
        (["diff", "run", "run", "--only", "weights"], "invalid choice: 'weights'"),
        (["export", "run", "out", "--format", "onnx"], "one of safetensors, torch, dcp"),
        (["export", "run", "out", "--dtype", "int8"], "one of fp32, bf16, fp16"),
        (["export", "run", "out", "--max-shard-size", "big"], "5GB or 500MiB"),
        (["export", "run", "out", "--overwite"], "did you mean --overwrite?"),
        (["export", "run"], "OUT"),
        (["list", "nowhere"], "there is no directory nowhere"),
        (["clean", "nowhere"], "there is no directory nowhere"),
        (["clean", "run", "--keep", "0"], "--keep has a wrong value"),
        (["inspekt", "run"], "inspekt"),
    ],
)
def test_wrong_words_get_a_remedy(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    answer = Answer(capsys, *words)
    assert (answer.code, answer.out) == (2, "")
    assert expected in answer.err


def test_a_damaged_index_and_a_file_that_may_not_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    damage(tmp_path / "run" / TINY / "index.json", 300)
    for words in (["inspect"], ["verify"], ["diff", tmp_path / "run"], ["export", tmp_path / "out"]):
        answer = Answer(capsys, words[0], tmp_path / "run", *words[1:])
        assert answer.code == 2
        assert "index.json is damaged" in answer.err
    assert "index.json is damaged" in Answer(capsys, "list", tmp_path / "run").out

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "run")

    monkeypatch.setattr("shardwise.checkpoint.opening.find_native", refuse)
    answer = Answer(capsys, "inspect", tmp_path / "run")
    assert (answer.code, answer.err) == (2, "shardwise checkpoint inspect: run: found Permission denied.\n")


def test_help_teaches_and_loads_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(capsys, "--help")
    assert answer.code == 0
    assert all(name in answer.out for name in ACTIONS)
    assert Answer(capsys).code == 2
    for name in ACTIONS:
        answer = Answer(capsys, name, "--help")
        assert answer.code == 0
        assert f"shardwise checkpoint {name} runs/" in answer.out
    check = (
        "import sys\nfrom shardwise.cli import main\n"
        "try:\n    main(['checkpoint', 'export', '--help'])\n"
        "except SystemExit as stop: print('code', stop.code)\n"
        "print('heavy', sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("code 0\nheavy []\n")
