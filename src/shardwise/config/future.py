"""Sections of capabilities that do not exist yet. Their keys are known, so that a disabled section passes and a typo does not.

Refuses to know when those capabilities will come.
"""

from __future__ import annotations

from typing import Any

from shardwise.config.fields import DtypeName, FutureSection, Number, Whole, key, later, section

__all__ = [
    "Comet",
    "CommsLogger",
    "Compile",
    "CsvMonitor",
    "ExpertParallel",
    "FlopsProfiler",
    "Pipeline",
    "TensorBoard",
    "TensorParallel",
    "Wandb",
    "WeightQuantization",
]


class FlopsProfiler(FutureSection):
    """Counts the arithmetic of one training step per module."""

    enabled: bool = later(False, "Profile one step and print a table.")
    profile_step: Whole = key(1, "Which step is profiled.", ge=1)
    module_depth: Whole = key(-1, "How deep into nested modules the table goes; -1 for all.", ge=-1)
    top_modules: Whole = key(1, "How many modules the short table lists.", ge=1)
    detailed: bool = key(True, "Print the table for every module.")
    output_file: str | None = key(None, "File for the table; the terminal when absent.")
    recompute_fwd_factor: Number = key(0.0, "Share of the forward pass that is computed twice.", ge=0)


class CommsLogger(FutureSection):
    """Logs every collective with its size and time."""

    enabled: bool = later(False, "Log collectives.")
    verbose: bool = key(False, "One line per collective, as it happens.")
    prof_all: bool = key(True, "Log all kinds of collective.")
    debug: bool = key(False, "Name the caller of each collective.")
    prof_ops: list[str] | None = key(None, "Kinds of collective to log when prof_all is false.")


class TensorBoard(FutureSection):
    """Writes scalars for TensorBoard."""

    enabled: bool = later(False, "Write event files.")
    output_path: str = key("", "Folder for the event files.")
    job_name: str = key("", "Name of the run's folder.")


class Wandb(FutureSection):
    """Sends scalars to Weights & Biases."""

    enabled: bool = later(False, "Send scalars.")
    project: str | None = key(None, "Project the run belongs to.")
    group: str | None = key(None, "Group the run belongs to.")
    team: str | None = key(None, "Team that owns the project.")


class CsvMonitor(FutureSection):
    """Writes scalars to CSV files."""

    enabled: bool = later(False, "Write CSV files.")
    output_path: str = key("", "Folder for the CSV files.")
    job_name: str = key("", "Name of the run's folder.")


class Comet(FutureSection):
    """Sends scalars to Comet."""

    enabled: bool = later(False, "Send scalars.")
    samples_log_interval: Whole = key(100, "Samples between two submissions.", ge=1)
    project: str | None = key(None, "Project the run belongs to.")
    workspace: str | None = key(None, "Workspace that owns the project.")
    api_key: str | None = key(None, "Access key; better left to Comet's own configuration file.")
    experiment_name: str | None = key(None, "Name of the run.")
    experiment_key: str | None = key(None, "Identifier of the run to continue.")
    online: bool | None = key(None, "Send to the server, or store an offline run.")
    mode: str | None = key(None, "get, create or get_or_create.")


class TensorParallelGroup(FutureSection):
    """Size of the tensor-parallel group, in its older place."""

    tp_size: Whole = later(1, "Ranks that share one layer.", off=(0,), ge=0)
    tp_grain_size: Whole = key(1, "Smallest piece of a layer, in columns.", ge=1)


class TensorParallel(FutureSection):
    """Cuts single layers over ranks."""

    autotp_size: Whole = later(0, "Ranks that share one layer.", off=(1,), ge=0)
    dtype: DtypeName | None = key(None, "Format the model is converted to.", allowed='one of "fp32", "fp16", "bf16"')
    tp_overlap_comm: bool = key(False, "Overlap its collectives with computation.")
    tp: TensorParallelGroup = section(TensorParallelGroup, "Group size, in its older place.")
    partition_config: dict[str, Any] | None = key(None, "Rules that say which layer is cut along which dimension.")
    preset_model: str | None = key(None, "Built-in rules for a known architecture.")
    keep_module_on_host: bool = key(False, "Load checkpoints to host memory first.")


class ExpertParallel(FutureSection):
    """Puts different experts of a mixture on different ranks."""

    enabled: bool = later(False, "Replace mixture-of-experts layers.")
    autoep_size: Whole = later(1, "Ranks that share the experts of one layer.", off=(0,), ge=0)
    expert_tensor_parallel_size: Whole = later(1, "Ranks that share one expert.", off=(0,), ge=0)
    preset_model: str | None = key(None, "Built-in names for a known architecture.")
    moe_layer_pattern: str | None = key(None, "Pattern of the names of mixture layers.")
    router_pattern: str | None = key(None, "Name of the router inside a mixture layer.")
    expert_pattern: str | None = key(None, "Name of the experts inside a mixture layer.")
    expert_w1: str | None = key(None, "Name of the gate projection of an expert.")
    expert_w2: str | None = key(None, "Name of the down projection of an expert.")
    expert_w3: str | None = key(None, "Name of the up projection of an expert.")
    num_experts_attr: str | None = key(None, "Attribute of the model's config that counts experts.")
    top_k_attr: str | None = key(None, "Attribute of the model's config that holds top_k.")
    top_k: Whole | None = key(None, "Experts each token is sent to.", ge=1)
    score_func: str | None = key(None, "How the router scores experts: softmax or sigmoid.")
    score_apply: str | None = key(None, "Whether scores are applied before or after the experts.")
    route_norm: bool | None = key(None, "Normalise the scores of the chosen experts.")
    route_scale: Number = key(1.0, "Factor on the scores.")
    routed_scaling_factor: Number | None = key(None, "Factor on the output of the chosen experts.")
    num_expert_groups: Whole | None = key(None, "Groups the experts are divided into.", ge=1)
    num_limited_groups: Whole | None = key(None, "Groups a token may choose from.", ge=1)
    has_shared_experts: bool | None = key(None, "Whether some experts see every token.")
    shared_experts_pattern: str | None = key(None, "Name of the shared experts inside a mixture layer.")
    use_grouped_mm: bool = key(True, "Compute all experts of a rank in one grouped product.")


class Pipeline(FutureSection):
    """Puts different layers on different ranks. Any content switches it on, except `enabled` false or one stage."""

    enabled: bool | None = key(None, "Cut the model into pipeline stages.")
    stages: Whole | None = key(None, "Number of pipeline stages.", ge=0)
    partition: str | None = key(None, "How layers are dealt out to stages.")
    seed_layers: bool = key(False, "Give each layer its own random seed.")
    activation_checkpoint_interval: Whole = key(0, "Layers between two saved activations.", ge=0)
    pipe_partitioned: bool = key(True, "Cut activations between stages over the model-parallel ranks.")
    grad_partitioned: bool = key(True, "Cut gradients between stages over the model-parallel ranks.")


class Compile(FutureSection):
    """Compiles the model together with its communication."""

    enabled: bool = later(False, "Compile the model; until then, call `engine.compile()`.")
    deepcompile: bool = later(False, "Let the compiler place the collectives.")
    backend: str | None = key(None, "Backend of torch.compile.")
    free_activation: bool = key(False, "Free activations early.")
    free_activation_threshold: Whole = key(10_485_760, "Smallest activation, in bytes, that is freed early.", ge=0)
    offload_activation: bool = key(False, "Keep saved activations in host memory.")
    offload_opt_states: bool = key(False, "Keep optimizer state in host memory between steps.")
    offload_parameters: bool = key(False, "Keep parameters in host memory between uses.")
    double_buffer: bool = key(True, "Use two buffers per gather.")
    symmetric_memory: bool = key(False, "Exchange through symmetric memory.")
    debug_log: bool = key(False, "Write the graphs to disk.")
    sync_before_reduce: bool = key(False, "Synchronise before each reduction.")
    sync_after_reduce: bool = key(False, "Synchronise after each reduction.")
    sync_before_allgather: bool = key(False, "Synchronise before each gather.")
    sync_after_allgather: bool = key(False, "Synchronise after each gather.")
    keep_int_input_tensors: bool = key(True, "Keep integer inputs of the graph.")
    keep_all_input_tensors: bool = key(False, "Keep all inputs of the graph.")
    passes: list[str] | None = key(None, "Passes over the graph, in order.")


class WeightQuantization(FutureSection):
    """Keeps weights in fewer bits. Any content switches it on, except `enabled` false."""

    enabled: bool | None = key(None, "Quantise the weights.")
    quantized_initialization: dict[str, Any] | None = key(None, "How weights are quantised while they are created.")
    post_init_quant: dict[str, Any] | None = key(None, "How weights are quantised after they were created.")
