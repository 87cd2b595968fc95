"""Invented DeepSpeed checkpoints of any shapes, groups and numbers of ranks; and those that were saved without ZeRO."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.contents import Key
from shardwise.checkpoint.foreign import DeepSpeedSource, open_foreign
from shardwise.checkpoint.foreign.deepspeed_whole import assign
from shardwise.errors import CheckpointError
from shardwise.optim.loss_scale import LossScale
from tests.unit.foreign_invented import GROUPS, adam_state, change, invent, save_whole
from tests.unit.foreign_support import interval, same, whole

SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3), st.sampled_from([1, 2, 3]), st.integers(1, 5), st.integers(1, 3))
def test_any_shapes_groups_and_ranks(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[list[int]]], stage: int, world: int, subgroups: int
) -> None:
    folder = tmp_path_factory.mktemp("invented")
    groups = [{f"p{number}.{at}": torch.randn(shape) for at, shape in enumerate(group)} for number, group in enumerate(shapes)]
    invent(folder, groups, stage, world, subgroups)
    source = DeepSpeedSource(folder)
    for group in groups:
        for name, tensor in group.items():
            assert same(whole(source, Key("weight", name)), tensor)
            assert same(whole(source, Key("optimizer", name, "exp_avg")), 2 * tensor)
            start, stop = tensor.numel() // 3, tensor.numel() - tensor.numel() // 4
            assert torch.equal(interval(source, Key("weight", name), start, stop), tensor.view(-1)[start:stop])
    assert same(whole(source, Key("weight", "frozen")), torch.arange(7.0))
    names = [name for group in groups for name in group]
    assert source.facts.steps == dict.fromkeys(names, 5)
    assert source.facts.numbers == {name: {"other": 1.5} for name in names}
    assert [sorted(group["parameters"]) for group in source.facts.groups] == [sorted(group) for group in groups]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "which, edit",
    [
        ("optim", lambda state: state.pop("optimizer_state_dict")),
        ("optim", lambda state: state["optimizer_state_dict"].pop("partition_count")),
        ("optim", lambda state: state["optimizer_state_dict"].update(partition_count=0)),
        ("optim", lambda state: state["optimizer_state_dict"].update(partition_count="2")),
        ("optim", lambda state: state["optimizer_state_dict"].update(zero_stage=1.5)),
        ("optim", lambda state: state["optimizer_state_dict"].update(fp32_flat_groups=1, single_partition_of_fp32_groups=1)),
        (
            "optim",
            lambda state: [
                state["optimizer_state_dict"][key].pop()
                for key in ("fp32_flat_groups", "single_partition_of_fp32_groups")
                if key in state["optimizer_state_dict"]
            ],
        ),
        ("model", lambda state: state.update(param_shapes=3)),
        ("model", lambda state: state["param_shapes"][0].update(a=torch.Size([500, 500]))),
        ("model", lambda state: state["param_shapes"][0].update(a=(-3, 5))),
        ("model", lambda state: state["param_shapes"].append({"more": torch.Size([9])})),
        ("model", lambda state: state.update(frozen_param_fragments={})),
        ("model", lambda state: state.update(module=None)),
    ],
)
def test_what_does_not_fit_is_damaged(tmp_path: Path, stage: int, which: str, edit: Any) -> None:
    invent(tmp_path, GROUPS, stage, 2)
    change(next(path for path in sorted(tmp_path.iterdir()) if which in path.name), edit)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        open_foreign(tmp_path)


def test_moments_of_another_layout_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    invent(tmp_path, GROUPS, 2, 2)

    def shorten(state: Any) -> None:
        for held in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            held["exp_avg"] = held["exp_avg"][:1]

    for path in tmp_path.glob("*optim_states.pt"):
        change(path, shorten)
    with caplog.at_level(logging.WARNING):
        source = DeepSpeedSource(tmp_path)
    assert {key.kind for key in source.specs} == {"weight", "buffer"}
    assert source.facts.origin["left_out"] == ["optimizer state exp_avg, which is not laid out as the weights"]
    assert "left out: optimizer state exp_avg" in caplog.text


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path: Path) -> None:
    invent(tmp_path, GROUPS, 3, 2)
    for path in tmp_path.glob("*optim_states.pt"):
        change(path, lambda state: state["optimizer_state_dict"]["optimizer_state_dict"].update(state={}))
    source = DeepSpeedSource(tmp_path)
    assert {key.name for key in source.specs if key.kind == "weight"} == {"a", "b", "c", "frozen"}
    assert not any(key.kind == "optimizer" for key in source.specs)
    assert source.facts.steps == {}


# Without ZeRO


@pytest.mark.parametrize("names", [None, ["b", "a"]])
def test_equal_shapes_cannot_be_told_apart_unless_they_have_names(tmp_path: Path, names: list[str] | None) -> None:
    """One of three equal weights is in no group."""
    module = {name: torch.randn(3) for name in "abc"}
    group: dict[str, Any] = {"lr": 1.0, "params": [0, 1]}
    if names:
        group["param_names"] = names
    save_whole(tmp_path, {"state": adam_state([module["b"], module["a"]]), "param_groups": [group]}, module)
    source = DeepSpeedSource(tmp_path)
    assert {key.name for key in source.specs if key.kind == "weight"} == set("abc")
    if names:
        assert same(whole(source, Key("optimizer", "a", "exp_avg")), 2 * module["a"])
        assert source.facts.groups == [{"options": {"lr": 1.0}, "parameters": names}]
    else:
        assert not any(key.kind == "optimizer" for key in source.specs)
        assert "cannot be told which parameter has which" in source.facts.origin["left_out"][0]


@pytest.mark.parametrize("flat", [False, True])
def test_masters_tell_equal_shapes_apart(tmp_path: Path, flat: bool) -> None:
    masters = {name: torch.randn(2, 3) for name in "abcd"}
    module = {name: tensor.bfloat16() for name, tensor in masters.items()}
    groups = [["a", "d"], ["c"]]  # b is frozen
    held = [[masters[name] for name in group] for group in groups]
    if flat:
        joined = [torch.cat([tensor.view(-1) for tensor in group]) for group in held]
        envelope: dict[str, Any] = {"fp32_groups_flat": joined}
        inner = {"state": adam_state(joined), "param_groups": [{"params": [0]}, {"params": [1]}]}
    else:
        envelope = {"fp32_groups": held}
        inner = {"state": adam_state([*held[0], *held[1]]), "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
    save_whole(tmp_path, {**envelope, "optimizer_state_dict": inner, "cur_scale": 8.0}, module)
    source = DeepSpeedSource(tmp_path)
    for name in "acd":
        assert same(whole(source, Key("weight", name)), masters[name])
        assert same(whole(source, Key("optimizer", name, "exp_avg")), 2 * masters[name])
    assert same(whole(source, Key("weight", "b")), module["b"])
    assert [group["parameters"] for group in source.facts.groups] == groups
    assert source.facts.loss_scale == LossScale.constant(8.0).state_dict()
    assert source.facts.steps == {"a": 2, "c": 2, "d": 2}


def test_assign_takes_an_answer_only_if_it_is_the_only_one() -> None:
    sizes = {"a": 1, "b": 2, "c": 1, "d": 2}
    groups = [[2, 2], [1]]

    def fits(group: int, at: int, name: str) -> bool:
        return groups[group][at] == sizes[name]

    assert assign(list(sizes), [1] * 4, [2, 1], fits) is None  # a or c
    assert assign(["a", "b", "d"], [1] * 3, [2, 1], fits) == [["b", "d"], ["a"]]
    assert assign(["b", "d"], [1] * 2, [2, 1], fits) is None  # too few
    assert assign([], [], [], fits) == []
