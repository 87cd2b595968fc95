"""What is said about a configuration: the doctor's report, the JSON Schema, the reference page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import ConfigView, doctor_report, json_schema, load_config
from shardwise.config.reference import render_reference
from shardwise.config.report import diagnose
from shardwise.config.settle import all_paths
from shardwise.config.spellings import REFUSED, RENAMED
from shardwise.errors import ConfigError
from tests.unit.test_config_rules import HUGGING_FACE, filled

ROOT = Path(__file__).parents[2]


def rows(report: str) -> dict[str, list[str]]:
    """First cell -> other cells of every table row."""
    cells = (re.split(r"\s{2,}", line.strip()) for line in report.splitlines())
    return {row[0]: row[1:] for row in cells if len(row) > 1}


# --- the doctor -------------------------------------------------------------------------------------------------------


def test_the_report_tells_values_defaults_and_origins() -> None:
    raw = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "adamw", "params": {"lr": 3e-4, "fused": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7},
        "bfloat16": {"enabled": True},
        "sparse_gradients": False,
    }
    report = doctor_report(raw, world_size=2)
    found = rows(report)
    assert "resolved for 2 ranks" in report
    assert found["train_batch_size"] == ["64", "given"]
    origin = "derived from train_batch_size 64 / (train_micro_batch_size_per_gpu 4 x 2 data-parallel ranks)"
    assert found["gradient_accumulation_steps"] == ["8", origin]
    assert found["zero_optimization.stage"] == ["3", "default 0"]
    assert found["zero_optimization.stage3_prefetch_bucket_size"] == ["50000000", "the default"]
    assert found["optimizer.type"] == ['"AdamW"']
    assert found["optimizer.params.lr"] == ["0.0003"]
    assert found["Precision"] == ["bf16 with fp32 master weights"]
    assert found["Gradient clipping"] == ["to a norm of 1"]
    inert = report.partition("Keys without effect here\n")[2].partition("\n\n")[0].split()
    assert inert == ["zero_optimization.reduce_bucket_size", "optimizer.params.fused"]
    assert "bfloat16 is an older spelling of bf16" in report
    assert "sparse_gradients is switched off" in report
    assert "Problems" not in report


def test_the_report_of_nothing_is_the_defaults() -> None:
    report = doctor_report(None)
    found = rows(report)
    assert found["train_micro_batch_size_per_gpu"] == ["1", "default: no batch size was given"]
    assert found["Gradient clipping"][0].startswith("off (0")
    assert "Values given" not in report
    assert "resolved for 1 rank\n" in report


def test_of_a_bad_configuration_only_the_problems_are_told() -> None:
    """They are those of the error of the loader, and nothing stands around them."""
    raw = {"train_batch_size": "8", "zero_optimization": {"stage": 2, "reduce_scatter": True}, "gradient_clipp1ng": 1}
    verdict = diagnose(raw)
    assert not verdict.healthy
    with pytest.raises(ConfigError) as caught:
        load_config(raw, world_size=1)
    assert verdict.text == f"{caught.value}\n"
    title, *problems = verdict.text.splitlines()
    assert title.endswith("has 2 problems:")
    assert len(problems) == 2
    assert "- gradient_clipp1ng is not a known key" in verdict.text
    assert diagnose({"zero_optimization": {"stage": 2}}).healthy


def test_the_report_of_a_missing_file_says_so(tmp_path: Path) -> None:
    verdict = diagnose(tmp_path / "nowhere.json")
    assert not verdict.healthy
    assert "no such configuration file" in verdict.text
    assert len(verdict.text.splitlines()) == 1


def test_the_report_lists_keys_of_the_checkpoint_section_without_effect() -> None:
    checkpoint = {"load_universal": True, "writer": {"type": "fast"}}
    report = doctor_report({"checkpoint": checkpoint})
    inert = report.partition("Keys without effect here\n")[2].split()
    assert inert == [f"checkpoint.{name}" for name in checkpoint]
    assert "Values given" not in report


@pytest.mark.parametrize(
    ("raw", "precision", "gradients"),
    [
        ({}, "as the model has it", "accumulated in fp32, sent in fp32, averaged"),
        ({"fp16": {"enabled": True}}, "loss scale adapts from 65536, never below 1", "accumulated in fp32"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss scale fixed at 128", "sent in fp32"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "gradient_allreduce_op": "sum"},
            "bf16 with bf16 master weights",
            "accumulated in bf16, sent in bf16, summed",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}, "communication_data_type": "bf16"},
            "1 pattern kept in fp32",
            "accumulated in fp32, sent in bf16",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "autocast in fp16", "accumulated in fp32"),
    ],
)
def test_the_report_sums_up_the_precision(raw: dict[str, Any], precision: str, gradients: str) -> None:
    found = rows(doctor_report(raw))
    assert precision in found["Precision"][0]
    assert gradients in found["Gradients"][0]


def test_the_report_keeps_secrets() -> None:
    assert "s3cret" not in doctor_report({"comet": {"enabled": False, "api_key": "s3cret"}})


# --- the JSON Schema --------------------------------------------------------------------------------------------------


def test_the_schema_is_json_and_every_key_is_described() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    described = dict(properties(schema))
    assert all(text.strip() and "\n" not in text for text in described.values())
    for path in [*all_paths(), *REFUSED, *RENAMED]:
        assert path in described, path


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and description of every property, arguments of optimizers and schedules included."""
    for name, below in schema.get("properties", {}).items():
        yield f"{path}{name}", below["description"]
        for inner in below.get("anyOf", []):
            yield from properties(inner, f"{path}{name}.")
    for case in schema.get("allOf", []):
        yield from properties(case["then"]["properties"]["params"]["anyOf"][0], f"{path}params.")


def accepts(schema: dict[str, Any], value: object) -> bool:
    """A small judge of the keywords that the schema uses."""
    checks = {
        "const": lambda want: value == want,
        "enum": lambda want: value in want,
        "type": lambda want: is_of_type(value, want),
        "anyOf": lambda want: any(accepts(inner, value) for inner in want),
        "allOf": lambda want: all(accepts(inner, value) for inner in want),
        "minimum": lambda want: not is_number(value) or value >= want,
        "maximum": lambda want: not is_number(value) or value <= want,
        "exclusiveMinimum": lambda want: not is_number(value) or value > want,
        "exclusiveMaximum": lambda want: not is_number(value) or value < want,
        "minLength": lambda want: not isinstance(value, str) or len(value) >= want,
        "minItems": lambda want: not isinstance(value, list) or len(value) >= want,
        "maxItems": lambda want: not isinstance(value, list) or len(value) <= want,
        "items": lambda want: not isinstance(value, list) or all(accepts(want, item) for item in value),
        "required": lambda want: not isinstance(value, dict) or all(name in value for name in want),
        "properties": lambda want: (
            not isinstance(value, dict) or all(accepts(want[name], item) for name, item in value.items() if name in want)
        ),
        "additionalProperties": lambda _: not isinstance(value, dict) or set(value) <= set(schema["properties"]),
        "if": lambda want: not accepts(want, value) or accepts(schema["then"], value),
    }
    ignored = {"description", "default", "deprecated", "title", "then", "$schema", "x-shardwise"}
    assert set(schema) <= set(checks) | ignored
    return all(checks[word](want) for word, want in schema.items() if word in checks)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_of_type(value: object, name: str) -> bool:
    if name in ("number", "integer"):
        return is_number(value) and (name == "number" or float(value).is_integer())  # type: ignore[arg-type]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {**HUGGING_FACE, "steps_per_print": 10},
        {**filled(HUGGING_FACE), "steps_per_print": None},
        {"bfloat16": {"enabled": True}, "amp": {"enabled": False}, "zero_optimization": {"cpu_offload": False}},
        {"communication_data_type": "float16", "checkpoint": {"tag_validation": "Warn"}},
        {"optimizer": {"type": "NAdam", "params": {"momentum_decay": 4e-3}}},
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}}},
        {"zero_optimization": {"stage": 3.0, "reduce_bucket_size": 5e8, "units": ["Block"]}},
    ],
)
def test_the_schema_accepts_what_a_file_may_hold(raw: dict[str, Any]) -> None:
    assert accepts(json_schema(), json.loads(json.dumps(raw)))


@pytest.mark.parametrize(
    "raw",
    [
        {"gradient_clipp1ng": 1.0},
        {"fp16": {"enabled": "true"}},
        {"fp16": {"loss_scal": 0}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage3_prefetch_bucket_size": 15099494.4}},
        {"zero_optimization": {"units": "Block"}},
        {"gradient_predivide_factor": 0},
        {"steps_per_print": 0},
        {"communication_data_type": "fp8"},
        {"optimizer": {"params": {"lr": 0.1}}},
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}}},
        {"optimizer": []},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(raw: dict[str, Any]) -> None:
    assert not accepts(json_schema(), raw)
    with pytest.raises(ConfigError):
        load_config(raw, world_size=1)


# --- the reference page -----------------------------------------------------------------------------------------------


def test_the_committed_page_is_the_rendered_one() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == render_reference(), "run `python -m shardwise.config.reference > docs/configuration.md`"


def test_the_page_has_every_key() -> None:
    page = render_reference()
    for path in all_paths():
        assert f"`{path.rpartition('.')[2]}`" in page or f"## `{path}`" in page, path
    for path in [*REFUSED, *RENAMED]:
        assert f"`{path}`" in page


def test_the_examples_of_the_page_load() -> None:
    examples = re.findall(r"```json\n(.*?)```", render_reference(), flags=re.DOTALL)
    assert examples
    for example in examples:
        assert load_config(example, world_size=2).zero_optimization.stage == 3


def test_tables_of_the_page_are_even() -> None:
    for block in render_reference().split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) <= 1


def test_every_declared_key_says_what_it_does() -> None:
    for name, field in ConfigView.model_fields.items():
        assert field.description, name
