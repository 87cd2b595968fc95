"""Optimizers given as object, class or function: any elementwise class, over cut parameters, against itself on whole ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.errors import OptimizerError
from shardwise.optim import StepSettings, plan_groups
from tests.unit.optim_support import SHAPES, Job, Reference, Setup, close, make_grads

Make = Callable[[Any], torch.optim.Optimizer]


class SignMomentum(torch.optim.Optimizer):
    """A user's own elementwise class, with state made in the constructor and a counter in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["trail"] = torch.full_like(p, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                trail = self.state[p]["trail"]
                trail.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] / group["count"] * trail.tanh())


class NormalisedSgd(torch.optim.SGD):
    """Divides by the norm of each tensor: not elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class MatrixMean(torch.optim.SGD):
    """Uses the shape: not elementwise, although nothing is summed over all of a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * (p.grad - p.grad.mean(-1, keepdim=True)))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class ModeByGroup(torch.optim.SGD):
    """Elementwise in one group, not in the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * (p.grad / p.grad.norm() if group.get("whole") else p.grad))


TORCH: list[tuple[str, Make]] = [
    ("Adadelta", lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.01)),
    ("Adamax", lambda p: torch.optim.Adamax(p, lr=0.01)),
    ("ASGD", lambda p: torch.optim.ASGD(p, lr=0.1, t0=1)),
    ("NAdam", lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)),
    ("RAdam", lambda p: torch.optim.RAdam(p, lr=0.01)),
    ("RMSprop", lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True)),
    ("Rprop", lambda p: torch.optim.Rprop(p, lr=0.01)),
    ("user class", SignMomentum),
    ("Adam", lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=True)),
    ("AdamW", lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True)),
    ("SGD", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3)),
]
BUILT_IN = {"Adam", "AdamW", "SGD", "Adagrad"}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("name", "make"), TORCH, ids=[name for name, _ in TORCH])
def test_adopted_instance_matches_itself(name: str, make: Make, world: int) -> None:
    job = Job(lambda p: (make(p), None, None), Setup(world, seed=world, settings=StepSettings(clip=3.0)))
    reference = Reference(job, make)
    for number, unused in enumerate(((), (4,), (), (0, 7), ())):
        grads = make_grads(number, unused=unused)
        reference.step(grads, clip=3.0)
        job.step([None if grad is None else grad * 4.0 for grad in grads], denominator=4.0)
    close(job.gather(), reference.params)
    assert (job.plans[0].optimizer.optimizer is job.plans[0].optimizer) == (name in BUILT_IN)


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "AdamW"])
@pytest.mark.parametrize("form", ["class", "function", "config"])
def test_class_function_and_name(name: str, form: str) -> None:
    kind = getattr(torch.optim, name)
    decay = kind([Parameter(torch.ones(1))]).defaults["weight_decay"]
    forms: dict[str, Callable[[list[Parameter]], tuple[Any, Any, Any]]] = {
        "class": lambda p: (kind, p, None),
        "function": lambda p: (lambda params: kind(params, lr=0.02), p, None),
        "config": lambda p: (None, p, {"type": name.lower(), "params": {"lr": 0.02, "weight_decay": decay}}),
    }
    job = Job(forms[form], Setup(2))
    reference = Reference(job, kind if form == "class" else lambda p: kind(p, lr=0.02))
    for number in range(3):
        reference.step(make_grads(number))
        job.step(make_grads(number))
    close(job.gather(), reference.params)


@pytest.mark.parametrize(("name", "make"), TORCH, ids=[name for name, _ in TORCH])
def test_state_of_the_instance_is_carried_over(name: str, make: Make) -> None:
    """Two steps by the instance itself, then it is handed over: as if nothing had happened."""
    reference_params = [Parameter(param.detach().clone()) for param in Job(lambda p: (make(p), None, None), Setup(1)).params]
    reference = make(reference_params)

    def trained(params: list[Parameter]) -> tuple[Any, Any, Any]:
        optimizer = make(params)
        for number in range(2):
            for param, grad in zip(params, make_grads(number, unused=(6,)), strict=True):
                param.grad = grad
            optimizer.step()
        optimizer.zero_grad()
        return optimizer, None, None

    job = Job(trained, Setup(3))
    for number in range(4):
        grads = make_grads(number, unused=(6,) if number < 2 else ())
        for param, grad in zip(reference_params, grads, strict=True):
            param.grad = grad
        reference.step()
        if number >= 2:
            job.step(grads)
    close(job.gather(), reference_params)
    assert all(not plan.adopted.state for plan in job.plans if plan.adopted)


def test_group_dicts_of_the_instance_stay_the_live_ones() -> None:
    params = [Parameter(torch.zeros(4)), Parameter(torch.zeros(3))]
    user = torch.optim.RMSprop([{"params": params[:1]}, {"params": [], "lr": 9.0}, {"params": params[1:], "lr": 0.5}], lr=0.1)
    dicts = list(user.param_groups)
    plan = plan_groups(user, None, [("a", params[0]), ("b", params[1])], None)
    assert plan is not None
    assert all(left is right for left, right in zip(plan.optimizer.param_groups, dicts, strict=True))
    assert plan.param_groups is user.param_groups
    assert [group["params"] for group in plan.param_groups] == [params[:1], [], params[1:]]
    assert (plan.group_of(params[1]), plan.group_of(Parameter(torch.zeros(1)))) == (2, None)


@pytest.mark.parametrize("make", [TORCH[5][1], TORCH[9][1]], ids=["RMSprop", "AdamW"])
def test_a_scheduler_on_the_users_instance_acts_without_warning(make: Make) -> None:
    schedulers: list[Any] = []

    def with_scheduler(params: list[Parameter]) -> tuple[Any, Any, Any]:
        user = make(params)
        schedulers.append(torch.optim.lr_scheduler.StepLR(user, 1, gamma=0.1))
        return user, None, None

    job = Job(with_scheduler, Setup(2))
    reference = Reference(job, make)
    scheduler = torch.optim.lr_scheduler.StepLR(reference.optimizer, 1, gamma=0.1)
    for number in range(3):
        reference.step(make_grads(number))
        scheduler.step()
        job.step(make_grads(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for plan, own in zip(job.plans, schedulers, strict=True):
                before = [param.detach().clone() for group in plan.param_groups for param in group["params"]]
                plan.optimizer.announce_step()
                after = [param for group in plan.param_groups for param in group["params"]]
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                own.step()
    close(job.gather(), reference.params)


def test_counters_in_groups_are_visible_and_options_are_live() -> None:
    job = Job(lambda p: (SignMomentum(p), None, None), Setup(2))
    for number in range(2):
        job.step(make_grads(number))
    assert job.plans[0].param_groups[0]["count"] == 2
    before = job.gather()
    job.plans[0].param_groups[0]["lr"] = job.plans[1].param_groups[0]["lr"] = 0.0
    job.step(make_grads(2))
    assert all(torch.equal(a, b) for a, b in zip(before, job.gather(), strict=True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS.*dot products"),
        (torch.optim.SparseAdam, "SparseAdam.*sparse"),
        (torch.optim.Adafactor, "Adafactor.*row and column means"),
        (torch.optim.Muon, "Muon.*orthogonalises"),
        (NormalisedSgd, "NormalisedSgd.*in two parts gives other values"),
        (MatrixMean, "MatrixMean.*in two parts gives other values"),
        (NeedsClosure, "NeedsClosure.*trial step.*closure"),
        (lambda p: ModeByGroup([{"params": p[:1]}, {"params": p[1:], "whole": True}]), "ModeByGroup.*in two parts"),
        (lambda _: torch.optim.LBFGS, "LBFGS.*dot products"),
        (lambda _: NormalisedSgd, "NormalisedSgd.*in two parts"),
        (lambda _: torch.nn.Linear, "Linear is not an optimizer"),
        (lambda _: lambda params: params, "did not make one.*found list"),
        (lambda _: 3, "cannot be used.*found int"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(given: Any, reason: str) -> None:
    params = [Parameter(torch.randn(4, 4)), Parameter(torch.randn(2, 2))]
    with pytest.raises(OptimizerError, match=reason):
        plan_groups(given(params), params, [("a", params[0]), ("b", params[1])], None)


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "Adafactor", "SparseAdam"])
def test_whole_tensor_classes_are_refused_by_name(kind: str) -> None:
    params = [Parameter(torch.randn(4, 4))]
    with pytest.raises(OptimizerError, match=f"{kind} cannot work on sharded parameters"):
        plan_groups(None, params, [("a", params[0])], {"type": kind, "params": {}})


def test_the_probe_changes_nothing() -> None:
    params = [Parameter(torch.randn(4, 4))]
    user = SignMomentum(params)
    before, seed = params[0].detach().clone(), torch.get_rng_state()
    plan_groups(user, None, [("a", params[0])], None)
    assert torch.equal(params[0], before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert params[0].grad is None
    assert user.param_groups[0]["count"] == 0
    assert torch.equal(user.state[params[0]]["trail"], torch.full((4, 4), 0.5))


def test_bf16_state_needs_a_built_in_rule() -> None:
    setup = Setup(1, settings=StepSettings(state_dtype=torch.bfloat16))
    with pytest.raises(OptimizerError, match="RMSprop keeps its state in the dtype of the parameters"):
        Job(lambda p: (torch.optim.RMSprop(p), None, None), setup)


def test_low_precision_weights_follow() -> None:
    job = Job(lambda p: (torch.optim.RMSprop(p), None, None), Setup(2, weight=torch.bfloat16, grad=torch.bfloat16))
    before = job.gather("weight")
    job.step([grad if number != 4 else None for number, grad in enumerate(make_grads(0))])
    assert torch.equal(job.gather("weight")[4], before[4])
    assert all(torch.equal(w, m.bfloat16()) for w, m in zip(job.gather("weight"), job.gather(), strict=True))
    assert not torch.equal(job.gather("weight")[0], before[0])


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_can_be_kept(keep: bool) -> None:
    job = Job(lambda p: (torch.optim.RMSprop(p), None, None), Setup(1, settings=StepSettings(keep_grad=keep)), ((100,),))
    grads = make_grads(0, ((100,),))
    job.step(grads, denominator=2.0)
    shard = job.paths[0].shards[0]
    kept: Tensor = shard.grad[shard.pieces[0].start : shard.pieces[0].stop]
    assert grads[0] is not None
    assert torch.equal(kept, grads[0]) == keep


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "user class", "AdamW", "SGD"])
def test_state_round_trip(name: str) -> None:
    make = dict(TORCH)[name]
    first, second = (Job(lambda p: (make(p), None, None), Setup(2)) for _ in range(2))
    for number in range(2):
        first.step(make_grads(number, unused=(4,)))
    for rank in range(2):
        saved = first.plans[rank].optimizer.state_dict()
        second.plans[rank].optimizer.load_state_dict(saved)
        for ours, theirs in zip(second.paths[rank].shards, first.paths[rank].shards, strict=True):
            ours.master.copy_(theirs.master)
            assert ours.steps == theirs.steps
    for job in (first, second):
        job.step(make_grads(5))
    assert all(torch.equal(a, b) for a, b in zip(first.gather(), second.gather(), strict=True))


def test_loading_an_earlier_state_forgets_the_later_one() -> None:
    job = Job(lambda p: (torch.optim.Adagrad(p, initial_accumulator_value=0.25), None, None), Setup(1), SHAPES[:2])
    start = job.plans[0].optimizer.state_dict()
    masters = [shard.master.clone() for shard in job.paths[0].shards]
    job.step(make_grads(0, SHAPES[:2]))
    after = job.gather()
    job.plans[0].optimizer.load_state_dict(start)
    for shard, master in zip(job.paths[0].shards, masters, strict=True):
        shard.master.copy_(master)
    job.step(make_grads(0, SHAPES[:2]))
    assert all(torch.equal(a, b) for a, b in zip(after, job.gather(), strict=True))
