"""The sections that choose number formats: `fp16`, `bf16`, `torch_autocast`, `data_types`.

Refuses to know what the engine does with them.
"""

from __future__ import annotations

from pydantic import Field

from shardwise.config.fields import DtypeName, Names, Number, Section, Whole, key

__all__ = ["Bf16", "DataTypes", "Fp16", "TorchAutocast"]


class Fp16(Section):
    """Half precision: parameters and gradients in fp16, fp32 master weights, and a loss scale against underflow."""

    enabled: bool = key(False, "Train in fp16 with fp32 master weights and loss scaling.")
    loss_scale: Number = key(0.0, "Fixed factor the loss is multiplied by; 0 adapts it while training.", ge=0)
    initial_scale_power: Whole = key(16, "The adaptive scale starts at 2 to this power.", ge=0, le=120)
    loss_scale_window: Whole = key(1000, "Steps without overflow after which the adaptive scale doubles.", ge=1)
    hysteresis: Whole = key(2, "Overflows that are tolerated before the adaptive scale is halved.", ge=1)
    consecutive_hysteresis: bool = key(
        False, "Refill the tolerance after every good step, instead of only when the scale grows."
    )
    min_loss_scale: Whole = key(1, "The adaptive scale never falls below this.", ge=1)
    auto_cast: bool = key(False, "Cast floating-point inputs of the model to fp16.")


class Bf16(Section):
    """Brain floating point: the range of fp32 in 16 bits, so no loss scale is needed."""

    enabled: bool = key(False, "Train in bf16 with fp32 master weights and fp32 gradient accumulation.")
    check_grad_overflow: bool = key(True, "Skip a step, on all ranks, when any gradient is Inf or NaN.")
    bf16_master_weights_and_grads: bool = key(
        False, "Keep master weights and accumulated gradients in bf16 too: less memory, less accuracy."
    )
    bf16_optimizer_states: bool = key(False, "Keep optimizer moments in bf16 as well; needs bf16_master_weights_and_grads.")
    immediate_grad_update: bool = key(
        False, "Add each gradient to its accumulator as soon as it is ready, which always happens."
    )


class TorchAutocast(Section):
    """Weights stay fp32; `torch.autocast` picks a 16-bit format per operation."""

    enabled: bool = key(False, "Run the forward pass under torch.autocast.")
    dtype: DtypeName = key(
        "bf16", "The 16-bit format of the autocast regions.", allowed='"bf16" or "fp16" (or their longer names)'
    )
    lower_precision_safe_modules: Names | None = key(
        None, "Class names of modules whose gradients may travel in the 16-bit format.", allowed="a list of class names"
    )


class DataTypes(Section):
    """Number formats that are chosen apart from the training precision."""

    grad_accum_dtype: DtypeName | None = key(
        None,
        "Format in which gradients are summed over micro-batches; fp32 when absent.",
        allowed='one of "fp32", "fp16", "bf16" (or their longer names)',
    )
    keep_in_fp32_modules: Names = Field(
        default_factory=list,
        description="Parameter names, module names, patterns or class names that stay in fp32 in 16-bit training.",
        json_schema_extra={"kind": "works", "allowed": "a list of names, patterns or class names"},
    )
