"""What `bench.scale` counts without devices is what engines count that train."""

from __future__ import annotations

import pytest
import torch
from bench.cases import Shape
from bench.gpt import GPT
from bench.scale import footprint

import shardwise
from shardwise.comm import difference
from tests.harness import ranks

SHAPE = Shape(vocabulary=512, width=256, layers=3, heads=4)
CONTEXT = 8


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_real_step_sends_what_the_dry_run_counts(stage: int, precision: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "transport": "gloo",  # as between machines
    }
    engine, *_ = shardwise.initialize(model=GPT(SHAPE, CONTEXT), config=config)
    text = torch.arange(CONTEXT + 1).unsqueeze(0)
    before = engine.counters()
    for _ in range(3):
        before = engine.counters()
        engine.backward(engine(text[:, :-1], text[:, 1:]))
        engine.step()
    step = difference(before, engine.counters())
    expected = footprint(SHAPE, CONTEXT, stage, 2, precision)
    assert {kind: total for kind, total in step["bytes"].items() if total} == expected.payload
    assert sum(step["calls"].values()) == expected.messages
    report = engine.memory_report()
    assert report["parameters_resting"] == expected.parameters
    assert report["gradients"] <= expected.gradients
    assert report["optimizer"] == expected.optimizer
    engine.destroy()
