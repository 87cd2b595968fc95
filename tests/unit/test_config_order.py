"""Ranks compare their configurations, so the same file must give the same text in every process."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from shardwise.config import load_config
options = {"weight_decay": 0.1, "betas": [0.9, 0.99], "lr": 1e-2, "eps": 1e-8}
schedule = {"warmup_num_steps": 3, "warmup_max_lr": 1e-2, "total_num_steps": 9, "warmup_min_lr": 0}
config = {"optimizer": {"type": "AdamW", "params": options}, "scheduler": {"type": "WarmupDecayLR", "params": schedule}}
print(load_config(config, world_size=2).model_dump_json())
"""


def test_text_does_not_depend_on_the_hash_seed() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in range(4)
    }
    assert len(texts) == 1
