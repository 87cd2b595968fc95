"""The remaining sections: optimizer and schedule, and those that tune what does not exist here: checkpoints, recomputation,
disk.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.config.fields import Section, Upper, Whole, inert, key, later

__all__ = ["ActivationCheckpointing", "Aio", "Checkpoint", "Optimizer", "Scheduler"]


class Optimizer(Section):
    """The update rule."""

    type: str = key(..., "Adam, AdamW, SGD, Adagrad, Lion, Lamb, or the name of another torch.optim class.", auto_is_error=True)
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the update rule; the tables below list them.",
        json_schema_extra={"kind": "works"},
    )


class Scheduler(Section):
    """The learning-rate schedule, stepped by the engine after every update that was not skipped."""

    type: str = key(..., "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest.", auto_is_error=True)
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the schedule; the tables below list them.",
        json_schema_extra={"kind": "works"},
    )


class Checkpoint(Section):
    """Checkpoints of a training run; the section will have meaning once there are any."""

    tag_validation: Annotated[Literal["WARN", "FAIL", "IGNORE"], Upper] = inert(
        "WARN", "What to do when ranks were given different checkpoint tags."
    )
    use_node_local_storage: bool = inert(False, "Every node writes its part to its own disk.")
    load_universal: bool = inert(False, "Every checkpoint will be universal.")
    writer: dict[str, Any] | None = inert(None, "Settings of the checkpoint writer.")


class ActivationCheckpointing(Section):
    """Recomputation of activations in the backward pass."""

    partition_activations: bool = later(False, "Cut saved activations over the model-parallel ranks.")
    cpu_checkpointing: bool = later(False, "Keep saved activations in host memory.")
    number_checkpoints: Whole | None = inert(None, "Sized a preallocated buffer.", ge=0)
    contiguous_memory_optimization: bool = inert(False, "Tuned that buffer.")
    synchronize_checkpoint_boundary: bool = inert(False, "Added device synchronisation.")
    profile: bool = inert(False, "Timed each checkpoint.")


class Aio(Section):
    """Tuning of disk access; it will have meaning once something is offloaded to disk."""

    block_size: Whole = inert(1_048_576, "Bytes per disk request.", ge=1)
    queue_depth: Whole = inert(8, "Disk requests in flight.", ge=1)
    intra_op_parallelism: Whole = inert(1, "Threads that share one transfer.", ge=1)
    thread_count: Whole = inert(1, "Another name for intra_op_parallelism.", ge=1)
    single_submit: bool = inert(False, "Submit disk requests one by one.")
    overlap_events: bool = inert(True, "Submit new requests while waiting for old ones.")
    use_gds: bool = inert(False, "Move bytes between disk and device without host memory.")
