"""Several backwards before a step, in every way that training loops do it: the gradient is their sum by one rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardwise import Engine, utils
from shardwise.errors import UsageError
from tests.distributed.scenario_support import (
    STAGES,
    adamw,
    assert_close,
    assert_equal,
    build,
    full,
    part,
    samples,
    sgd,
    squares,
    start,
)
from tests.harness import ranks
from tests.models import case

Losses = Sequence[Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]


def plain_steps(optimizer: Optimize, steps: int, loss: Callable[[nn.Module, int], Tensor]) -> dict[str, Tensor]:
    """Weights after some steps of plain PyTorch; `loss` is asked for the sum of what a step minimises."""
    model = build()
    updates = optimizer(model.parameters())
    for step in range(steps):
        updates.zero_grad()
        loss(model, step).backward()
        updates.step()
    return full(model)


# ---- several backwards, one step


@ranks(2)
@pytest.mark.parametrize("how", ["engine", "plain", "interleaved"])
def test_several_backwards_before_a_step_are_summed(how: str) -> None:
    """Four backwards, accumulation left at 1: also when all forwards come first."""
    for optimizer in (sgd, adamw) if how == "engine" else (adamw,):
        right = plain_steps(
            optimizer,
            2,
            lambda model, step: sum(squares(model, samples(4, 10 * step + n)) for n in range(4)),  # pyright: ignore
        )
        found = {}
        for stage in STAGES:
            with start(build(), stage, optimizer) as engine:
                for step in range(2):
                    losses = (squares(engine, part(samples(4, 10 * step + n), 2)) for n in range(4))
                    for loss in list(losses) if how == "interleaved" else losses:
                        engine.backward(loss) if how != "plain" else loss.backward()
                    engine.step()
                    assert engine.was_step_applied()
                assert engine.global_steps == 2
                found[stage] = full(engine)
            assert_close(found[stage], right, f"stage {stage} {optimizer.__name__}")
        assert_equal(found[0], found[1], "stage 0 and 1")
        assert_equal(found[2], found[3], "stage 2 and 3")


@ranks(2)
def test_several_backwards_in_each_micro_batch() -> None:
    """With accumulation 2, three backwards in the window contribute half of themselves each."""
    right = plain_steps(sgd, 2, lambda model, step: sum(squares(model, samples(4, 10 * step + n)) for n in range(3)) / 2)  # pyright: ignore
    for stage in STAGES:
        with start(build(), stage, accumulation=2) as engine:
            for step in range(2):
                for numbers in ((0, 1), (2,)):
                    for n in numbers:
                        engine.backward(squares(engine, part(samples(4, 10 * step + n), 2)))
                    engine.step()
            assert engine.global_steps == 2
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_how_samples_are_split_into_micro_batches_does_not_matter() -> None:
    """16 samples of a step as 1 x 8, 2 x 4 and 4 x 2 per rank; the user's loss stays as it is."""
    model = build()
    updates = adamw(model.parameters())
    norms = []
    for step in range(3):
        updates.zero_grad()
        squares(model, samples(16, step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)))
        updates.step()
    for stage in STAGES:
        for accumulation in (1, 2, 4):
            micro = 8 // accumulation
            with start(build(), stage, adamw, micro=micro, accumulation=accumulation, gradient_clipping=0.5) as engine:
                assert engine.train_batch_size() == 16
                for step in range(3):
                    for number in range(accumulation):
                        loss = squares(engine, part(samples(16, step), micro, number))
                        before = loss.detach().clone()
                        assert engine.is_gradient_accumulation_boundary() == (number == accumulation - 1)
                        assert engine.backward(loss) is loss
                        assert torch.equal(loss, before)
                        engine.step()
                        assert engine.was_step_applied() == (number == accumulation - 1)
                    assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-5)
                assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3 * accumulation, 48)
                assert_close(full(engine), full(model), f"stage {stage}, accumulation {accumulation}")


@ranks(2)
def test_a_loss_that_was_divided_already() -> None:
    right = plain_steps(sgd, 2, lambda model, step: squares(model, samples(8, step)))
    for stage in STAGES:
        for how in ("scale_wrt_gas", "plain", "mixed"):
            with start(build(), stage, accumulation=2) as engine:
                for step in range(2):
                    for number in range(2):
                        loss = squares(engine, part(samples(8, step), 2, number))
                        if how == "plain":
                            (loss / 2).backward()
                        elif how == "mixed" and number == 0:
                            engine.backward(loss)
                        else:
                            engine.backward(loss / 2, scale_wrt_gas=False)
                        engine.step()
                assert_close(full(engine), right, f"stage {stage} {how}")


# ---- several losses, retained graphs


def two_losses(model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    output = model(batch[0])
    return torch.nn.functional.mse_loss(output, batch[1]), (output * output.detach().sign()).mean()


@ranks(2)
@pytest.mark.parametrize("between", ["nothing", "engine.zero_grad", "optimizer.zero_grad"])
@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
def test_two_losses_on_one_forward(between: str, plain: bool) -> None:
    """Both gradients; or the second alone, when gradients are dropped between the backwards."""
    right = plain_steps(
        adamw,
        2,
        lambda model, step: sum(two_losses(model, samples(4, step))[0 if between == "nothing" else 1 :]),  # pyright: ignore
    )
    for stage in STAGES:
        with start(build(), stage, adamw) as engine:
            for step in range(2):
                first, second = two_losses(engine, part(samples(4, step), 2))
                if plain:
                    first.backward(retain_graph=True)
                else:
                    engine.backward(first, retain_graph=True)
                if between != "nothing":
                    (engine if between.startswith("engine") else engine.optimizer).zero_grad()
                if plain:
                    second.backward()
                else:
                    engine.backward(second)
                engine.step()
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_one_loss_three_times() -> None:
    right = plain_steps(sgd, 2, lambda model, step: 3 * squares(model, samples(4, step)))
    for stage in STAGES:
        with start(build(), stage) as engine:
            for step in range(2):
                loss = squares(engine, part(samples(4, step), 2))
                for again in (True, True, False):
                    engine.backward(loss, retain_graph=again)
                engine.step()
            assert_close(full(engine), right, f"stage {stage}")


class TwoHeads(nn.Module):
    """The auxiliary loss comes from the middle, and does not reach the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.probe = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.blocks[1](self.blocks[0](x))
        return self.head(self.blocks[2](early)), self.probe(early).square().mean()


@ranks(2)
def test_losses_that_reach_different_units() -> None:
    """In any order of the backwards."""
    for order in ((0, 1), (1, 0)):
        model = build(TwoHeads)
        updates = sgd(model.parameters())
        for step in range(2):
            updates.zero_grad()
            x, y = samples(4, step)
            output, extra = model(x)
            (torch.nn.functional.mse_loss(output, y) + extra).backward()
            updates.step()
        for stage in STAGES:
            with start(build(TwoHeads), stage) as engine:
                for step in range(2):
                    x, y = part(samples(4, step), 2)
                    output, extra = engine(x)
                    losses = (torch.nn.functional.mse_loss(output, y), extra)
                    engine.backward(losses[order[0]], retain_graph=True)
                    engine.backward(losses[order[1]])
                    engine.step()
                assert_close(full(engine), full(model), f"stage {stage}, order {order}")


@ranks(2)
def test_a_graph_older_than_the_step_is_refused() -> None:
    """Its weights are gone; at stages where torch can tell, torch's own error is as good."""
    for stage in STAGES:
        with start(build(), stage) as engine:
            loss = squares(engine, part(samples(4), 2))
            engine.backward(loss, retain_graph=True)
            engine.step()
            with pytest.raises((UsageError, RuntimeError), match=r"between the forward and the backward|modified by an inp"):
                engine.backward(loss)
            engine.backward(squares(engine, part(samples(4, 1), 2)))
            engine.step()
            assert engine.was_step_applied()


# ---- who says when a step is due


@ranks(2)
def test_the_boundary_set_by_the_user_decides() -> None:
    """The configured accumulation (2) still divides, and no longer counts."""
    lengths = (3, 1, 2)
    right = plain_steps(
        sgd,
        len(lengths),
        lambda model, step: sum(squares(model, samples(4, 10 * step + n)) for n in range(lengths[step])) / 2,  # pyright: ignore
    )
    for stage in STAGES:
        for plain in (False, True):
            with start(build(), stage, accumulation=2) as engine:
                for step, length in enumerate(lengths):
                    for n in range(length):
                        engine.set_gradient_accumulation_boundary(is_boundary=n == length - 1)
                        assert engine.is_gradient_accumulation_boundary() == (n == length - 1)
                        loss = squares(engine, part(samples(4, 10 * step + n), 2))
                        if plain:
                            (loss / 2).backward()
                        else:
                            engine.backward(loss)
                        engine.step()
                        assert engine.global_steps == step + (n == length - 1)
                assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_without_managed_accumulation_every_step_is_a_step() -> None:
    lengths = (2, 1, 3)
    right = plain_steps(
        sgd,
        len(lengths),
        lambda model, step: sum(squares(model, samples(4, 10 * step + n)) for n in range(lengths[step])) / 3,  # pyright: ignore
    )
    for stage in STAGES:
        with start(build(), stage, accumulation=3, managed_gradient_accumulation=False) as engine:
            for step, length in enumerate(lengths):
                for n in range(length):
                    engine.backward(squares(engine, part(samples(4, 10 * step + n), 2)))
                engine.step()
                assert engine.was_step_applied()
                assert engine.global_steps == step + 1
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
@pytest.mark.parametrize("last", ["outside", "inside"])
def test_no_sync_collects_without_communication(last: str) -> None:
    """The last backward of the window is outside of `no_sync`, or inside, and then the step reduces."""
    right = plain_steps(adamw, 2, lambda model, step: squares(model, samples(12, step)))
    for stage in STAGES:
        for plain in (False, True):
            with start(build(), stage, adamw, accumulation=3) as engine:
                for step in range(2):
                    for number in range(3):
                        batch = part(samples(12, step), 2, number)
                        if number < 2 or last == "inside":
                            before = reduced_bytes(engine)
                            with engine.no_sync():
                                run_backward(engine, squares(engine, batch), plain)
                            assert reduced_bytes(engine) == before
                        else:
                            run_backward(engine, squares(engine, batch), plain)
                        engine.step()
                assert_close(full(engine), right, f"stage {stage}")


def run_backward(engine: Engine, loss: Tensor, plain: bool) -> None:
    if plain:
        (loss / engine.gradient_accumulation_steps()).backward()
    else:
        engine.backward(loss)


def reduced_bytes(engine: Engine) -> int:
    """Bytes of gradients summed so far; agreements and norms are all-reduced too, but are much smaller."""
    moved = engine.counters()["bytes"]
    return moved.get("reduce_scatter", 0) + (moved.get("all_reduce", 0) if engine.zero_optimization_stage() == 0 else 0)


# ---- the loop of plain PyTorch


@ranks(2)
@pytest.mark.parametrize("cleared", ["after", "before", "first"])
def test_the_loop_of_plain_pytorch(cleared: str) -> None:
    """With the returned optimizer, which is live: gradients cleared after the step, before backward, or before forward."""
    model = build()
    updates = adamw(model.parameters())
    for step in range(3):
        updates.zero_grad()
        squares(model, samples(4, step)).backward()
        updates.param_groups[0]["lr"] = 0.05 / (step + 1)
        updates.step()
    for stage in STAGES:
        with start(build(), stage, adamw) as engine:
            optimizer = engine.optimizer
            assert isinstance(optimizer, torch.optim.Optimizer)
            for step in range(3):
                if cleared == "first":
                    optimizer.zero_grad()
                loss = squares(engine.module if step else engine, part(samples(4, step), 2))
                if cleared == "before":
                    optimizer.zero_grad()
                loss.backward()
                optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
                assert optimizer.step() is None
                assert not optimizer.overflow
                if cleared == "after":
                    optimizer.zero_grad(set_to_none=False)
            assert engine.global_steps == 3
            assert engine.get_lr() == [0.05 / 3]
            assert_close(full(engine), full(model), f"stage {stage}")


@ranks(2)
def test_a_plain_loop_with_managed_accumulation() -> None:
    """`optimizer.step()` and `zero_grad()` after every micro-batch: the first ones of a window neither step nor clear."""
    right = plain_steps(sgd, 2, lambda model, step: squares(model, samples(8, step)))
    for stage in STAGES:
        with start(build(), stage, accumulation=2) as engine:
            assert engine.optimizer is not None
            for step in range(2):
                for number in range(2):
                    (squares(engine, part(samples(8, step), 2, number)) / 2).backward()
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
            assert engine.global_steps == 2
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_a_closure_is_evaluated_once() -> None:
    right = plain_steps(sgd, 1, lambda model, step: squares(model, samples(4, step)))
    for stage in STAGES:
        with start(build(), stage) as engine:
            assert engine.optimizer is not None
            calls = []

            def closure(engine: Engine = engine, calls: list[Tensor] = calls) -> Tensor:
                loss = squares(engine, part(samples(4), 2))
                loss.backward()
                calls.append(loss)
                return loss

            assert engine.optimizer.step(closure) is calls[0]
            assert len(calls) == 1
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_a_plain_backward_after_a_managed_one_is_refused() -> None:
    for stage in STAGES:
        with start(build(), stage, accumulation=2) as engine:
            engine.backward(squares(engine, part(samples(4), 2)))
            with pytest.raises(UsageError, match=r"after engine\.backward\(loss\) in one accumulation window.*scale_wrt_gas"):
                squares(engine, part(samples(4), 2)).backward()


# ---- fp16


@ranks(2)
def test_plain_backward_in_fp16_needs_the_scale() -> None:
    """Refused with what to do instead, and nothing is left behind; scaled by the engine it is the same training."""
    for stage in STAGES:
        results = []
        for plain in (False, True):
            with start(build(), stage, adamw, precision="fp16") as engine:
                assert engine.optimizer is not None
                for step in range(3):
                    x, y = part(samples(4, step), 2)
                    if plain:
                        with pytest.raises(UsageError, match=r"loss scale of 256\. call .*backward\(loss\), or engine\.scale"):
                            squares(engine, (x.half(), y)).backward()
                    loss = squares(engine, (x.half(), y))
                    if plain:
                        scaled = engine.scale(loss)
                        assert scaled.item() == loss.item() * 256
                        scaled.backward()
                        engine.optimizer.step()
                        engine.optimizer.zero_grad()
                    else:
                        engine.backward(loss)
                        engine.step()
                    assert engine.was_step_applied()
                    assert engine.optimizer.cur_scale == engine.loss_scale == 256
                masters = {name: utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
                results.append((masters, engine.get_global_grad_norm()))
        assert_equal(results[0][0], results[1][0], f"stage {stage}")
        assert results[0][1] == results[1][1]


@ranks(1)
def test_scale_does_nothing_in_other_precisions() -> None:
    with start(build(), 2, precision="bf16") as engine:
        loss = squares(engine, [samples(2)[0].bfloat16(), samples(2)[1]])
        assert engine.scale(loss) is loss
        engine.scale(loss).backward()
        engine.step()
        assert engine.was_step_applied()


# ---- precision of the sum


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(torch.ones(()))

    def forward(self, c: Tensor) -> Tensor:
        return c * self.w


@ranks(1, 2)
def test_bf16_gradients_are_summed_in_float32() -> None:
    """1 + 255 x 2^-9: every term after the first is lost in a bf16 sum, which stays at 1."""
    total = 1.498046875
    for stage, divided in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        with start(build(Scalar), stage, accumulation=256, precision="bf16") as engine:
            for number in range(256):
                c = torch.tensor(2.0**-9 if number else 1.0, dtype=torch.bfloat16)
                engine.backward(engine(c), scale_wrt_gas=divided)
                if number == 255:
                    gradient = utils.safe_get_full_grad(engine.module.w)
                    assert gradient is not None
                    assert gradient.dtype == torch.float32
                    assert gradient.item() == (total / 256 if divided else total)
                engine.step()
            assert engine.get_global_grad_norm() == (total / 256 if divided else total)


# ---- inert sizes, one reduction


class Square(nn.Module):
    """Its weights have as many elements as one of the bucket sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("communication", [None, "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_bucket_sizes_do_not_change_a_bit(communication: str | None) -> None:
    sweeps: list[dict[str, Any]] = [
        {"reduce_bucket_size": size, "allgather_bucket_size": size, "overlap_comm": size != 7} for size in (1, 7, 64, 10**6)
    ]
    sweeps += [{"stage3_prefetch_bucket_size": size, "stage3_max_live_parameters": size} for size in (0, 72)]
    sweeps += [{"stage3_param_persistence_threshold": size} for size in (8, 10**6)]
    everything = []
    stages = STAGES if communication is None else (0, 3)
    for stage in stages:
        found = []
        for sizes in sweeps:
            with start(build(Square), stage, adamw, zero=sizes, communication_data_type=communication) as engine:
                for step in range(3):
                    engine.backward(squares(engine, part(samples(4, step, width=8), 2)))
                    engine.step()
                found.append(full(engine))
        for sizes, weights in zip(sweeps, found, strict=True):
            assert_equal(weights, found[0], f"stage {stage} {sizes}")
        everything.append(found[0])
    for stage, weights in zip(stages, everything, strict=True):
        assert_equal(weights, everything[0], f"stage {stage} and 0")


@ranks(2)
@pytest.mark.parametrize("name", ["siamese", "siamese_checkpointed", "siamese_reentrant", "checkpointed_reentrant"])
def test_a_unit_used_twice_is_reduced_once(name: str) -> None:
    """Whatever kind of recomputation runs it how often."""
    for stage in STAGES:
        torch.manual_seed(1)
        with start(case(name).build(), stage) as engine:
            kind = "reduce_scatter" if stage else "all_reduce"
            calls = []
            for step in range(2):
                loss = case(name).loss(engine, case(name).batch(2, torch.Generator().manual_seed(step), step))
                before = engine.counters()["calls"].get(kind, 0)
                engine.backward(loss)
                calls.append(engine.counters()["calls"].get(kind, 0) - before)
                engine.step()
            assert calls == [3, 3], f"stage {stage}: one reduction for each of two blocks and the root"


# ---- more ranks


@ranks(4)
def test_four_ranks(world_size: int) -> None:
    """Sizes that nothing divides, with micro-batches and clipping."""
    model = build()
    updates = adamw(model.parameters())
    for step in range(3):
        updates.zero_grad()
        squares(model, samples(4 * world_size, step)).backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.1)
        updates.step()
    for stage in STAGES:
        with start(build(), stage, adamw, accumulation=2, gradient_clipping=0.1) as engine:
            for step in range(3):
                for number in range(2):
                    engine.backward(squares(engine, part(samples(4 * world_size, step), 2, number)))
                    engine.step()
            assert_close(full(engine), full(model), f"stage {stage}")
