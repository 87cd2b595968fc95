"""`safe_set_*`: what is set is what the optimizer and the next forward see, at every stage and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import utils, zero
from shardwise.errors import ParameterError, UsageError
from shardwise.zero import GatheredParameters
from tests.distributed.test_access_values import ADAM, build, close, full, loss_of, part, parts
from tests.distributed.zero_support import agree, engine_for, same
from tests.harness import ranks


def whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_weights(precision: str) -> None:
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage, precision) as engine:
            torch.manual_seed(31)
            values = {
                name: torch.randn_like(whole(utils.safe_get_full_fp32_param(p)))
                if p.is_floating_point() or p.is_complex()
                else torch.arange(5).flip(0)
                for name, p in model.named_parameters()
            }
            for name, parameter in model.named_parameters():
                utils.safe_set_full_fp32_param(parameter, values[name])
            masters = full(utils.safe_get_full_fp32_param, model)
            with GatheredParameters(model.parameters()):
                weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    assert same(whole(masters[name]), values[name]), (stage, name)
                assert same(weights[name], values[name].to(parameter.dtype)), (stage, name)
            assert agree(weights.values())
            expected = build()
            with torch.no_grad():
                for name, parameter in expected.named_parameters():
                    parameter.data = weights[name].clone()
                x = part(0).to(model.first.weight.dtype)
                assert torch.equal(engine(x), expected(x)), stage


@ranks(2)
def test_pieces_of_weights() -> None:
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage, "bf16"):
            for name, parameter in model.named_parameters():
                before = whole(utils.safe_get_full_fp32_param(parameter))
                piece = whole(utils.safe_get_local_fp32_param(parameter))
                utils.safe_set_local_fp32_param(parameter, piece * 2)
                after = whole(utils.safe_get_full_fp32_param(parameter))
                assert same(after, before * 2), (stage, name)
                with GatheredParameters([parameter]):
                    assert torch.equal(parameter.detach(), (before * 2).to(parameter.dtype)), (stage, name)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_gradients(stage: int) -> None:
    """Set before, in and after an accumulation: the step uses what was set."""
    for micros, precision in ((1, "fp32"), (3, "fp32"), (2, "fp16")):
        dtype = torch.float16 if precision == "fp16" else torch.float32
        model = build()
        with engine_for(model, stage, precision, gradient_accumulation_steps=micros) as engine:
            for micro in range(micros):
                engine.backward(loss_of(engine, part(0, micro, dtype)))
                if micro < micros - 1:
                    engine.step()
            before = full(utils.safe_get_full_fp32_param, model)
            torch.manual_seed(17)
            chosen = {name: torch.randn_like(whole(before[name])) for name, p in model.named_parameters() if p.requires_grad}
            for name, parameter in model.named_parameters():
                if name in chosen:
                    utils.safe_set_full_grad(parameter, chosen[name])
            for name, parameter in model.named_parameters():
                assert name not in chosen or close(utils.safe_get_full_grad(parameter), chosen[name]), (micros, name)
            engine.step()
            norm = torch.stack([value.abs().double().square().sum() for value in chosen.values()]).sum().sqrt()
            assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
            after = full(utils.safe_get_full_fp32_param, model)
            for name, value in chosen.items():
                assert close(after[name], whole(before[name]) - 0.1 * value), (micros, name)


@ranks(2)
def test_a_gradient_set_before_the_last_backward_is_part_of_the_sum() -> None:
    for stage in (0, 1, 2, 3):
        model, plain = build(), build()
        for x in parts(0, 2)[2:]:
            (loss_of(plain, x) / 4).backward()
        with engine_for(model, stage, gradient_accumulation_steps=2) as engine:
            engine.backward(loss_of(engine, part(0, 0)))
            utils.safe_set_full_grad(model.first.weight, torch.full((5, 5), 0.25))
            engine.step()
            engine.backward(loss_of(engine, part(0, 1)))
            found = utils.safe_get_full_grad(model.first.weight)
            assert close(found, plain.first.weight.grad + 0.25), stage
            before = whole(utils.safe_get_full_fp32_param(model.first.weight))
            engine.step()
            after = utils.safe_get_full_fp32_param(model.first.weight)
            assert close(after, before - 0.1 * whole(found)), stage


@ranks(2)
def test_gradients_of_parameters_that_had_none() -> None:
    """Before any backward at all, and for a parameter that no loss has reached: it is updated like the others."""
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage, optimizer=ADAM) as engine:
            engine.backward(loss_of(engine, part(0)))
            before = whole(utils.safe_get_full_fp32_param(model.unused.weight))
            utils.safe_set_full_grad(model.unused.weight, torch.ones(2, 3))
            assert close(utils.safe_get_full_grad(model.unused.weight), torch.ones(2, 3)), stage
            engine.step()
            assert not same(whole(utils.safe_get_full_fp32_param(model.unused.weight)), before), stage
            moment = utils.safe_get_full_optimizer_state(model.unused.weight, "exp_avg")
            assert close(moment, torch.full((2, 3), 0.1)), stage
            assert close(utils.safe_get_full_fp32_param(model.unused.bias), build().unused.bias.detach()), stage


@ranks(2)
def test_pieces_of_gradients() -> None:
    for stage in (1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            with pytest.raises(UsageError, match=r"'first\.weight' is not reduced yet"):
                utils.safe_set_local_grad(model.first.weight, torch.zeros(0))
            engine.backward(loss_of(engine, part(0)))
            before = full(utils.safe_get_full_grad, model)
            weights = full(utils.safe_get_full_fp32_param, model)
            for parameter in model.parameters():
                piece = utils.safe_get_local_grad(parameter)
                if piece is not None:
                    utils.safe_set_local_grad(parameter, piece * 3)
            for name, parameter in model.named_parameters():
                if before[name] is not None:
                    assert close(utils.safe_get_full_grad(parameter), whole(before[name]) * 3), (stage, name)
            engine.step()
            for name, value in full(utils.safe_get_full_fp32_param, model).items():
                right = whole(weights[name]) - (0.3 * whole(before[name]) if before[name] is not None else 0)
                assert close(value, right), (stage, name)


@ranks(2)
def test_optimizer_state() -> None:
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16"):
            model = build()
            with engine_for(model, stage, precision, optimizer=ADAM) as engine:
                x = part(0).to(model.first.weight.dtype)
                with pytest.raises(UsageError, match="exp_avg"):
                    utils.safe_set_full_optimizer_state(model.first.weight, torch.zeros(5, 5), "exp_avg")
                engine.backward(loss_of(engine, x))
                engine.step()
                for name in ("first.weight", "blocks.0.0.bias", "scale", "spectrum", "wide"):
                    parameter = model.get_parameter(name)
                    value = torch.full_like(whole(utils.safe_get_full_optimizer_state(parameter, "exp_avg")), 0.5)
                    utils.safe_set_full_optimizer_state(parameter, value, "exp_avg")
                    assert same(whole(utils.safe_get_full_optimizer_state(parameter, "exp_avg")), value), (stage, name)
                    piece = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
                    piece = torch.empty(0) if piece is None else piece  # another rank has all of it
                    utils.safe_set_local_optimizer_state(parameter, piece + 1, "exp_avg")
                    found = whole(utils.safe_get_full_optimizer_state(parameter, "exp_avg"))
                    right = torch.complex(torch.full((5, 2), 1.5), torch.ones(5, 2)) if name == "spectrum" else value + 1
                    assert same(found, right.to(found.dtype)), (stage, name)
                utils.safe_set_full_optimizer_state(model.scale, torch.tensor(7.0), "exp_avg")
                engine.backward(loss_of(engine, x))
                gradient = whole(utils.safe_get_full_grad(model.scale))
                engine.step()
                moment = utils.safe_get_full_optimizer_state(model.scale, "exp_avg")
                assert close(moment, 0.9 * torch.tensor(7.0) + 0.1 * gradient), (stage, precision)


@ranks(2)
def test_training_after_a_set_is_as_if_it_had_been_so() -> None:
    """Weights, momentum and gradients are moved from one engine into another at another stage, which goes on in its place."""
    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    for stage, other_stage in ((3, 0), (0, 3), (2, 1)):
        one, other = build(), build()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        with engine_for(one, stage, optimizer=momentum) as first, engine_for(other, other_stage, optimizer=momentum) as second:
            for engine in (first, second):
                engine.backward(loss_of(engine, part(0)))
                engine.step()
            first.backward(loss_of(first, part(1)))
            for source, target in zip(one.parameters(), other.parameters(), strict=True):
                utils.safe_set_full_fp32_param(target, whole(utils.safe_get_full_fp32_param(source)))
                moment = utils.safe_get_full_optimizer_state(source, "momentum_buffer")
                if moment is not None and utils.safe_get_full_optimizer_state(target, "momentum_buffer") is not None:
                    utils.safe_set_full_optimizer_state(target, moment, "momentum_buffer")
            second.backward(loss_of(second, part(1)))
            for engine in (first, second):
                engine.step()
            for _ in range(2):
                for engine in (first, second):
                    engine.backward(loss_of(engine, part(2)))
                    engine.step()
            left, right = (full(utils.safe_get_full_fp32_param, model) for model in (one, other))
            for name, value in left.items():
                assert close(value, right[name]), (stage, other_stage, name)


# ---- mistakes


@ranks(2)
def test_wrong_shapes_and_lengths_are_refused() -> None:
    for stage in (0, 3):
        model = build()
        with engine_for(model, stage, optimizer=ADAM) as engine:
            engine.backward(loss_of(engine, part(0)))
            wrong = torch.zeros(4, 5)
            for setter, extra in (
                (utils.safe_set_full_fp32_param, ()),
                (utils.safe_set_full_grad, ()),
                (utils.safe_set_full_optimizer_state, ("exp_avg",)),
            ):
                with pytest.raises(ParameterError, match=r"'first\.weight' has the wrong shape.*\(5, 5\).*\(4, 5\)"):
                    setter(model.first.weight, wrong, *extra)
            engine.step()
            for setter, extra in (
                (utils.safe_set_local_fp32_param, ()),
                (utils.safe_set_local_optimizer_state, ("exp_avg",)),
            ):
                for number in (0, 1):
                    if whole(utils.safe_get_local_fp32_param(model.first.weight)).numel() != number:
                        with pytest.raises(ParameterError, match=r"piece of 'first\.weight' has the wrong length"):
                            setter(model.first.weight, torch.zeros(number), *extra)
            dist.barrier()


@ranks(2)
def test_what_cannot_be_set_is_refused() -> None:
    model, plain = build(), build()
    with zero.Init():
        unclaimed = build()
    with engine_for(model, 3, optimizer=ADAM) as engine:
        engine.backward(loss_of(engine, part(0)))
        engine.step()
        for tensor in (plain.first.weight, unclaimed.first.weight, nn.Parameter(torch.ones(2))):
            for setter, extra in (
                (utils.safe_set_full_fp32_param, ()),
                (utils.safe_set_full_grad, ()),
                (utils.safe_set_full_optimizer_state, ("exp_avg",)),
                (utils.safe_set_local_fp32_param, ()),
                (utils.safe_set_local_grad, ()),
                (utils.safe_set_local_optimizer_state, ("exp_avg",)),
            ):
                with pytest.raises(ParameterError, match="belongs to no engine"):
                    setter(tensor, torch.zeros(tuple(tensor.shape)), *extra)
        for setter, extra in ((utils.safe_set_full_grad, ()), (utils.safe_set_full_optimizer_state, ("exp_avg",))):
            with pytest.raises(ParameterError, match="no optimizer updates 'frozen'"):
                setter(model.frozen, torch.zeros(5), *extra)
        with pytest.raises(UsageError, match="'exp_agv'"):
            utils.safe_set_full_optimizer_state(model.first.weight, torch.zeros(5, 5), "exp_agv")


@ranks(2)
def test_a_graph_recorded_before_a_set_is_not_continued() -> None:
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            loss: Any = loss_of(engine, part(0))
            utils.safe_set_full_fp32_param(model.blocks[0][0].weight, torch.ones(5, 5))
            with pytest.raises(RuntimeError):
                engine.backward(loss)
