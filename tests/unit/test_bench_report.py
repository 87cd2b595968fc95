"""`bench.report`: the page and the pictures say what the saved runs say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bench import report
from bench.cases import make_task
from bench.plot import draw
from bench.results import Row, Run

COMMAND = "python -m bench.compare --case comm"


def saved() -> Run:
    rows = [
        Row("single", "PyTorch, one process", steps_s=[0.1], backward_s=[0.05], peak_rank=570_000_000),
        Row("deepspeed-3", "DeepSpeed stage 3", "not installed", "deepspeed is not installed: do <this> & that"),
        Row("shardwise-3", "Shardwise stage 3", steps_s=[0.08, 0.06, 0.09], backward_s=[0.05] * 3, peak_rank=250_000_000),
    ]
    return Run(make_task("comm", 2, "fp32", 3), COMMAND, {"torch": "2.13.0"}, rows)


def test_the_page_has_tables_command_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved().save(tmp_path / "run.json")
    (tmp_path / "floor.txt").write_text("416 ms\n")
    report.main([str(tmp_path / "run.json"), "--docs", str(tmp_path), "--floor", str(tmp_path / "floor.txt")])
    page = (tmp_path / "benchmarks.md").read_text()
    assert f"```bash\n{COMMAND}\n```" in page
    assert "| PyTorch, one process | 100 ms | 100 ms |" in page
    assert "| DeepSpeed stage 3 | not installed: deepspeed is not installed: do <this> & that |" in page
    assert "| shardwise-3, time | 0.80 |" in page
    assert "| shardwise-3 over single, step time | <= 0.95 | 0.80 | reached |" in page
    assert "```text\n416 ms\n```" in page
    assert "bench.optimizer" not in page
    assert "GPT of 6.86 billion parameters" in page
    assert "(images/benchmark-comm-2-fp32.svg)" in page
    assert (tmp_path / "images" / "benchmark-comm-2-fp32.svg").read_text() == draw(saved())
    assert "from 1 runs" in capsys.readouterr().out


def test_without_runs_the_page_says_so() -> None:
    assert "No run has been saved yet" in report.page([], "tables", "images")


def test_bars_are_as_long_as_the_numbers() -> None:
    picture = ElementTree.fromstring(draw(saved()))
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in picture.iter(f"{space}rect") if each.get("height") == "16"]
    times, memory = bars[:2], bars[2:]
    lengths = [float(bar.attrib["width"]) for bar in times]
    assert lengths[1] / lengths[0] == pytest.approx(0.8, rel=0.01)
    assert float(memory[1].attrib["width"]) / float(memory[0].attrib["width"]) == pytest.approx(250 / 570, rel=0.01)
    words = [each.text for each in picture.iter(f"{space}text")]
    assert "not installed" in words
    assert {"100 ms", "80 ms", "570 MB", "250 MB"} <= set(words)
