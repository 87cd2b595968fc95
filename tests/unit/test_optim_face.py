"""The object users hold, and the plan it comes from."""

from __future__ import annotations

import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from shardwise.errors import OptimizerError, UsageError
from shardwise.optim import ShardedOptimizer, adopt_scheduler, plan_groups
from tests.unit.optim_support import Job, Setup, close, make_grads

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.1}}


def plan_for(model_parameters: Any, params: list[Parameter], optimizer: Any = None, section: Any = ADAMW) -> Any:
    return plan_groups(optimizer, model_parameters, [(f"p{number}", param) for number, param in enumerate(params)], section)


def params_of(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(torch.randn(shape)) for shape in shapes]


def bound_job() -> tuple[Job, ShardedOptimizer, list[Any]]:
    job, calls = Job(lambda p: (None, p, ADAMW), Setup(1)), []
    path, face = job.paths[0], job.plans[0].optimizer
    params = dict(zip(job.names, face.param_groups[0]["params"], strict=True))

    def on_step() -> None:
        job.step(make_grads(len(calls)))
        calls.append("step")

    face.bind(path, params, on_step, lambda set_to_none: calls.append(("zero", set_to_none)))
    return job, face, calls


def test_it_is_a_torch_optimizer_with_live_groups() -> None:
    job, face, calls = bound_job()
    assert isinstance(face, torch.optim.Optimizer)
    assert face.defaults["lr"] == 0.1
    face.param_groups[0]["lr"] = 0.0
    before = job.gather()
    face.step()
    assert all(torch.equal(a, b) for a, b in zip(before, job.gather(), strict=True))
    face.param_groups[0]["lr"] = 0.1
    face.step()
    assert not torch.equal(before[0], job.gather()[0])
    face.zero_grad()
    face.zero_grad(set_to_none=False)
    assert calls == ["step", "step", ("zero", True), ("zero", False)]
    assert (face.overflow, face.cur_scale, face.optimizer) == (False, 1.0, face)


def test_state_is_by_parameter() -> None:
    job, face, _ = bound_job()
    assert not face.state
    face.step()
    params = face.param_groups[0]["params"]
    assert set(face.state) == {params[number] for number in range(8) if number != 3}
    assert face.state[params[0]]["step"] == 1
    face.state[params[0]]["exp_avg"].fill_(7.0)
    assert job.gather_state("exp_avg")[0].tolist() == [7.0] * 35
    with pytest.raises(UsageError, match="load_state_dict"):
        face.state = {params[0]: {}}


def test_closure_is_evaluated_once_with_gradients_on() -> None:
    _, face, calls = bound_job()
    seen: list[bool] = []

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 3.5

    with torch.no_grad():
        assert face.step(closure) == 3.5
    assert (seen, calls) == ([True], ["step"])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
@pytest.mark.parametrize("through_step", [True, False])
def test_torch_schedulers_work_without_warning(make: Any, through_step: bool) -> None:
    job, face, calls = bound_job()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = adopt_scheduler(make, face)
        before = face.param_groups[0]["lr"]
        for _ in range(3):
            if through_step:
                face.step()
            else:
                job.step(make_grads(0))
                face.announce_step()
            scheduler.step()
    assert face.param_groups[0]["lr"] != before
    assert scheduler.get_last_lr() == [face.param_groups[0]["lr"]]
    assert len(calls) == (3 if through_step else 0)


def test_announcing_leaves_groups_and_parameters_alone() -> None:
    _, face, calls = bound_job()
    groups, first = face.param_groups, face.param_groups[0]
    torch.optim.lr_scheduler.StepLR(face, 1)
    face.announce_step()
    assert face.param_groups is groups
    assert face.param_groups[0] is first
    assert calls == []


def test_adding_a_group_later_is_refused() -> None:
    _, face, _ = bound_job()
    with pytest.raises(UsageError, match="initialize"):
        face.add_param_group({"params": [Parameter(torch.zeros(1))]})


def test_it_can_be_subclassed_and_mixed() -> None:
    mixed = type("Fabric", (ShardedOptimizer,), {})
    made = mixed([{"params": [Parameter(torch.zeros(1))], "lr": 1.0}], {"lr": 0.1})
    made.anything = 1
    assert made.param_groups[0]["lr"] == 1.0


def test_alone_it_says_what_is_missing() -> None:
    face = ShardedOptimizer([{"params": [Parameter(torch.zeros(1))]}], {"lr": 0.1})
    with pytest.raises(UsageError, match="not connected"):
        face.step()
    with pytest.raises(UsageError, match="not connected"):
        face.load_state_dict({"param_groups": [], "shards": [], "loss_scale": {}})
    face.zero_grad()
    face.param_groups[0]["params"][0].grad = torch.ones(1)
    face.zero_grad()
    assert face.param_groups[0]["params"][0].grad is None
    assert (face.overflow, face.cur_scale, face.optimizer) == (False, 1.0, face)


def test_state_dict_round_trip_through_a_safe_file() -> None:
    first, second = Job(lambda p: (None, p, ADAMW), Setup(2)), Job(lambda p: (None, p, ADAMW), Setup(2))
    for number in range(2):
        first.step(make_grads(number, unused=(1,)))
    for rank in range(2):
        file = io.BytesIO()
        first.plans[rank].param_groups[0]["lr"] = 0.05
        torch.save(first.plans[rank].optimizer.state_dict(), file)
        file.seek(0)
        second.plans[rank].optimizer.load_state_dict(torch.load(file, weights_only=True))
        assert second.plans[rank].param_groups[0]["lr"] == 0.05
        for ours, theirs in zip(second.paths[rank].shards, first.paths[rank].shards, strict=True):
            ours.master.copy_(theirs.master)
            assert ours.steps == theirs.steps
    for job in (first, second):
        job.step(make_grads(9))
    assert all(torch.equal(a, b) for a, b in zip(first.gather(), second.gather(), strict=True))


def test_state_of_another_layout_is_refused() -> None:
    two, one = Job(lambda p: (None, p, ADAMW), Setup(2)), Job(lambda p: (None, p, ADAMW), Setup(1))
    with pytest.raises(UsageError, match="does not fit this rank's shards"):
        one.plans[0].optimizer.load_state_dict(two.plans[0].optimizer.state_dict())
    saved = two.plans[0].optimizer.state_dict()
    with pytest.raises(OptimizerError, match="expected 1 parameter groups, found 2"):
        two.plans[0].optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})


@pytest.mark.parametrize("given", [None, []])
def test_no_optimizer_no_plan(given: Any) -> None:
    params = params_of((2,))
    assert plan_groups(None, given, [("w", params[0])], None) is None


def test_nothing_to_train_no_plan() -> None:
    frozen = Parameter(torch.zeros(2), requires_grad=False)
    assert plan_groups(None, None, [("w", frozen)], ADAMW) is None
    assert plan_groups(None, [], [("w", frozen)], ADAMW) is None


def test_default_is_everything_that_requires_gradients() -> None:
    params = params_of((2,), (3,))
    params[0].requires_grad_(False)
    assert plan_for(None, params).param_groups[0]["params"] == params[1:]


def test_parameters_may_be_a_generator_pairs_groups_or_repeated() -> None:
    params = params_of((2,), (3,))
    assert plan_for((param for param in params), params).param_groups[0]["params"] == params
    assert plan_for([params[0], params[1], params[0]], params).param_groups[0]["params"] == params
    pairs = plan_for([("x", params[0]), ("y", params[1])], params).param_groups[0]
    assert (pairs["params"], pairs["param_names"]) == (params, ["x", "y"])
    groups = [{"params": params[0], "lr": 5.0}, {"params": []}, {"params": iter(params[1:]), "tag": "b"}]
    plan = plan_for(groups, params)
    assert [group["params"] for group in plan.param_groups] == [params[:1], [], params[1:]]
    assert [group["lr"] for group in plan.param_groups] == [5.0, 0.1, 0.1]
    assert plan.param_groups[2]["tag"] == "b"


def test_bad_groups_are_refused() -> None:
    params = params_of((2,), (3,))
    with pytest.raises(OptimizerError, match="more than one parameter group"):
        plan_for([{"params": params}, {"params": params[:1]}], params)
    with pytest.raises(OptimizerError, match="mixes groups"):
        plan_for([{"params": params[:1]}, params[1]], params)
    with pytest.raises(OptimizerError, match=r"parameters that the model does not have: found shapes \(9,\) in group 0"):
        plan_for([Parameter(torch.zeros(9))], params)
    with pytest.raises(OptimizerError, match="does not have"):
        plan_for(None, params, optimizer=torch.optim.SGD([Parameter(torch.zeros(9))]), section=None)


def test_an_optimizer_serves_one_engine() -> None:
    params = params_of((2,))
    with pytest.raises(OptimizerError, match="already belongs"):
        plan_for(None, params, optimizer=plan_for(None, params).optimizer, section=None)


def test_the_object_wins_over_the_section() -> None:
    params = params_of((2,))
    plan = plan_for(None, params, optimizer=torch.optim.SGD(params, lr=3.0))
    assert (plan.description, plan.param_groups[0]["lr"]) == ("SGD", 3.0)


def test_sections_may_be_objects() -> None:
    params = params_of((2,))
    written = SimpleNamespace(model_dump=lambda exclude_unset: {"lr": 0.7, "betas": None} if exclude_unset else {})
    plan = plan_for(None, params, section=SimpleNamespace(type="adam", params=written))
    assert plan.param_groups[0]["lr"] == 0.7
    assert plan.param_groups[0]["betas"] == (0.9, 0.999)
    assert plan.description == "AdamW"


def test_shared_modules_and_frozen_parameters_in_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    plan = plan_groups(None, model.parameters(), model.named_parameters(), ADAMW)
    assert plan is not None
    assert len(plan.param_groups[0]["params"]) == 3
    assert plan.group_of(model[0].bias) == 0


def test_steps_through_the_face_match_torch() -> None:
    job, face, _ = bound_job()
    params = [Parameter(param.detach().clone()) for param in job.params]
    reference = torch.optim.AdamW(params, lr=0.1, weight_decay=0.0)
    for number in range(3):
        face.step()
        for param, grad in zip(params, make_grads(number), strict=True):
            param.grad = grad
        reference.step()
    close(job.gather(), params)
