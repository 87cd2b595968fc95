"""The parts of the example that need no engine: its model, its text, its command line."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise.config import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
    return example.parse_arguments()


def test_default_model_has_3_to_10_million_parameters(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(example, monkeypatch)
    model = example.GPT(args.layers, args.width, args.heads, args.context)  # type: ignore[attr-defined]
    assert 3e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 10e6


def test_model_sees_no_future(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(layers=2, width=32, heads=2, context=16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # the blocks begin as identities, which would hide a leak
    text = torch.randint(256, (2, 16))
    changed = text.clone()
    changed[:, 9:] = torch.randint(256, (2, 7))
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_text_is_the_same_each_time_and_held_out_files_are_not_trained_on(example: ModuleType) -> None:
    training, held_out = example.read_standard_library()
    assert (training, held_out) == example.read_standard_library()
    assert len(training) > 5 * len(held_out) > 500_000
    assert held_out[1000:3000] not in training


def test_a_python_without_its_source_is_told_so(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "python3.zip"))
    with pytest.raises(SystemExit, match="found too little Python source under"):
        example.read_standard_library()


def test_windows_cover_the_text_and_targets_are_one_ahead(example: ModuleType) -> None:
    windows = example.Windows(bytes(range(10)), context=3)
    assert len(windows) == 3
    text, targets = windows[2]
    assert text.tolist() == [6, 7, 8]
    assert targets.tolist() == [7, 8, 9]


def test_writing_is_repeatable_and_goes_beyond_the_context(example: ModuleType) -> None:
    model = example.GPT(layers=1, width=16, heads=2, context=8)
    written = [example.write(model, 8, "def ", length=40, seed=3) for _ in range(2)]
    assert written[0] == written[1]
    assert written[0].startswith("def ")
    assert len(written[0].encode(errors="replace")) >= 40


def test_command_line_is_put_over_the_configuration(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--stage=1", "--precision=bf16", "--steps=50", "--batch-size=2", "--accumulation=3", "--lr=1e-3", "--local_rank=1"]
    config = load_config(example.configuration(arguments(example, monkeypatch, *words)), world_size=2)
    assert config.zero_optimization.stage == 1
    assert config.bf16.enabled and not config.fp16.enabled
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps, config.train_batch_size) == (2, 3, 12)
    assert config.optimizer is not None and config.optimizer.params["lr"] == 1e-3


def test_without_options_the_configuration_is_the_file(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert example.configuration(arguments(example, monkeypatch)) == json.loads((EXAMPLES / "zero3.json").read_text())
