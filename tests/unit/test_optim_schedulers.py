"""Schedulers by configuration on several groups, and the user's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardwise.config import load_config
from shardwise.errors import OptimizerError
from shardwise.optim import adopt_scheduler, build_scheduler, plan_groups

ALL: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.2}},
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 0.001}},
    {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}},
    {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 2}},
]


def optimizer_of(groups: list[dict[str, Any]], kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    groups = [{**group, "params": [Parameter(torch.zeros(1)) for _ in range(group.pop("count", 1))]} for group in groups]
    named = [(f"p{number}", param) for number, param in enumerate(param for group in groups for param in group["params"])]
    plan = plan_groups(None, groups, named, {"type": kind, "params": options})
    assert plan is not None
    plan.optimizer.bind(None, {}, lambda: None, lambda _: None)  # type: ignore[arg-type]
    return plan.optimizer


def lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("section", ALL, ids=[section["type"] for section in ALL])
def test_ratios_of_groups_stay_and_empty_groups_keep_their_place(section: dict[str, Any]) -> None:
    optimizer = optimizer_of([{"lr": 0.1}, {"lr": 0.7, "count": 0}, {"lr": 0.01}])
    alone = optimizer_of([{"lr": 0.1}])
    scheduler, single = build_scheduler(section, optimizer), build_scheduler(section, alone)
    for _ in range(12):
        assert scheduler.get_last_lr() == lrs(optimizer)
        assert lrs(optimizer)[0] == pytest.approx(lrs(alone)[0])
        assert lrs(optimizer)[2] == pytest.approx(lrs(optimizer)[0] / 10)
        for one, its in ((optimizer, scheduler), (alone, single)):
            one.step()
            its.step()


def test_all_groups_start_at_the_warm_ups_start() -> None:
    optimizer = optimizer_of([{"lr": 0.1}, {"count": 0}, {"lr": 0.01}])
    scheduler = build_scheduler({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}, optimizer)
    assert lrs(optimizer) == [0, 0, 0]
    trace = [lrs(optimizer)]
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        trace.append(lrs(optimizer))
    assert [lr[0] for lr in trace] == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])
    assert [lr[2] for lr in trace] == pytest.approx([0, 0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_the_peak_is_the_groups_own_rate_or_the_one_given() -> None:
    params: dict[str, Any] = {"warmup_num_steps": 2}
    for given, expected in ((None, [0.3, 0.03]), (6.0, [6.0, 0.6]), ([5.0, 7.0], [5.0, 7.0])):
        optimizer = optimizer_of([{"lr": 0.3}, {"lr": 0.03}])
        scheduler = build_scheduler({"type": "WarmupLR", "params": {**params, "warmup_max_lr": given}}, optimizer)
        for _ in range(4):
            optimizer.step()
            scheduler.step()
        assert lrs(optimizer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "options", "read", "first", "top"),
    [
        ("AdamW", {"betas": (0.7, 0.95)}, lambda group: group["betas"], (0.9, 0.95), (0.8, 0.95)),
        ("SGD", {"momentum": 0.5}, lambda group: group["momentum"], 0.9, 0.8),
        ("SGD", {}, lambda group: group["momentum"], 0, 0),
    ],
)
def test_one_cycle_moves_momentum_the_other_way(kind: str, options: dict[str, Any], read: Any, first: Any, top: Any) -> None:
    optimizer = optimizer_of([{"lr": 0.1}], kind, **options)
    scheduler = build_scheduler(ALL[4], optimizer)
    assert read(optimizer.param_groups[0]) == pytest.approx(first)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert read(optimizer.param_groups[0]) == pytest.approx(top)
    still = optimizer_of([{"lr": 0.1}], kind, **options)
    before = read(still.param_groups[0])
    build_scheduler({"type": "OneCycle", "params": {**ALL[4]["params"], "cycle_momentum": False}}, still)
    assert read(still.param_groups[0]) == before


def test_one_cycle_in_stairs_from_a_configuration() -> None:
    """As DeepSpeed documents it: each half in that many stairs, the second in as many as the first unless it says otherwise."""
    lengths = {"cycle_first_step_size": 4, "cycle_second_step_size": 6, "decay_step_size": 2, "decay_lr_rate": 1.0}
    for stairs, falling in (
        ({"cycle_first_stair_count": 2}, [1, 0.5, 0.5, 0.5, 0, 0, 0]),
        ({"cycle_first_stair_count": 2, "cycle_second_stair_count": 3}, [1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0]),
        ({"cycle_first_stair_count": 2, "cycle_second_stair_count": 0}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
    ):
        params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.1, **lengths, **stairs}
        config = load_config({"scheduler": {"type": "OneCycle", "params": params}}, world_size=1)
        assert config.inert == []
        optimizer = optimizer_of([{"lr": 0.1}])
        scheduler = build_scheduler(config.scheduler, optimizer)
        rates: list[float] = []
        momenta: list[float] = []
        for _ in range(13):
            rates += lrs(optimizer)
            momenta.append(optimizer.param_groups[0]["betas"][0])
            optimizer.step()
            scheduler.step()
        heights = [0, 0, 0.5, 0.5, *falling]
        assert rates[:11] == pytest.approx([0.1 + height for height in heights])
        assert rates[11:] == pytest.approx([0.1 / 1.5, 0.1 / 2])
        assert momenta[:11] == pytest.approx([0.9 - 0.1 * height for height in heights])


@pytest.mark.parametrize("section", ALL, ids=[section["type"] for section in ALL])
def test_resuming_continues_the_curve(section: dict[str, Any]) -> None:
    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = optimizer_of([{"lr": 0.1}, {"lr": 0.02}])
        return optimizer, build_scheduler(section, optimizer)

    optimizer, scheduler = fresh()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    resumed, again = fresh()
    again.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    for _ in range(4):
        assert again.get_last_lr() == lrs(resumed) == lrs(optimizer)
        for one, its in ((optimizer, scheduler), (resumed, again)):
            one.step()
            its.step()


def test_names_in_any_case_and_inert_nulls() -> None:
    optimizer = optimizer_of([{"lr": 0.1}])
    scheduler = build_scheduler({"type": "warmuplr", "params": {"warmup_max_lr": None, "warmup_num_steps": 1.0}}, optimizer)
    assert scheduler.get_last_lr() == [0.0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "WarmpLR", "params": {}}, ["'WarmpLR'", "did you mean 'WarmupLR'?", "LRRangeTest"]),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, ["warmup_steps", "warmup_num_steps"]),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, ["warmup_max_lr", "'auto'"]),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}, ["warmup_num_steps", "2.5"]),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, ["warmup_type", "log or linear"]),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [1.0, 2.0]}}, ["1 numbers, one per group"]),
        ({"type": "WarmupDecayLR", "params": {}}, ["total_num_steps", "None"]),
        ({"type": "OneCycle", "params": {**ALL[4]["params"], "cycle_first_step_size": 0}}, ["cycle_first_step_size"]),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.1}}, ["cycle_min_lr"]),
    ],
)
def test_bad_sections_are_refused(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        build_scheduler(section, optimizer_of([{"lr": 0.1}]))
    assert all(word in str(caught.value) for word in words)


def test_adopting() -> None:
    optimizer = optimizer_of([{"lr": 0.1}])
    made = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert adopt_scheduler(made, optimizer) is made
    assert adopt_scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), optimizer).optimizer is optimizer
    own = type("Own", (), {"step": lambda self: None})()
    assert adopt_scheduler(own, optimizer) is own
    with pytest.raises(OptimizerError, match="groups of another optimizer"):
        adopt_scheduler(torch.optim.lr_scheduler.StepLR(optimizer_of([{"lr": 0.1}]), 1), optimizer)
    for bad in (3, lambda o: 3):
        with pytest.raises(OptimizerError, match=r"step\(\).*found int"):
            adopt_scheduler(bad, optimizer)
