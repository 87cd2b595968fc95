"""Checkpoints that DeepSpeed wrote, against what it said was in them; invented ones, against a plain model of the layout."""

from __future__ import annotations

import logging
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint.contents import Key
from shardwise.checkpoint.foreign import DeepSpeedSource, open_foreign
from shardwise.checkpoint.foreign.deepspeed_whole import assign
from shardwise.errors import CheckpointError
from shardwise.optim.loss_scale import LossScale
from tests.unit.foreign_support import Evil, count_bytes, interval, read_safetensors, same, whole

ARCHIVE = Path(__file__).parents[1] / "data" / "deepspeed.tar.xz"
with tarfile.open(ARCHIVE) as _archive:
    CASES = sorted({name.partition("/")[0] for name in _archive.getnames()})
DECAYED = ["embed.weight", "middle.0.weight", "middle.2.weight"]
OTHERS = ["gain", "middle.0.bias", "scale"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        for member in archive.getmembers():
            data = archive.extractfile(member)
            assert data is not None and ".." not in member.name
            (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(data.read())
    return folder


def copy(made: Path, case: str, to: Path) -> Path:
    """A checkpoint that a test may spoil."""
    shutil.copytree(made / case, to / case)
    return to / case


def expected(folder: Path) -> tuple[dict[Key, Tensor], Any]:
    tensors, facts = read_safetensors(folder / "expected.safetensors")
    found: dict[Key, Tensor] = {}
    for text, tensor in tensors.items():
        kind, _, name = text.partition("/")
        found[
            Key("buffer", name)
            if kind == "buffer"
            else Key("weight", name)
            if kind == "weight"
            else Key("optimizer", name, kind)
        ] = tensor
    return found, facts


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_what_deepspeed_gathers(made: Path, case: str) -> None:
    source = open_foreign(made / case)
    assert isinstance(source, DeepSpeedSource)
    tensors, _ = expected(made / case)
    if "nofrozen" in case:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.name.startswith("frozen")}
    assert set(source.specs) == set(tensors)
    for key, tensor in tensors.items():
        assert same(whole(source, key), tensor), key
        flat, count = tensor.reshape(-1), tensor.numel()
        for start in range(0, count, 3):
            stop = min(count, start + 7)
            assert torch.equal(interval(source, key, start, stop), flat[start:stop]), (key, start)


@pytest.mark.parametrize("case", CASES)
def test_every_fact_is_what_deepspeed_had(made: Path, case: str) -> None:
    source = DeepSpeedSource(made / case)
    facts = source.facts
    _, told = expected(made / case)
    stage, precision, world, *_ = case.split("-")
    assert facts.counters == {**told["counters"], "micro_steps": told["counters"]["global_steps"]}
    assert facts.steps == dict.fromkeys([*DECAYED, *OTHERS], told["steps"])
    assert facts.ties == {"head.weight": "embed.weight"}
    assert [sorted(group["parameters"]) for group in facts.groups] == [DECAYED, OTHERS]
    if "elastic" not in case:  # then DeepSpeed does not save options
        assert [group["options"]["lr"] for group in facts.groups] == told["lr"]
        assert [group["options"]["weight_decay"] for group in facts.groups] == [0.1, 0.0]
    assert facts.schedule.get("last_batch_iteration") == told["schedule"].get("last_batch_iteration")
    if told["schedule"]:
        assert facts.schedule["last_epoch"] == told["counters"]["global_steps"] - told["counters"]["skipped_steps"]
    assert facts.loss_scale.get("scale") == told["loss_scale"]
    name = {"bf16": "BF16", "fp16": "F16"}.get(precision)
    assert facts.weight_dtypes == (dict.fromkeys([*DECAYED, *OTHERS], name) if name else {})
    assert (facts.origin["zero_stage"], facts.origin["world_size"]) == (int(stage), int(world))
    assert (facts.origin["version"], facts.origin["left_out"]) == (told["version"], [])
    assert source.client_state == {"note": "by the user"}


def test_a_loss_scale_goes_on_where_it_was(made: Path) -> None:
    """Seven overflows with a hysteresis of 2 spend it once and then halve 2**20 six times."""
    scale = LossScale(2.0**20, dynamic=True, window=3, hysteresis=2, left=2)
    for _ in range(1):
        scale.update(False)
    for _ in range(7):
        scale.update(True)
    saved = DeepSpeedSource(made / "2-fp16-2-elastic").facts.loss_scale
    assert saved == {**scale.state_dict(), "stuck": 0}


def test_reading_a_slice_reads_little(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DeepSpeedSource(made / "2-fp32-3")
    key = Key("weight", "embed.weight")
    whole(source, key)  # finds out where it is
    with count_bytes(monkeypatch) as sizes:
        interval(source, key, 3, 8)
    assert sum(sizes) == 5 * 4


def test_one_checkpoint_can_be_given_by_tag_or_directly(made: Path) -> None:
    for source in (DeepSpeedSource(made / "2-bf16-2" / "global_step3"), DeepSpeedSource(made / "2-bf16-2", "global_step3")):
        assert source.facts.counters["global_steps"] == 3
    assert open_foreign(made / "2-bf16-2" / "latest") is None
    assert open_foreign(made) is None
    with pytest.raises(CheckpointError, match="is no DeepSpeed checkpoint"):
        DeepSpeedSource(made / "2-bf16-2", "global_step4")


@pytest.mark.parametrize(
    "case, file",
    [
        ("2-fp32-3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("1-bf16-3", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("1-fp32-2", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("1-fp32-2", "mp_rank_00_model_states.pt"),
        ("3-fp32-2", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("3-bf16-3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_file_is_named(made: Path, tmp_path: Path, case: str, file: str) -> None:
    folder = copy(made, case, tmp_path)
    (folder / "global_step3" / file).unlink()
    with pytest.raises(CheckpointError, match=f"[/ ]{file}"):
        open_foreign(folder)


@pytest.mark.parametrize(
    "file, problem",
    [
        ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "has files of another run: zero_pp_rank_2_mp"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "two runs"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "two runs"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "parallel ranks"),
        ("mp_rank_01_model_states.pt", "parallel ranks"),
        ("layer_00-model_00-model_states.pt", "parallel ranks"),
        ("layer_1_expert_0_mp_rank_00_model_states.pt", "parallel ranks"),
    ],
)
def test_files_of_others_are_refused(made: Path, tmp_path: Path, file: str, problem: str) -> None:
    folder = copy(made, "1-fp32-2", tmp_path)
    shutil.copy(folder / "global_step3" / "mp_rank_00_model_states.pt", folder / "global_step3" / file)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_foreign(folder)
    assert file in str(caught.value)


@pytest.mark.parametrize("tag", ["../1-fp32-2/global_step3", "/etc", "..", "", "global_step3/../..", "a\0b", "a\\b"])
def test_a_tag_cannot_lead_elsewhere(made: Path, tmp_path: Path, tag: str) -> None:
    folder = copy(made, "1-fp32-2", tmp_path)
    (folder / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="latest is damaged: expected the name of a file in the same directory"):
        open_foreign(folder)


def test_a_file_that_runs_code_is_refused(made: Path, tmp_path: Path) -> None:
    folder, mark = copy(made, "1-fp32-2", tmp_path), tmp_path / "mark"
    torch.save({"module": {}, "evil": Evil(mark)}, folder / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt cannot be trusted.*posix.system"):
        open_foreign(folder)
    assert not mark.exists()


@pytest.mark.parametrize("case", ["1-fp32-2", "3-bf16-3"])
def test_a_file_cut_short_is_named(made: Path, tmp_path: Path, case: str) -> None:
    folder = copy(made, case, tmp_path)
    for file in sorted((folder / "global_step3").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match=file.name):
            open_foreign(folder)
        file.write_bytes(data)
    source = open_foreign(folder)
    assert source is not None
    for file in (folder / "global_step3").iterdir():
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="is damaged"):
        whole(source, Key("weight", "embed.weight"))


# Invented checkpoints


def flat_parts(tensors: list[Tensor], world: int, trim: bool) -> list[Tensor]:
    """Stages 1 and 2: end to end, padded to 2 elements per rank, in equal parts; the padding itself need not be stored."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    padded = torch.cat([flat, flat.new_full((-flat.numel() % (2 * world),), -1.0)])
    size = padded.numel() // world
    parts = [padded[rank * size : (rank + 1) * size] for rank in range(world)]
    return [part[: max(0, flat.numel() - rank * size)] for rank, part in enumerate(parts)] if trim else parts


def equal_parts(tensor: Tensor, world: int) -> list[Tensor]:
    """Stage 3: one tensor in equal parts, the last ones padded."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_full((size * world - flat.numel(),), -1.0)])
    return [padded[rank * size : (rank + 1) * size] for rank in range(world)]


def invent(folder: Path, groups: list[dict[str, Tensor]], stage: int, world: int, subgroups: int = 1) -> None:
    """What DeepSpeed would write; the moment of each weight is its double."""
    shapes: list[dict[str, torch.Size]] = []
    masters: list[list[Tensor]] = []  # by flat group, then rank
    members: list[list[int]] = []
    for group in groups:
        names = list(group)
        cuts = [names[at::subgroups] for at in range(subgroups)] if stage == 3 else [names]
        members.append([])
        for cut in filter(None, cuts):
            members[-1].append(len(shapes))
            shapes.append({name: group[name].shape for name in cut})
            tensors = [group[name] for name in cut]
            if stage == 3:
                each = [equal_parts(tensor, world) for tensor in tensors]
                masters.append([torch.cat([parts[rank] for parts in each]) for rank in range(world)])
            else:
                masters.append(flat_parts(tensors, world, trim=stage == 2))
    frozen = {"frozen": torch.arange(7.0)}
    for rank in range(world):
        base = {
            "state": {at: {"step": 5, "exp_avg": 2 * parts[rank], "other": 1.5} for at, parts in enumerate(masters)},
            "param_groups": [{"lr": 0.1 * at, "params": held} for at, held in enumerate(members)],
        }
        mine = [parts[rank] for parts in masters]
        optimizer = {"zero_stage": stage, "partition_count": world if stage == 3 else [world] * len(groups)}
        if stage == 3:
            optimizer |= {"fp32_flat_groups": mine, "optimizer_state_dict": base}
        else:
            optimizer |= {"single_partition_of_fp32_groups": mine, "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        fragments = {name: equal_parts(each, world)[rank] if stage == 3 else each for name, each in frozen.items()}
        model = {
            "module": {"buffer": torch.ones(2)},
            "buffer_names": ["buffer"],
            "param_shapes": shapes,
            "shared_params": {},
            "frozen_param_shapes": {name: each.shape for name, each in frozen.items()},
            "frozen_param_fragments": fragments,
        }
        if stage == 3 or rank == 0:
            torch.save(model, folder / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")


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


GROUPS = [{"a": torch.randn(5, 3), "b": torch.randn(4)}, {"c": torch.randn(7)}]


def change(path: Path, edit: Any) -> None:
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


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


def save_whole(path: Path, optimizer: dict[str, Any], module: dict[str, Tensor]) -> None:
    state = {"module": module, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "shared_params": None}
    torch.save(state, path / "mp_rank_00_model_states.pt")


def adam_state(tensors: list[Tensor]) -> dict[int, dict[str, Any]]:
    return {at: {"step": torch.tensor(2.0), "exp_avg": 2 * tensor.float()} for at, tensor in enumerate(tensors)}


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
