"""`shardwise bench io`: the report, and what is said to wrong words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.config import load_config


@pytest.mark.slow
def test_the_settings_that_are_printed_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", str(tmp_path / "disk"), "--size", "8MiB"]) == 0
    printed = capsys.readouterr()
    settings = json.loads(printed.out[printed.out.index("\n{") :])
    settings["zero_optimization"]["stage"] = 1
    assert load_config({"train_batch_size": 1, **settings}, world_size=1).zero_optimization.offload_optimizer.device == "nvme"
    assert "[0/" in printed.err
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cpu", "x"], "there is no measurement 'cpu'. type: shardwise bench io DIR"),
        (["io", "{path}", "--size", "huge"], "this is no size"),
        (["io", "{path}", "--size", "1000000TB"], "too little room to measure the disk"),
        (["io", "{path}/file/below", "--size", "1MiB"], "file"),
    ],
)
def test_wrong_words(words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", *(word.format(path=tmp_path) for word in words)]) == 2
    assert told in capsys.readouterr().err
