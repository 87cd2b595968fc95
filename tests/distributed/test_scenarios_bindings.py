"""What users do to parameters behind the engine's back: refused by name, or right; never trained past in silence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import ParameterError, UsageError
from tests.harness import ranks

STAGES = (0, 1, 2, 3)


def _engine(model: nn.Module, stage: int, **more: object) -> shardwise.Engine:
    config = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1, "betas": [0.9, 0.99], "lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return shardwise.initialize(model=model, config=config)[0]


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def _inputs() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


@ranks(2)
def test_replaced_data_is_an_error_not_a_step_into_nowhere() -> None:
    for stage in (0, 1, 2):
        model = _blocks()
        with _engine(model, stage) as engine:
            first = model[0][0].weight
            first.data = first.data.clone()
            engine.backward(engine(_inputs()).pow(2).mean())
            with pytest.raises(ParameterError, match=r"'0\.0\.weight' was replaced after initialize"):
                engine.step()


@ranks(2)
def test_a_cast_of_the_module_is_an_error() -> None:
    model = _blocks()
    with _engine(model, 1) as engine:
        engine.module.double()
        engine.backward(engine(_inputs().double()).pow(2).mean())
        with pytest.raises(ParameterError, match="choose the dtype in the configuration"):
            engine.step()


@ranks(2)
def test_parameters_replaced_by_a_load_are_an_error() -> None:
    for stage in STAGES:
        model = _blocks()
        with _engine(model, stage), pytest.raises(ParameterError, match="assign=False"):
            model.load_state_dict(_blocks().state_dict(), assign=True)


@ranks(2)
def test_unfreezing_what_no_optimizer_holds_is_an_error() -> None:
    for stage in STAGES:
        model = _blocks()
        model[1].requires_grad_(False)
        with _engine(model, stage) as engine:
            engine.backward(engine(_inputs()).pow(2).mean())
            engine.step()
            model[1].requires_grad_(True)
            with pytest.raises(UsageError, match=r"'1\.0\.weight' was frozen at initialize"):
                engine(_inputs())


@ranks(2)
def test_a_second_unscaled_backward_through_a_graph_is_refused_in_fp16() -> None:
    for stage in STAGES:
        with _engine(_blocks(), stage, fp16={"enabled": True, "initial_scale_power": 8}) as engine:
            output = engine(_inputs().half()).float()
            engine.scale(output.pow(2).mean())  # for a log line, say; it must not vouch for another loss
            engine.scale(output.pow(2).mean()).backward(retain_graph=True)
            with pytest.raises(UsageError, match="loss scale"):
                output.mean().backward()


def test_embeddings_that_renormalise_in_forward_are_refused() -> None:
    with pytest.raises(ParameterError, match="max_norm"):
        _engine(nn.Sequential(nn.Embedding(4, 3, max_norm=1.0)), 0)


@ranks(2)
def test_double_backward_equals_plain_pytorch() -> None:
    """A gradient penalty: the gradient of a norm of input gradients."""
    everyone = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    plain = _blocks()
    _penalty(plain, torch.cat(everyone)).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf")).item()
    for stage in STAGES:
        with _engine(_blocks(), stage) as engine:
            for _ in range(2):  # and again, with graphs of the first gone
                engine.zero_grad()
                engine.backward(_penalty(engine, _inputs()))
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)


def _penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


@ranks(2)
def test_units_are_released_during_backward_beside_resident_parameters() -> None:
    """Small parameters stay; the large ones of a unit must not wait for the end of the pass because of them."""
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 6, "stage3_prefetch_bucket_size": 0},
        "transport": "gloo",
    }
    with shardwise.initialize(model=_blocks(), config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(_inputs()).pow(2).mean())
            engine.step()
        one = 2 * 32 * 4  # a 6 x 6 weight padded to two chunks of 32 floats
        assert 0 < engine.memory_report()["parameters_live_peak"] <= 2 * one
