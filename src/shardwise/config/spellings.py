"""Keys that are not part of the format any more: removed ones, and older names of present ones.

Refuses to know the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

__all__ = ["RENAMED", "REFUSED", "Renamed", "asks_for_something"]


REFUSED: dict[str, str] = {
    "amp": "Use bf16, fp16 or torch_autocast",
    "nebula": "Remove it; the checkpoint section says how checkpoints are written",
    "compression_training": "Remove it and compress the trained model afterwards",
    "quantize_training": "Remove it and quantise the trained model afterwards",
    "sparse_gradients": "Remove it; gradients of embeddings are reduced as dense tensors",
    "sparse_attention": "Remove it and choose the attention in the model",
    "eigenvalue": "Remove it; it served quantize_training, which is gone too",
    "elasticity": "Remove it and give train_batch_size; the other batch numbers follow from the world size",
    "graph_harvesting": "Remove it and call engine.compile()",
    "curriculum_learning": "Remove it and order the samples in the data loader",
    "progressive_layer_drop": "Remove it and drop layers in the model",
    "zero_optimization.mics_shard_size": "Remove it; stage 3 shards over all data-parallel ranks",
    "zero_optimization.mics_hierarchical_params_gather": "Remove it; stage 3 shards over all data-parallel ranks",
    "zero_optimization.zeropp_loco_param": "Remove it; gradients are reduced uncompressed",
    "optimizer.params.max_grad_norm": "Use the top-level key gradient_clipping",
}
"""Dotted path of each key that cannot be honoured -> what to do instead."""


@dataclass(frozen=True)
class Renamed:
    """The present name of an older key, in the same object.

    Args:
        name: present name.
        device: set when the old key was a switch that now is `{"device": ...}` in the object `name`.
    """

    name: str
    device: str | None = None

    def understands(self, old: object) -> bool:
        """Whether the old value can be read at all."""
        return self.device is None or isinstance(old, bool) or old == "auto"

    def value(self, old: object) -> object:
        """The value under the present name, None for absent."""
        if self.device is None:
            return old
        return {"device": self.device} if old is True else None


RENAMED: dict[str, Renamed] = {
    "bfloat16": Renamed("bf16"),
    "zero_optimization.cpu_offload": Renamed("offload_optimizer", "cpu"),
    "zero_optimization.cpu_offload_params": Renamed("offload_param", "cpu"),
    "zero_optimization.cpu_offload_param": Renamed("offload_param", "cpu"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Renamed("stage3_gather_16bit_weights_on_model_save"),
}
"""Dotted path of each older key -> its present name."""


def asks_for_something(value: object) -> bool:
    """Whether the value of a removed key would have switched anything on; files keep such keys around with `false`."""
    if isinstance(value, Mapping):
        inner = cast("Mapping[object, object]", value)
        return asks_for_something(inner["enabled"]) if "enabled" in inner else bool(inner)
    if isinstance(value, (int, float)):
        return value > 0
    return value is not None and value not in ("", "auto")
