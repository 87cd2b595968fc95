"""Gradient norm and clipping, fp16 overflow, and gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import Engine, utils
from shardwise.errors import NonFiniteError
from tests.distributed.scenario_support import (
    STAGES,
    adamw,
    as_values,
    assert_close,
    assert_equal,
    build,
    clip,
    everywhere,
    full,
    part,
    reference,
    samples,
    settings,
    sgd,
    squares,
    start,
    warnings_logged,
)
from tests.harness import ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Spoiler:
    """Puts a value into one element of one parameter's gradient, on one rank, whenever it is armed."""

    def __init__(self, model: nn.Module, name: str, rank: int = 1) -> None:
        self.value: float | None = None
        self.rank = rank
        self.handle = model.get_parameter(name).register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        if self.value is None or dist.get_rank() != self.rank:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[-1] = self.value
        return gradient


def micro_step(engine: Engine, step: int, precision: str, number: int = 0) -> None:
    """Forward, backward and step of one micro-batch of two samples."""
    count = 2 * dist.get_world_size() * engine.gradient_accumulation_steps()
    x, y = part(samples(count, step), 2, number)
    engine.backward(squares(engine, (x.to(DTYPES[precision]), y)))
    engine.step()


def masters(engine: Engine) -> dict[str, Tensor | None]:
    return {name: utils.safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}


def everything(engine: Engine) -> list[Any]:
    """All that a skipped step must leave alone: weights, masters, moments and step counts, learning rates."""
    assert engine.optimizer is not None
    return [full(engine), masters(engine), as_values(engine.optimizer.state), engine.get_lr()]


# ---- norm and clipping


@ranks(2)
@pytest.mark.parametrize("plain", [False, True], ids=["engine.step", "optimizer.step"])
def test_a_clipped_step_equals_that_of_pytorch(plain: bool) -> None:
    """With a limit well below the norm, near it, and well above; the norm told is that before clipping."""
    for optimizer in (sgd, adamw):
        for limit in (0.05,) if plain or optimizer is sgd else (0.05, 0.9, 100.0):
            model = build()
            updates = optimizer(model.parameters())
            norms = []
            for step in range(3):
                updates.zero_grad()
                squares(model, samples(8, step)).backward()
                norms.append(clip(model, limit))
                updates.step()
            assert (min(norms) > 0.05) and (max(norms) < 100.0)
            found = {}
            for stage in STAGES:
                with start(build(), stage, optimizer, accumulation=2, gradient_clipping=limit) as engine:
                    assert engine.optimizer is not None
                    assert engine.get_global_grad_norm() is None
                    told = []
                    for step in range(3):
                        for number in range(2):
                            loss = squares(engine, part(samples(8, step), 2, number))
                            if plain:
                                (loss / 2).backward()
                                engine.optimizer.step()
                                engine.optimizer.zero_grad()
                            else:
                                engine.backward(loss)
                                engine.step()
                        told.append(engine.get_global_grad_norm())
                    assert told == pytest.approx(norms, rel=1e-5)
                    found[stage] = full(engine)
                    assert_close(found[stage], full(model), f"stage {stage}, limit {limit}")
            assert_equal(found[0], found[1], "stage 0 and 1")
            assert_equal(found[2], found[3], "stage 2 and 3")


@ranks(1, 2)
def test_the_norm_is_a_number_at_every_stage_and_precision(world_size: int) -> None:
    norms: dict[str, list[float]] = {}
    for precision in DTYPES:
        for stage in STAGES:
            with start(build(), stage, precision=precision, gradient_clipping=0.01) as engine:
                micro_step(engine, 0, precision)
                norm = engine.get_global_grad_norm()
                assert norm is not None
                assert set(everywhere(float(norm))) == {float(norm)}
                norms.setdefault(precision, []).append(float(norm))
    for precision, found in norms.items():
        assert found == pytest.approx([norms["fp32"][0]] * 4, rel=1e-5 if precision == "fp32" else 0.05)
        assert found == pytest.approx([found[0]] * 4, rel=1e-6)


# ---- fp16


@ranks(2)
def test_fp16_overflow_on_one_rank() -> None:
    """Hysteresis 2, window 3: the first overflow costs patience, the second halves the scale, three clean steps double it."""
    #       step:  clean  Inf  Inf  clean x 3            Inf  clean
    bad = [None, math.inf, math.inf, None, None, None, -math.inf, None]
    scales = [256, 256, 128, 128, 128, 256, 256, 256]
    for stage in STAGES:
        clean = reference_masters(stage, [step for step, value in enumerate(bad) if value is None])
        fp16 = {"hysteresis": 2, "loss_scale_window": 3}
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05, "warmup_type": "linear"}}
        with start(build(), stage, adamw, precision="fp16", fp16=fp16, scheduler=schedule) as engine:
            assert engine.optimizer is not None
            spoiler = Spoiler(engine.module, "blocks.1.0.weight")
            skipped = 0
            for step, (value, scale) in enumerate(zip(bad, scales, strict=True)):
                spoiler.value = value
                before = everything(engine)
                micro_step(engine, step, "fp16")
                assert engine.was_step_applied() == (value is None)
                assert engine.optimizer.overflow == (value is not None)
                skipped += value is not None
                if value is not None:
                    assert_equal(everything(engine), before, f"stage {stage} step {step}")
                assert engine.loss_scale == engine.optimizer.cur_scale == scale, f"stage {stage} step {step}"
                told = (
                    engine.loss_scale,
                    engine.get_lr(),
                    engine.skipped_steps,
                    engine.global_steps,
                    engine.was_step_applied(),
                )
                assert len(set(map(repr, everywhere(told)))) == 1
                assert (engine.skipped_steps, engine.global_steps) == (skipped, step + 1)
            assert engine.lr_scheduler.last_epoch == 5
            counts = {each["step"] for each in engine.optimizer.state.values()}
            assert counts == {5}
            assert_equal(masters(engine), clean, f"stage {stage}: as if the bad batches had not been there")


def reference_masters(stage: int, steps: list[int]) -> dict[str, Tensor | None]:
    """The same training without the steps that are skipped, at a scale that stays."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05, "warmup_type": "linear"}}
    with start(build(), stage, adamw, precision="fp16", scheduler=schedule) as engine:
        for step in steps:
            micro_step(engine, step, "fp16")
        return masters(engine)


@ranks(2)
def test_consecutive_hysteresis_is_restored_by_a_clean_step() -> None:
    for consecutive, last in ((True, 256), (False, 128)):
        fp16 = {"hysteresis": 2, "consecutive_hysteresis": consecutive}
        with start(build(), 3, precision="fp16", fp16=fp16) as engine:
            spoiler = Spoiler(engine.module, "gain")
            for step, value in enumerate((math.inf, None, math.inf)):
                spoiler.value = value
                micro_step(engine, step, "fp16")
            assert engine.loss_scale == last


@ranks(2)
def test_ten_skips_at_the_smallest_scale_are_an_error_that_names_the_parameter() -> None:
    """It takes hysteresis steps and halvings to get there; then ten more in a row, on every rank."""
    for stage in STAGES:
        fp16 = {"initial_scale_power": 3, "min_loss_scale": 2, "hysteresis": 1}
        with start(build(), stage, precision="fp16", fp16=fp16) as engine:
            spoiler = Spoiler(engine.module, "head.bias")
            spoiler.value = math.nan
            for step in range(11):
                micro_step(engine, step, "fp16")
                assert not engine.was_step_applied()
                assert engine.loss_scale == max(2, 8 / 2 ** (step + 1))
            with pytest.raises(
                NonFiniteError, match=r"(?s)10 steps in a row .* at its minimum \(2\).*NaN in .*'head\.bias'.*rank 1"
            ):
                micro_step(engine, 11, "fp16")


@ranks(2)
def test_a_clean_step_at_the_smallest_scale_starts_the_count_anew() -> None:
    with start(build(), 2, precision="fp16", fp16={"initial_scale_power": 0, "hysteresis": 1}) as engine:
        spoiler = Spoiler(engine.module, "head.bias")
        for step in range(19):
            spoiler.value = None if step == 9 else math.inf
            micro_step(engine, step, "fp16")
        with pytest.raises(NonFiniteError):
            micro_step(engine, 19, "fp16")


@ranks(2)
def test_a_fixed_loss_scale_stays() -> None:
    with start(build(), 3, precision="fp16", fp16={"loss_scale": 64}) as engine:
        spoiler = Spoiler(engine.module, "gain")
        for step, value in enumerate((None, math.inf, math.inf, None)):
            spoiler.value = value
            micro_step(engine, step, "fp16")
            assert engine.loss_scale == 64
            assert engine.was_step_applied() == (value is None)


# ---- Inf and NaN without a loss scale


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_bad_element_on_one_rank_skips_the_step_on_all(precision: str) -> None:
    """One log line with step, parameter, rank and kind; the schedule stands still; the next step is an ordinary one."""
    bad = {2: ("blocks.0.0.weight", math.inf, "Inf"), 3: ("head.weight", math.nan, "NaN")}
    for stage in STAGES:
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05, "warmup_type": "linear"}}
        found = []
        for spoiled in (True, False):
            with start(build(), stage, adamw, precision=precision, scheduler=schedule) as engine, warnings_logged() as lines:
                spoilers = {name: Spoiler(engine.module, name) for name, _, _ in bad.values()}
                for step in range(5):
                    name, value, kind = bad.get(step, ("", 0.0, ""))
                    if not name:
                        micro_step(engine, step, precision)
                        assert engine.was_step_applied()
                    elif spoiled:
                        spoilers[name].value = value
                        before = everything(engine)
                        micro_step(engine, step, precision)
                        spoilers[name].value = None
                        assert not engine.was_step_applied()
                        assert not math.isfinite(engine.get_global_grad_norm() or 0.0)
                        assert_equal(everything(engine), before, f"stage {stage}")
                        said = f"step {step + 1} skipped on all ranks: {kind} in the gradient of '{name}' from rank 1"
                        assert [line.partition(" (")[0] for line in lines] == ([said] if dist.get_rank() == 0 else [])
                        assert "scale" not in "".join(lines)
                        lines.clear()
                assert not lines
                assert engine.skipped_steps == (2 if spoiled else 0)
                assert engine.lr_scheduler.last_epoch == 3
                found.append(masters(engine))
        assert_equal(found[0], found[1], f"stage {stage}: as if the bad batches had not been there")


@ranks(2)
def test_a_bad_micro_batch_spoils_its_window_only() -> None:
    """Whichever of three it is, on either rank or both; of several bad parameters the first is named."""
    cases = [
        (0, {"gain": [0]}, "'gain' from rank 0"),
        (1, {"blocks.1.0.bias": [1]}, "'blocks.1.0.bias' from rank 1"),
        (2, {"gain": [0], "blocks.1.0.bias": [1]}, "'gain' from rank 0"),
        (2, {"blocks.1.0.bias": [0, 1]}, "'blocks.1.0.bias' from rank 0, 1"),
    ]
    for stage in STAGES:
        with start(build(), stage, adamw, accumulation=3) as engine, warnings_logged() as lines:
            spoilers = {
                (name, rank): Spoiler(engine.module, name, rank) for name in ("gain", "blocks.1.0.bias") for rank in (0, 1)
            }
            for step, (bad, guilty, said) in enumerate(cases):
                before = everything(engine)
                for number in range(3):
                    for (name, rank), spoiler in spoilers.items():
                        spoiler.value = math.inf if number == bad and rank in guilty.get(name, ()) else None
                    micro_step(engine, step, "fp32", number)
                assert not engine.was_step_applied()
                assert_equal(everything(engine), before)
                if dist.get_rank() == 0:
                    assert lines[-1].endswith(f"Inf in the gradient of {said}")
                    assert len(lines) == step + 1
            for spoiler in spoilers.values():
                spoiler.value = None
            for number in range(3):
                micro_step(engine, 9, "fp32", number)
            assert engine.was_step_applied()
            assert engine.skipped_steps == 4


@ranks(2)
def test_gradients_whose_squares_overflow_are_finite() -> None:
    """Elements of 1e20 have squares beyond float32; the step is not skipped, and is clipped as it should be."""
    for stage in STAGES:
        with start(build(), stage, gradient_clipping=1.0) as engine:
            before = full(engine)
            spoiler = Spoiler(engine.module, "gain")
            spoiler.value = 2e20
            micro_step(engine, 0, "fp32")
            assert engine.was_step_applied()
            assert engine.get_global_grad_norm() == pytest.approx(1e20, rel=1e-5)
            after = full(engine)
            assert float(before["gain"][-1] - after["gain"][-1]) == pytest.approx(0.1, rel=1e-4)


@ranks(2)
def test_the_check_can_be_turned_off_in_bf16() -> None:
    """Then a bad gradient reaches the weights, as in plain PyTorch."""
    for stage in (0, 3):
        config = {"bf16": {"enabled": True, "check_grad_overflow": False}}
        with start(build(), stage, sgd, **config) as engine, warnings_logged() as lines:
            spoiler = Spoiler(engine.module, "gain")
            spoiler.value = math.nan
            micro_step(engine, 0, "bf16")
            assert engine.was_step_applied()
            assert math.isnan(float(full(engine)["gain"][-1]))
            assert not lines


@ranks(2)
def test_skipped_steps_do_not_move_a_schedule_of_the_user() -> None:
    right = reference(build(), 1)
    engine, _, _, scheduler = shardwise.initialize(
        model=build(),
        optimizer=sgd,
        lr_scheduler=lambda given: torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5),
        config=settings(3),
    )
    with engine:
        spoiler = Spoiler(engine.module, "gain")
        spoiler.value = math.inf
        for _ in range(3):
            micro_step(engine, 0, "fp32")
            assert engine.get_lr() == [0.1]
        spoiler.value = None
        micro_step(engine, 0, "fp32")
        assert engine.get_lr() == [0.05]
        assert scheduler.last_epoch == 1
        assert_close(full(engine), right)
