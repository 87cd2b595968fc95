"""An engine goes on from other programs' checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.checkpoint.export import export
from shardwise.checkpoint.opening import open_path
from shardwise.errors import CheckpointError
from tests.distributed.checkpoint_support import open_engine, same, state_of, train_on
from tests.harness import ranks


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_from_torchs_own_format(precision: str, tmp_path: Path) -> None:
    """Weights, moments and step counts, which a directory of torch.distributed.checkpoint holds; not schedules and counters."""
    with open_engine(3, precision) as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path / "run")
    if dist.get_rank() == 0:
        export(open_path(tmp_path / "run"), tmp_path / "dcp", format="dcp")
    dist.barrier()
    with open_engine(1, precision) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "dcp")
        assert (path, client_state) == (str(tmp_path / "dcp"), {})
        after = state_of(engine)
        for name, value in saved.items():
            if name.partition(" ")[0] in ("weight", "live", "buffer", "exp_avg", "exp_avg_sq"):
                same({name: after[name]}, {name: value})
        train_on(engine, 1, first=2)


@ranks(2)
def test_from_a_directory_for_from_pretrained(tmp_path: Path) -> None:
    with open_engine(2) as engine:
        train_on(engine, 1)
        saved = state_of(engine)
        engine.save_16bit_model(tmp_path / "hf", "model.safetensors")
    with open_engine(3) as engine:
        with pytest.raises(CheckpointError, match=r"there is no checkpoint 'x'|no checkpoint"):
            engine.load_checkpoint(tmp_path / "hf", tag="x")
        engine.load_checkpoint(tmp_path / "hf", load_module_only=True)
        after = state_of(engine)
        same(*({name: value for name, value in each.items() if name.startswith(("live", "buffer"))} for each in (after, saved)))
