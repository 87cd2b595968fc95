"""Saving and loading on other ranks, stages and precisions: training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.checkpoint_support import go_on, open_engine, same, state_of, train_on
from tests.harness import ranks, run_on_ranks

STAGES = (0, 1, 2, 3)


@ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_layout_goes_on_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    with open_engine(stage, precision) as engine:
        train_on(engine, 3)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        same(state_of(engine), saved)  # saving changes nothing
        losses = train_on(engine, 3, first=3)
        expected = state_of(engine)
    with open_engine(stage, precision) as engine:
        train_on(engine, 1)  # whatever was there before is gone
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step3")
        assert client_state == {"epoch": 3}
        same(state_of(engine), saved)
        assert train_on(engine, 3, first=3) == losses
        same(state_of(engine), expected)


def whole_run(stage: int, precision: str, directory: Path) -> None:
    with open_engine(stage, precision) as engine:
        train_on(engine, 3)
        engine.save_checkpoint(directory)
        before = state_of(engine)
        train_on(engine, 3, first=3)
        if torch.distributed.get_rank() == 0:
            torch.save([before, state_of(engine)], directory / "expected.pt")
        else:
            state_of(engine)
    torch.distributed.barrier()


@pytest.mark.parametrize(("world", "stage", "resumed"), [(1, 3, 0), (3, 2, 3), (4, 0, 1), (3, 3, 2), (1, 1, 3), (4, 2, 3)])
def test_another_world_and_stage_go_on_alike(world: int, stage: int, resumed: int, tmp_path: Path) -> None:
    run_on_ranks(2, whole_run, stage, "fp32", tmp_path)
    run_on_ranks(world, go_on, resumed, tmp_path)
