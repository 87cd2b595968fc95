"""Checkpoints for tests that need no engine: a few tensors, cut among some ranks, and facts.

Owns their contents. What is written goes through `write_checkpoint`, as an engine's does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint import (
    ByCollective,
    Contents,
    Destination,
    Facts,
    Folder,
    Key,
    NativeSource,
    Part,
    Source,
    Spec,
    write_checkpoint,
)
from shardwise.zero import as_storage

__all__ = ["TINY", "damage", "read_whole", "tiny_facts", "tiny_tensors", "write_run"]

TINY = "global_step3"
"""The tag of `write_run`."""


def tiny_tensors(seed: int = 0) -> dict[Key, Tensor]:
    """Weights, buffers and optimizer state, of every sort."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    weights = {
        "embed.weight": normal(7, 5),
        "blocks.0.linear.weight": normal(5, 5),
        "blocks.0.linear.bias": normal(5),
        "blocks.1.linear.weight": normal(5, 5).to(torch.bfloat16),
        "blocks.1.linear.bias": normal(5).double(),
        "scale": normal(),
        "table": torch.arange(6),
        "turn": torch.complex(normal(3), normal(3)),
        "nothing": torch.empty(0, 3),
    }
    found = {Key("weight", name): value for name, value in weights.items()}
    found[Key("buffer", "mean")] = normal(5)
    found[Key("buffer", "seen")] = torch.tensor(41)
    for state in ("exp_avg", "exp_avg_sq"):
        found[Key("optimizer", "embed.weight", state)] = normal(7, 5)
        found[Key("optimizer", "blocks.0.linear.weight", state)] = normal(5, 5)
    return found


def tiny_facts() -> Facts:
    """What goes with them."""
    return Facts(
        counters={"global_steps": 3, "global_samples": 36, "micro_steps": 3, "skipped_steps": 0},
        groups=[{"options": {"lr": 0.05, "weight_decay": 0.1}, "parameters": ["embed.weight", "blocks.0.linear.weight"]}],
        steps={"embed.weight": 3, "blocks.0.linear.weight": 3},
        loss_scale={"scale": 1024.0, "dynamic": True},
        schedule={"last_epoch": 3},
        ties={"head.weight": "embed.weight"},
        weight_dtypes={"embed.weight": "bfloat16", "blocks.0.linear.weight": "float16"},
        origin={"shardwise": "0", "torch": "2", "stage": 3, "ranks": 2, "optimizer": "AdamW"},
    )


def write_run(
    directory: Path,
    tag: str = TINY,
    tensors: Mapping[Key, Tensor] | None = None,
    facts: Facts | None = None,
    *,
    world: int = 2,
    client_state: bytes | None = None,
) -> NativeSource:
    """Save tensors as `world` ranks would, each a part of every one; returns the checkpoint, open."""
    tensors = tiny_tensors() if tensors is None else tensors
    facts = tiny_facts() if facts is None else facts
    folder = Folder(directory)
    written = folder.begin(tag)
    specs = {key: Spec(tuple(value.shape), value.dtype) for key, value in tensors.items()}
    parts: list[list[Part]] = [[] for _ in range(world)]
    for key, value in tensors.items():
        flat = as_storage(value.contiguous())
        step = -(-len(flat) // world) or 1
        for rank, start in enumerate(range(0, len(flat), step)):
            parts[rank].append(Part(key, specs[key], start, flat[start : start + step]))
    texts: dict[str, dict[int, str]] = {}
    barrier = threading.Barrier(world)

    def save(rank: int) -> None:
        def gather(text: str, name: str) -> list[str]:
            texts.setdefault(name, {})[rank] = text
            barrier.wait(30)
            return [texts[name][each] for each in range(world)]

        first = {"specs": specs, "facts": facts, "client_state": client_state} if rank == 0 else {}
        write_checkpoint(Contents(parts[rank], **first), Destination(folder, tag, written, rank, world), ByCollective(gather))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return NativeSource(folder, tag)


def read_whole(source: Source, key: Key) -> Tensor:
    """All values of a tensor."""
    value = torch.empty(source.specs[key].shape, dtype=source.specs[key].dtype)
    source.read([Part(key, source.specs[key], 0, as_storage(value))])
    return value


def damage(path: Path, at: int = -1) -> None:
    """Turn a bit of a file around."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
