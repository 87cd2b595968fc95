"""Saving and loading on other ranks, stages and precisions: training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.checkpoint_support import go_on, open_engine, same, state_of, train_on
from tests.harness import ranks, run_on_ranks

SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param(stage, precision, marks=() if stage == 3 or (stage, precision) == (0, "fp32") else SLOW)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
]


@ranks(2)
@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    goes_on(stage, precision, tmp_path)


@ranks(1)
def test_so_does_one_rank(tmp_path: Path) -> None:
    for stage, precision in ((0, "bf16"), (2, "fp16"), (3, "fp32")):
        goes_on(stage, precision, tmp_path / f"{stage}-{precision}")


def goes_on(stage: int, precision: str, directory: Path) -> None:
    with open_engine(stage, precision) as engine:
        train_on(engine, 3)
        saved = state_of(engine)
        engine.save_checkpoint(directory, client_state={"epoch": 3})
        same(state_of(engine), saved)  # saving changes nothing
        losses = train_on(engine, 3, first=3)
        expected = state_of(engine)
    with open_engine(stage, precision) as engine:
        train_on(engine, 1)  # whatever was there before is gone
        path, client_state = engine.load_checkpoint(directory)
        assert path == str(directory / "global_step3")
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


@pytest.mark.parametrize(
    ("world", "stage", "resumed"),
    [
        (1, 3, 0),
        (3, 2, 3),
        pytest.param(4, 0, 1, marks=SLOW),
        pytest.param(3, 3, 2, marks=SLOW),
        pytest.param(1, 1, 3, marks=SLOW),
        pytest.param(4, 2, 3, marks=SLOW),
    ],
)
def test_another_world_and_stage_go_on_alike(world: int, stage: int, resumed: int, tmp_path: Path) -> None:
    run_on_ranks(2, whole_run, stage, "fp32", tmp_path)
    run_on_ranks(world, go_on, resumed, tmp_path)
