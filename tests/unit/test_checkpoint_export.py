"""Whole weights for other programs: what is in the files, and that a directory is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint import Facts, Key, Spec
from shardwise.checkpoint import outfiles as outfiles_module
from shardwise.checkpoint.contents import DTYPES
from shardwise.checkpoint.export import export, parse_size, plan_export
from shardwise.checkpoint.opening import open_path
from shardwise.checkpoint.safetensors import read_header
from shardwise.checkpoint.streaming import Converted, chunks
from shardwise.errors import CheckpointDamagedError, CheckpointError
from tests.unit.checkpoint_support import TINY, damage, read_whole, tiny_facts, tiny_tensors, write_run

WEIGHTS = {key.name: value for key, value in tiny_tensors().items() if key.kind in ("weight", "buffer")}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, as a reader would that maps it into memory: each at a multiple of its width."""
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    data, end, found = path.read_bytes(), None, {}
    for name, stored in header.tensors.items():
        assert end in (None, stored.start), "there are no gaps"
        assert stored.start % stored.dtype.itemsize == 0 or stored.dtype.is_complex
        raw = bytearray(data[stored.start : stored.stop])
        flat = torch.frombuffer(raw, dtype=stored.dtype) if raw else torch.empty(0, dtype=stored.dtype)
        found[name], end = flat.view(stored.shape), stored.stop
    assert end == len(data)
    return found


def read_shards(directory: Path, index: str) -> dict[str, Any]:
    described = json.loads((directory / index).read_text())
    where: dict[str, str] = described["weight_map"]
    found: dict[str, Any] = {}
    for file in sorted(set(where.values())):
        path = directory / file
        tensors = read_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        assert {name for name, each in where.items() if each == file} == tensors.keys()
        found.update(tensors)
    once = {value.data_ptr(): value.nbytes for value in found.values() if isinstance(value, Tensor) and value.numel()}
    assert described["metadata"] == {"total_size": sum(once.values())}
    return found


def same(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def as_computed() -> dict[str, Tensor]:
    expected = dict(WEIGHTS)
    expected["embed.weight"] = expected["embed.weight"].bfloat16()
    expected["blocks.0.linear.weight"] = expected["blocks.0.linear.weight"].half()
    return expected


def as_dtype(dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights converted; buffers, integers and complex numbers as they are."""
    kept = ("mean", "seen")
    return {n: v.to(dtype) if v.is_floating_point() and n not in kept else v for n, v in WEIGHTS.items()}


# ---- what is in the files


def test_safetensors_have_the_dtypes_of_the_model_and_tied_weights_once(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    plan = export(source, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    same(read_file(tmp_path / "out" / "model.safetensors"), as_computed())
    assert plan.notes == ["tied weights are there once, under the name in brackets: head.weight (embed.weight)"]


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_dtype_is_that_of_all_floating_point_weights(dtype: str, wanted: torch.dtype, tmp_path: Path) -> None:
    export(write_run(tmp_path / "run", world=3), tmp_path / "out", dtype=dtype)
    same(read_file(tmp_path / "out" / "model.safetensors"), as_dtype(wanted))


def test_torch_files_have_all_names_and_what_is_no_tensor(tmp_path: Path) -> None:
    facts = tiny_facts()
    facts.extra = {"gate._extra_state": {"seen": [1, 2]}}
    export(write_run(tmp_path / "run", facts=facts), tmp_path / "out", format="torch")
    path = tmp_path / "out" / "pytorch_model.bin"
    for mapped in (False, True):
        found = torch.load(path, mmap=mapped, weights_only=True)
        assert found.pop("gate._extra_state") == {"seen": [1, 2]}
        assert found["head.weight"].data_ptr() == found.pop("embed.weight").data_ptr()
        found["embed.weight"] = found.pop("head.weight")
        same(found, as_computed())
    assert zipfile.ZipFile(path).testzip() is None  # checksums, too


@pytest.mark.parametrize(
    ("kind", "stem", "suffix"), [("safetensors", "model", "safetensors"), ("torch", "pytorch_model", "bin")]
)
def test_shards_are_as_large_as_allowed_and_indexed(kind: Any, stem: str, suffix: str, tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    plan = export(source, tmp_path / "out", format=kind, dtype="fp32", max_shard_size=120)
    names = [file.name for file in plan.files]
    assert names == [f"{stem}-{number:05d}-of-{len(names):05d}.{suffix}" for number in range(1, len(names) + 1)]
    assert len(names) > 2
    assert names_in(tmp_path / "out") == sorted([*names, f"{stem}.{suffix}.index.json"])
    for file in plan.files:
        assert file.nbytes <= 120 or len(file.tensors) == 1
    found = read_shards(tmp_path / "out", f"{stem}.{suffix}.index.json")
    if kind == "torch":
        assert torch.equal(found.pop("head.weight"), WEIGHTS["embed.weight"])
    same(found, as_dtype(torch.float32))


def test_a_plan_reads_and_writes_nothing(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    plan = plan_export(source, max_shard_size="120B")
    assert source.stats.bytes_read == 0
    assert names_in(tmp_path) == ["run"]
    assert plan == export(source, tmp_path / "out", max_shard_size=120)
    assert sum(file.nbytes for file in plan.files) == plan.nbytes == sum(value.nbytes for value in as_computed().values())


def test_what_is_not_in_it_is_said(tmp_path: Path) -> None:
    facts = Facts(excluded=["frozen.weight"], extra={"gate._extra_state": 1})
    notes = " ".join(plan_export(write_run(tmp_path, facts=facts)).notes)
    assert "frozen.weight" in notes
    assert "gate._extra_state" in notes


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_dcp_has_masters_and_optimizer_state(dtype: str | None, wanted: torch.dtype, tmp_path: Path) -> None:
    told: list[int] = []
    source = write_run(tmp_path / "run")
    export(source, tmp_path / "out", format="dcp", dtype=dtype, progress=told.append)
    assert sum(told) >= plan_export(source, format="dcp", dtype=dtype).nbytes
    state: dict[str, Any] = {"embed.weight": torch.empty(7, 5, dtype=wanted), "head.weight": torch.empty(7, 5, dtype=wanted)}
    moment = torch.empty(7, 5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp: Any = torch.distributed.checkpoint
        dcp.load({"model": state, "optim": {"state": {"embed.weight": {"exp_avg": moment}}}}, checkpoint_id=tmp_path / "out")
    assert torch.equal(state["embed.weight"], WEIGHTS["embed.weight"].to(wanted))
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert torch.equal(moment, tiny_tensors()[Key("optimizer", "embed.weight", "exp_avg")])
    other = open_path(tmp_path / "out")
    assert other.specs[Key("weight", "embed.weight")].dtype == wanted
    with pytest.raises(CheckpointError, match="is not empty"):
        export(source, tmp_path / "out", format="dcp")
    export(source, tmp_path / "out", overwrite=True)
    assert names_in(tmp_path / "out") == ["model.safetensors"]


def test_progress_is_told_of_every_byte(tmp_path: Path) -> None:
    told: list[int] = []
    plan = export(write_run(tmp_path / "run"), tmp_path / "out", progress=told.append)
    assert sum(told) == plan.nbytes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"format": "onnx"}, "expected one of safetensors, torch, dcp, found 'onnx'"),
        ({"dtype": "int8"}, "expected one of fp32, bf16, fp16"),
        ({"max_shard_size": "5 apples"}, "5GB or 500MiB, found '5 apples'"),
        ({"max_shard_size": 0}, "max_shard_size"),
    ],
)
def test_wrong_options_are_refused(options: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        export(write_run(tmp_path / "run"), tmp_path / "out", **options)
    assert expected in str(caught.value)
    assert names_in(tmp_path) == ["run"]


def test_sizes() -> None:
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size(" 1.5 MiB ") == 3 << 19
    assert parse_size("100") == parse_size(100) == 100


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        plan_export(write_run(tmp_path, tensors={Key("buffer", "b"): torch.ones(2)}, facts=Facts()))


def test_an_unknown_dtype_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is of an unknown dtype: found 'load'"):
        plan_export(write_run(tmp_path, facts=Facts(weight_dtypes={"embed.weight": "load"})))


# ---- the directory


def test_what_is_there_stays_unless_told_otherwise(tmp_path: Path) -> None:
    source, out = write_run(tmp_path / "run"), tmp_path / "out"
    export(source, out, max_shard_size=120)
    (out / "config.json").write_text("{}")
    before = names_in(out)
    with pytest.raises(CheckpointError, match=r"out is not empty: expected an empty directory, found config\.json"):
        export(source, out)
    assert names_in(out) == before
    export(source, out, format="torch", overwrite=True)
    assert names_in(out) == ["config.json", "pytorch_model.bin"]  # no weights that another reader would prefer
    assert (out / "config.json").read_text() == "{}"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        export(source, tmp_path / "file")


def test_an_empty_directory_and_a_link_are_filled(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    export(source, tmp_path / "out")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    for name in ("out", "real"):
        same(read_file(tmp_path / name / "model.safetensors"), as_computed())


def test_directories_inside_stay(tmp_path: Path) -> None:
    """As when the weights go beside the checkpoints of a run."""
    source = write_run(tmp_path)
    export(source, tmp_path, max_shard_size=120, overwrite=True)
    export(source, tmp_path, overwrite=True)
    assert names_in(tmp_path) == [TINY, "latest", "model.safetensors"]
    same(read_file(tmp_path / "model.safetensors"), as_computed())
    assert torch.equal(read_whole(write_run(tmp_path, "again"), Key("weight", "scale")), WEIGHTS["scale"])


def test_a_damaged_checkpoint_gives_no_directory(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    for path in (tmp_path / "run" / TINY).glob("rank-*"):
        damage(path)
    with pytest.raises(CheckpointDamagedError, match=r"rank-00000\.safetensors is damaged"):
        export(source, tmp_path / "out")
    assert names_in(tmp_path) == ["run"]


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_run(tmp_path / "run")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(outfiles_module.os, "pwrite", full)
        with pytest.raises(CheckpointError, match="out cannot be written: the disk is full: expected room for"):
            export(source, tmp_path / "out")
    assert names_in(tmp_path) == ["run"]
    export(source, tmp_path / "out")


KILLED = """
import os, signal, sys
from shardwise.checkpoint import Folder, NativeSource
from shardwise.checkpoint.export import export

def kill(count, seen=[0]):
    seen[0] += count
    if seen[0] > 200:
        os.kill(os.getpid(), signal.SIGKILL)

export(NativeSource(Folder(sys.argv[1]), sys.argv[2]), sys.argv[3], progress=kill)
"""


def test_a_kill_leaves_no_directory_and_the_next_export_tidies_up(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), TINY, str(tmp_path / "out")]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(names_in(tmp_path)) == 2  # what was begun
    export(source, tmp_path / "out")
    assert names_in(tmp_path) == ["out", "run"]


# ---- memory


PEAK = """
import sys
from pathlib import Path
from shardwise.checkpoint import Folder, NativeSource
from shardwise.checkpoint.export import export

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

run, tag, out = sys.argv[1:]
for kind, dtype in (("safetensors", "fp32"), ("safetensors", "bf16"), ("torch", "bf16")):
    export(NativeSource(Folder(run), "small"), f"{out}/small-{kind}-{dtype}", format=kind, dtype=dtype)
    source = NativeSource(Folder(run), tag)
    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS:")
    export(source, f"{out}/{kind}-{dtype}", format=kind, dtype=dtype)
    print(kind, dtype, field("VmHWM:") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no high-water mark")
def test_less_than_one_tensor_is_in_memory(tmp_path: Path) -> None:
    size = 80_000_000
    large = {Key("weight", f"layer.{number}"): torch.full((size // 4000, 1000), float(number)) for number in range(2)}
    write_run(tmp_path / "run", "large", large, Facts()).close()
    write_run(tmp_path / "run", "small", {Key("weight", "w"): torch.ones(3)}, Facts()).close()
    command = [sys.executable, "-c", PEAK, str(tmp_path / "run"), "large", str(tmp_path / "out")]
    told = subprocess.run(command, timeout=120, check=True, capture_output=True, text=True).stdout
    assert [0 <= int(line.split()[-1]) < size for line in told.splitlines()] == [True] * 3, told


# ---- passing through


SHAPES = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=6
    ),
    size=st.integers(16, 200),
    world=st.integers(1, 3),
)
def test_all_values_pass_through_little_memory(
    shapes: list[tuple[list[int], str]], size: int, world: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors: dict[Key, Tensor] = {}
    for number, (shape, dtype) in enumerate(shapes):
        spec = Spec(tuple(shape), DTYPES[dtype])
        raw = torch.randint(0, 2, (spec.nbytes,), dtype=torch.uint8)
        tensors[Key("weight", str(number))] = (
            raw.view(spec.dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=spec.dtype)
        )
    source = write_run(tmp_path_factory.mktemp("run"), "t", tensors, Facts(), world=world)
    found: dict[Key, bytes] = dict.fromkeys(tensors, b"")
    for parts in chunks(source, tensors, size):
        assert sum(part.values.nbytes for part in parts) <= size
        for part in parts:
            found[part.key] += bytes(part.values.view(torch.uint8).numpy())
    source.close()
    for key, value in tensors.items():
        flat = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        assert found[key] == bytes(flat.numpy()), key


def test_any_part_can_be_read_in_another_dtype(tmp_path: Path) -> None:
    value = torch.randn(5_000_000)
    key = Key("weight", "w")
    source = Converted(write_run(tmp_path, "t", {key: value}, Facts(), world=3), {key: torch.bfloat16})
    assert source.specs[key] == Spec((5_000_000,), torch.bfloat16)
    assert torch.equal(read_whole(source, key), value.bfloat16())
