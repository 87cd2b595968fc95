"""Saves in the background: what is saved is the moment of the call, and training goes on meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import CheckpointError
from shardwise.persistence import keeper
from tests.distributed.checkpoint_support import die_in_write, open_engine, same, state_of, train_on
from tests.harness import ranks

ASYNC = {"async": True}


class Held:
    """Writing waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._write = keeper.write_checkpoint

    def __enter__(self) -> Held:
        keeper.write_checkpoint = self._wait
        return self

    def _wait(self, *args: Any) -> None:
        assert self.go.wait(30)
        self._write(*args)

    def __exit__(self, *error: object) -> None:
        keeper.write_checkpoint = self._write
        self.go.set()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_and_the_moment_of_the_call_is_saved(stage: int, tmp_path: Path) -> None:
    with open_engine(stage, checkpoint=ASYNC) as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        with Held() as held:
            engine.save_checkpoint(tmp_path, client_state={"a": 1})
            train_on(engine, 2, first=2)
            assert not (tmp_path / "latest").exists()
            held.go.set()
            engine.wait_for_checkpoint()
        assert (tmp_path / "latest").read_text() == "global_step2"
        expected = state_of(engine)
        assert engine.load_checkpoint(tmp_path)[1] == {"a": 1}
        same(state_of(engine), saved)
        train_on(engine, 2, first=2)
        same(state_of(engine), expected)
        engine.save_checkpoint(tmp_path)
    # The end of the engine waits, on each rank for its own part.
    dist.barrier()
    assert (tmp_path / "latest").read_text() in ("global_step4", "global_step2")


@ranks(2)
def test_memory_of_the_copy_is_kept_and_given_back(tmp_path: Path) -> None:
    with open_engine(2, checkpoint=ASYNC) as engine:
        train_on(engine, 1)
        for tag in "abc":
            engine.save_checkpoint(tmp_path, tag=tag)
            held = engine.counters()["resident"]["checkpoint copy"]
        written = engine.counters()["bytes"]["checkpoint write"] // 3
        assert written <= held < written + 64 * 200  # parts begin at multiples of 64 bytes
        ledger = engine._trainer.parts.comm.ledger
    assert ledger.resident("checkpoint copy") == 0


@ranks(2)
def test_a_second_save_waits_or_is_refused(tmp_path: Path) -> None:
    with open_engine(3, checkpoint={**ASYNC, "on_busy": "refuse"}) as engine:
        train_on(engine, 1)
        with Held() as held:
            engine.save_checkpoint(tmp_path, tag="one")
            with pytest.raises(CheckpointError, match="the checkpoint before this one is still being written"):
                engine.save_checkpoint(tmp_path, tag="two")
            train_on(engine, 1, first=1)
            held.go.set()
            engine.wait_for_checkpoint()
        engine.save_checkpoint(tmp_path, tag="two")
        engine.wait_for_checkpoint()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
    with open_engine(3, checkpoint=ASYNC) as engine:
        for tag in ("three", "four"):
            engine.save_checkpoint(tmp_path, tag=tag)
        engine.wait_for_checkpoint()
        assert (tmp_path / "latest").read_text() == "four"
        assert (tmp_path / "three" / "index.json").exists()


@ranks(2, disposable=True)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_on_one_rank_is_told_on_all_at_the_next_call(bad: int, tmp_path: Path) -> None:
    import resource

    with open_engine(3, checkpoint=ASYNC) as engine:
        train_on(engine, 1)
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == bad:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        train_on(engine, 1, first=1)
        engine.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=rf"rank {bad}: saving checkpoint 'global_step2' failed: .*disk is full"):
            engine.save_checkpoint(tmp_path, tag="next")
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train_on(engine, 1, first=2)
        engine.save_checkpoint(tmp_path, tag="next")
        engine.wait_for_checkpoint()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest", "next"]


@ranks(2, dies=(1,))
def test_the_end_does_not_wait_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    engine = open_engine(3, checkpoint=ASYNC)
    train_on(engine, 1)
    engine.save_checkpoint(tmp_path, tag="whole")
    engine.wait_for_checkpoint()
    if dist.get_rank() == 1:
        die_in_write()
    engine.save_checkpoint(tmp_path, tag="part")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="rank 1 has ended before its part was written"):
        engine.destroy(restore=False)
    assert time.monotonic() - began < 10  # the watchdog would wait for five minutes
    assert (tmp_path / "latest").read_text() == "whole"


END = """
import sys, torch, shardwise
model = torch.nn.Linear(300, 3000)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "checkpoint": {"async": True}}
engine, *_ = shardwise.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 300)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
"""


def test_the_end_of_the_program_waits_for_the_write(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", END, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert sorted(path.name for path in (tmp_path / "global_step1").iterdir()) == ["index.json", "rank-00000.safetensors"]
