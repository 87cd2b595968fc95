"""Parameter groups keep what they are, and schedules move each from its own base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import shardwise
from shardwise import Engine
from shardwise.schedules import OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay
from tests.distributed.scenario_support import (
    STAGES,
    adamw,
    assert_close,
    assert_equal,
    build,
    full,
    part,
    samples,
    settings,
    sgd,
    squares,
    start,
    train,
)
from tests.harness import ranks

Groups = list[dict[str, Any]]


def halves(model: nn.Module) -> Groups:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2]}]


def three(model: nn.Module) -> Groups:
    """Rates, decays and betas of their own, an empty group between them and one at the end."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices[:1], "lr": 0.1, "weight_decay": 0.2, "name": "first"},
        {"params": [], "lr": 7.0, "weight_decay": 1.0},
        {"params": matrices[1:], "lr": 0.01, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"params": others, "weight_decay": 0.05, "eps": 0.1},
        {"params": []},
    ]


def adapt(groups: Groups, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Groups:
    """Groups without what only the Adam family knows."""
    return [
        {key: value for key, value in group.items() if optimizer is adamw or key not in ("betas", "eps")} for group in groups
    ]


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, schedule: Any = None) -> list[list[float]]:
    """Plain PyTorch over the whole batch; returns the learning rates that each step used."""
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        squares(model, samples(4, step)).backward()
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return rates


# ---- groups


@ranks(2)
def test_splitting_a_group_changes_nothing() -> None:
    for optimizer, stages in ((sgd, (0, 2)), (adamw, (1, 3))):
        for stage in stages:
            found = []
            for split in (False, True):
                model = build()
                chosen = optimizer(halves(model) if split else model.parameters())
                engine = shardwise.initialize(model=model, optimizer=chosen, config=settings(stage))[0]
                with engine:
                    train(engine, 3)
                    found.append((full(engine), engine.get_global_grad_norm()))
            assert_equal(found[0][0], found[1][0], f"stage {stage}")
            assert found[0][1] == pytest.approx(found[1][1], rel=1e-7)


@ranks(2)
@pytest.mark.parametrize("given", ["object", "class", "function", "config"])
def test_groups_keep_identity_order_and_options(given: str) -> None:
    """Also when they are empty; whoever makes the optimizer."""
    for optimizer in (sgd, adamw) if given != "config" else (adamw,):
        right = build()
        updates = optimizer(adapt(three(right), optimizer))
        train_plainly(right, updates, 3)
        for stage in STAGES if given == "object" else (3,):
            model = build()
            groups = adapt(three(model), optimizer)
            members = [list(group["params"]) for group in groups]
            engine = engine_for(model, groups, optimizer, stage, given)
            with engine:
                assert engine.optimizer is not None
                live = engine.optimizer.param_groups
                assert len(live) == 5
                assert all(one is other for one, other in zip(live, groups, strict=True))
                train(engine, 3)
                for group, parameters, expected in zip(live, members, updates.param_groups, strict=True):
                    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in parameters]
                    for key in ("lr", "weight_decay", "betas", "momentum", "eps", "name"):
                        assert group.get(key) == expected.get(key), key
                assert engine.get_lr() == [group["lr"] for group in updates.param_groups]
                assert_close(full(engine), full(right), f"stage {stage} {given}")


def engine_for(
    model: nn.Module, groups: Groups, optimizer: Callable[[Any], torch.optim.Optimizer], stage: int, given: str
) -> Engine:
    if given == "object":
        return shardwise.initialize(model=model, optimizer=optimizer(groups), config=settings(stage))[0]
    if given == "function":
        return shardwise.initialize(model=model, optimizer=optimizer, model_parameters=groups, config=settings(stage))[0]
    defaults = optimizer([torch.zeros(1, requires_grad=True)]).defaults
    if given == "class":
        for group in groups:
            for key in ("lr", "momentum", "eps", "weight_decay"):
                if key in defaults:
                    group.setdefault(key, defaults[key])
        kind = torch.optim.AdamW if optimizer is adamw else torch.optim.SGD
        return shardwise.initialize(model=model, optimizer=kind, model_parameters=groups, config=settings(stage))[0]
    section = {"type": "AdamW", "params": {key: defaults[key] for key in ("lr", "eps", "weight_decay")}}
    config = settings(stage, optimizer=section)
    return shardwise.initialize(model=model, model_parameters=groups, config=config)[0]


@ranks(2)
def test_options_changed_between_steps_take_effect() -> None:
    """Learning rate, weight decay and momentum, in the middle of training."""
    right = build()
    updates = sgd(halves(right))
    for step in range(4):
        change(updates, step)
        updates.zero_grad()
        squares(right, samples(4, step)).backward()
        updates.step()
    for stage in STAGES:
        model = build()
        engine = shardwise.initialize(model=model, optimizer=sgd(halves(model)), config=settings(stage))[0]
        with engine:
            assert engine.optimizer is not None
            for step in range(4):
                change(engine.optimizer, step)
                train(engine, 1, first=step)
            assert_close(full(engine), full(right), f"stage {stage}")


def change(optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (1 + step + number)
        group["weight_decay"] = 0.1 * step
        group["momentum"] = 0.9 - 0.2 * number


@ranks(2)
def test_a_part_of_the_model_is_trained() -> None:
    """Parameters that are in no group, though they want gradients, stay as they are; so do frozen ones that are in one."""
    for stage in STAGES:
        model = build()
        model.blocks[0].requires_grad_(False)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trained = [*model.head.parameters(), *model.blocks[0].parameters()]
        right = build()
        right.blocks[0].requires_grad_(False)
        train_plainly(right, adamw([*right.head.parameters(), *right.blocks[0].parameters()]), 3)
        engine = shardwise.initialize(model=model, optimizer=adamw(trained), config=settings(stage))[0]
        with engine:
            train(engine, 3)
            found = full(engine)
            for name, parameter in model.named_parameters():
                assert parameter.grad is None
                if not name.startswith("head"):
                    assert_equal(found[name], before[name], name)
            assert_close(found, full(right), f"stage {stage}")


@ranks(2)
def test_named_parameters_are_taken_as_torch_takes_them() -> None:
    right = build()
    train_plainly(right, adamw(right.parameters()), 2)
    for named in ("model_parameters", "optimizer"):
        model = build()
        given: dict[str, Any] = {"optimizer": adamw(model.named_parameters())}
        if named == "model_parameters":
            given = {"optimizer": adamw, "model_parameters": model.named_parameters()}
        with shardwise.initialize(model=model, config=settings(3), **given)[0] as engine:
            train(engine, 2)
            assert_close(full(engine), full(right), named)


# ---- schedules


WARMUP = {"warmup_num_steps": 4, "warmup_type": "linear"}
SCHEDULES: list[tuple[str, dict[str, Any], Callable[[float], Callable[[int], float]]]] = [
    ("WarmupLR", WARMUP, lambda base: Warmup(0.0, base, 4, True).lr),
    ("WarmupLR", {"warmup_num_steps": 4}, lambda base: Warmup(0.0, base, 4, False).lr),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 8}, lambda base: WarmupDecay(0.0, base, 4, True, 8).lr),
    ("WarmupCosineLR", {**WARMUP, "total_num_steps": 8}, lambda base: WarmupCosine(base, 0.0, 4, 8, 1e-4, True).lr),
    (
        "OneCycle",
        {"cycle_min_lr": 0.02, "cycle_max_lr": 0.2, "cycle_first_step_size": 3, "cycle_momentum": False},
        lambda base: OneCycle(0.2 * base, 2 * base, 3, 3).lr,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.05, "lr_range_test_step_size": 2},
        lambda base: RangeTest(base / 2, 2).lr,
    ),
]


def three_rates(model: nn.Module) -> Groups:
    """Base rates 0.1, (empty), 0.01."""
    parameters = list(model.parameters())
    return [
        {"params": parameters[:3], "lr": 0.1},
        {"params": [], "lr": 0.5},
        {"params": parameters[3:], "lr": 0.01},
    ]


@ranks(1, 2)
def test_schedules_of_the_configuration_move_every_group_from_its_own_base(world_size: int) -> None:
    """The ratio of 10 stays, the empty group does not shift the list, and the first step already has the first value."""
    for stage in (0, 3) if world_size == 1 else (3,):
        for kind, params, curve in SCHEDULES:
            model = build()
            section = {"type": kind, "params": params}
            config = settings(stage, scheduler=section)
            engine, _, _, scheduler = shardwise.initialize(model=model, optimizer=sgd(three_rates(model)), config=config)
            with engine:
                assert engine.lr_scheduler is scheduler
                for step in range(9):
                    first, _, last = engine.get_lr()
                    assert [first, last] == pytest.approx([curve(0.1)(step), curve(0.01)(step)], rel=1e-9), (
                        f"{kind} step {step}"
                    )
                    assert last == pytest.approx(first / 10, rel=1e-9)
                    train(engine, 1, first=step)
                    assert scheduler.last_epoch == step + 1
                assert scheduler.get_last_lr() == engine.get_lr()


@ranks(2)
def test_warm_up_begins_before_the_first_step() -> None:
    """A first step at learning rate 0 changes nothing, in any group; with accumulation the schedule moves once per step."""
    for stage in STAGES:
        model = build()
        config = settings(stage, accumulation=2, scheduler={"type": "WarmupLR", "params": WARMUP})
        engine = shardwise.initialize(model=model, optimizer=sgd(three_rates(model)), config=config)[0]
        with engine:
            assert engine.get_lr() == [0.0, 0.0, 0.0]
            before = full(engine)
            for number in range(2):
                engine.backward(squares(engine, part(samples(8), 2, number)))
                engine.step()
            assert engine.was_step_applied()
            assert_equal(full(engine), before)
            assert engine.lr_scheduler.last_epoch == 1


Maker = Callable[[torch.optim.Optimizer], Any]
TORCH_SCHEDULES: list[Maker] = [
    lambda optimizer: LambdaLR(optimizer, [lambda n: 1 / (n + 1), lambda n: 1.0, lambda n: 0.5**n]),
    partial(StepLR, step_size=2, gamma=0.1),
    partial(CosineAnnealingLR, T_max=3),
    partial(OneCycleLR, max_lr=[0.2, 1.0, 0.02], total_steps=7),
]


@ranks(2)
@pytest.mark.parametrize("given", ["function", "object", "outside", "outside, by hand"])
def test_schedules_of_torch(given: str) -> None:
    """Made by a function of the returned optimizer, on the user's optimizer before, or on the returned one after."""
    for number, make in enumerate(TORCH_SCHEDULES):
        right = build()
        updates = sgd(three_rates(right))
        schedule = make(updates)
        rates = train_plainly(right, updates, 4, schedule)
        for stage in (1, 3) if given == "object" else (3,):
            model = build()
            optimizer = sgd(three_rates(model))
            schedule = make if given == "function" else make(optimizer) if given == "object" else None
            engine, returned, _, scheduler = shardwise.initialize(
                model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings(stage)
            )
            with engine:
                assert returned is not None
                if given.startswith("outside"):
                    assert scheduler is None
                    scheduler = make(returned)
                used = []
                for step in range(4):
                    used.append(engine.get_lr())
                    if given == "outside, by hand":
                        squares(engine, part(samples(4, step), 2)).backward()
                        returned.step()
                        returned.zero_grad()
                    else:
                        train(engine, 1, first=step)
                    if given.startswith("outside"):
                        scheduler.step()
                assert used == rates, f"schedule {number}"
                assert_close(full(engine), full(right), f"stage {stage}, schedule {number}")


@ranks(1)
def test_arguments_of_the_schedule_go_through_step() -> None:
    with start(build(), 1) as engine:
        engine.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5)
        for metrics in (1.0, 2.0, 3.0):
            engine.backward(squares(engine, part(samples(2), 2)))
            engine.step(lr_kwargs={"metrics": metrics})
        assert engine.get_lr() == [0.025]


# ---- update rules by name

BY_NAME: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1, "eps": 1e-3},
    "RMSprop": {"lr": 0.01, "eps": 1e-3},
    "NAdam": {"lr": 0.01, "eps": 1e-3},
    "RAdam": {"lr": 0.01, "eps": 1e-3},
    "Adamax": {"lr": 0.01, "eps": 1e-3},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
}


@ranks(2)
def test_classes_of_torch_by_name() -> None:
    for name, params in BY_NAME.items():
        right = build()
        train_plainly(right, getattr(torch.optim, name)(right.parameters(), **params), 3)
        for stage in (3,) if name.startswith("Ad") else (0, 3):
            config = settings(stage, optimizer={"type": name, "params": params})
            with shardwise.initialize(model=build(), config=config)[0] as engine:
                train(engine, 3)
                assert_close(full(engine), full(right), f"{name} at stage {stage}")


@ranks(2)
def test_rules_that_torch_does_not_have_agree_between_stages() -> None:
    """Lion bit for bit; Lamb, whose trust ratios are sums over ranks, within the tolerance."""
    for name, check in (("Lion", assert_equal), ("Lamb", assert_close)):
        found = []
        for stage in STAGES:
            config = settings(stage, optimizer={"type": name, "params": {"lr": 0.01, "weight_decay": 0.1}})
            with shardwise.initialize(model=build(), config=config)[0] as engine:
                train(engine, 3)
                found.append(full(engine))
        for stage in STAGES[1:]:
            check(found[stage], found[0], f"{name}: stage {stage} and 0")
