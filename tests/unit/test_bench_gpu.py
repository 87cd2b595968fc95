"""`bench.gpu.check`: what it says without a device, and that its code runs."""

from __future__ import annotations

import re

import pytest
import torch
from bench.gpu import check
from bench.gpu.parts import Job


@pytest.mark.skipif(torch.accelerator.is_available(), reason="shows what is said where there is no accelerator")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 2
    assert "no accelerator here" in capsys.readouterr().out


def test_full_sizes_are_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err


def test_jobs_survive_a_command_line() -> None:
    plan = check.sizes(tiny=False, device="cuda")
    for job in (plan.numbers.of("shardwise", 3, world=2), plan.speed.of("fsdp2")):
        assert Job.from_text(job.as_text()) == job
    assert 1.25e9 < plan.speed.shape.parameters(plan.speed.context) < 1.45e9


@pytest.mark.slow
def test_its_code_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = check.main(["--device", "cpu", "--tiny"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    lines = [line for line in printed.splitlines() if line.startswith(("numbers  ", "speed  ", "bandwidth  "))]
    assert sum(line.endswith("good") for line in lines) == 3
    assert "FAILED" not in printed
    assert any("of a copy" in line for line in lines)
    assert any(re.search(r"FSDP2 +time [\d.]+ x$", line) for line in lines)
