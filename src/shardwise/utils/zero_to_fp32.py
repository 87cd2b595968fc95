"""Whole fp32 weights from a checkpoint, under the names that scripts written for DeepSpeed call.

Owns these names. They take any checkpoint that `shardwise.checkpoint.opening` can open. For a directory that `from_pretrained`
or `torch.load` reads, `shardwise checkpoint export` does the same from the command line.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint import Key, Part, Source
from shardwise.checkpoint.export import export
from shardwise.checkpoint.opening import open_path
from shardwise.checkpoint.streaming import Converted
from shardwise.persistence import load_pretrained
from shardwise.zero import as_storage

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]


class LazyTensor:
    """A tensor of a checkpoint that is read when it is asked for.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, opened: _Opened, key: Key) -> None:
        spec = opened.source.specs[key]
        self.shape = torch.Size(spec.shape)
        self.dtype = spec.dtype
        self._opened = opened
        self._key = key

    def contiguous(self) -> Tensor:
        """Read it."""
        value = torch.empty(self.shape, dtype=self.dtype)
        self._opened.source.read([_part(self._opened.source, self._key, value)])
        return value


class _Opened:
    """A checkpoint that is closed when nobody needs it any more."""

    def __init__(self, source: Source) -> None:
        self.source = source
        weakref.finalize(self, source.close)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """All weights and buffers, in host memory, for `model.load_state_dict`.

    Args:
        checkpoint_dir: a run's directory, or one checkpoint.
        tag: which of a run's checkpoints; None for the latest.
        exclude_frozen_parameters: leave out weights that no optimizer updated.
        lazy_mode: give objects whose `contiguous()` reads the tensor, instead of tensors.

    Returns:
        floating-point values as float32, others as they are; tied weights under all their names, as one tensor.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    opened = _Opened(_wide(open_path(checkpoint_dir, tag), without_frozen=exclude_frozen_parameters))
    source = opened.source
    keys = [key for key in source.specs if key.kind in ("weight", "buffer")]
    state: dict[str, Any]
    if lazy_mode:
        state = {key.name: LazyTensor(opened, key) for key in keys}
    else:
        state = {key.name: torch.empty(source.specs[key].shape, dtype=source.specs[key].dtype) for key in keys}
        source.read([_part(source, key, state[key.name]) for key in keys])
    state.update({alias: state[name] for alias, name in source.facts.ties.items() if name in state})
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as `pytorch_model.bin`, or shards of it, for `from_pretrained` and `torch.load`.

    Args:
        checkpoint_dir: a run's directory, or one checkpoint.
        output_dir: a directory; weights that are in it are replaced, other files stay.
        max_shard_size: bytes, or text such as "5GB".
        safe_serialization: write safetensors instead.
        tag: which of a run's checkpoints; None for the latest.
        exclude_frozen_parameters: leave out weights that no optimizer updated.

    Raises:
        CheckpointError: the checkpoint is damaged, or the directory cannot be written.
    """
    source = _wide(open_path(checkpoint_dir, tag), without_frozen=exclude_frozen_parameters)
    try:
        kind = "safetensors" if safe_serialization else "torch"
        export(source, output_dir, format=kind, dtype="fp32", max_shard_size=max_shard_size, overwrite=True)
    finally:
        source.close()


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> nn.Module:
    """Load the weights into a model, where it is and in its dtypes. What does not fit is left, and said so in the log.

    Args:
        model: an ordinary one, one built under `zero.Init`, or an engine; collective in the latter cases.
        checkpoint_dir: a run's directory, or one checkpoint.
        tag: which of a run's checkpoints; None for the latest.

    Returns:
        the model.

    Raises:
        CheckpointError: the checkpoint is damaged, or a weight has another shape.
    """
    load_pretrained(model, checkpoint_dir, tag=tag, strict=False)
    return model


def _wide(source: Source, *, without_frozen: bool) -> Converted:
    """The checkpoint with all floating-point weights and buffers as float32."""
    specs = {key: spec for key, spec in source.specs.items() if key.kind in ("weight", "buffer")}
    dtypes = {key: torch.float32 for key, spec in specs.items() if spec.dtype.is_floating_point}
    trained = {name for group in source.facts.groups for name in group.get("parameters", ())}
    frozen = [key for key in specs if key.kind == "weight" and key.name not in trained] if without_frozen and trained else []
    return Converted(source, dtypes, without=frozen)


def _part(source: Source, key: Key, value: Tensor) -> Part:
    return Part(key, source.specs[key], 0, as_storage(value))
