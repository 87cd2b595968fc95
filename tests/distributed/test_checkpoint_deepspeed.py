"""An engine goes on from real checkpoints of DeepSpeed (see tests/data/README.md), on other ranks and stages."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

import shardwise
import shardwise.utils.zero_to_fp32
from tests.data.make_deepspeed import Tiny
from tests.distributed.scenario_support import settings
from tests.harness import ranks

ARCHIVE = Path(__file__).parents[1] / "data" / "deepspeed.tar.xz"


@ranks(2)
@pytest.mark.parametrize("case", ["3-fp32-1", "3-fp32-2", "2-fp32-3"])
def test_weights_moments_and_counters_carry_over(case: str, tmp_path: Path) -> None:
    folder = tmp_path / str(torch.distributed.get_rank())
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder)
    [latest] = folder.rglob(f"{case}/latest")
    model = Tiny()
    with shardwise.initialize(model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=0.02), config=settings(3))[
        0
    ] as engine:
        path, client_state = engine.load_checkpoint(latest.parent)
        assert path == str(latest.parent / "global_step3")
        assert "note" in client_state
        assert engine.global_steps == 3
        expected = shardwise.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(latest.parent)
        trained = 0
        for name, parameter in model.named_parameters():
            assert torch.equal(shardwise.utils.safe_get_full_fp32_param(parameter), expected[name]), name
            trained += shardwise.utils.safe_get_full_optimizer_state(parameter, "exp_avg") is not None
        assert trained
