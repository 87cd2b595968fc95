"""The step path: norm, agreement, clipping, skipping; the same on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from shardwise.errors import NonFiniteError, UsageError
from shardwise.optim import BadGradient, LossScale, Piece, Shard, StepPath, StepSettings, plan_groups
from shardwise.optim.norm import find_bad, sum_of_squares
from tests.unit.optim_support import Job, Setup, close, make_grads

CPU = torch.device("cpu")
ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


def adamw(params: list[Parameter]) -> tuple[Any, Any, Any]:
    return None, params, ADAMW


def dynamic_scale() -> LossScale:
    return LossScale(scale=1024.0, dynamic=True, window=3, hysteresis=2, left=2)


def norm_of(*grads: Tensor, exact: bool = False) -> float:
    shards = [Shard(0, torch.zeros_like(grad), grad=grad) for grad in grads]
    return math.sqrt(float(sum_of_squares(shards, CPU, exact=exact)))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 99),
)
def test_norm_is_that_of_clip_grad_norm(sizes: list[int], exponent: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    grads = [torch.randn(size, generator=source) * 10.0**exponent for size in sizes]
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(params, math.inf))
    assert norm_of(*grads) == pytest.approx(expected, rel=5e-7)
    assert norm_of(*grads) == pytest.approx(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads)), rel=2e-7)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 300_000), cut=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_part_counts_the_same_in_a_copy_and_in_its_own_shard(size: int, cut: float, seed: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    middle = int(size * cut)
    for part in (slice(0, middle), slice(middle, size)):
        copy = Shard(0, torch.zeros(size), grad=grad, counted=part)
        own = Shard(0, torch.zeros(size)[part], grad=grad[part].clone())
        assert torch.equal(sum_of_squares([copy], CPU), sum_of_squares([own], CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_of_other_dtypes(dtype: torch.dtype) -> None:
    grad = torch.randn(200_003).to(dtype)
    assert norm_of(grad) == pytest.approx(float(grad.double().norm()), rel=5e-8 if dtype != torch.float64 else 1e-12)


def test_large_norms_are_more_exact_than_float32_sums() -> None:
    grad = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert norm_of(grad) == pytest.approx(float(grad.double().norm()), rel=3e-8)


def test_exact_sum_survives_squares_that_float32_cannot_hold() -> None:
    grad = torch.tensor([3e30, 4e30])
    assert norm_of(grad) == math.inf
    assert norm_of(grad, exact=True) == pytest.approx(5e30, rel=1e-6)


def test_huge_finite_gradients_are_applied() -> None:
    job = Job(adamw, Setup(2, settings=StepSettings(clip=1.0)), ((5, 5),))
    before = job.gather()[0].clone()
    reports = job.step([torch.full((5, 5), 1e25)])
    assert all(report.applied and not report.nonfinite and report.culprit == "" for report in reports)
    assert reports[0].grad_norm == pytest.approx(5e25, rel=1e-6)
    assert not torch.equal(before, job.gather()[0])
    assert job.gather()[0].isfinite().all()


@pytest.mark.parametrize(("value", "word"), [(math.inf, "Inf"), (-math.inf, "Inf"), (math.nan, "NaN")])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(value: float, word: str, world: int) -> None:
    job = Job(adamw, Setup(world, scaler=dynamic_scale, settings=StepSettings(clip=1.0)))
    job.step(make_grads(0), denominator=2.0)
    before, state = job.gather(), job.gather_state("exp_avg")
    steps = [list(shard.steps) for path in job.paths for shard in path.shards]
    reports = job.step(make_grads(1), bad={world - 1: (2, value)})
    name = job.paths[world - 1].shards[0].pieces[0].name
    assert all(report == reports[0] for report in reports if not math.isnan(report.grad_norm))
    assert not reports[0].applied
    assert reports[0].nonfinite
    assert not math.isfinite(reports[0].grad_norm)
    assert repr(name) in reports[0].culprit
    assert word in reports[0].culprit
    assert f"rank {world - 1}" in reports[0].culprit
    assert all(torch.equal(a, b) for a, b in zip(before, job.gather(), strict=True))
    assert all(torch.equal(value, job.gather_state("exp_avg")[key]) for key, value in state.items())
    assert steps == [list(shard.steps) for path in job.paths for shard in path.shards]
    assert all(plan.optimizer.overflow for plan in job.plans)
    assert job.step(make_grads(2))[0].applied
    assert not job.plans[0].optimizer.overflow


def test_loss_scale_moves_alike_on_all_ranks() -> None:
    """Hysteresis 2, window 3: the first overflow only spends hysteresis, the second halves, three clean steps double."""
    job = Job(adamw, Setup(2, scaler=dynamic_scale))
    scales = []
    for number, bad in enumerate((None, (0, math.inf), (1, math.inf), None, None, None, (0, math.nan))):
        job.step(make_grads(number), bad=None if bad is None else {bad[0]: (0, bad[1])})
        assert job.plans[0].optimizer.cur_scale == job.plans[1].optimizer.cur_scale
        scales.append(job.plans[0].optimizer.cur_scale)
    assert scales == [1024, 1024, 512, 512, 512, 1024, 1024]


def test_gradients_are_unscaled_before_norm_and_update() -> None:
    scaled = Job(adamw, Setup(2, scaler=dynamic_scale, settings=StepSettings(clip=0.5)))
    plain = Job(adamw, Setup(2, settings=StepSettings(clip=0.5)))
    grads = make_grads(0)
    report = scaled.step([None if grad is None else grad * 1024.0 * 4.0 for grad in grads], denominator=4.0)[0]
    assert report.loss_scale == 1024.0
    assert report.grad_norm == pytest.approx(plain.step(grads)[0].grad_norm, rel=1e-7)
    close(scaled.gather(), plain.gather(), rtol=1e-6)


def test_overflow_check_can_be_off() -> None:
    job = Job(adamw, Setup(1, settings=StepSettings(check_overflow=False)), ((4,),))
    report = job.step(make_grads(0, ((4,),)), bad={0: (1, math.nan)})[0]
    assert report.applied
    assert report.nonfinite
    assert job.gather()[0].isnan().tolist() == [False, True, False, False]


def test_ten_skips_in_a_row_are_an_error_on_every_rank() -> None:
    job = Job(adamw, Setup(2, scaler=lambda: LossScale(scale=1.0, dynamic=True)))
    for _ in range(9):
        job.step(make_grads(0), bad={1: (0, math.inf)})
    with pytest.raises(NonFiniteError, match="10 steps in a row") as caught:
        job.step(make_grads(0), bad={1: (0, math.inf)})
    assert repr(job.paths[1].shards[0].pieces[0].name) in str(caught.value)


def test_one_collective_per_step_and_one_more_for_a_bad_one() -> None:
    job = Job(adamw, Setup(2))
    job.step(make_grads(0))
    job.step(make_grads(1), bad={0: (0, math.inf)})
    assert job.reducer.calls[0] == ["gradient norm", "gradient norm", "non-finite gradients"]
    assert job.reducer.calls[1] == job.reducer.calls[0]


def test_extra_numbers_travel_with_the_norm() -> None:
    job = Job(adamw, Setup(1), ((4,),))
    shard = job.paths[0].shards[0]
    shard.grad = torch.zeros(len(shard.master))
    report = job.paths[0].run(job.plans[0].param_groups, 1.0, [True], torch.tensor([1.5, math.nan]))
    assert report.applied
    assert report.extra is not None
    assert report.extra.tolist()[0] == 1.5


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
def test_clipping_is_that_of_torch(clip: float) -> None:
    job = Job(lambda p: (None, p, {"type": "SGD", "params": {"lr": 1.0}}), Setup(3, settings=StepSettings(clip=clip)))
    before, grads = job.gather(), make_grads(0)
    params = [Parameter(torch.zeros_like(grad)) for grad in grads if grad is not None]
    for param, grad in zip(params, grads, strict=True):
        assert grad is not None
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, clip or math.inf)
    job.step(grads)
    close(job.gather(), [start - param.grad for start, param in zip(before, params, strict=True) if param.grad is not None])


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.inf, math.nan])
def test_a_denominator_that_divides_nothing_is_refused(denominator: float) -> None:
    job = Job(adamw, Setup(1), ((4,),))
    with pytest.raises(UsageError, match="denominator"):
        job.step(make_grads(0, ((4,),)), denominator=denominator)


def test_a_rank_without_parameters_takes_part() -> None:
    job = Job(adamw, Setup(3), ((1,),))
    reports = job.step(make_grads(0, ((1,),)))
    assert [len(path.shards[0].pieces) for path in job.paths] == [1, 0, 0]
    assert reports[0] == reports[1] == reports[2]


def test_a_path_without_any_shard() -> None:
    params = [Parameter(torch.zeros(2), requires_grad=False)]
    plan = plan_groups(None, params, [("w", params[0])], ADAMW)
    assert plan is not None
    path = StepPath([], plan.driver([]), StepSettings(), lambda t, _: t, lambda t, _: t, LossScale.constant())
    assert path.run(plan.param_groups, 1.0, [False]).grad_norm == 0.0


def test_the_driver_must_be_for_these_shards() -> None:
    params = [Parameter(torch.zeros(2))]
    plan = plan_groups(None, params, [("w", params[0])], ADAMW)
    assert plan is not None
    shard = Shard(0, torch.zeros(2))
    with pytest.raises(UsageError, match="other shards"):
        StepPath([replace(shard)], plan.driver([shard]), StepSettings(), lambda t, _: t, lambda t, _: t, LossScale())


def test_the_first_bad_parameter_is_named() -> None:
    pieces = (Piece("b", 5, 0, 3, 3), Piece("a", 2, 4, 8, 4))
    grad = torch.zeros(8)
    shard = Shard(0, torch.zeros(8), grad=grad, pieces=pieces)
    assert find_bad([shard]) is None
    grad[3] = math.nan
    assert find_bad([shard]) == BadGradient(-1, "(padding)", True)
    grad[3], grad[6] = 0.0, math.inf
    assert find_bad([shard]) == BadGradient(2, "a", False)
    other = Shard(0, torch.zeros(2), grad=torch.tensor([0.0, math.nan]), pieces=(Piece("c", 1, 0, 2, 2),))
    assert find_bad([shard, other]) == BadGradient(1, "c", True)
