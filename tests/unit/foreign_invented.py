"""Invented DeepSpeed checkpoints: a plain model of how its files are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["GROUPS", "adam_state", "change", "invent", "save_whole"]

GROUPS = [{"a": torch.randn(5, 3), "b": torch.randn(4)}, {"c": torch.randn(7)}]
"""Parameters of two groups."""


def flat_parts(tensors: list[Tensor], world: int, trim: bool) -> list[Tensor]:
    """Stages 1 and 2: end to end, padded to 2 elements per rank, in equal parts; the padding itself need not be stored."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    padded = torch.cat([flat, flat.new_full((-flat.numel() % (2 * world),), -1.0)])
    size = padded.numel() // world
    parts = [padded[rank * size : (rank + 1) * size] for rank in range(world)]
    return [part[: max(0, flat.numel() - rank * size)] for rank, part in enumerate(parts)] if trim else parts


def equal_parts(tensor: Tensor, world: int) -> list[Tensor]:
    """Stage 3: one tensor in equal parts, the last ones padded."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_full((size * world - flat.numel(),), -1.0)])
    return [padded[rank * size : (rank + 1) * size] for rank in range(world)]


def invent(folder: Path, groups: list[dict[str, Tensor]], stage: int, world: int, subgroups: int = 1) -> None:
    """What DeepSpeed would write; the moment of each weight is its double."""
    shapes: list[dict[str, torch.Size]] = []
    masters: list[list[Tensor]] = []  # by flat group, then rank
    members: list[list[int]] = []
    for group in groups:
        names = list(group)
        cuts = [names[at::subgroups] for at in range(subgroups)] if stage == 3 else [names]
        members.append([])
        for cut in filter(None, cuts):
            members[-1].append(len(shapes))
            shapes.append({name: group[name].shape for name in cut})
            tensors = [group[name] for name in cut]
            if stage == 3:
                each = [equal_parts(tensor, world) for tensor in tensors]
                masters.append([torch.cat([parts[rank] for parts in each]) for rank in range(world)])
            else:
                masters.append(flat_parts(tensors, world, trim=stage == 2))
    frozen = {"frozen": torch.arange(7.0)}
    for rank in range(world):
        base = {
            "state": {at: {"step": 5, "exp_avg": 2 * parts[rank], "other": 1.5} for at, parts in enumerate(masters)},
            "param_groups": [{"lr": 0.1 * at, "params": held} for at, held in enumerate(members)],
        }
        mine = [parts[rank] for parts in masters]
        optimizer = {"zero_stage": stage, "partition_count": world if stage == 3 else [world] * len(groups)}
        if stage == 3:
            optimizer |= {"fp32_flat_groups": mine, "optimizer_state_dict": base}
        else:
            optimizer |= {"single_partition_of_fp32_groups": mine, "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        fragments = {name: equal_parts(each, world)[rank] if stage == 3 else each for name, each in frozen.items()}
        model = {
            "module": {"buffer": torch.ones(2)},
            "buffer_names": ["buffer"],
            "param_shapes": shapes,
            "shared_params": {},
            "frozen_param_shapes": {name: each.shape for name, each in frozen.items()},
            "frozen_param_fragments": fragments,
        }
        if stage == 3 or rank == 0:
            torch.save(model, folder / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")


def change(path: Path, edit: Any) -> None:
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


def save_whole(path: Path, optimizer: dict[str, Any], module: dict[str, Tensor]) -> None:
    state = {"module": module, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "shared_params": None}
    torch.save(state, path / "mp_rank_00_model_states.pt")


def adam_state(tensors: list[Tensor]) -> dict[int, dict[str, Any]]:
    return {at: {"step": torch.tensor(2.0), "exp_avg": 2 * tensor.float()} for at, tensor in enumerate(tensors)}
