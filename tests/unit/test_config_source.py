"""Where a configuration may come from, and what can be wrong before any key is looked at."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from pydantic import ValidationError

from shardwise.config import ConfigView, load_config
from shardwise.errors import ConfigError

RAW = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_dict_path_and_text_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps(RAW), encoding="utf-8")
    for source in (RAW, path, str(path), json.dumps(RAW), "\n  " + json.dumps(RAW, indent=2)):
        config = load_config(source, world_size=2)
        assert config.train_micro_batch_size_per_gpu == 4
        assert config.zero_optimization.stage == 2
        assert config.raw == RAW


def test_raw_is_the_dict_that_was_passed_and_is_not_changed() -> None:
    raw = {**copy.deepcopy(RAW), "bfloat16": {"enabled": True}, "amp": None, "gradient_clipping": "auto"}
    before = copy.deepcopy(raw)
    config = load_config(raw, world_size=2)
    assert config.raw is raw
    assert raw == before
    assert config.optimizer is not None
    assert config.optimizer.params is not raw["optimizer"]["params"]


def test_other_mappings_are_read() -> None:
    assert load_config(MappingProxyType(RAW), world_size=1).train_batch_size == 8


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_text(json.dumps(RAW), encoding="utf-8-sig")
    assert load_config(path, world_size=1).train_batch_size == 8


def test_the_configuration_is_frozen() -> None:
    config = load_config(RAW, world_size=1)
    with pytest.raises(ValidationError):
        config.train_batch_size = 4  # pyright: ignore
    with pytest.raises(ValidationError):
        config.zero_optimization.stage = 3
    config.inert.append("x")
    config.warnings.append("x")
    config.batch_origin.clear()
    assert config.inert == config.warnings == []
    assert len(config.batch_origin) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: no such configuration file"):
        load_config(tmp_path / "nowhere.json", world_size=1)
    with pytest.raises(ConfigError, match=r"JSON text must start with \{"):
        load_config("train_batch_size: 8", world_size=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, world_size=1)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"{\xff\xfe")
    with pytest.raises(ConfigError, match=r"model\.bin: cannot be read: it is not UTF-8"):
        load_config(path, world_size=1)


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ('{\n  "train_batch_size": 8,\n  // how much\n}', "line 3, column 3", "JSON has no comments"),
        ('{\n  "train_batch_size": 8,\n  # how much\n}', "line 3, column 3", "JSON has no comments"),
        ('{"train_batch_size": 8 /* much */}', "line 1, column 24", "JSON has no comments"),
        ('{\n  "train_batch_size": 8,\n}', "line ", "comma before the closing bracket"),
        ("{'train_batch_size': 8}", "line 1, column 2", "Use double quotes"),
        ('{"fp16": {"enabled": True}}', "line 1, column 22", "Write true, false or null"),
        ('{"train_batch_size": 8', "line 1, column 23", ""),
    ],
)
def test_bad_json_says_where_and_what_to_do(tmp_path: Path, text: str, place: str, hint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    for source, name in ((path, "bad.json, "), (text, "the configuration text, ")):
        with pytest.raises(ConfigError) as caught:
            load_config(source, world_size=1)
        assert name + place in str(caught.value)
        assert hint in str(caught.value)


def test_the_top_level_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected an object in braces, found \[1, 2\]"):
        load_config(path, world_size=1)


def test_text_nested_without_end_is_no_crash() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config('{"a":' * 100_000, world_size=1)


def test_things_that_are_no_configuration_are_refused() -> None:
    for source in (7, [RAW], object()):
        with pytest.raises(ConfigError, match="expected a dict, the path of a JSON file, JSON text or None"):
            load_config(source, world_size=1)  # pyright: ignore


def test_duplicate_keys_are_problems_beside_the_others() -> None:
    text = """{
        "train_batch_size": 8, "train_batch_size": 16,
        "zero_optimization": {"stage": 2, "leaf_module": {"names": ["a"], "names": ["b"]}, "stage": 3, "stage": 1},
        "speed": 1
    }"""
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the configuration text has 4 problems:"
    told = "\n".join(lines)
    assert "train_batch_size stands 2 times in one object: found 8 and 16. Keep one." in told
    assert "zero_optimization.stage stands 3 times in one object: found 2 and 3 and 1" in told
    assert 'zero_optimization.leaf_module.names stands 2 times in one object: found ["a"] and ["b"]' in told
    assert "speed is not a known key" in told


def test_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "three.json"
    path.write_text('{"speed": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"three\.json has 1 problem:"):
        load_config(path, world_size=1)


def test_keys_are_text() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({1: 2, "fp16": {None: 1}, "optimizer": {"type": "NAdam", "params": {3: 4}}}, world_size=1)
    for name in ("1 is not a key", "fp16.None is not a key", "optimizer.params.3 is not a key"):
        assert name in str(caught.value)


def test_the_room_needs_no_torch_and_nobody_else_needs_pydantic() -> None:
    code = "import sys, shardwise.config; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "False"
    package = Path(sys.modules[ConfigView.__module__].__file__ or "").parents[1]
    for path in package.rglob("*.py"):
        if path.parent.name != "config":
            assert not re.search(r"^\s*(import|from) pydantic", path.read_text(encoding="utf-8"), re.MULTILINE), path
