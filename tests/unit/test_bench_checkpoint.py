"""`bench.checkpoint`: that all ways are asked the same, and that what they load is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import checkpoint, savers
from bench.checkpoint import Row, render, shape_for
from bench.savers import WAYS, named


@pytest.mark.parametrize("parameters", [20_000, 200_000, 10_000_000, 120_000_000, 1_000_000_000])
def test_the_model_is_about_as_large_as_asked_for(parameters: int) -> None:
    shape = shape_for(parameters)
    assert shape.parameters(64) == pytest.approx(parameters, rel=0.01 if parameters > 1_000_000 else 1.5)
    assert shape.width % shape.heads == 0


def test_the_table_says_who_could_not_run() -> None:
    fine = Row("a", "A", save_s=[1.0, 3.0, 2.0], disk_s=[4.0], cold_s=[5.0], warm_s=[6.0], save_peak=[1_000_000], load_peak=[0])
    table = render([fine, Row("b", "B", "failed", "it broke")]).splitlines()
    assert table[1].split() == ["A", "2.00", "s", "4.00", "s", "5.00", "s", "6.00", "s", "1", "MB", "0", "MB", "0", "MB"]
    assert table[2].split(maxsplit=1) == ["B", "failed: it broke"]


def test_names_and_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert [way.system.name for way in named(["shardwise", "torch"])] == ["torch", "shardwise-3", "shardwise-3-async"]
    for words, told in [
        (["--ways", "torch", "tensorflow"], "no way is called tensorflow"),
        (["--params", "many"], "'many' is no number such as 120M"),
        (["--world", "0"], "1 or more"),
    ]:
        with pytest.raises(SystemExit) as stop:
            checkpoint.main(words)
        assert stop.value.code == 2
        assert told in capsys.readouterr().err


class Forgetful(savers._Torch):
    """Loads nothing."""

    def load(self, path: Path) -> None:
        pass


@pytest.mark.slow
def test_ways_save_and_load_and_one_that_does_not_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plain, ours = named(["torch", "shardwise-3-async"])
    broken = replace(plain, system=replace(plain.system, name="broken", title="broken", setup=Forgetful))
    monkeypatch.setattr(checkpoint, "WAYS", (ours, broken))
    words = ["--params", "20k", "--world", "1", "--rounds", "1", "--dir", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert checkpoint.main(words) == 1
    assert "broken failed: what was loaded is not what was saved" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    good, bad = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (good["status"], bad["status"]) == ("ok", "failed")
    found: dict[str, Any] = good
    assert found["nbytes"] > 20_000 * 12
    assert 0 < found["save_s"][0] <= found["disk_s"][0]
    assert found["cold_s"][0] > 0
    assert len(WAYS) == 7
