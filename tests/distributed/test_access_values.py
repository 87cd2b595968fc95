"""`safe_get_*`: what the optimizer has, in full and in pieces, at every stage and moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import utils, zero
from tests.distributed.zero_support import agree, engine_for, everywhere, same
from tests.harness import ranks

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}}


class Model(nn.Module):
    """Tied, frozen, complex, scalar, empty, double and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.spectrum = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.frozen
        for block in self.blocks:
            x = block(x)
        x = self.last(x) * self.scale
        y = (x.float().to(torch.complex64) @ self.spectrum).abs() * self.wide
        return y + 0 * self.nothing.sum()


def build() -> Any:
    torch.manual_seed(6)
    return Model()


def part(step: int, micro: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's micro-batch."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())).to(dtype)


def parts(step: int, micros: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The micro-batches of all ranks."""
    made = []
    for micro in range(micros):
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            made.append(torch.randn(2, 5, generator=generator).to(dtype))
    return made


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean().float()


def reference_gradients(step: int, micros: int = 1, model: Any = None) -> dict[str, Tensor | None]:
    """Mean gradients in plain PyTorch."""
    model = model or build()
    batches = parts(step, micros)
    for x in batches:
        (loss_of(model, x) / len(batches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def full(getter: Callable[..., Tensor | None], model: nn.Module, *key: str) -> dict[str, Tensor | None]:
    return {name: getter(parameter, *key) for name, parameter in model.named_parameters()}


def close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other.to(one.dtype), rtol=1e-5, atol=1e-6)


# ---- weights


@ranks(2)
def test_full_weights() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        expected = dict(build().named_parameters())
        for stage in (0, 1, 2, 3):
            model = build()
            with engine_for(model, stage, precision):
                found = full(utils.safe_get_full_fp32_param, model)
                for name, value in found.items():
                    right = expected[name].detach()
                    if precision != "fp32" and name == "frozen":
                        right = right.to(dict(model.named_parameters())[name].dtype).float()  # it has no master
                    assert value is not None, name
                    assert same(value, right), (precision, stage, name)
                    assert not value.requires_grad
                values = [value for value in found.values() if value is not None]
                assert agree(values)
                values[0].zero_()  # a copy
                again = utils.safe_get_full_fp32_param(model.first.weight)
                assert again is not None
                assert same(again, expected["first.weight"].detach())
                assert utils.safe_get_full_fp32_param(model.last.weight) is not None


@ranks(1, 2, 3)
def test_pieces_of_weights_are_the_whole(world_size: int) -> None:
    for stage in (0, 1, 3):
        model, expected = build(), build()
        with engine_for(model, stage, "bf16"):
            for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
                piece = utils.safe_get_local_fp32_param(parameter)
                assert piece is not None
                assert piece.dim() == 1
                pieces = everywhere(piece)
                width = 2 if other.is_complex() else 1
                total = sum(each.numel() for each in pieces)
                if stage == 0:
                    assert all(same(each, piece) for each in pieces)
                    total = piece.numel()
                    pieces = [piece]
                flat = torch.cat(pieces)
                assert total == other.numel() * width, (stage, name)
                right = other.detach().to(parameter.dtype) if not parameter.requires_grad else other.detach()
                right = torch.view_as_real(right) if right.is_complex() else right
                assert torch.equal(flat, right.reshape(-1).to(flat.dtype)), (stage, name)


# ---- gradients


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_gradients_between_backward_and_step(stage: int) -> None:
    model = build()
    with engine_for(model, stage, optimizer=ADAM) as engine:
        assert all(value is None for value in full(utils.safe_get_full_grad, model).values()), "before any backward"
        for step in range(2):
            before = full(utils.safe_get_full_fp32_param, model)
            engine.backward(loss_of(engine, part(step)))
            found = full(utils.safe_get_full_grad, model)
            plain = build()
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(before[name])
            right = reference_gradients(step, model=plain)
            assert {name for name, value in found.items() if value is None} == {
                "frozen",
                "table",
                "unused.weight",
                "unused.bias",
            }
            for name, value in found.items():
                assert close(value, right[name]), (step, name, value, right[name])
                if value is not None:
                    assert value.dtype == (right[name] if right[name] is not None else value).dtype, name
            assert agree(value for value in found.values() if value is not None)
            again = full(utils.safe_get_full_grad, model)
            assert all(value is None or same(value, again[name]) for name, value in found.items()), "asking changes nothing"
            engine.step()
            assert all(value is None for value in full(utils.safe_get_full_grad, model).values()), "after the step"


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_gradients_in_an_accumulation(precision: str) -> None:
    """What the next step will see: at each moment the sum so far over the length of the window; unscaled; in float32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    seen = []
    for stage in (0, 1, 2, 3):
        model = build()
        values = []
        with engine_for(model, stage, precision, gradient_accumulation_steps=3) as engine:
            for micro in range(3):
                engine.backward(loss_of(engine, part(0, micro, dtype)))
                found = full(utils.safe_get_full_grad, model)
                assert all(
                    value is None or value.dtype in (torch.float32, torch.float64, torch.complex64) for value in found.values()
                )
                values.append(found)
                if precision == "fp32":
                    plain = build()
                    for x in parts(0, micro + 1):
                        (loss_of(plain, x) / (3 * dist.get_world_size())).backward()
                    for name, parameter in plain.named_parameters():
                        assert close(found[name], parameter.grad), (stage, micro, name)
                engine.step()
        seen.append(values)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert all(close(one[name], two[name]) for name in one)


@ranks(2)
def test_gradients_outside_of_the_engines_backward() -> None:
    """A plain loop, `no_sync`, a loss that is not divided, predivided sums."""
    right = reference_gradients(0)
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            loss_of(engine, part(0)).backward()
            assert all(close(value, right[name]) for name, value in full(utils.safe_get_full_grad, model).items()), stage
            engine.optimizer.step()
            assert engine.was_step_applied()
        model = build()
        with engine_for(model, stage) as engine:
            with engine.no_sync():
                engine.backward(loss_of(engine, part(0)))
                found = full(utils.safe_get_full_grad, model)
            assert all(close(value, right[name]) for name, value in found.items()), stage
            assert all(close(value, right[name]) for name, value in full(utils.safe_get_full_grad, model).items()), stage
        model = build()
        with engine_for(model, stage, gradient_accumulation_steps=4, prescale_gradients=True) as engine:
            engine.backward(loss_of(engine, part(0)), scale_wrt_gas=False)
            assert all(close(value, right[name]) for name, value in full(utils.safe_get_full_grad, model).items()), stage


@ranks(2)
def test_a_gradient_that_one_rank_has() -> None:
    """The other contributes zeros, and both see the mean."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(5, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[dist.get_rank()](x)

    for stage in (0, 2, 3):
        torch.manual_seed(6)
        model = Router()
        right = [
            torch.autograd.grad(model.experts[r](x).square().mean(), model.experts[r].weight)[0] / 2
            for r, x in enumerate(parts(0))
        ]
        with engine_for(model, stage, zero_optimization={"leaf_module": {"classes": ["Router"]}}) as engine:
            engine.backward(engine(part(0)).square().mean())
            for expert, value in zip(model.experts, right, strict=True):
                assert close(utils.safe_get_full_grad(expert.weight), value), stage


@ranks(2)
def test_pieces_of_gradients() -> None:
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            assert all(utils.safe_get_local_grad(p) is None for p in model.parameters())
            engine.backward(loss_of(engine, part(0)))
            for name, parameter in model.named_parameters():
                whole = utils.safe_get_full_grad(parameter)
                piece = utils.safe_get_local_grad(parameter)
                if whole is None:
                    assert piece is None or not piece.any(), (stage, name)
                    continue
                assert piece is not None, (stage, name)
                pieces = [piece] if stage == 0 else everywhere(piece)
                flat = torch.view_as_real(whole) if whole.is_complex() else whole
                assert torch.equal(torch.cat(pieces), flat.reshape(-1)), (stage, name)
            engine.step()
            assert all(utils.safe_get_local_grad(p) is None for p in model.parameters())


# ---- optimizer state


@ranks(2)
def test_full_optimizer_state() -> None:
    plain = build()
    rule = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01, eps=1e-3, weight_decay=0.0)
    for step in range(2):
        for x in parts(step):
            (loss_of(plain, x) / dist.get_world_size()).backward()
        rule.step()
        rule.zero_grad()
    for stage in (0, 1, 2, 3):
        model = build()
        with engine_for(model, stage, optimizer=ADAM) as engine:
            for step in range(2):
                for name, parameter in model.named_parameters():
                    moment = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
                    used = step and parameter.requires_grad and not name.startswith("unused")
                    assert (moment is not None) is bool(used) or name == "nothing" or (moment is not None and not moment.any())
                engine.backward(loss_of(engine, part(step)))
                engine.step()
            for (name, parameter), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                state = rule.state.get(other[1], {})
                for key in ("exp_avg", "exp_avg_sq"):
                    found = utils.safe_get_full_optimizer_state(parameter, key)
                    if key not in state or not parameter.numel():
                        assert found is None or not found.any(), (stage, name, key)
                        continue
                    assert found is not None, (stage, name, key)
                    assert found.shape == parameter.shape
                    right = state[key]
                    if right.is_complex() and key == "exp_avg_sq":
                        assert torch.allclose(torch.view_as_real(found), torch.view_as_real(right), rtol=1e-5, atol=1e-6)
                    else:
                        assert close(found, right), (stage, name, key)
                assert utils.safe_get_full_optimizer_state(parameter, "no such state") is None
            assert utils.safe_get_full_optimizer_state(model.frozen, "exp_avg") is None


@ranks(2)
def test_pieces_of_optimizer_state() -> None:
    for stage in (0, 1, 3):
        model = build()
        with engine_for(model, stage, "bf16", optimizer=ADAM) as engine:
            assert utils.safe_get_local_optimizer_state(model.first.weight, "exp_avg") is None
            engine.backward(loss_of(engine, part(0, dtype=torch.bfloat16)))
            engine.step()
            for name in ("first.weight", "blocks.1.0.bias", "scale", "spectrum"):
                parameter = model.get_parameter(name)
                whole = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
                piece = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
                assert whole is not None
                assert whole.any(), name
                pieces = [each for each in everywhere(piece) if each is not None]
                flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1)
                assert torch.equal(pieces[0] if stage == 0 else torch.cat(pieces), flat), (stage, name)


# ---- tensors that nobody manages


@ranks(2)
def test_of_other_tensors_there_is_nothing() -> None:
    model, plain = build(), build()
    with zero.Init():
        unclaimed = build()
    with engine_for(model, 3):
        for tensor in (plain.first.weight, torch.ones(3), unclaimed.first.weight):
            assert utils.safe_get_full_fp32_param(tensor) is None
            assert utils.safe_get_full_grad(tensor) is None
            assert utils.safe_get_full_optimizer_state(tensor, "exp_avg") is None
            assert utils.safe_get_local_fp32_param(tensor) is None
            assert utils.safe_get_local_grad(tensor) is None
            assert utils.safe_get_local_optimizer_state(tensor, "exp_avg") is None
    assert utils.safe_get_full_fp32_param(model.first.weight) is None, "the engine is gone"


@ranks(1, 3)
def test_on_other_numbers_of_ranks() -> None:
    right = reference_gradients(0)
    for stage in (1, 3):
        model = build()
        with engine_for(model, stage, optimizer=ADAM) as engine:
            engine.backward(loss_of(engine, part(0)))
            assert all(close(value, right[name]) for name, value in full(utils.safe_get_full_grad, model).items()), stage
            engine.step()
            moment = utils.safe_get_full_optimizer_state(model.spectrum, "exp_avg")
            assert moment is not None
            assert torch.allclose(moment, 0.1 * right["spectrum"], rtol=1e-5, atol=1e-6)  # pyright: ignore[reportOptionalOperand]
