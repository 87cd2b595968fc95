"""From the configuration format to the terms the engine works in.

Owns that translation, which is the only place that knows both. Refuses to know modules and ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import torch

from shardwise.config import Config
from shardwise.errors import UsageError, explain
from shardwise.optim import Paging
from shardwise.policy import STAGES, Policy, Precision
from shardwise.tiers import DiskSettings, DiskTier, HostTier

__all__ = ["dtype_named", "make_paging", "make_policy", "make_precision", "share_memory", "show_log", "state_dtype"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype that a configuration value means; the configuration has checked the name."""
    return None if name is None else _DTYPES[name.removeprefix("torch.").lower()]


def make_precision(config: Config, data_ranks: int) -> Precision:
    """The dtypes a configuration asks for.

    Args:
        config: resolved configuration.
        data_ranks: over how many ranks gradients are summed; `prescale_gradients` divides by it beforehand.
    """
    low_precision_master = config.bf16.enabled and config.bf16.bf16_master_weights_and_grads
    compute = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    accumulate = dtype_named(config.data_types.grad_accum_dtype)
    autocast = dtype_named(config.torch_autocast.dtype) if config.torch_autocast.enabled else None
    return Precision(
        compute=compute,
        low_precision_master=low_precision_master,
        accumulate=accumulate or (torch.bfloat16 if low_precision_master else None),
        communicate=dtype_named(config.communication_data_type),
        narrow=tuple(config.torch_autocast.lower_precision_safe_modules or ()) if autocast else (),
        pinned=tuple(config.data_types.keep_in_fp32_modules),
        predivide=float(data_ranks) if config.prescale_gradients else config.gradient_predivide_factor,
        autocast=autocast,
        cast_inputs=config.fp16.enabled and config.fp16.auto_cast,
    )


def share_memory(config: Config, device: torch.device) -> bool | Literal["required"]:
    """Whether ranks of one machine exchange tensors through shared memory; see `Comm`.

    Raises:
        UsageError: the configuration asks for it, and the model is not in host memory.
    """
    if config.transport == "shm" and device.type != "cpu":
        remedy = "leave it out: accelerators exchange bytes through their own process group"
        raise UsageError(explain('"transport": "shm" is for models in host memory', found=f"device {device}", do=remedy))
    if config.transport == "gloo" or device.type != "cpu":
        return False
    return "required" if config.transport == "shm" else True


def make_paging(config: Config) -> Paging | None:
    """Where optimizer state rests, unless it stays on the device.

    On the CPU, state in host memory is where it would be in any case; it takes the same way, so that this is seen to work.
    """
    offload, aio = config.zero_optimization.offload_optimizer, config.aio
    if offload.device == "none" or not offload.ratio:
        return None
    if offload.device == "cpu":
        return Paging(lambda: HostTier(pinned=offload.pin_memory), offload.buffer_size, offload.ratio)
    disk = DiskSettings(
        buffer_count=offload.buffer_count,
        buffer_size=offload.buffer_size,
        threads=max(aio.intra_op_parallelism, aio.thread_count or 1),
        block_bytes=aio.block_size,
        queue_depth=aio.queue_depth,
        pipeline_read=offload.pipeline_read,
        pipeline_write=offload.pipeline_write,
        pinned=offload.pin_memory,
    )
    folder = str(offload.nvme_path)
    return Paging(lambda: DiskTier(folder, disk, name="optimizer state"), offload.buffer_size, offload.ratio)


def make_policy(config: Config, data_ranks: int) -> Policy:
    """The rules a configuration asks for."""
    zero = config.zero_optimization
    return Policy(
        stage=STAGES[zero.stage],
        precision=make_precision(config, data_ranks),
        persist_below=zero.stage3_param_persistence_threshold,
        prefetch_elements=min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters),
        units=tuple(zero.units),
        leaf_modules=(*zero.leaf_module.classes, *zero.leaf_module.names, *_as_patterns(zero.leaf_module.name_suffixes)),
    )


def state_dtype(config: Config) -> torch.dtype | None:
    """Dtype of optimizer moments; None for that of the master weights."""
    if not config.bf16.enabled:
        return None
    if config.bf16.bf16_optimizer_states:
        return torch.bfloat16
    return torch.float32 if config.bf16.bf16_master_weights_and_grads else None


def show_log(config: Config) -> None:
    """Make what the configuration asks to be printed visible, unless the program has set up logging by itself.

    A library is silent by default: this acts only where `log_level`, `steps_per_print` or `dump_state` is given.
    """
    asked = {key for key in ("log_level", "steps_per_print", "dump_state") if config.raw.get(key) is not None}
    if not asked:
        return
    logger = logging.getLogger("shardwise")
    level = logging.getLevelName(config.log_level.upper()) if "log_level" in asked else logging.INFO
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[shardwise] %(message)s"))
        logger.addHandler(handler)


def _as_patterns(suffixes: Iterable[str]) -> list[str]:
    return [f"*{suffix}" for suffix in suffixes]
