"""The remaining sections: optimizer, schedule, checkpoints; and two that tune what does not exist here: recomputation, disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from shardwise.config.fields import Lower, Section, Upper, Whole, inert, key, later

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


class CheckpointKeys(Section):
    """Checkpoints of a training run."""

    tag_validation: Annotated[Literal["WARN", "FAIL", "IGNORE"], Upper] = key(
        "WARN", "What to do when ranks were given different checkpoint tags; unless it fails, the first rank's is taken."
    )
    keep_last: Whole = key(
        0,
        "Shardwise only: how many checkpoints stay in a directory; older ones are deleted after a save. 0 keeps all.",
        ge=0,
    )
    on_busy: Annotated[Literal["wait", "refuse"], Lower] = key(
        "wait", "Shardwise only: what a save does while the one before is still being written in the background."
    )
    use_node_local_storage: bool = later(False, "Every node writes its part to its own disk.")
    load_universal: bool = inert(False, "Every checkpoint is universal.")
    writer: dict[str, Any] | None = inert(None, "Settings of the checkpoint writer.")

    @property
    def asynchronous(self) -> bool:
        """The key "async", which Python does not take as a name."""
        return bool(getattr(self, "async"))


_ASYNC = key(
    False,
    "Shardwise only: a save copies the state to host memory and returns; the files are written while training goes on.",
)

if TYPE_CHECKING:

    class Checkpoint(CheckpointKeys):
        """Checkpoints of a training run."""
else:
    Checkpoint = create_model(
        "Checkpoint", __base__=CheckpointKeys, __doc__=CheckpointKeys.__doc__, **{"async": (bool, _ASYNC)}
    )


class ActivationCheckpointing(Section):
    """Recomputation of activations in the backward pass."""

    partition_activations: bool = later(False, "Cut saved activations over the model-parallel ranks.")
    cpu_checkpointing: bool = later(False, "Keep saved activations in host memory.")
    number_checkpoints: Whole | None = inert(None, "Sized a preallocated buffer.", ge=0)
    contiguous_memory_optimization: bool = inert(False, "Tuned that buffer.")
    synchronize_checkpoint_boundary: bool = inert(False, "Added device synchronisation.")
    profile: bool = inert(False, "Timed each checkpoint.")


class Aio(Section):
    """Tuning of disk access, for what is offloaded to disk; `shardwise bench io` measures what is best."""

    block_size: Whole = key(8_388_608, "Bytes per disk request.", ge=1)
    queue_depth: Whole = key(8, "Transfers in flight.", ge=1)
    intra_op_parallelism: Whole = key(2, "Threads that share one transfer.", ge=1)
    thread_count: Whole | None = key(None, "Another name for intra_op_parallelism; the larger of the two counts.", ge=1)
    single_submit: bool = inert(False, "Submit disk requests one by one.")
    overlap_events: bool = inert(True, "Submit new requests while waiting for old ones.")
    use_gds: bool = inert(False, "Move bytes between disk and device without host memory.")
