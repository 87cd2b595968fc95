"""Reading foreign checkpoints in tests."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.contents import Key, Part, Source, real_dtype
from shardwise.checkpoint.safetensors import encode_header, read_header

__all__ = [
    "Evil",
    "Model",
    "count_bytes",
    "interval",
    "read_safetensors",
    "same",
    "save_dcp",
    "state_of",
    "trained",
    "whole",
    "write_safetensors",
]


class Evil:
    """Runs a command when it is unpickled by something careless."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def whole(source: Source, key: Key) -> Tensor:
    """All values of a tensor."""
    spec = source.specs[key]
    return interval(source, key, 0, spec.length).view(spec.dtype).view(spec.shape)


def interval(source: Source, key: Key, start: int, stop: int) -> Tensor:
    """Storage elements of a tensor."""
    spec = source.specs[key]
    values = torch.full((stop - start,), 77, dtype=real_dtype(spec.dtype))
    source.read([Part(key, spec, start, values)])
    return values


def same(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A file in that format."""
    text, _ = encode_header({name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}, metadata or {})
    data = [bytes(each.detach().contiguous().view(-1).view(torch.uint8).numpy()) for each in tensors.values()]
    path.write_bytes(text + b"".join(data))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What such a file holds, and the facts in its metadata."""
    header, data = read_header(path), path.read_bytes()
    tensors = {
        name: torch.frombuffer(bytearray(data[each.start : each.stop]), dtype=each.dtype).view(each.shape)
        for name, each in header.tensors.items()
    }
    return tensors, json.loads(header.metadata["facts"])


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """`torch.distributed.checkpoint.save`, in one process or on all ranks."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


@contextmanager
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of all reads at positions."""
    sizes: list[int] = []
    true_read = os.preadv

    def counted(file: int, buffers: Any, at: int) -> int:
        count = true_read(file, buffers, at)
        sizes.append(count)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield sizes


class Model(nn.Module):
    """Tied, complex and scalar parameters, buffers, and a module called "model"."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.spectrum = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(3, 4)
        self.head.weight = self.model[0].weight


def trained(steps: int = 3) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.1}, {"params": others, "lr": 0.2, "betas": (0.5, 0.6)}])
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def state_of(model: Model, optimizer: torch.optim.Optimizer, flat: bool = False) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    found = get_state_dict(model, optimizer, options=options)
    return {"model": found[0], "optim": found[1]}
