"""The whole format as one frozen model, and the resolved configuration the engine reads.

Owns the top-level keys. Refuses to know where the values came from and how problems are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from shardwise.config.fields import DtypeName, Interval, Lower, Number, Section, Whole, inert, key, later, section
from shardwise.config.future import (
    Comet,
    CommsLogger,
    Compile,
    CsvMonitor,
    ExpertParallel,
    FlopsProfiler,
    Pipeline,
    TensorBoard,
    TensorParallel,
    Wandb,
    WeightQuantization,
)
from shardwise.config.precision import Bf16, DataTypes, Fp16, TorchAutocast
from shardwise.config.sections import ActivationCheckpointing, Aio, Checkpoint, Optimizer, Scheduler
from shardwise.config.zero import ZeroOptimization

__all__ = ["Config", "ConfigView", "Findings", "Keys"]


@dataclass(frozen=True)
class Findings:
    """What reading a configuration found out besides the values.

    Args:
        raw: the dict that was passed in (the same object), or what the file or text held.
        batch_origin: batch number -> "given", "default ..." or "derived from ...".
        inert: dotted paths of keys in the file that have no effect.
        warnings: things that are legal and worth a line in the log.
    """

    raw: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    batch_origin: Mapping[str, str] = field(default_factory=dict[str, str])
    inert: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


_TOTAL_DOC = "Samples per optimizer step, over all ranks and micro-batches."
_MICRO_DOC = "Samples one rank passes through the model at a time."
_ACCUMULATION_DOC = "Micro-batches per optimizer step."


class Keys(Section):
    """Every key but the three batch numbers. Attribute names are the JSON key names, nested as in the file."""

    managed_gradient_accumulation: bool = key(
        True, "Count micro-batches and step on the last one; when false, every step() is an optimizer step."
    )
    optimizer: Optimizer | None = key(None, "The update rule; absent when an optimizer object is passed.")
    scheduler: Scheduler | None = key(None, "The learning-rate schedule; absent for a constant rate or a schedule object.")
    gradient_clipping: Number = key(
        0.0, "Largest norm of all gradients together; longer gradients are scaled down to it. 0 is off.", ge=0
    )
    prescale_gradients: bool = key(False, "Divide gradients before they are summed over ranks instead of afterwards.")
    gradient_predivide_factor: Number = key(
        1.0, "Divide gradients by this before the sum, and the rest afterwards; helps fp16 on many ranks.", gt=0
    )
    communication_data_type: DtypeName | None = key(
        None,
        "Format in which gradients travel between ranks; the accumulation format when absent.",
        allowed='one of "fp32", "fp16", "bf16" (or their longer names)',
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Lower] = key(
        "mean", "Whether gradients are averaged or summed over the data-parallel ranks."
    )
    fp16: Fp16 = section(Fp16, "fp16 training.")
    bf16: Bf16 = section(Bf16, "bf16 training.")
    torch_autocast: TorchAutocast = section(TorchAutocast, "Mixed precision by torch.autocast.")
    data_types: DataTypes = section(DataTypes, "Formats chosen apart from the training precision.")
    zero_optimization: ZeroOptimization = section(ZeroOptimization, "What is sharded, and how.")
    checkpoint: Checkpoint = section(Checkpoint, "Checkpoints of a training run.")
    steps_per_print: Interval | None = key(
        None, "Print a progress line every so many steps; never when absent.", allowed="a whole number >= 1, or inf"
    )
    dump_state: bool = key(False, "Print the resolved configuration at the start.")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], Lower] = key(
        "warning", "How much is logged."
    )
    dataloader_drop_last: bool = key(False, "Drop the last, smaller batch of the data loader.")
    watchdog_s: Number = key(300.0, "Shardwise only: seconds a collective may take before the job is stopped.", gt=0)
    transport: Annotated[Literal["auto", "gloo", "shm"], Lower] = key(
        "auto",
        "Shardwise only: how ranks of one host exchange tensors in host memory: through shared memory if they can (auto), "
        "never (gloo: only through the process group), or else it is an error (shm).",
    )
    wall_clock_breakdown: bool = later(False, "Print how long each phase of a step takes.")
    memory_breakdown: bool = later(False, "Print the memory at each phase of a step.")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "Recomputation of activations in the backward pass."
    )
    aio: Aio = section(Aio, "Disk access.")
    flops_profiler: FlopsProfiler = section(FlopsProfiler, "Arithmetic per module.")
    comms_logger: CommsLogger = section(CommsLogger, "Log of collectives.")
    tensorboard: TensorBoard = section(TensorBoard, "Scalars for TensorBoard.")
    wandb: Wandb = section(Wandb, "Scalars for Weights & Biases.")
    csv_monitor: CsvMonitor = section(CsvMonitor, "Scalars in CSV files.")
    comet: Comet = section(Comet, "Scalars for Comet.")
    data_parallel_size: Whole | None = key(
        None, "Ranks that see different samples; until there is another kind of parallelism, all of them.", ge=1
    )
    sequence_parallel_size: Whole = later(1, "Ranks that share one sequence.", off=(0,), ge=0)
    tensor_parallel: TensorParallel = section(TensorParallel, "Layers cut over ranks.")
    expert_parallel: ExpertParallel = section(ExpertParallel, "Experts dealt out to ranks.")
    pipeline: Pipeline = section(Pipeline, "Layers dealt out to ranks.")
    compile: Compile = section(Compile, "Compilation of the model.")
    weight_quantization: WeightQuantization = section(WeightQuantization, "Weights in fewer bits.")
    zero_allow_untested_optimizer: bool = inert(False, "Every elementwise optimizer is allowed.")
    zero_force_ds_cpu_optimizer: bool = inert(True, "Chose an optimizer implementation; there is one.")

    _findings: Findings = PrivateAttr(default_factory=Findings)

    def attach(self, findings: Findings) -> None:
        """Remember what reading found; called once, by the loader."""
        self._findings = findings

    @property
    def raw(self) -> Mapping[Any, Any]:
        """The dict that was passed in (the same object, unchanged), or what the file or text held."""
        return self._findings.raw

    @property
    def inert(self) -> list[str]:
        """Dotted paths of keys in the file that have no effect."""
        return list(self._findings.inert)

    @property
    def warnings(self) -> list[str]:
        """Things that are legal and worth a line in the log."""
        return list(self._findings.warnings)


class ConfigView(Keys):
    """A configuration whose batch numbers may be unknown: before "auto" is filled in, or while it is checked."""

    train_batch_size: Whole | None = key(None, _TOTAL_DOC, ge=1, auto_is_error=True)
    train_micro_batch_size_per_gpu: Whole | None = key(None, _MICRO_DOC, ge=1, auto_is_error=True)
    gradient_accumulation_steps: Whole | None = key(None, _ACCUMULATION_DOC, ge=1, auto_is_error=True)


class Config(Keys):
    """The resolved configuration: no "auto", no unknown batch number. Frozen."""

    train_batch_size: Whole = key(..., _TOTAL_DOC, ge=1)
    train_micro_batch_size_per_gpu: Whole = key(..., _MICRO_DOC, ge=1)
    gradient_accumulation_steps: Whole = key(..., _ACCUMULATION_DOC, ge=1)

    @property
    def batch_origin(self) -> dict[str, str]:
        """Batch number -> "given", "default ..." or "derived from ..."."""
        return dict(self._findings.batch_origin)
