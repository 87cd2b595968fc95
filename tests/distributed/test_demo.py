"""The example with a tiny model: launched in every way, at every stage, in every precision."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from examples import train_gpt

from tests.harness import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
TINY = ["--steps=4", "--layers=2", "--width=32", "--heads=2", "--context=32", "--no-progress"]


def command(name: str) -> str:
    """A command of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found is not None, f"{name} is not installed beside {sys.executable}"
    return found


def run(*words: str | Path) -> str:
    """Run a command without a launcher's variables around it; returns what it printed."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def sharded(*options: str) -> str:
    """What rank 0 prints, of two ranks that were started before."""
    return run_on_ranks(2, main_of_the_example, options)[0]


def main_of_the_example(options: tuple[str, ...]) -> str:
    before = sys.argv
    sys.argv = [str(EXAMPLE), *TINY, *options]
    try:
        with redirect_stdout(io.StringIO()) as out:
            train_gpt.main()
    finally:
        sys.argv = before
    return out.getvalue()


def losses(output: str) -> tuple[float, float]:
    """Held-out loss before and after training."""
    match = re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", output)
    assert match is not None, output
    return float(match[1]), float(match[2])


def held(output: str, row: str) -> tuple[float, ...]:
    """A row of the memory table, in MB: the ranks', then the unsharded."""
    line = next(line for line in output.splitlines() if line.startswith(row))
    scale = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
    return tuple(float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+) (\w*B)\b", line))


def test_launched_from_the_command_line() -> None:
    """The same losses as in the workers of the tests; and progress in a log is plain lines."""
    output = run(command("shardwise"), "run", "--nproc", "2", EXAMPLE, *TINY[:-1])
    assert losses(output) == losses(sharded())
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert lines[-1].startswith("step 4/4  loss ")
    assert "\x1b" not in output


def test_stages_agree() -> None:
    results = [losses(sharded(f"--stage={stage}")) for stage in range(4)]
    assert len(set(results)) == 1, results
    before, after = results[0]
    assert after < before - 0.1


@pytest.mark.slow
def test_memory_table_shows_what_stage_3_saves() -> None:
    whole, cut = sharded("--stage=0"), sharded("--stage=3")
    for row in ("parameters, at rest", "optimizer state"):
        *ranks, unsharded = held(whole, row)
        assert ranks == [unsharded, unsharded]
        assert all(rank == pytest.approx(unsharded / 2, rel=0.02) for rank in held(cut, row)[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_precision_learns_too(precision: str) -> None:
    before, after = losses(sharded(f"--precision={precision}"))
    assert after < before - 0.1


@pytest.mark.slow
def test_accumulation_gives_the_loss_of_one_large_batch() -> None:
    _, large = losses(sharded("--batch-size=4"))
    _, small = losses(sharded("--batch-size=2", "--accumulation=2"))
    assert large == pytest.approx(small, abs=2e-3)


@pytest.mark.slow
def test_torchrun_starts_the_example_too() -> None:
    output = run(command("torchrun"), "--standalone", "--nproc-per-node", "2", EXAMPLE, *TINY)
    assert losses(output) == losses(sharded())


@pytest.mark.slow
def test_plain_python_is_a_world_of_one() -> None:
    output = run(sys.executable, EXAMPLE, *TINY)
    before, after = losses(output)
    assert after < before - 0.1
    assert "memory of 1 rank " in output


@pytest.mark.slow
def test_the_example_goes_on_and_its_checkpoints_are_looked_at(tmp_path: Path) -> None:
    """Two ranks save, one goes on, and the commands of the page on checkpoints work on what they leave."""
    runs, exported = tmp_path / "run", tmp_path / "exported"
    sharded("--save", str(runs))
    printed = run_on_ranks(1, main_of_the_example, ("--save", str(runs), "--steps=6"))[0]
    assert "going on after step 4" in printed
    shardwise = command("shardwise")
    assert "global_step6" in run(shardwise, "checkpoint", "list", runs)
    assert "embedding" in run(shardwise, "checkpoint", "inspect", runs)
    assert "everything is as it was written" in run(shardwise, "checkpoint", "verify", runs)
    run(shardwise, "checkpoint", "diff", runs / "global_step6", runs / "global_step6")
    run(shardwise, "checkpoint", "export", runs, exported, "--dtype", "bf16")
    assert (exported / "model.safetensors").is_file()
