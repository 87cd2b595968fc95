"""Checkpoints that DeepSpeed wrote, against what it said was in them; invented ones, against a plain model of the layout."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.contents import Key
from shardwise.checkpoint.foreign import DeepSpeedSource, open_foreign
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
