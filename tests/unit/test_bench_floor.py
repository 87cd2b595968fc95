"""`bench.optimizer` and `bench.floor`: their tables have a row for everything that is measured."""

from __future__ import annotations

import pytest
from bench import floor, optimizer


def test_the_step_beside_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizer.main(["--elements", "5000", "--repeats", "1", "--no-compile"]) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[2:]] == [
        "copy",
        *(way.title for way in optimizer.WAYS if "compile" not in way.title),
    ]
    assert printed.count("GB/s") == 1


@pytest.mark.slow
def test_processes_that_only_compute(capsys: pytest.CaptureFixture[str]) -> None:
    assert floor.main(["--case", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["one", "2"]
    assert all(line.endswith(" ms") for line in lines[2:])
