"""Whole fp32 weights under the names that scripts written for DeepSpeed call."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.safetensors import read_header
from shardwise.errors import CheckpointError
from shardwise.utils import safe_get_full_fp32_param
from shardwise.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.unit.checkpoint_support import TINY, tiny_tensors, write_run

WHOLE = {
    key.name: value.float() if value.is_floating_point() else value
    for key, value in tiny_tensors().items()
    if key.kind in ("weight", "buffer")
}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_the_module_is_where_it_is_looked_for() -> None:
    assert shardwise.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint is get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(AttributeError, match=r"module 'shardwise\.utils' has no attribute 'zero_to_fp23'"):
        _ = shardwise.utils.zero_to_fp23


def test_weights_and_buffers_come_whole_and_wide(tmp_path: Path) -> None:
    write_run(tmp_path, "other").close()
    write_run(tmp_path).close()
    for path, tag in ((tmp_path, None), (str(tmp_path), TINY), (tmp_path / TINY, None)):
        found = get_fp32_state_dict_from_zero_checkpoint(path, tag)
        assert found["head.weight"] is found["embed.weight"]
        del found["head.weight"]
        same(found, WHOLE)


def test_frozen_weights_can_be_left_out(tmp_path: Path) -> None:
    """What no optimizer updated is frozen; buffers stay."""
    write_run(tmp_path).close()
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(found) == {"embed.weight", "head.weight", "blocks.0.linear.weight", "mean", "seen"}


def open_files(directory: Path) -> list[str]:
    """Files under a directory that this process has open."""
    return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if directory in link.resolve().parents]


def test_lazy_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path).close()
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    lazy = found["blocks.1.linear.weight"]
    assert (lazy.shape, lazy.dtype) == (torch.Size((5, 5)), torch.float32)
    same({name: value.contiguous() for name, value in found.items() if name != "head.weight"}, WHOLE)
    assert open_files(tmp_path)
    del found, lazy
    gc.collect()
    assert open_files(tmp_path) == []


def test_conversion_to_files(tmp_path: Path) -> None:
    """Also into the directory of the run, where scripts put them."""
    write_run(tmp_path).close()
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path)
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    same(found, {**WHOLE, "head.weight": WHOLE["embed.weight"]})
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path, safe_serialization=True)
    assert not (tmp_path / "pytorch_model.bin").exists()
    assert read_header(tmp_path / "model.safetensors").tensors.keys() == WHOLE.keys()
    convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "out", max_shard_size="150B", tag=TINY, exclude_frozen_parameters=True
    )
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"]) == {"embed.weight", "head.weight", "blocks.0.linear.weight", "mean", "seen"}


class Tied(nn.Module):
    """A model with a tied, a frozen and a missing weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 5)
        self.first.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.rand(5))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.first(self.embed(words)) + self.mean.to(self.embed.weight.dtype))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_an_engine_has_saved(stage: int, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    with shardwise.initialize(model=Tied(), config=config)[0] as engine:
        engine.backward(engine(torch.arange(6).view(2, 3)).float().square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters(remove_duplicate=False)}
        expected = {**masters, "mean": engine.module.mean.float()}
    same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected)
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(trained) == {"embed.weight", "head.weight", "mean"}
    model = Tied()
    assert load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert model.head.weight is model.embed.weight
    same(model.state_dict(), expected)


def test_what_does_not_fit_is_left_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path).close()
    model = Tied()
    before = model.first.weight.detach().clone()
    load_state_dict_from_zero_checkpoint(model, tmp_path)
    assert torch.equal(model.embed.weight, WHOLE["embed.weight"])
    assert torch.equal(model.first.weight, before)
    assert "not in the checkpoint, left as it is: first.weight, first.bias" in caplog.text
    assert "blocks.0.linear.weight" in caplog.text
    model.embed = nn.Embedding(8, 5)
    with pytest.raises(CheckpointError, match=r"'embed\.weight' has another shape .* expected \(8, 5\).* found \(7, 5\)"):
        load_state_dict_from_zero_checkpoint(model, tmp_path)
