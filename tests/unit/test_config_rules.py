"""Rules that look at more than one key, "auto", and telling everything at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import init_view, load_config
from shardwise.config.settle import all_paths
from shardwise.errors import ConfigError


def problems(raw: dict[str, Any], world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, world_size=world_size)
    return str(caught.value).splitlines()[1:]


# --- precision --------------------------------------------------------------------------------------------------------

ON = {"enabled": True}


@pytest.mark.parametrize(
    ("first", "second"), [("fp16", "bf16"), ("fp16", "torch_autocast"), ("bf16", "torch_autocast"), ("fp16", "bfloat16")]
)
def test_one_precision_at_a_time(first: str, second: str) -> None:
    told = problems({first: ON, second: ON})
    assert len(told) == 1
    assert f"- {second}.enabled conflicts with another precision" in told[0]
    assert f"{first}.enabled" in told[0]
    load_config({first: ON, second: {"enabled": False}}, world_size=1)
    load_config({first: {"enabled": False}, second: {"enabled": False}}, world_size=1)


@pytest.mark.parametrize("place", ["communication_data_type", "data_types.grad_accum_dtype"])
@pytest.mark.parametrize(("chosen", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_two_16_bit_formats_do_not_mix(place: str, chosen: str, other: str) -> None:
    def raw(dtype: str) -> dict[str, Any]:
        section, _, name = place.rpartition(".")
        return {chosen: ON, **({section: {name: dtype}} if section else {name: dtype})}

    told = problems(raw(other))
    assert len(told) == 1
    assert f'- {place} conflicts with {chosen}.enabled: expected "{chosen}" or "fp32", found "{other}"' in told[0]
    for fine in (chosen, "fp32"):
        assert load_config(raw(fine), world_size=1).warnings == []


def test_fp16_on_the_wire_without_a_loss_scale_warns() -> None:
    config = load_config({"communication_data_type": "fp16"}, world_size=1)
    assert any("no loss scale" in line for line in config.warnings)


def test_bf16_moments_need_bf16_master_weights() -> None:
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    assert "bf16.bf16_optimizer_states needs bf16 master weights" in problems({"bf16": bf16})[0]
    config = load_config({"bf16": {**bf16, "bf16_master_weights_and_grads": True}}, world_size=1)
    assert config.bf16.bf16_optimizer_states


@pytest.mark.parametrize(
    ("name", "setting"),
    [("fp16", {"loss_scale": 128}), ("bf16", {"check_grad_overflow": False}), ("torch_autocast", {"dtype": "bf16"})],
)
def test_a_precision_that_was_never_switched_on_warns(name: str, setting: dict[str, Any]) -> None:
    config = load_config({name: setting}, world_size=1)
    assert config.warnings == [f"{name} has settings but no {name}.enabled, so it is off"]
    for enabled in (False, "auto"):
        assert load_config({name: {**setting, "enabled": enabled}}, world_size=1).warnings == []


@pytest.mark.parametrize("kind", ["classes", "names"])
def test_a_module_is_a_unit_or_a_leaf(kind: str) -> None:
    zero = {"units": ["Block", "MoE"], "leaf_module": {kind: ["MoE"]}}
    told = problems({"zero_optimization": zero})
    assert len(told) == 1
    assert 'zero_optimization.units names "MoE"' in told[0]
    load_config({"zero_optimization": {"units": ["Block"], "leaf_module": {kind: ["MoE"]}}}, world_size=1)


def test_rules_are_told_beside_wrong_values_but_not_because_of_them() -> None:
    told = problems({"fp16": ON, "bf16": {"enabled": "true"}, "gradient_clipping": -1, "torch_autocast": ON})
    assert len(told) == 3
    assert sum("conflicts" in line for line in told) == 1
    assert problems({"fp16": ON, "bf16": {"enabled": "true"}})[0].startswith("  - bf16.enabled: expected true or false")


# --- all at once ------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_at_once() -> None:
    told = "\n".join(
        problems(
            {
                "gradient_clipp1ng": 1.0,
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
                "fp16": {"enabled": "true", "loss_scal": 0},
                "zero_optimization": {"stage": 4, "stage3_prefetch_bucket_size": 15099494.4, "reduce_bucket_size": 0},
                "bf16": ON,
                "torch_autocast": ON,
                "amp": ON,
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9]}},
                "scheduler": {"type": "OneCycel"},
                "tensor_parallel": {"autotp_size": 2},
                "wandb": True,
            },
            world_size=4,
        )
    )
    for line in (
        "gradient_clipp1ng is not a known key: found 1.0. The nearest valid key is gradient_clipping.",
        "fp16.loss_scal is not a known key: found 0. The nearest valid key is fp16.loss_scale.",
        "amp is not supported and will not be",
        'optimizer.params.lr is still "auto"',
        "optimizer.params.betas: expected two numbers, each at least 0 and below 1, found [0.9]",
        'scheduler.type: expected one of "WarmupLR"',
        'fp16.enabled: expected true or false, found "true". Write true without quotes.',
        "zero_optimization.stage: expected a whole number from 0 to 3, found 4",
        "zero_optimization.stage3_prefetch_bucket_size: expected a whole number >= 0, found 15099494.4",
        "zero_optimization.reduce_bucket_size: expected a whole number >= 1, found 0",
        "wandb: expected an object in braces, found true",
        "tensor_parallel.autotp_size is not available yet: found 2",
        "torch_autocast.enabled conflicts with another precision",
        "train_batch_size: the batch numbers do not agree: expected 48 = train_micro_batch_size_per_gpu 4 (given) x "
        "gradient_accumulation_steps 3 (given) x 4 data-parallel ranks, found 32 (given)",
    ):
        assert line in told
    assert len(told.splitlines()) == 14


def test_a_missing_type_and_wrong_arguments_are_two_problems() -> None:
    told = problems({"optimizer": {"params": False}})
    assert len(told) == 2
    assert "optimizer.params: expected an object in braces, found false" in told[1]


def test_secrets_are_not_printed() -> None:
    raw = {"comet": {"enabled": True, "api_key": 5}, "commet": {"api_key": "s3cret"}, "token": "s3cret"}
    told = "\n".join(problems(raw))
    assert "comet.api_key: expected text" in told
    assert "s3cret" not in told


def test_long_values_are_shortened() -> None:
    assert all(len(line) < 200 for line in problems({"spped": list(range(10_000))}))


def test_numbers_in_quotes_are_recognised() -> None:
    assert "Write 1e9 without quotes" in problems({"zero_optimization": {"sub_group_size": "1e9"}})[0]


# --- auto and null ----------------------------------------------------------------------------------------------------

HUGGING_FACE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None, "pin_memory": True},
        "offload_param": {"device": "none", "nvme_path": None},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": float("inf"),
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
}

MUST_BE_FILLED = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer.params.lr",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
]


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """The file as Transformers hands it over."""
    raw = copy.deepcopy(raw)
    raw["optimizer"]["params"].update(lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0)
    raw["scheduler"]["params"] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-4,
        "warmup_num_steps": 0,
        "total_num_steps": 20,
    }
    raw.update(train_batch_size=16, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    return raw


def test_leftover_auto_is_an_error_where_there_is_no_good_default() -> None:
    told = problems(HUGGING_FACE, world_size=2)
    assert sorted(line.split()[1] for line in told) == sorted(MUST_BE_FILLED)
    assert all('is still "auto" when training starts' in line for line in told)


def test_leftover_auto_elsewhere_is_the_default() -> None:
    raw = filled(HUGGING_FACE)
    before = copy.deepcopy(raw)
    config = load_config(raw, world_size=2)
    assert raw == before
    assert config.gradient_clipping == 0.0
    assert not config.fp16.enabled
    assert not config.bf16.enabled
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_num_steps"] == 0
    assert config.warnings == []
    assert "zero_optimization.reduce_bucket_size" in config.inert
    assert "optimizer.params.torch_adam" in config.inert


def test_other_optimizers_need_their_learning_rate_too() -> None:
    told = problems({"optimizer": {"type": "Rprop", "params": {"lr": "auto", "etas": "auto"}}})
    assert len(told) == 1
    assert "optimizer.params.lr is still" in told[0]


def test_auto_is_no_type_and_no_section() -> None:
    told = problems({"optimizer": {"type": "auto", "params": {}}, "zero_optimization": "auto"})
    assert 'optimizer.type is still "auto"' in told[0]
    assert 'zero_optimization: expected an object in braces, found "auto"' in told[1]


def test_an_unknown_key_stays_unknown_whatever_its_value() -> None:
    told = problems({"gradient_cliping": "auto", "fp16": {"enable": None}})
    assert len(told) == 2


def test_null_is_absent_everywhere() -> None:
    def nulls(value: Any) -> Any:
        return {key: nulls(item) for key, item in value.items()} if isinstance(value, dict) else None

    config = load_config(nulls(HUGGING_FACE), world_size=1)
    assert config.model_dump() == load_config(None, world_size=1).model_dump()
    assert config.inert == config.warnings == []


def test_unknown_top_level_keys_can_be_forgiven() -> None:
    raw = {"zero_optimization.reduce_bucket_size": 1.5, "zero_optimization.cpu_offload": True, "my_key": {"a": 1}}
    told = problems(raw)
    assert len(told) == 3
    assert "zero_optimization.reduce_bucket_size is not a known key: found 1.5. Write nested objects" in told[0]
    config = load_config(raw, world_size=1, unknown_top_level="warn")
    assert len(config.warnings) == 3
    assert config.zero_optimization.offload_optimizer.device == "none"
    with pytest.raises(ConfigError, match=r"fp16\.enable is not a known key"):
        load_config({**raw, "fp16": {"enable": True}}, world_size=1, unknown_top_level="warn")


# --- a view before "auto" is filled in --------------------------------------------------------------------------------


def test_a_view_reads_a_file_that_still_holds_auto() -> None:
    view = init_view(HUGGING_FACE)
    assert view.raw is HUGGING_FACE
    assert view.zero_optimization.stage == 3
    assert view.train_batch_size is view.gradient_accumulation_steps is None
    assert view.optimizer is not None
    assert view.optimizer.params == {}
    assert init_view({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}).train_batch_size == 7
    assert init_view(None).zero_optimization.stage == 0
    assert init_view({"optimizer": {"type": "auto"}}).optimizer is None


def test_a_view_still_checks_everything_else() -> None:
    for raw in (
        {"zero_optimization": {"stagee": 3}},
        {"zero_optimization": {"stage": "3"}},
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        {"fp16": ON, "bf16": ON},
        {"scheduler": {"type": "WarmupDecayLR"}},
        {"scheduler.params": 1},
    ):
        with pytest.raises(ConfigError, match="has 1 problem"):
            init_view(raw)
    assert init_view({"my_key": 1}, unknown_top_level="warn").warnings != []


# --- anything at all --------------------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats()
    | st.sampled_from(["auto", "", "true", "cpu", "none", "fp16", "Adam", "Muon", "OneCycle"])
)
names = st.sampled_from(sorted({part for path in all_paths() for part in path.split(".")} | {"amp", "bfloat16", "cpu_offload"}))
objects = st.recursive(
    st.dictionaries(names, leaves, max_size=4),
    lambda inner: st.dictionaries(names, leaves | inner | st.lists(leaves, max_size=2), max_size=5),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    raw=st.fixed_dictionaries(
        {}, optional={"optimizer": objects, "scheduler": objects, "fp16": objects, "zero_optimization": objects}
    )
    | objects,
    world_size=st.integers(1, 4),
)
def test_any_object_is_read_or_told_about(raw: dict[str, Any], world_size: int) -> None:
    before = repr(raw)
    try:
        config = load_config(raw, world_size=world_size)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        assert len(lines) == int(head.split()[3])
        assert len(set(lines)) == len(lines)
    else:
        assert config.train_batch_size == (
            config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * world_size
        )
        assert load_config(raw, world_size=world_size, unknown_top_level="warn") == config
    assert repr(raw) == before
