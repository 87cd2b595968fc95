"""What is found out about checkpoints: tensors by module, all of a run, whether one is whole, how two differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import Facts, Key, Source
from shardwise.checkpoint.compare import Difference, bytes_to_compare, diff
from shardwise.checkpoint.export import export
from shardwise.checkpoint.inspect import list_checkpoints, tree_of, verify
from shardwise.checkpoint.opening import find_native, open_checkpoint, open_path
from shardwise.errors import CheckpointDamagedError, CheckpointError
from tests.unit.checkpoint_support import TINY, damage, read_whole, tiny_facts, tiny_tensors, write_run

EMBED, SEEN = Key("weight", "embed.weight"), Key("buffer", "seen")


# ---- one


def test_tensors_by_module(tmp_path: Path) -> None:
    root = tree_of(write_run(tmp_path))
    assert list(root.modules) == ["embed", "blocks"]
    assert list(root.leaves) == ["scale", "table", "turn", "nothing", "mean", "seen"]
    assert list(root.modules["blocks"].modules) == ["0", "1"]
    leaf = root.modules["embed"].leaves["weight"]
    assert (leaf.key, leaf.spec.shape, leaf.computed, leaf.tied) == (EMBED, (7, 5), "bfloat16", ["head.weight"])
    assert leaf.state == 2 * 7 * 5 * 4
    tensors = tiny_tensors()
    assert root.nbytes == sum(value.nbytes for key, value in tensors.items() if key.kind != "optimizer")
    assert root.state == sum(value.nbytes for key, value in tensors.items() if key.kind == "optimizer")
    block = root.modules["blocks"].modules["0"]
    assert (block.elements, block.nbytes, block.state) == (30, 120, 200)


# ---- all of a run


def test_a_run_lists_its_checkpoints_the_newest_first(tmp_path: Path) -> None:
    facts = tiny_facts()
    for number, tag in enumerate(("one", "two", "three")):
        facts.counters["global_steps"] = number
        write_run(tmp_path, tag, facts=facts)
        if tag == "one":
            damage(tmp_path / tag / "index.json", 300)
        os.utime(tmp_path / tag / "index.json", (1000 + number, 1000 + number))
    (tmp_path / "latest").write_text("two")
    found = list_checkpoints(tmp_path)
    assert [(each.tag, each.step, each.latest, each.saved_at) for each in found] == [
        ("three", 2, False, 1002.0),
        ("two", 1, True, 1001.0),
        ("one", None, False, 1000.0),
    ]
    assert found[0].nbytes == sum(path.stat().st_size for path in (tmp_path / "three").iterdir() if path.name != "index.json")
    assert "index.json is damaged" in found[2].problem
    assert not found[0].problem
    assert list_checkpoints(tmp_path / "nothing") == []


# ---- from a path


def test_a_run_and_one_checkpoint_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "one")
    write_run(tmp_path, "two")
    for path, tag, expected in [
        (tmp_path, None, "two"),
        (tmp_path, "one", "one"),
        (tmp_path / "one", None, "one"),
        (tmp_path / "one", "one", "one"),
    ]:
        source = open_path(path, tag)
        assert source.where == str(tmp_path / expected)
        source.close()
    monkeypatch.chdir(tmp_path / "one")
    assert open_path(".").where == str(tmp_path / "one")


def test_a_tag_may_be_of_another_program(tmp_path: Path) -> None:
    source = write_run(tmp_path, "ours")
    export(source, tmp_path / "theirs", format="dcp")
    for tag in ("ours", "theirs"):
        opened, client_state = open_checkpoint(tmp_path, tag)
        assert torch.equal(read_whole(opened, EMBED), tiny_tensors()[EMBED])
        assert client_state == {}
        opened.close()
    with pytest.raises(CheckpointDamagedError, match="no checkpoint 'nobodys'"):
        open_checkpoint(tmp_path, "nobodys")
    assert open_path(tmp_path, "ours").where == open_path(tmp_path).where
    assert torch.equal(read_whole(open_path(tmp_path / "theirs"), EMBED), tiny_tensors()[EMBED])


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "one")
    with pytest.raises(CheckpointError, match=r"there is nothing at .*/nowhere"):
        open_path(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint 'two' in .*: expected one of: one"):
        open_path(tmp_path / "run", "two")
    with pytest.raises(CheckpointError, match="is one checkpoint, and a tag was given: found 'two'"):
        open_path(tmp_path / "run" / "one", "two")
    with pytest.raises(CheckpointError, match="this tag cannot be used"):
        open_path(tmp_path / "run", "../one")
    (tmp_path / "run" / "one" / "index.json").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"index\.json is missing"):
        open_path(tmp_path / "run" / "one")
    (tmp_path / "empty").mkdir()
    assert find_native(tmp_path / "empty") is None
    with pytest.raises(CheckpointError):
        open_path(tmp_path / "empty")


# ---- whether it is whole


def test_every_file_is_verified_and_every_damaged_one_named(tmp_path: Path) -> None:
    index = write_run(tmp_path, world=4, client_state=b"x" * 100).index
    told: list[int] = []
    findings = list(verify(tmp_path, progress=told.append, begin=told.append))
    assert [found.problem for found in findings] == [""] * 6
    assert [found.name for found in findings] == [
        "index.json",
        *(f"rank-0000{n}.safetensors" for n in range(4)),
        "client_state.pt",
    ]
    assert told[0] == sum(told[1:]) == index.nbytes
    directory = tmp_path / TINY
    damage(directory / "rank-00000.safetensors")
    (directory / "rank-00002.safetensors").unlink()
    os.truncate(directory / "client_state.pt", 99)
    findings = list(verify(directory))
    assert [found.name for found in findings if found.problem] == [
        "rank-00000.safetensors",
        "rank-00002.safetensors",
        "client_state.pt",
    ]
    for found in findings:
        assert not found.problem or found.name in found.problem
    damage(directory / "index.json", 300)
    with pytest.raises(CheckpointDamagedError, match=r"index\.json is damaged"):
        list(verify(directory))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_checkpoints_of_other_programs_are_read_through(kind: Any, tmp_path: Path) -> None:
    export(write_run(tmp_path / "run"), tmp_path / "out", format=kind)
    told: list[int] = []
    assert [found.problem for found in verify(tmp_path / "out", progress=told.append, begin=told.append)] == [""]
    assert told[0] == sum(told[1:])
    data = max((tmp_path / "out").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    try:
        problems = [found.problem for found in verify(tmp_path / "out")]
    except CheckpointError as error:  # some notice when they are opened
        problems = [str(error)]
    assert any(data.name in problem for problem in problems)


# ---- two


def compare(tmp_path: Path, change: dict[Key, Tensor | None], facts: Facts | None = None, **options: Any) -> Difference:
    """The difference to the same checkpoint with some tensors changed, added or left out, saved by another number of ranks."""
    one = write_run(tmp_path / "one")
    tensors = {key: value for key, value in {**tiny_tensors(), **change}.items() if value is not None}
    other = write_run(tmp_path / "other", "other", tensors, facts, world=3)
    return diff(one, other, **options)


def test_equal_ones_do_not_differ(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", world=3)
    told: list[int] = []
    found = diff(one, other, progress=told.append)
    assert found.same
    assert found.compared == len(tiny_tensors())
    assert sum(told) == bytes_to_compare(one, other) == sum(value.nbytes for value in tiny_tensors().values())


def test_values_that_differ_are_measured(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    embed = tensors[EMBED].clone()
    embed[2, 3] = 4.0
    embed[0, 0] += 1e-3
    moved = abs(tensors[EMBED][2, 3].item() - 4.0)
    found = compare(tmp_path, {EMBED: embed, SEEN: torch.tensor(42)})
    assert not found.same
    values = found.values
    assert [(each.key, each.differing) for each in values] == [(EMBED, 2), (SEEN, 1)]
    assert values[0].largest == pytest.approx(moved)
    assert values[0].relative == pytest.approx(moved / 4.0, rel=0.3)
    assert (values[1].largest, values[1].relative) == (1.0, pytest.approx(1 / 42))


def test_numbers_that_are_none_and_large_integers(tmp_path: Path) -> None:
    nan, inf, big = float("nan"), float("inf"), 1 << 60
    floats, whole = Key("weight", "floats"), Key("weight", "whole")

    def write(name: str, first: list[float], second: list[int]) -> Source:
        tensors = {floats: torch.tensor(first), whole: torch.tensor(second)}
        return write_run(tmp_path / name, "t", tensors, Facts())

    one = write("one", [nan, nan, inf, -0.0, 1.0], [big, 5])
    other = write("other", [nan, 1.0, -inf, 0.0, inf], [big + 1, 5])
    values = diff(one, other).values
    assert (values[0].differing, values[0].largest, values[0].relative) == (3, inf, inf)
    assert (values[1].key, values[1].differing) == (whole, 1)


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    scale, turn, new = Key("weight", "scale"), Key("weight", "turn"), Key("optimizer", "scale", "exp_avg")
    half = tiny_tensors()[EMBED].bfloat16()
    found = compare(
        tmp_path,
        {
            EMBED: half,
            scale: None,
            new: torch.ones(()),
            SEEN: torch.ones(2, dtype=torch.int64),
            Key("weight", "turn"): torch.ones(3),
        },
    )
    assert found.only_one == [scale]
    assert found.only_other == [new]
    assert [(key, one.shape, other.shape) for key, one, other in found.shapes] == [
        (turn, (3,), (3,)),
        (SEEN, (), (2,)),
    ]
    (only,) = found.values
    assert (only.key, only.one.dtype, only.other.dtype) == (EMBED, torch.float32, torch.bfloat16)
    assert 0 < only.differing <= 35
    assert 0 < only.relative <= 2**-8


def test_a_dtype_alone_is_a_difference(tmp_path: Path) -> None:
    (only,) = compare(tmp_path, {EMBED: tiny_tensors()[EMBED].double()}).values
    assert (only.differing, only.other.dtype) == (0, torch.float64)


def test_a_tied_weight_may_have_its_values_under_another_name(tmp_path: Path) -> None:
    facts = tiny_facts()
    facts.ties = {"embed.weight": "head.weight"}
    tensors = {Key(key.kind, key.name.replace("embed", "head"), key.state): value for key, value in tiny_tensors().items()}
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", "other", tensors, facts)
    found = diff(one, other, kinds=("weight", "buffer", "optimizer"))
    assert not (found.only_one or found.only_other or found.values)
    assert [fact.name for fact in found.facts] == ["ties.head.weight", "ties.embed.weight"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_an_export_is_compared_with_what_was_exported(kind: Any, tmp_path: Path) -> None:
    """Also where a format does not tell weights from buffers."""
    source = write_run(tmp_path / "run")
    export(source, tmp_path / "out", format=kind, dtype="fp32")
    found = diff(source, open_path(tmp_path / "out"), kinds=("weight", "buffer"))
    assert not (found.only_one or found.only_other or found.shapes)
    assert {each.key.name for each in found.values} == {"blocks.1.linear.weight", "blocks.1.linear.bias"}  # bf16 and fp64
    assert not any(each.differing for each in found.values)


def test_facts_and_kinds(tmp_path: Path) -> None:
    facts = tiny_facts()
    facts.counters["global_steps"] = 6
    facts.groups[0]["options"]["lr"] = 0.1
    facts.loss_scale = {}  # nothing to compare with
    found = compare(tmp_path, {EMBED: None}, facts)
    assert [(each.name, each.one, each.other) for each in found.facts] == [
        ("counters.global_steps", 3, 6),
        ("groups[0].options.lr", 0.05, 0.1),
    ]
    one, other = open_path(tmp_path / "one"), open_path(tmp_path / "other")
    assert diff(one, other, kinds=("buffer",)).same
    assert not diff(one, other, kinds=("weight",)).same
