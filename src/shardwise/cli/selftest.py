"""`shardwise selftest`: does training over two ranks work on this machine?

Owns the check that an installation is whole: the launcher, the meeting of the ranks, the collectives and the engine. Two ranks
train a tiny model at every stage, and the losses have to agree with plain PyTorch in one process. Run as a module under the
launcher, this file is the program of the ranks.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

__all__ = ["main", "rank_main"]

_RANKS = 2
_STEPS = 3
_SAMPLES = 4
_LEARNING_RATE, _DECAY = 0.05, 0.01
_TOLERANCE = 1e-5
_LIMIT_S = 300.0


def main() -> int:
    """Launch the check; 0 when it passes, 1 when it does not."""
    command = [sys.executable, "-m", "shardwise", "run", "--nproc", str(_RANKS), "-m", __spec__.name if __spec__ else __name__]
    print(f"shardwise selftest: {_RANKS} ranks train a tiny model at ZeRO stages 0 to 3", flush=True)
    try:
        code = subprocess.run(command, timeout=_LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"shardwise selftest: nothing came back within {_LIMIT_S:.0f} s", flush=True)
        code = 1
    print("PASS" if code == 0 else f"FAIL (exit code {code}; the reason is above)", flush=True)
    return 0 if code == 0 else 1


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def _batches(ranks: int) -> Any:
    import torch

    return torch.randn(_STEPS, ranks, _SAMPLES, 5, generator=torch.Generator().manual_seed(1))


def _plain_losses(ranks: int, rank: int) -> list[float]:
    """What `rank` has to see: its own samples' loss of each step, in one process that trains on all samples."""
    import torch

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=_DECAY)
    losses: list[float] = []
    for batch in _batches(ranks):
        each = model(batch).square().mean((1, 2))
        each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(each[rank].item())
    return losses


def _sharded_losses(stage: int, rank: int, ranks: int) -> list[float]:
    """The same, sharded over the ranks of this job."""
    import shardwise

    config = {
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "weight_decay": _DECAY}},
        "zero_optimization": {"stage": stage},
    }
    engine = shardwise.initialize(model=_model(), config=config)[0]
    losses: list[float] = []
    for batch in _batches(ranks):
        loss = engine(batch[rank].to(engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def rank_main() -> None:
    """What each rank runs.

    Raises:
        SystemExit: with a message, when the losses of a stage differ from plain PyTorch.
    """
    import shardwise
    from shardwise.comm import get_rank, get_world_size

    shardwise.init_distributed()
    rank, ranks = get_rank(), get_world_size()
    expected = _plain_losses(ranks, rank)
    for stage in range(4):
        found = _sharded_losses(stage, rank, ranks)
        good = all(abs(one - other) <= _TOLERANCE * max(1.0, abs(other)) for one, other in zip(found, expected, strict=True))
        if rank == 0:
            print(
                f"  stage {stage}: losses {', '.join(f'{value:.6f}' for value in found)} {'agree' if good else 'DIFFER'}",
                flush=True,
            )
        if not good:
            raise SystemExit(f"stage {stage}: plain PyTorch gives {expected}")


if __name__ == "__main__":
    rank_main()
