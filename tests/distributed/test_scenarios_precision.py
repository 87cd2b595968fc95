"""Which numbers have which format: 16-bit weights beside float32 ones, autocast, buffers, formats of sums and transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import Engine, utils
from shardwise.errors import ParameterError
from tests.distributed.scenario_support import (
    STAGES,
    Net,
    adamw,
    assert_close,
    assert_equal,
    build,
    everywhere,
    full,
    part,
    samples,
    settings,
    sgd,
    start,
)
from tests.harness import ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def masters(engine: Engine) -> dict[str, Tensor]:
    found = {name: utils.safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


# ---- pinned to float32


class Scale(nn.Module):
    """A norm that computes in the dtype of its weight, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.rand(5) + 0.5)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


class Mixed(nn.Module):
    """Blocks with a layer and a norm, and a router in the root, as mixtures of experts have it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Scale()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(self.norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.router = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        gate = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        return self.head(x * gate.to(x.dtype))


class Biased(Mixed):
    """Layers that compute in the dtype of their weight and add their bias in its own."""

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = Parameter(torch.randn(outputs, inputs) / 3)
            self.bias = Parameter(torch.randn(outputs) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.weight.dtype) @ self.weight.t()).to(self.bias.dtype).add(self.bias).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.layer = self.Layer(5, 5)
        self.head = self.Layer(5, 3)


WAYS: dict[str, tuple[list[str], set[str]]] = {
    "class name": (["Scale"], {"blocks.0.norm.weight", "blocks.1.norm.weight"}),
    "module name": (["router"], {"router.weight"}),
    "last part of a name": (["norm"], {"blocks.0.norm.weight", "blocks.1.norm.weight"}),
    "dotted module name": (["blocks.1.norm"], {"blocks.1.norm.weight"}),
    "parameter name": (["head.bias"], {"head.bias"}),
    "pattern": (["blocks.*.bias", "rout*"], {"blocks.0.layer.bias", "blocks.1.layer.bias", "router.weight"}),
    "a whole block": (["blocks.0"], {"blocks.0.norm.weight", "blocks.0.layer.weight", "blocks.0.layer.bias"}),
}


def one_step_by_hand(make: Callable[[], nn.Module], pinned: set[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Masters after one step of the same arithmetic, spelled out: 16-bit gradients, summed and applied in float32."""
    model = build(make)
    named = dict(model.named_parameters())
    wide = {name: Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.data = parameter.data.to(torch.float32 if name in pinned else dtype)
    updates = adamw(wide.values())
    scale = 256.0 if dtype == torch.float16 else 1.0
    for rank in range(2):
        x, y = part(samples(4), 2, rank=rank)
        loss = scale * F.mse_loss(model(x.to(dtype)).float(), y)
        for master, gradient in zip(wide.values(), torch.autograd.grad(loss, list(named.values())), strict=True):
            master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()
    for master in wide.values():
        assert master.grad is not None
        master.grad /= 2 * scale
    updates.step()
    return {name: master.detach() for name, master in wide.items()}


@ranks(2)
def test_modules_pinned_to_float32_stay_so_at_every_stage() -> None:
    """Through construction, forward, steps and destroy; they begin with the very bits they had."""
    for stage in STAGES:
        check_pins("pattern", "bf16", stage)
    check_pins("a whole block", "fp16", 3)


@ranks(2)
def test_modules_are_pinned_to_float32_by_name_pattern_and_class() -> None:
    for way in WAYS:
        check_pins(way, "bf16", 3)


def check_pins(way: str, precision: str, stage: int) -> None:
    patterns, pinned = WAYS[way]
    dtype = DTYPES[precision]
    original = full(build(Biased))
    right = {name: torch.float32 if name in pinned else dtype for name in original}
    model = build(Biased)
    with start(model, stage, adamw, precision=precision, data_types={"keep_in_fp32_modules": patterns}) as engine:
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == right
        assert_equal({name: full(engine)[name] for name in pinned}, {name: original[name] for name in pinned})
        assert_equal(masters(engine), original, "masters keep all digits the model was built with")
        seen = watch_dtypes(model)
        for step in range(3):
            x, y = part(samples(4, step), 2)
            engine.backward(F.mse_loss(engine(x.to(dtype)).float(), y))
            engine.step()
            assert engine.was_step_applied()
            assert {name: parameter.dtype for name, parameter in model.named_parameters()} == right
            held = masters(engine)
            assert_equal(full(engine), {name: held[name].to(right[name]) for name in right})
            if step == 0:
                assert_close(held, one_step_by_hand(Biased, pinned, dtype), f"stage {stage} {precision} {way}")
        assert seen == right
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == right


def watch_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes that the forward of each module finds its parameters in."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: seen.update(
            {f"{name}.{key}".lstrip("."): value.dtype for key, value in module.named_parameters(recurse=False)}
        )

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    return seen


@ranks(1)
def test_a_pin_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"keep_in_fp32_modules names 'LayerNrm', which matches no parameter"):
        start(build(), 3, precision="bf16", data_types={"keep_in_fp32_modules": ["LayerNrm"]})


# ---- autocast


def autocast_reference(dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """Plain PyTorch under autocast, each rank's micro-batch by itself, as rounding depends on what is multiplied at once."""
    model = build()
    updates = adamw(model.parameters())
    for step in range(steps):
        updates.zero_grad()
        for rank in range(2):
            x, y = part(samples(4, step), 2, rank=rank)
            with torch.autocast("cpu", dtype):
                output = model(x)
            (F.mse_loss(output.float(), y) / 2).backward()
        updates.step()
    return full(model)


@ranks(2)
def test_autocast_keeps_weights_in_float32_and_computes_in_16_bits() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("torch.float16", torch.float16)):
        right = autocast_reference(dtype, 3)
        for stage in STAGES:
            with start(build(), stage, adamw, torch_autocast={"enabled": True, "dtype": name}) as engine:
                for step in range(3):
                    x, y = part(samples(4, step), 2)
                    output = engine(x)
                    assert output.dtype == dtype
                    assert not torch.is_autocast_enabled("cpu")
                    engine.backward(F.mse_loss(output.float(), y))
                    engine.step()
                assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
                assert "master weights" not in engine.counters()["resident"]
                assert_close(full(engine), right, f"stage {stage} {name}")


@ranks(2)
def test_autocast_of_the_user_around_the_engine() -> None:
    right = autocast_reference(torch.bfloat16, 3)
    for stage in (1, 3):
        with start(build(), stage, adamw) as engine:
            for step in range(3):
                x, y = part(samples(4, step), 2)
                with torch.autocast("cpu", torch.bfloat16):
                    output = engine(x)
                engine.backward(F.mse_loss(output.float(), y))
                engine.step()
            assert_close(full(engine), right, f"stage {stage}")


# ---- buffers and inputs


class Tables(Net):
    """Buffers of several dtypes, one of which the forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.001, 1.0, 5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().double().mean(0), alpha=0.1)
        return super().forward((x.float() * self.frequencies).to(x.dtype).masked_fill(~self.mask, 0))


@ranks(2)
def test_buffers_keep_their_dtype_and_values() -> None:
    plain = build(Tables)
    kinds = {name: buffer.dtype for name, buffer in plain.named_buffers()}
    for precision, dtype in DTYPES.items():
        for stage in STAGES:
            model = build(Tables)
            with start(model, stage, precision=precision) as engine:
                for step in range(2):
                    x, y = part(samples(4, step), 2)
                    engine.backward(F.mse_loss(engine(x.to(dtype)).float(), y))
                    engine.step()
                assert {name: buffer.dtype for name, buffer in model.named_buffers()} == kinds
                assert int(model.calls) == 2
                assert_equal(model.frequencies, plain.frequencies)
            assert {name: buffer.dtype for name, buffer in model.named_buffers()} == kinds


@ranks(2)
def test_inputs_are_cast_where_the_configuration_says_so() -> None:
    """Floating-point ones only, at any depth; otherwise a wrong dtype is the user's error."""

    class Reader(Net):
        def forward(self, batch: dict[str, Any]) -> Tensor:  # pyright: ignore
            assert batch["ids"].dtype == torch.int64
            assert batch["nested"][0].dtype == torch.float16
            return super().forward(batch["nested"][0])

    x = samples(2)[0]
    for stage in (0, 3):
        with start(build(Reader), stage, precision="fp16", fp16={"auto_cast": True}) as engine:
            engine({"ids": torch.arange(3), "nested": (x,)})
        with start(build(), stage, precision="fp16") as engine, pytest.raises(RuntimeError, match="dtype"):
            engine(x)


# ---- formats of sums, transport and masters


@ranks(2)
def test_master_weights_and_states_have_the_formats_asked_for() -> None:
    full_precision: dict[str, Any] = {"enabled": True}
    low: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}
    lowest: dict[str, Any] = {**low, "bf16_optimizer_states": True}
    size = sum(parameter.numel() for parameter in build().parameters())
    for stage in STAGES:
        held = []
        for section in (full_precision, low, lowest):
            with start(build(), stage, adamw, bf16=section) as engine:
                x, y = part(samples(4), 2)
                engine.backward(F.mse_loss(engine(x.bfloat16()).float(), y))
                engine.step()
                assert engine.was_step_applied()
                states = {
                    value.dtype
                    for each in engine.optimizer.state.values()
                    for value in each.values()
                    if isinstance(value, Tensor)
                }  # pyright: ignore
                assert states == ({torch.bfloat16} if section is lowest else {torch.float32})
                report = engine.memory_report()
                held.append((report["optimizer"], report["unsharded_gradients"]))
        elements = held[0][0] // 12
        assert [optimizer for optimizer, _ in held] == [12 * elements, 8 * elements, 4 * elements]
        assert [gradients for _, gradients in held] == [4 * size, 2 * size, 2 * size]


@ranks(2)
def test_16_bit_accumulation_only_where_it_is_asked_for() -> None:
    """256 terms: a bf16 sum stays at 1 where a float32 one has 1.498."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(torch.ones(()))

        def forward(self, c: Tensor) -> Tensor:
            return c * self.w

    for dtype, total in (("bf16", 1.0), ("fp32", 1.498046875)):
        with start(build(Scalar), 3, accumulation=256, precision="bf16", data_types={"grad_accum_dtype": dtype}) as engine:
            for number in range(256):
                c = torch.tensor(2.0**-9 if number else 1.0, dtype=torch.bfloat16)
                engine.backward(engine(c), scale_wrt_gas=False)
                engine.step()
            assert engine.get_global_grad_norm() == total


@ranks(2)
def test_gradients_travel_in_the_format_asked_for() -> None:
    """Half the bytes, nearly the same result; and what is divided before the sum is multiplied back."""
    found = {}
    for stage in STAGES:
        for name, changes in {
            "plain": {},
            "bf16": {"communication_data_type": "bf16"},
            "prescaled": {"prescale_gradients": True},
            "predivided": {"gradient_predivide_factor": 4.0},
            "summed": {"gradient_allreduce_op": "sum"},
            "autocast": {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["Linear"]}},
        }.items():
            with start(build(), stage, sgd, gradient_clipping=1e6, **changes) as engine:
                x, y = part(samples(4), 2)
                before = engine.counters()["bytes"]
                engine.backward(F.mse_loss(engine(x), y))
                after = engine.counters()["bytes"]
                kind = "reduce_scatter" if stage else "all_reduce"
                moved = after[kind] - before.get(kind, 0)
                engine.step()
                found[stage, name] = (moved, engine.get_global_grad_norm(), full(engine))
        moved, norm, weights = found[stage, "plain"]
        assert norm is not None
        assert found[stage, "bf16"][0] * 2 == moved
        torch.testing.assert_close(found[stage, "bf16"][2], weights, rtol=1e-2, atol=1e-3)
        for name in ("prescaled", "predivided"):
            assert found[stage, name][0] == moved
            assert_equal(found[stage, name][2], weights, f"powers of two: {name} at stage {stage}")
        assert moved / 2 <= found[stage, "autocast"][0] < moved, "all but the bare parameter of the root travels in 16 bits"
        assert found[stage, "summed"][1] == pytest.approx(2 * norm, rel=1e-6)


@ranks(2)
def test_models_that_are_16_bit_already_are_trained_as_they_are() -> None:
    """`model.bfloat16()` without a precision section: 16-bit weights with float32 masters; everyone agrees on the result."""
    for stage in STAGES:
        model = build().bfloat16()
        with shardwise.initialize(model=model, optimizer=adamw, config=settings(stage))[0] as engine:
            x, y = part(samples(4), 2)
            engine.backward(F.mse_loss(engine(x.bfloat16()).float(), y))
            engine.step()
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
            found = masters(engine)
            assert {value.dtype for value in found.values()} == {torch.float32}
            assert_equal(full(engine), {name: value.bfloat16() for name, value in found.items()})
            first = everywhere(found)[0]
            assert_equal(found, first)
    assert dist.get_world_size() == 2
