"""The surface of an engine on one rank, without a launcher: counters, numbers, the loader, attributes of the model."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shardwise
from shardwise import Engine
from shardwise.engine import trainer_of
from shardwise.utils import safe_get_full_fp32_param


class Reader(nn.Module):
    """A model with attributes and methods of its own."""

    vocabulary = 7

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(3))
        self.note = {"made": "today"}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def describe(self, word: str) -> str:
        return f"{word} {self.vocabulary}"


def start(stage: int = 3, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **changes,
    }
    return shardwise.initialize(model=Reader(), config=config)[0]


def micro_step(engine: Engine) -> None:
    engine.backward(F.mse_loss(engine(torch.ones(2, 4)), torch.zeros(2, 2)))
    engine.step()


@pytest.mark.parametrize("stage", range(4))
def test_weights_written_in_place_reach_the_master_weights(stage: int) -> None:
    """A world of one keeps them whole at every stage."""
    with start(stage, gradient_accumulation_steps=1, bf16={"enabled": True}) as engine:
        weight = engine.module.second.weight
        with torch.no_grad():
            weight[0] = 4.0
        engine.backward(engine(torch.zeros(2, 4, dtype=torch.bfloat16)).float().sum() * 0.0)
        engine.step()
        assert engine.was_step_applied()
        master = safe_get_full_fp32_param(weight)
        assert master is not None
        assert master[0].tolist() == [4.0] * 4
        assert weight[0].tolist() == [4.0] * 4


@pytest.mark.parametrize("stage", range(4))
def test_numbers_of_a_run(stage: int) -> None:
    with start(stage) as engine:
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (
            6,
            2,
            3,
        )
        assert engine.zero_optimization_stage() == stage
        assert (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps) == (0, 0, 0, 0)
        assert not engine.was_step_applied()
        assert engine.get_lr() == [0.5]
        assert engine.loss_scale == 1.0
        assert engine.device.type in ("cpu", torch.empty(0).device.type)
        for call in range(1, 8):
            assert engine.is_gradient_accumulation_boundary() == (call % 3 == 0)
            micro_step(engine)
            assert engine.was_step_applied() == (call % 3 == 0)
            assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (call, call // 3, 6 * (call // 3))
        assert engine.optimizer is not None
        engine.optimizer.param_groups[0]["lr"] = 0.25
        assert engine.get_lr() == [0.25]
        assert isinstance(engine.get_global_grad_norm(), float)


def test_attributes_of_the_model_are_those_of_the_engine() -> None:
    with start() as engine:
        assert engine.vocabulary == 7
        assert engine.describe("size") == "size 7"
        assert engine.note is engine.module.note
        assert engine.first is engine.module.first
        assert engine.table is engine.module.table
        with pytest.raises(AttributeError, match="neither Engine nor Reader has an attribute 'descrbe'"):
            engine.descrbe("x")
        assert getattr(engine, "nothing", 5) == 5
        assert not hasattr(engine, "nothing")
        assert isinstance(engine, nn.Module)
        assert [name for name, _ in engine.module.named_parameters()] == [
            "first.weight",
            "first.bias",
            "second.weight",
            "second.bias",
        ]
        assert {id(parameter) for parameter in engine.parameters()} == {id(p) for p in engine.module.parameters()}


def test_an_engine_takes_no_other_names_from_its_model() -> None:
    """Every public name of an engine hides the model's, so that a new one is a decision."""
    with start() as engine:
        names = {name for name in {*dir(type(engine)), *vars(engine)} if not name.startswith("_")}
        methods = """backward counters destroy get_global_grad_norm get_lr gradient_accumulation_steps inference
            is_gradient_accumulation_boundary load_checkpoint memory_report module_state_dict no_sync save_16bit_model
            save_checkpoint scale set_gradient_accumulation_boundary step
            train_batch_size train_micro_batch_size_per_gpu wait_for_checkpoint was_step_applied
            zero_gather_16bit_weights_on_model_save zero_optimization_stage"""
        values = """config device global_samples global_steps loss_scale lr_scheduler micro_steps optimizer skipped_steps
            training_dataloader"""
        assert names - set(dir(nn.Module())) == {*methods.split(), *values.split()}


def test_counters_can_be_set() -> None:
    """As after loading a checkpoint of one's own."""
    with start() as engine:
        engine.global_steps, engine.micro_steps = 10, 20
        engine.step()
        assert (engine.global_steps, engine.micro_steps) == (10, 21)
        assert engine.global_samples == 0


def test_train_and_eval_reach_the_model() -> None:
    with start() as engine:
        assert engine.eval() is engine
        assert not engine.training
        assert not engine.module.second.training
        assert engine.train() is engine
        assert engine.module.second.training


def units_of(engine: Engine) -> list[str]:
    return [unit.name for unit in trainer_of(engine).parts.runtime.units]


def test_units_are_found_or_named() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.initialize(model=Deep(), config=config)[0] as engine:
        assert units_of(engine) == ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    config["zero_optimization"]["units"] = ["blocks.1"]
    with shardwise.initialize(model=Deep(), config=config)[0] as engine:
        assert units_of(engine) == ["<root>", "blocks.1"]


def test_a_loader_is_made_from_training_data() -> None:
    """Micro-batches of the configured size, each sample once; a collate function is used."""
    data = TensorDataset(torch.arange(10.0).view(10, 1))
    config = {"train_micro_batch_size_per_gpu": 4}
    engine, _, loader, _ = shardwise.initialize(model=Reader(), training_data=data, config=config)
    with engine:
        assert engine.training_dataloader is loader
        assert len(loader) == 3
        batches = [batch[0] for batch in loader]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).flatten().tolist()) == list(range(10))
    engine, _, loader, _ = shardwise.initialize(
        model=Reader(), training_data=data, collate_fn=len, config={**config, "dataloader_drop_last": True}
    )
    with engine:
        assert list(loader) == [4, 4]


def test_zero_grad_between_micro_batches_and_after() -> None:
    """After `step()` inside a window it is the habit of plain loops and does nothing; after a backward it drops the window."""
    gradients = []
    for clear in (False, True):
        with start(1) as engine:
            torch.manual_seed(0)
            micro_step(engine)
            engine.zero_grad()
            micro_step(engine)
            if clear:
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.zero_grad()
            micro_step(engine)
            gradients.append(engine.get_global_grad_norm())
            assert engine.global_steps == 1
    assert gradients[0] > gradients[1] > 0.0  # the window that was cleared holds one micro-batch of three


def test_a_step_without_a_backward_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with start(3, gradient_accumulation_steps=1) as engine:
        before = engine.module.first.weight.detach().clone()
        with caplog.at_level(logging.WARNING, "shardwise"):
            engine.step()
        assert ["without a backward" in record.getMessage() for record in caplog.records] == [True]
        torch.testing.assert_close(engine.module.first.weight.detach(), before, rtol=0, atol=0)


def test_progress_lines_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwise"), start(1, gradient_accumulation_steps=1, steps_per_print=2) as engine:
        caplog.clear()
        for _ in range(5):
            micro_step(engine)
        lines = [record.getMessage() for record in caplog.records]
        assert [line.partition(",")[0] for line in lines] == ["step 2", "step 4"]
        assert "lr [0.5]" in lines[0]


def test_gradient_clipping_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    for value, said in ((0.0, "gradient clipping off"), (0.7, "gradient clipping 0.7")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "shardwise"), start(1, gradient_clipping=value):
            pass
        assert any(said in record.getMessage() for record in caplog.records)


def test_an_engine_that_is_dropped_without_destroy_frees_its_memory() -> None:
    """Nothing process-wide holds it; the model goes with it."""
    engine = start(3)
    micro_step(engine)
    found = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.module.first.weight)]
    del engine
    gc.collect()
    assert [each() for each in found] == [None, None, None]


def test_engines_print_and_can_be_moved_nowhere() -> None:
    with start() as engine:
        assert "Reader" in repr(engine)
        assert sum(parameter.numel() for parameter in engine.parameters()) == 30
