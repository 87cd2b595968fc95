"""The section `zero_optimization`: what is sharded, and how sharded parameters are handled.

Refuses to know what a stage does; the policy table does.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shardwise.config.fields import FutureSection, Names, Number, Section, Whole, inert, key, later, section

__all__ = ["LeafModule", "OffloadOptimizer", "OffloadParam", "ZeroOptimization"]


def _names(doc: str) -> Any:
    return Field(default_factory=list, description=doc, json_schema_extra={"kind": "works"})


class OffloadOptimizer(Section):
    """Where optimizer state and separate master weights rest between steps (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none", "Keep optimizer state in host memory (cpu) or on disk (nvme) instead of on the device."
    )
    nvme_path: str | None = key(None, "Folder on a fast disk, for device nvme.")
    pin_memory: bool = key(False, "Use page-locked host memory, which copies faster.")
    buffer_count: Whole = key(4, "Buffers through which pages of state pass, for device nvme.", ge=1)
    buffer_size: Whole = key(
        16_777_216, "Shardwise only: bytes of each of them, and so of a page of state. A step needs no more memory.", ge=65_536
    )
    pipeline_read: bool = key(True, "Read the next page of state while the current one is updated.")
    pipeline_write: bool = key(True, "Write the previous page of state while the current one is updated.")
    ratio: Number = key(1.0, "Share of the optimizer state that is moved off the device.", ge=0, le=1)
    fast_init: bool = inert(False, "Tuned the creation of state files.")


class OffloadParam(FutureSection):
    """Where sharded parameters rest between uses (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = later(
        "none", "Keep parameter shards in host memory (cpu) or on disk (nvme) instead of on the device."
    )
    nvme_path: str | None = key(None, "Folder on a fast disk, for device nvme.")
    buffer_count: Whole = key(5, "Staging buffers for device nvme.", ge=1)
    buffer_size: Whole = key(100_000_000, "Elements per staging buffer for device nvme.", ge=1)
    max_in_cpu: Whole = key(1_000_000_000, "Elements kept in host memory when device is nvme.", ge=0)
    pin_memory: bool = key(False, "Use page-locked host memory, which copies faster.")


class LeafModule(Section):
    """Modules that are gathered whole, because different ranks may run different parts of their inside."""

    classes: Names = _names("Class names of such modules (mixture-of-experts blocks, for example).")
    names: Names = _names("Full dotted names of such modules.")
    name_suffixes: Names = _names("Endings of the dotted names of such modules.")


class ZeroOptimization(Section):
    """What is cut over the data-parallel ranks: nothing (0), optimizer state (1), also gradients (2), also parameters (3)."""

    stage: Whole = key(0, "ZeRO stage; the higher, the less memory per rank and the more communication.", ge=0, le=3)
    stage3_param_persistence_threshold: Whole = key(
        100_000, "Stage 3: parameters with at most this many elements stay gathered.", ge=0
    )
    stage3_prefetch_bucket_size: Whole = key(50_000_000, "Stage 3: elements that may be gathered ahead of their use.", ge=0)
    stage3_max_live_parameters: Whole = key(
        1_000_000_000, "Stage 3: elements that may be gathered at one time, prefetch included.", ge=0
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False, "Stage 3: gather the whole model in its 16-bit format when weights are exported."
    )
    units: Names = _names(
        "Shardwise only: module class names, or patterns over module names, gathered as one unit; empty finds them."
    )
    leaf_module: LeafModule = section(LeafModule, "Modules whose inside may run differently on different ranks.")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "Where optimizer state rests.")
    offload_param: OffloadParam = section(OffloadParam, "Where sharded parameters rest.")
    zero_hpz_partition_size: Whole = later(
        1, "Ranks of one node that keep a second copy of the parameters, to gather without the network.", off=(0,), ge=0
    )
    zero_quantized_weights: bool = later(False, "Gather parameters in 8 bits.")
    zero_quantized_nontrainable_weights: bool = later(False, "Keep frozen parameters in 8 bits.")
    zero_quantized_gradients: bool = later(False, "Reduce gradients in 4 bits.")
    overlap_comm: bool | None = inert(None, "Communication always overlaps computation where it can.")
    sub_group_size: Whole = inert(1_000_000_000, "Tuned the tile of the optimizer step.", ge=1)
    reduce_bucket_size: Whole = inert(500_000_000, "Tuned reduction buckets; a unit is reduced as one.", ge=1)
    allgather_bucket_size: Whole = inert(500_000_000, "Tuned gather buckets; a unit is gathered as one.", ge=1)
    allgather_partitions: bool = inert(True, "Chose all-gather over broadcasts; it always is all-gather.")
    reduce_scatter: bool = inert(True, "Chose reduce-scatter over all-reduce; the stage decides.")
    contiguous_gradients: bool = inert(True, "Gradients always are contiguous.")
    round_robin_gradients: bool = inert(False, "Tuned how gradients were dealt out; shards are equal intervals.")
    ignore_unused_parameters: bool = inert(True, "Unused parameters are always legal.")
    stage3_max_reuse_distance: Whole = inert(1_000_000_000, "Tuned when a parameter was released.", ge=0)
    stage3_module_granularity_threshold: Whole = inert(0, "Tuned which modules were gathered together; see units.")
    log_trace_cache_warnings: bool = inert(False, "There is no trace to warn about.")
    use_multi_rank_bucket_allreduce: bool = inert(True, "Tuned reduction buckets.")
    load_from_fp32_weights: bool = inert(True, "Master weights are always restored in full.")
    memory_efficient_linear: bool = inert(True, "Chose a replacement of torch.nn.Linear; there is none.")
    elastic_checkpoint: bool = inert(False, "Every checkpoint loads at any world size.")
    override_module_apply: bool = inert(True, "torch.nn.Module is never patched.")
