"""Weights that users write in place, outside of `GatheredParameters`, at the stages where they stay whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shardwise import Engine, utils, zero
from shardwise.errors import ParameterError
from tests.distributed.scenario_support import (
    Net,
    adamw,
    assert_close,
    assert_equal,
    build,
    full,
    part,
    reference,
    samples,
    squares,
    start,
    train,
)
from tests.harness import ranks

WHOLE = (0, 1, 2)  # stages at which weights stay
LOW = ("bf16", "fp16")


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def step(engine: Engine, number: int, precision: str, between: Callable[[], None] = lambda: None) -> None:
    """One step; `between` runs between its backward and its update."""
    x, y = part(samples(2 * dist.get_world_size(), number), 2)
    engine.backward(squares(engine, (x.to(next(engine.parameters()).dtype), y)))
    between()
    engine.step()


def masters(engine: Engine) -> dict[str, Tensor]:
    found = {name: utils.safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def comparisons(engine: Engine) -> int:
    """How often ranks have exchanged objects, which is what a write in place leads to, and nothing else in training."""
    return engine.counters()["calls"].get("all_gather_object", 0)


@ranks(2)
def test_in_full_precision_writes_that_are_alike_simply_work() -> None:
    model = build()
    updates = adamw(model.parameters())
    for number in range(3):
        if number == 1:
            halve(model)
        updates.zero_grad()
        squares(model, samples(4, number)).backward()
        updates.step()
    for stage in WHOLE:
        with start(build(), stage, adamw) as engine:
            train(engine, 1)
            halve(engine.module)
            train(engine, 2, first=1)
            assert_close(full(engine), full(model), f"stage {stage}")


def edit_alone(engine: Engine) -> None:
    halve(engine.module)


def edit_gathered(engine: Engine) -> None:
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        if dist.get_rank() == 0:
            halve(engine.module)


@ranks(2)
@pytest.mark.parametrize("precision", LOW)
def test_at_16_bits_writes_that_are_alike_reach_the_master_weights(precision: str) -> None:
    """As if they had been made inside GatheredParameters: before a forward, or between backward and step."""
    for stage in WHOLE:
        for late in (False, True):
            results: list[Any] = []
            for edit in (edit_gathered, edit_alone):
                with start(build(), stage, adamw, precision=precision) as engine:
                    step(engine, 0, precision)
                    before = masters(engine)
                    if late:
                        step(engine, 1, precision, lambda engine=engine, edit=edit: edit(engine))
                    else:
                        edit(engine)
                        step(engine, 1, precision)
                    assert engine.was_step_applied()
                    step(engine, 2, precision)
                    results.append((masters(engine), full(engine), before))
            assert_equal(results[1], results[0], f"stage {stage}, late {late}")
            weight = results[1][0]["head.weight"]
            assert (weight.norm() / results[1][2]["head.weight"].norm()).item() < 0.75


@ranks(2)
def test_small_weights_that_stay_at_stage_3_are_treated_alike() -> None:
    for threshold in (0, 1000):
        with start(build(), 3, adamw, precision="bf16", zero={"stage3_param_persistence_threshold": threshold}) as engine:
            if not threshold:
                with pytest.raises(ParameterError, match="sharded and cannot be written"), torch.no_grad():
                    engine.module.head.weight.fill_(3.0)
                continue
            with torch.no_grad():
                engine.module.head.weight.fill_(3.0)
            step(engine, 0, "bf16")
            value = utils.safe_get_full_fp32_param(engine.module.head.weight)
            assert value is not None
            assert (value - 3.0).abs().max().item() < 0.2


def on_rank_0(model: Any) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.blocks[1][0].bias.add_(1.0)


def by_rank(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1][0].bias[dist.get_rank()] = 2.0


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", *LOW])
def test_writes_that_differ_are_a_named_error_on_every_rank(precision: str) -> None:
    """Nothing is left in flight: with the weights made equal again, training goes on."""
    for stage in WHOLE:
        for edit in (on_rank_0, by_rank):
            with start(build(), stage, adamw, precision=precision) as engine:
                step(engine, 0, precision)
                edit(engine.module)
                for _ in range(2):
                    with pytest.raises(ParameterError) as caught:
                        step(engine, 1, precision)
                told = str(caught.value)
                assert "parameter 'blocks.1.0.bias' was written in place, and not alike on all ranks" in told
                assert "found others on rank 1 than on rank 0" in told
                assert told.endswith("GatheredParameters(..., modifier_rank=0)`.")
                with zero.GatheredParameters(engine.module.blocks[1][0].bias, modifier_rank=1):
                    pass
                step(engine, 1, precision)
                assert engine.was_step_applied()


@ranks(2)
def test_weights_that_are_put_back_keep_all_digits_of_their_masters() -> None:
    """Averaged weights swapped in for an evaluation, for example."""
    for stage in WHOLE:
        results: list[Any] = []
        for swap in (False, True):
            with start(build(), stage, adamw, precision="bf16") as engine:
                step(engine, 0, "bf16")
                if swap:
                    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
                    halve(engine.module)
                    with torch.no_grad():
                        for parameter, value in zip(engine.module.parameters(), before, strict=True):
                            parameter.copy_(value)
                step(engine, 1, "bf16")
                results.append(masters(engine))
        assert_equal(results[1], results[0], f"stage {stage}")


class Parts(Net):
    """Norms with running statistics, tied and frozen weights, weights computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.spectral = parametrizations.spectral_norm(nn.Linear(5, 5))
        self.weight_norm = parametrizations.weight_norm(nn.Linear(5, 5))
        self.old = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.old.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * self.gain)
        for layer in (*self.blocks, self.spectral, self.weight_norm, self.old, self.tied, self.frozen):
            x = torch.tanh(layer(x))
        return self.head(x)


def normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations"):
        nn.init.normal_(module.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch's compiler
@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_training_does_by_itself_is_no_write(precision: str) -> None:
    """Nothing is compared, whatever the model is made of, compiled or not; also not after initialization by hand before."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for stage in WHOLE:
        for compiled in (False, True):
            model = build(Parts).to(dtype)  # its buffers too, which do not follow the configuration
            model.apply(normal)
            with start(model, stage, adamw, precision=precision, accumulation=2) as engine:
                if compiled:
                    engine.compile(backend="eager")
                before = comparisons(engine)
                for number in range(4):
                    step(engine, number, precision)
                with torch.no_grad():
                    engine(samples(2)[0].to(dtype))
                value = utils.safe_get_full_fp32_param(model.head.weight)
                assert value is not None
                utils.safe_set_full_fp32_param(model.head.weight, value + 1.0)
                model.frozen.weight.data.zero_()
                with torch.no_grad():
                    model.frozen.bias.zero_()
                for number in range(2):
                    step(engine, number, precision)
                assert engine.global_steps == 3
                assert comparisons(engine) == before
                after = utils.safe_get_full_fp32_param(model.head.weight)
                assert after is not None
                assert (after - value - 1.0).abs().max().item() < 0.2


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_that_are_announced_are_no_error(precision: str) -> None:
    """Loading, and GatheredParameters with and without an edit that counts."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for stage in WHOLE:
        state = {name: value.to(dtype) for name, value in reference(build(), 2, adamw).items()}
        with start(build(), stage, adamw, precision=precision) as engine:
            weights = partial(full if precision == "fp32" else masters, engine)
            step(engine, 0, precision)
            engine.module.load_state_dict(state)
            step(engine, 1, precision)
            loaded = weights()["head.weight"]
            assert (loaded - state["head.weight"].float()).abs().max().item() < 0.1
            with zero.GatheredParameters(engine.module.head.weight, modifier_rank=1):
                if dist.get_rank() == 1:
                    with torch.no_grad():
                        engine.module.head.weight.fill_(4.0)
            step(engine, 2, precision)
            assert (weights()["head.weight"] - 4.0).abs().max().item() < 0.2
            with (
                pytest.warns(zero.gathered.DiscardedEditWarning),
                zero.GatheredParameters(engine.module.head.weight),
                torch.no_grad(),
            ):
                engine.module.head.weight.fill_(float(dist.get_rank()))
            step(engine, 3, precision)
            assert (weights()["head.weight"] - 4.0).abs().max().item() < 0.4


@ranks(2)
def test_a_write_is_not_lost_when_another_weight_of_its_unit_is_set() -> None:
    for stage in WHOLE:
        with start(build(), stage, adamw, precision="bf16") as engine:
            head = engine.module.head
            with torch.no_grad():
                head.weight.fill_(3.0)
            utils.safe_set_full_fp32_param(head.bias, torch.full((3,), 2.0))
            step(engine, 0, "bf16")
            for name, value in (("head.weight", 3.0), ("head.bias", 2.0)):
                assert (masters(engine)[name] - value).abs().max().item() < 0.2, (stage, name)
