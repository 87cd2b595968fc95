"""Directories of `save_pretrained`, slice by slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.contents import Key
from shardwise.checkpoint.foreign import HuggingFaceSource, open_foreign
from shardwise.errors import CheckpointError
from tests.unit.foreign_support import Evil, count_bytes, interval, same, whole, write_safetensors

TENSORS = {
    "model.embed.weight": torch.randn(7, 5).bfloat16(),
    "model.norm.weight": torch.randn(5),
    "model.norm.running_mean": torch.randn(5),
    "model.steps": torch.tensor(3),
    "head.weight": torch.randn(5, 7).t(),
    "none": torch.empty(0, 4),
}
BUFFERS = {"model.norm.running_mean", "model.steps"}


def key_of(name: str) -> Key:
    return Key("buffer" if name in BUFFERS else "weight", name)


def save_index(folder: Path, name: str, listed: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))


def save_split(folder: Path, kind: str, cut: int = 2) -> dict[str, str]:
    """Two files and an index."""
    safe = kind == "safetensors"
    stem = "model" if safe else "pytorch_model"
    listed: dict[str, str] = {}
    items = list(TENSORS.items())
    for number, part in enumerate((items[:cut], items[cut:])):
        file = f"{stem}-0000{number + 1}-of-00002.{kind}"
        if safe:
            write_safetensors(folder / file, dict(part), {"format": "pt"})
        else:
            torch.save(dict(part), folder / file)
        listed |= dict.fromkeys((name for name, _ in part), file)
    save_index(folder, f"{stem}.{kind}.index.json", listed)
    return listed


@pytest.mark.parametrize("kind", ["safetensors", "bin", "safetensors split", "bin split"])
def test_all_values(tmp_path: Path, kind: str) -> None:
    if kind == "safetensors":
        write_safetensors(tmp_path / "model.safetensors", TENSORS, {"format": "pt"})
    elif kind == "bin":
        torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    else:
        save_split(tmp_path, kind.partition(" ")[0])
    source = open_foreign(tmp_path)
    assert isinstance(source, HuggingFaceSource)
    assert set(source.specs) == {key_of(name) for name in TENSORS}
    for name, tensor in TENSORS.items():
        assert same(whole(source, key_of(name)), tensor)
        assert torch.equal(interval(source, key_of(name), 0, tensor.numel() // 2), tensor.reshape(-1)[: tensor.numel() // 2])
    assert source.facts.origin == {"format": "huggingface", "kinds": "guessed"}
    source.close()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_slice_is_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    big: dict[str, Tensor] = {"a": torch.arange(10_000.0).view(100, 100), "b": torch.zeros(10_000)}
    if kind == "bin":
        torch.save(big, tmp_path / "pytorch_model.bin")
    else:
        write_safetensors(tmp_path / "model.safetensors", big)
    with count_bytes(monkeypatch) as sizes:
        source = HuggingFaceSource(tmp_path)
        interval(source, Key("weight", "a"), 0, 1)  # finds out where it is
        assert sum(sizes) < 4_000
        sizes.clear()
        found = interval(source, Key("weight", "a"), 250, 450)
    assert torch.equal(found, torch.arange(250.0, 450.0))
    assert sizes == [800]


def test_ties(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    torch.save({"one": weight, "other": weight, "rows": weight[:1]}, tmp_path / "pytorch_model.bin")
    source = HuggingFaceSource(tmp_path)
    assert source.facts.ties == {"other": "one"} and {key.name for key in source.specs} == {"one", "rows"}
    (tmp_path / "pytorch_model.bin").unlink()
    write_safetensors(tmp_path / "model.safetensors", {"one": weight}, {"format": "pt", "other": "one"})
    assert HuggingFaceSource(tmp_path).facts.ties == {"other": "one"}


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b", "a\0b", 3, None]
)
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {"a": torch.zeros(1)})
    save_index(folder, "model.safetensors.index.json", {"a": name})
    with pytest.raises(CheckpointError, match=r"index.json is damaged: expected the name of a file in the same directory"):
        open_foreign(folder)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_missing_files_and_tensors_are_named(tmp_path: Path, kind: str) -> None:
    listed = save_split(tmp_path, kind)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    second = sorted(set(listed.values()))[1]
    save_index(tmp_path, f"{stem}.{kind}.index.json", {**listed, "lost.weight": second})
    with pytest.raises(CheckpointError, match=rf"{second} is damaged.*lost.weight"):
        open_foreign(tmp_path)
    (tmp_path / second).unlink()
    with pytest.raises(CheckpointError, match=f"{second} is missing"):
        open_foreign(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        open_foreign(tmp_path)


def test_code_and_other_objects_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Evil(tmp_path / "mark")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be trusted"):
        open_foreign(tmp_path)
    assert not (tmp_path / "mark").exists()
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is damaged: expected a state dict, found list"):
        open_foreign(tmp_path)


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.zeros(100)})
    source = HuggingFaceSource(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: expected at least \d+ bytes, found the end"):
        whole(source, Key("weight", "a"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        whole(source, Key("weight", "a"))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("none")
    assert open_foreign(tmp_path) is None
    assert open_foreign(tmp_path / "readme.txt") is None
    assert open_foreign(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match=r"has no weights: expected one of model\.safetensors, "):
        HuggingFaceSource(tmp_path)


def test_parts_of_several_files_in_any_order(tmp_path: Path) -> None:
    from shardwise.checkpoint.contents import Part

    save_split(tmp_path, "safetensors")
    source = HuggingFaceSource(tmp_path)
    parts: list[Part] = []
    wanted: list[Tensor] = []
    for name in ("model.norm.weight", "head.weight", "model.embed.weight", "model.norm.weight"):
        spec = source.specs[key_of(name)]
        parts.append(Part(key_of(name), spec, 2, torch.empty(3, dtype=spec.dtype)))
        wanted.append(TENSORS[name].reshape(-1)[2:5])
    source.read(parts)
    assert all(torch.equal(part.values, values) for part, values in zip(parts, wanted, strict=True))
