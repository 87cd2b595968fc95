"""Programs that use torch.distributed, under `shardwise run` and under `torchrun`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch_support import GONE_S, clean_environment, run

# Each cycle starts a process group, uses it and ends it; under torchrun the store lives on between them.
CYCLES = """
import sys
import torch, torch.distributed as dist, shardwise
from shardwise.comm import get_local_rank, get_rank, get_world_size, is_initialized
for cycle in range(3):
    shardwise.init_distributed(timeout=60)
    shardwise.init_distributed(timeout=60)
    total = torch.ones(1)
    dist.all_reduce(total)
    line = f"{cycle} rank {get_rank()} of {get_world_size()}, local {get_local_rank()}, sum {total.item():.0f}"
    sys.stdout.write(line + chr(10))  # in one piece: under torchrun nothing is buffered
    dist.destroy_process_group()
    assert not is_initialized()
"""
LINES = [f"{cycle} rank {rank} of 2, local {rank}, sum 2" for cycle in range(3) for rank in range(2)]


@pytest.mark.slow
def test_under_shardwise_run(tmp_path: Path) -> None:
    script = tmp_path / "cycles.py"
    script.write_text(CYCLES)
    done = run("--nproc", "2", script, "TOKEN")
    assert (done.code, sorted(done.out.splitlines())) == (0, LINES), done.err


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "cycles.py"
    script.write_text(CYCLES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean_environment(OMP_NUM_THREADS="1"), check=False
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, LINES), done.stderr


@pytest.mark.slow
def test_a_rank_that_raises_while_the_other_waits_in_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(
        "import time, torch, torch.distributed as dist, shardwise\n"
        "shardwise.init_distributed()\n"
        "for step in range(3):\n"
        "    if dist.get_rank() == 1 and step == 2:\n"
        "        open(__file__ + '.time', 'w').write(str(time.monotonic()))\n"
        "        raise ValueError('bad sample at step 2')\n"
        "    dist.all_reduce(torch.ones(4))\n"
    )
    done = run("--nproc", "2", script, "TOKEN")
    assert done.code == 1
    assert "rank 1 of 2 raised ValueError" in done.err
    assert done.err.endswith("ValueError: bad sample at step 2\n")
    assert time.monotonic() - float(Path(f"{script}.time").read_text()) < GONE_S
