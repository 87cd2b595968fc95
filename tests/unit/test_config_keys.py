"""Every key of the format, one row each: it works, it is inert, it is not available yet, or it is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic.fields import FieldInfo

from shardwise.config import Config, load_config
from shardwise.config.batch import BATCH_KEYS
from shardwise.config.fields import Section, kind_of, section_class
from shardwise.config.judge import LATER_OPTIMIZERS
from shardwise.config.model import ConfigView
from shardwise.config.optimizers import OPTIMIZER_PARAMS, TORCH_ELEMENTWISE, TORCH_WHOLE_TENSOR
from shardwise.config.schedulers import SCHEDULER_PARAMS
from shardwise.config.spellings import REFUSED, RENAMED
from shardwise.errors import ConfigError
from shardwise.optim.elementwise import is_torch_elementwise

MISSING = object()

# path -> (default, {value in the file: value read}, values that are refused). Defaults are those of the format's documentation.
BOOL = ({"true": True, "false": False}, ('"true"', "1", "0.0", '"yes"', "[]", "{}"))
WORKS: dict[str, tuple[object, dict[str, object], tuple[str, ...]]] = {
    "managed_gradient_accumulation": (True, *BOOL),
    "gradient_clipping": (0.0, {"1": 1.0, "0.5": 0.5, "0": 0.0}, ("-1", '"1.0"', "true", "NaN", "Infinity")),
    "prescale_gradients": (False, *BOOL),
    "gradient_predivide_factor": (1.0, {"2": 2.0, "0.5": 0.5}, ("0", "-1", '"2"')),
    "communication_data_type": (
        None,
        {'"fp32"': "fp32", '"FP16"': "fp16", '"bfloat16"': "bf16", '"torch.float32"': "fp32"},
        ('"fp8"', "16", "true"),
    ),
    "gradient_allreduce_op": ("mean", {'"sum"': "sum", '"MEAN"': "mean"}, ('"max"', "1")),
    "steps_per_print": (None, {"10": 10, "2e3": 2000, "Infinity": math.inf}, ("0", "-Infinity", "NaN", "1.5", '"inf"', "true")),
    "dump_state": (False, *BOOL),
    "log_level": ("warning", {'"INFO"': "info", '"error"': "error"}, ('"loud"', "10")),
    "dataloader_drop_last": (False, *BOOL),
    "watchdog_s": (300.0, {"20": 20.0, "0.5": 0.5}, ("0", "-1", '"300"', "Infinity")),
    "transport": ("auto", {'"gloo"': "gloo", '"SHM"': "shm"}, ('"tcp"', "1", "true")),
    "data_parallel_size": (None, {"2": 2, "2.0": 2}, ("0", '"2"')),
    "fp16.enabled": (False, *BOOL),
    "fp16.loss_scale": (0.0, {"128": 128.0, "0": 0.0}, ("-1", '"dynamic"', "true", "Infinity", "NaN")),
    "fp16.initial_scale_power": (16, {"32": 32, "0": 0}, ("-1", "16.5", "1000")),
    "fp16.loss_scale_window": (1000, {"1": 1, "5e2": 500}, ("0", "-1", "1.5")),
    "fp16.hysteresis": (2, {"1": 1}, ("0", "-1", "1.5", "true")),
    "fp16.consecutive_hysteresis": (False, *BOOL),
    "fp16.min_loss_scale": (1, {"4": 4}, ("0", "-1")),
    "fp16.auto_cast": (False, *BOOL),
    "bf16.enabled": (False, *BOOL),
    "bf16.check_grad_overflow": (True, *BOOL),
    "bf16.bf16_master_weights_and_grads": (False, *BOOL),
    "bf16.bf16_optimizer_states": (False, {"false": False}, BOOL[1]),
    "bf16.immediate_grad_update": (False, *BOOL),
    "torch_autocast.enabled": (False, *BOOL),
    "torch_autocast.dtype": ("bf16", {'"float16"': "fp16", '"bfloat16"': "bf16", '"half"': "fp16"}, ('"int8"', "16")),
    "torch_autocast.lower_precision_safe_modules": (None, {'["Linear"]': ["Linear"]}, ('"Linear"', "[1]", '[""]')),
    "data_types.grad_accum_dtype": (None, {'"fp32"': "fp32", '"bf16"': "bf16"}, ('"int"', "32")),
    "data_types.keep_in_fp32_modules": ([], {'["norm", "*.gate"]': ["norm", "*.gate"]}, ('"norm"', "[1]", '[""]', "{}")),
    "zero_optimization.stage": (0, {"0": 0, "1": 1, "2": 2, "3": 3, "3.0": 3}, ("4", "-1", '"3"', "true", "2.5")),
    "zero_optimization.stage3_param_persistence_threshold": (100_000, {"0": 0, "1e4": 10_000}, ("-1", "0.5", '"1e4"')),
    "zero_optimization.stage3_max_live_parameters": (1_000_000_000, {"0": 0, "3e7": 30_000_000}, ("-1", "0.5")),
    "zero_optimization.stage3_prefetch_bucket_size": (50_000_000, {"0": 0, "1e6": 1_000_000}, ("-1", "15099494.4")),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (False, *BOOL),
    "zero_optimization.units": ([], {'["Block", "*.h.*"]': ["Block", "*.h.*"]}, ('"Block"', "[1]", '[""]')),
    "zero_optimization.leaf_module.classes": ([], {'["MoE"]': ["MoE"]}, ('"MoE"', "[null]")),
    "zero_optimization.leaf_module.names": ([], {'["a.b"]': ["a.b"]}, ('"a.b"', "{}")),
    "zero_optimization.leaf_module.name_suffixes": ([], {'["mlp"]': ["mlp"]}, ('"mlp"', "3")),
    "aio.block_size": (8_388_608, {"1e6": 1_000_000}, ("0", "-1", "1.5", '"1M"')),
    "aio.queue_depth": (8, {"32": 32}, ("0", "-1", "true")),
    "aio.intra_op_parallelism": (2, {"4": 4}, ("0", "1.5")),
    "aio.thread_count": (None, {"4": 4}, ("0", "1.5")),
    "zero_optimization.offload_optimizer.device": ("none", {'"none"': "none"}, ('"disk"', "1", "true")),
    "zero_optimization.offload_optimizer.nvme_path": (None, {'"/tmp"': "/tmp"}, ("1", "true")),
    "zero_optimization.offload_optimizer.pin_memory": (False, *BOOL),
    "zero_optimization.offload_optimizer.buffer_count": (4, {"2": 2}, ("0", "1.5")),
    "zero_optimization.offload_optimizer.buffer_size": (16_777_216, {"1e6": 1_000_000}, ("0", "1000")),
    "zero_optimization.offload_optimizer.pipeline_read": (True, *BOOL),
    "zero_optimization.offload_optimizer.pipeline_write": (True, *BOOL),
    "zero_optimization.offload_optimizer.ratio": (1.0, {"0.5": 0.5, "0": 0.0}, ("-1", "1.5", '"1"')),
    "checkpoint.tag_validation": ("WARN", {'"fail"': "FAIL", '"IGNORE"': "IGNORE"}, ('"maybe"', "1", "true")),
    "checkpoint.keep_last": (0, {"3": 3, "2.0": 2}, ("-1", "1.5", '"3"', "true")),
    "checkpoint.on_busy": ("wait", {'"REFUSE"': "refuse"}, ('"drop"', "1")),
    "checkpoint.async": (False, *BOOL),
    "optimizer.type": (MISSING, {'"AdamW"': "AdamW", '"sgd"': "SGD", '"NAdam"': "NAdam"}, ("1", "true", '""', "[]")),
    "optimizer.params": (MISSING, {'{"lr": 1}': {"lr": 1.0}}, ("[]", "1")),
    "scheduler.type": (MISSING, {'"WarmupLR"': "WarmupLR", '"lrrangetest"': "LRRangeTest"}, ('"Cosine"', "1", '""')),
    "scheduler.params": (MISSING, {'{"warmup_num_steps": 5}': {"warmup_num_steps": 5}}, ("[]", "1")),
}

INERT = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization.reduce_bucket_size": 5e8,
    "zero_optimization.allgather_bucket_size": 2e8,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.reduce_scatter": False,
    "zero_optimization.contiguous_gradients": False,
    "zero_optimization.round_robin_gradients": True,
    "zero_optimization.ignore_unused_parameters": False,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.stage3_module_granularity_threshold": 10,
    "zero_optimization.log_trace_cache_warnings": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": False,
    "zero_optimization.load_from_fp32_weights": False,
    "zero_optimization.memory_efficient_linear": False,
    "zero_optimization.elastic_checkpoint": True,
    "zero_optimization.override_module_apply": False,
    "zero_optimization.overlap_comm": True,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.offload_optimizer.fast_init": False,
    "checkpoint.load_universal": True,
    "checkpoint.writer": {"type": "vanilla"},
    "aio.single_submit": True,
    "aio.overlap_events": False,
    "aio.use_gds": True,
    "activation_checkpointing.number_checkpoints": 4,
    "activation_checkpointing.contiguous_memory_optimization": True,
    "activation_checkpointing.synchronize_checkpoint_boundary": True,
    "activation_checkpointing.profile": True,
}

# path -> (values that ask for the capability, values that leave it off)
LATER: dict[str, tuple[list[object], list[object]]] = {
    "zero_optimization.offload_param.device": (["cpu", "nvme"], ["none"]),
    "zero_optimization.zero_hpz_partition_size": ([2, 8.0], [1, 0]),
    "zero_optimization.zero_quantized_weights": ([True], [False]),
    "zero_optimization.zero_quantized_nontrainable_weights": ([True], [False]),
    "zero_optimization.zero_quantized_gradients": ([True], [False]),
    "wall_clock_breakdown": ([True], [False]),
    "memory_breakdown": ([True], [False]),
    "checkpoint.use_node_local_storage": ([True], [False]),
    "activation_checkpointing.partition_activations": ([True], [False]),
    "activation_checkpointing.cpu_checkpointing": ([True], [False]),
    "flops_profiler.enabled": ([True], [False]),
    "comms_logger.enabled": ([True], [False]),
    "tensorboard.enabled": ([True], [False]),
    "wandb.enabled": ([True], [False]),
    "csv_monitor.enabled": ([True], [False]),
    "comet.enabled": ([True], [False]),
    "tensor_parallel.autotp_size": ([2], [0, 1]),
    "tensor_parallel.tp.tp_size": ([4], [0, 1]),
    "sequence_parallel_size": ([2], [0, 1]),
    "expert_parallel.enabled": ([True], [False]),
    "expert_parallel.autoep_size": ([2], [0, 1]),
    "expert_parallel.expert_tensor_parallel_size": ([2], [0, 1]),
    "compile.enabled": ([True], [False]),
    "compile.deepcompile": ([True], [False]),
    "pipeline": (
        [{"stages": 2}, {"partition": "best"}, {"enabled": True}],
        [{}, {"enabled": False, "stages": 4}, {"stages": 1, "partition": "best"}, {"stages": "auto"}],
    ),
    "weight_quantization": (
        [{"enabled": True}, {"post_init_quant": {"fc": {"num_bits": 4}}}],
        [{}, {"enabled": False, "post_init_quant": {"fc": {}}}],
    ),
}

# path -> (values that ask for it, values that do not)
REMOVED: dict[str, tuple[list[object], list[object]]] = {
    "amp": ([{"enabled": True, "opt_level": "O1"}, {"opt_level": "O1"}], [{"enabled": False}, {"enabled": "auto"}, {}]),
    "nebula": ([{"enabled": True}], [{"enabled": False, "persistent_storage_path": "/x"}]),
    "compression_training": ([{"weight_quantization": {}}], [{}]),
    "quantize_training": ([{"enabled": True}], [{"enabled": False}]),
    "sparse_gradients": ([True, "true"], [False]),
    "sparse_attention": ([{"mode": "fixed"}], [{}]),
    "eigenvalue": ([{"enabled": True}], [{"enabled": False}]),
    "elasticity": ([{"enabled": True, "max_train_batch_size": 64}], [{"enabled": False}]),
    "graph_harvesting": ([True], [False]),
    "curriculum_learning": ([{"enabled": True}], [{"enabled": False}]),
    "progressive_layer_drop": ([{"enabled": True, "theta": 0.5}], [{"enabled": False}]),
    "zero_optimization.mics_shard_size": ([8], [-1, 0]),
    "zero_optimization.mics_hierarchical_params_gather": ([True], [False]),
    "zero_optimization.zeropp_loco_param": ([{"err_beta": 0.8}], [{}]),
    "optimizer.params.max_grad_norm": ([1.0], [0, 0.0]),
}


def nest(path: str, value: object) -> dict[str, Any]:
    """`{"a": {"b": value}}` for `a.b`; with a type where one is needed."""
    *parents, name = path.split(".")
    raw: dict[str, Any] = {name: value}
    if parents == ["optimizer", "params"]:
        raw = {"params": raw, "type": "Adam"}
        parents = ["optimizer"]
    elif parents == ["optimizer"] and name == "params":
        raw["type"] = "Adam"
    elif parents == ["scheduler"] and name == "params":
        raw["type"] = "WarmupLR"
    for parent in reversed(parents):
        raw = {parent: raw}
    return raw


def read(config: Config, path: str) -> object:
    value: Any = config
    for name in path.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def load(path: str, value: object) -> Config:
    return load_config(nest(path, value), world_size=2)


def message_of(path: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, value)
    return str(caught.value)


# --- works ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "text", "expected"), [(p, t, v) for p, row in WORKS.items() for t, v in row[1].items()])
def test_a_working_key_is_read(path: str, text: str, expected: object) -> None:
    found = read(load(path, json.loads(text)), path)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("path", "default"), [(path, row[0]) for path, row in WORKS.items() if row[0] is not MISSING])
def test_an_absent_key_has_the_documented_default(path: str, default: object) -> None:
    empty = load_config(None, world_size=1)
    assert read(empty, path) == default
    for absent in (None, "auto"):
        config = load(path, absent)
        assert read(config, path) == default
        assert config.inert == config.warnings == []


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, row in WORKS.items() for text in row[2]])
def test_a_wrong_value_is_told_with_path_value_and_what_is_allowed(path: str, text: str) -> None:
    value = json.loads(text)
    told = message_of(path, value)
    assert "has 1 problem:" in told
    assert f"- {path}: expected " in told
    assert f", found {json.dumps(value)}" in told


def fields(model: type[Section], path: str = "", *, with_future: bool = True) -> dict[str, FieldInfo]:
    """Dotted path -> declaration of every plain value below a model."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        nested = section_class(field)
        if nested is None:
            found[f"{path}{name}"] = field
        elif nested.available or with_future:
            found |= fields(nested, f"{path}{name}.", with_future=with_future)
    return found


def of_kind(kind: str, *, with_future: bool = True) -> set[str]:
    return {path for path, field in fields(ConfigView, with_future=with_future).items() if kind_of(field) == kind}


def test_every_working_key_has_a_row_here() -> None:
    """The batch numbers have their own tests; sections that cannot be switched on have no working keys."""
    assert of_kind("works", with_future=False) - set(BATCH_KEYS) == set(WORKS)


# --- inert ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "value"), INERT.items())
def test_an_inert_key_is_accepted_and_listed(path: str, value: object) -> None:
    config = load(path, value)
    assert config.inert == [path]
    assert config.warnings == []
    assert load(path, "auto").inert == [path]
    assert load(path, None).inert == []


@pytest.mark.parametrize("path", INERT)
def test_an_inert_key_still_has_a_type(path: str) -> None:
    assert f"- {path}: expected " in message_of(path, "lots")


@pytest.mark.parametrize(
    "path", ["zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size", "aio.block_size"]
)
def test_a_size_of_zero_is_refused_before_it_can_divide(path: str) -> None:
    assert f"{path}: expected a whole number >= 1, found 0" in message_of(path, 0)


def test_every_inert_key_has_a_row_here() -> None:
    assert of_kind("inert") == set(INERT)


# --- not available yet ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, row in LATER.items() for value in row[0]])
def test_a_capability_to_come_is_refused_by_name(path: str, value: object) -> None:
    told = message_of(path, value)
    assert "has 1 problem:" in told
    shown = json.dumps(int(value) if isinstance(value, float) else value)
    assert f"- {path} is not available yet: found {shown}. " in told
    assert "emove it" in told


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, row in LATER.items() for value in [*row[1], None, "auto"]])
def test_a_capability_that_is_off_passes(path: str, value: object) -> None:
    if value == "auto" and path in ("pipeline", "weight_quantization"):
        assert "an object in braces" in message_of(path, value)
        return
    config = load(path, value)
    assert config.inert == config.warnings == []


def test_every_capability_to_come_has_a_row_here() -> None:
    assert of_kind("later") | {"pipeline", "weight_quantization"} == set(LATER)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "csv_monitor", "comet", "flops_profiler", "comms_logger"])
def test_a_disabled_section_passes_whole(name: str) -> None:
    values = {path.partition(".")[2]: f.default for path, f in fields(ConfigView).items() if path.startswith(f"{name}.")}
    assert len(values) >= 3
    assert load(name, {**values, "enabled": False}).inert == []


def test_offload_that_is_off_passes_with_its_settings() -> None:
    off = {"device": "none", "nvme_path": None, "pin_memory": True, "buffer_count": 5}
    zero = {"stage": 3, "offload_optimizer": {**off, "ratio": 0.5, "pipeline_read": True}, "offload_param": off}
    config = load_config({"zero_optimization": zero}, world_size=1)
    assert config.zero_optimization.offload_param.device == "none"


@pytest.mark.parametrize(
    ("zero", "optimizer", "told"),
    [
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme"}},
            "Adam",
            "nvme_path is missing: expected a folder on a fast disk",
        ),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "Adam", "expected zero_optimization.stage 1, 2 or 3, found 0"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "Lamb", "device does not go with Lamb"),
    ],
)
def test_offload_that_cannot_work_is_refused(zero: dict[str, object], optimizer: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"train_batch_size": 1, "zero_optimization": zero, "optimizer": {"type": optimizer}}, world_size=1)


def test_a_typo_in_a_section_to_come_is_no_silent_off() -> None:
    told = message_of("tensor_parallel.autotp_sise", 8)
    assert "nearest valid key is tensor_parallel.autotp_size" in told


def test_muon_is_not_available_yet() -> None:
    for name in ("Muon", "muon"):
        told = message_of("optimizer", {"type": name, "params": {"lr": 0.02, "ns_method": "gram"}})
        assert 'optimizer.type is not available yet: found "Muon"' in told
        assert "has 1 problem" in told


def test_fewer_data_parallel_ranks_are_not_available_yet() -> None:
    told = message_of("data_parallel_size", 1)
    assert "data_parallel_size is not available yet" in told
    assert load_config({"data_parallel_size": 2}, world_size=4, data_parallel_size=2).data_parallel_size == 2


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, row in REMOVED.items() for value in row[0]])
def test_a_removed_key_is_refused_with_what_to_use_instead(path: str, value: object) -> None:
    told = message_of(path, value)
    assert f"- {path} is not supported and will not be: found " in told
    assert REFUSED[path] in told
    assert "has 1 problem:" in told


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, row in REMOVED.items() for value in row[1]])
def test_a_removed_key_that_is_off_passes_with_a_warning(path: str, value: object) -> None:
    assert load(path, value).warnings == [f"{path} is switched off and does not exist here; it can be removed"]
    assert load(path, None).warnings == []


def test_every_removed_key_has_a_row_here() -> None:
    assert set(REMOVED) == set(REFUSED)


# --- older spellings --------------------------------------------------------------------------------------------------


def test_older_spellings_are_read_as_the_present_name() -> None:
    config = load("bfloat16", {"enabled": True})
    assert config.bf16.enabled
    assert config.warnings == ["bfloat16 is an older spelling of bf16"]
    path = "zero_optimization.stage3_gather_fp16_weights_on_model_save"
    config = load(path, True)
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert config.warnings == [f"{path} is an older spelling of {path.replace('fp16', '16bit')}"]


@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_params", "cpu_offload_param"])
def test_older_offload_switches(name: str) -> None:
    path = f"zero_optimization.{name}"
    present = RENAMED[path].name
    told = message_of(path, True)
    if present == "offload_param":
        assert f"{path} is not available yet: found true. Remove it." in told
    else:
        assert f"{path} needs a stage at which every rank updates a share" in told
        config = load_config({"zero_optimization": {"stage": 2, name: True}}, world_size=1)
        assert config.zero_optimization.offload_optimizer.device == "cpu"
    config = load(path, False)
    assert getattr(config.zero_optimization, present).device == "none"
    assert config.warnings == [f"{path} is an older spelling of zero_optimization.{present}"]
    assert load(path, "auto").zero_optimization.offload_param.device == "none"
    assert f'{path}: expected true or false, found "yes"' in message_of(path, "yes")


def test_a_wrong_value_under_an_older_spelling_is_told_as_it_stands_in_the_file() -> None:
    assert '- bfloat16.enabled: expected true or false, found "true"' in message_of("bfloat16", {"enabled": "true"})


def test_both_spellings_must_agree() -> None:
    both = {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert load_config(both, world_size=1).bf16.enabled
    with pytest.raises(ConfigError, match="bfloat16 and bf16 are two names of one key and disagree"):
        load_config({**both, "bf16": {"enabled": False}}, world_size=1)


# --- optimizers and schedules -----------------------------------------------------------------------------------------

OPTIMIZER_ARGUMENTS: dict[str, dict[str, tuple[object, tuple[object, ...]]]] = {
    "lr": {"*": (0.1, (-1, "0.1", True, None.__class__, float("inf")))},
    "weight_decay": {"*": (0.01, (-1, "x"))},
    "maximize": {"*": (True, (1, "true"))},
    "betas": {"Adam AdamW Lion Lamb": ((0.9, 0.95), ([0.9], [0.9, 1.0], [-0.1, 0.9], 0.9, ["a", "b"], [True, 0.9]))},
    "eps": {"Adam AdamW Adagrad Lamb": (1e-6, (-1, "1e-6"))},
    "amsgrad": {"Adam AdamW": (True, ("true", 1))},
    "adam_w_mode": {"Adam": (False, ("false", 0))},
    "bias_correction": {"Adam AdamW Lamb": (False, ("false", 0))},
    "eps_inside_sqrt": {"Lamb": (True, ("true", 1))},
    "momentum": {"SGD": (0.9, (-1, "0.9"))},
    "dampening": {"SGD": (0.1, ("0.1",))},
    "lr_decay": {"Adagrad": (0.1, (-1,))},
    "initial_accumulator_value": {"Adagrad": (0.1, (-1,))},
    "max_coeff": {"Lamb": (5.0, (0, -1))},
    "min_coeff": {"Lamb": (0.1, (-1,))},
}


def optimizer_rows() -> list[tuple[str, str, object, tuple[object, ...]]]:
    rows: list[tuple[str, str, object, tuple[object, ...]]] = []
    for key, by_kind in OPTIMIZER_ARGUMENTS.items():
        for kinds, (value, wrong) in by_kind.items():
            rows += [(kind, key, value, wrong) for kind in (OPTIMIZER_PARAMS if kinds == "*" else kinds.split())]
    return rows


@pytest.mark.parametrize(("kind", "key", "value", "wrong"), optimizer_rows())
def test_optimizer_arguments(kind: str, key: str, value: object, wrong: tuple[object, ...]) -> None:
    given = list(value) if isinstance(value, tuple) else value
    config = load("optimizer", {"type": kind.lower(), "params": {key: given}})
    assert config.optimizer is not None
    assert config.optimizer.type == kind
    assert config.optimizer.params == {key: value}
    for bad in wrong:
        assert f"- optimizer.params.{key}: expected " in message_of("optimizer", {"type": kind, "params": {key: bad}})


def test_every_optimizer_argument_has_a_row_here() -> None:
    rows = {(kind, key) for kind, key, _, _ in optimizer_rows()} | {("SGD", "nesterov"), ("AdamW", "adam_w_mode")}
    working = {
        (kind, key)
        for kind, model in OPTIMIZER_PARAMS.items()
        for key, field in model.model_fields.items()
        if kind_of(field) == "works"
    }
    assert working == rows


def test_nesterov_needs_momentum() -> None:
    given = {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9}}
    assert load("optimizer", given).optimizer.params == given["params"]  # type: ignore[union-attr]
    for params in ({"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}):
        assert "optimizer.params.nesterov needs momentum" in message_of("optimizer", {"type": "SGD", "params": params})
    told = message_of("optimizer", {"type": "SGD", "params": {"nesterov": True, "momentum": "0.9"}})
    assert "has 1 problem" in told


@pytest.mark.parametrize("key", ["torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none"])
def test_choices_of_an_implementation_are_inert(key: str) -> None:
    config = load("optimizer", {"type": "AdamW", "params": {"lr": 1e-3, key: True}})
    assert config.inert == [f"optimizer.params.{key}"]
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3}
    assert f"optimizer.params.{key}: expected true or false" in message_of("optimizer.params", {key: "yes"})


def test_adamw_without_decoupled_decay_warns() -> None:
    config = load("optimizer", {"type": "AdamW", "params": {"adam_w_mode": False}})
    assert any("adam_w_mode" in line for line in config.warnings)
    assert load("optimizer", {"type": "Adam", "params": {"adam_w_mode": False}}).warnings == []


def test_an_unknown_optimizer_argument_is_told_with_the_nearest() -> None:
    told = message_of("optimizer.params", {"learning_rate": 1, "wieght_decay": 0.1})
    assert "optimizer.params.learning_rate is not a known key" in told
    assert "nearest valid key is optimizer.params.weight_decay" in told


def test_other_optimizers_pass_through_unchecked() -> None:
    params = {"lr": 0.002, "momentum_decay": 4e-3, "anything": [1], "foreach": None, "eps": "auto"}
    config = load("optimizer", {"type": "NAdam", "params": params})
    assert config.optimizer is not None
    assert config.optimizer.type == "NAdam"
    assert config.optimizer.params == {"lr": 0.002, "momentum_decay": 4e-3, "anything": [1]}


@pytest.mark.parametrize(("found", "meant"), [("AdmW", "AdamW"), ("sdg", "SGD"), ("RMSProb", "RMSprop"), ("Adam_W", "AdamW")])
def test_an_unknown_optimizer_names_the_nearest_and_all_that_can_be_named(found: str, meant: str) -> None:
    told = message_of("optimizer", {"type": found, "params": {"lr": 1e-3}})
    assert "has 1 problem:" in told
    assert f'found "{found}". The nearest is {meant}; any other optimizer can be passed to initialize()' in told
    for name in (*OPTIMIZER_PARAMS, *TORCH_ELEMENTWISE):
        assert f'"{name}"' in told, name


@pytest.mark.parametrize(("found", "meant"), [("WarmpLR", "WarmupLR"), ("cosine", "WarmupCosineLR"), ("1Cycle", "OneCycle")])
def test_an_unknown_schedule_names_the_nearest_and_all_that_can_be_named(found: str, meant: str) -> None:
    told = message_of("scheduler", {"type": found})
    assert f'found "{found}". The nearest is {meant}; any other schedule can be passed to initialize()' in told
    for name in SCHEDULER_PARAMS:
        assert f'"{name}"' in told, name


def test_every_optimizer_of_torch_can_be_named() -> None:
    """The configuration does not look into torch, so its lists have to follow torch's."""
    classes = [getattr(torch.optim, name) for name in dir(torch.optim)]
    names = {kind.__name__ for kind in classes if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    known = {*OPTIMIZER_PARAMS, *TORCH_ELEMENTWISE, *TORCH_WHOLE_TENSOR, *LATER_OPTIMIZERS}
    assert names - {"Optimizer"} <= known
    assert all(is_torch_elementwise(getattr(torch.optim, name)) for name in TORCH_ELEMENTWISE)
    for name in (*TORCH_ELEMENTWISE, *TORCH_WHOLE_TENSOR):
        config = load("optimizer", {"type": name.lower()})
        assert config.optimizer is not None
        assert config.optimizer.type == name


def test_an_optimizer_needs_a_type() -> None:
    assert "optimizer.type is missing: expected text" in message_of("optimizer", {"params": {"lr": 1}})
    assert "scheduler.type is missing" in message_of("scheduler", {"params": {"warmup_num_steps": 1}})
    config = load_config({"optimizer": {}, "scheduler": {"type": None}}, world_size=1)
    assert config.optimizer is None
    assert config.scheduler is None


SCHEDULES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "WarmupLR": (
        {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
        {"warmup_min_lr": -1, "warmup_max_lr": "x", "warmup_num_steps": 1.5, "warmup_type": "cosine"},
    ),
    "WarmupDecayLR": (
        {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.1,
            "warmup_num_steps": 0,
            "warmup_type": "log",
            "total_num_steps": 100,
        },
        {"total_num_steps": 0, "warmup_num_steps": -1, "warmup_min_lr": [0], "warmup_max_lr": True, "warmup_type": 1},
    ),
    "WarmupCosineLR": (
        {
            "total_num_steps": 100,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 10,
            "cos_min_ratio": 0.0,
            "warmup_type": "log",
        },
        {
            "total_num_steps": "all",
            "warmup_min_ratio": -1,
            "warmup_num_steps": "10",
            "cos_min_ratio": "0",
            "warmup_type": "",
        },
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 5,
            "decay_step_size": 2,
            "cycle_momentum": False,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 5,
        },
        {
            "cycle_min_lr": -1,
            "cycle_max_lr": "x",
            "decay_lr_rate": -1,
            "cycle_first_step_size": 0,
            "cycle_second_step_size": 0,
            "decay_step_size": -1,
            "cycle_momentum": "false",
            "cycle_min_mom": 2,
            "cycle_max_mom": -1,
            "decay_mom_rate": -1,
            "cycle_first_stair_count": -1,
            "cycle_second_stair_count": 0.5,
        },
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 10,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
        {
            "lr_range_test_min_lr": -1,
            "lr_range_test_step_size": 0,
            "lr_range_test_step_rate": -1,
            "lr_range_test_staircase": 1,
        },
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_arguments(kind: str) -> None:
    good, bad = SCHEDULES[kind]
    assert set(good) == set(bad) == set(SCHEDULER_PARAMS[kind].model_fields)
    config = load("scheduler", {"type": kind.upper(), "params": good})
    assert config.scheduler is not None
    assert config.scheduler.type == kind
    assert config.scheduler.params == good
    told = message_of("scheduler", {"type": kind, "params": bad})
    for key in bad:
        assert f"- scheduler.params.{key}: expected " in told
    assert f"has {len(bad)} problems" in told


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        ("WarmupLR", set[str]()),
        ("WarmupDecayLR", {"total_num_steps"}),
        ("WarmupCosineLR", {"total_num_steps"}),
        ("OneCycle", {"cycle_min_lr", "cycle_max_lr"}),
        ("LRRangeTest", set[str]()),
    ],
)
def test_schedules_name_the_arguments_they_miss(kind: str, required: set[str]) -> None:
    if not required:
        assert load("scheduler", {"type": kind}).scheduler.params == {}  # type: ignore[union-attr]
        return
    told = message_of("scheduler", {"type": kind})
    assert all(f"scheduler.params.{key} is missing" in told for key in required)
    assert told.count("is missing") == len(required)


def test_an_unknown_schedule_is_told_with_the_nearest() -> None:
    told = message_of("scheduler", {"type": "WarmupCosine", "params": {"total_num_steps": 5}})
    assert 'expected one of "WarmupLR", "WarmupDecayLR"' in told
    assert "The nearest is WarmupCosineLR" in told
    assert "can be passed to initialize() as an object" in told


def test_an_unknown_schedule_argument_is_told_with_the_nearest() -> None:
    told = message_of("scheduler", {"type": "WarmupLR", "params": {"warmup_steps": 5}})
    assert "nearest valid key is scheduler.params.warmup_num_steps" in told


def test_a_warmup_longer_than_the_training_warns() -> None:
    params = {"total_num_steps": 10, "warmup_num_steps": 20}
    assert any("ends in warmup" in line for line in load("scheduler", {"type": "WarmupDecayLR", "params": params}).warnings)
