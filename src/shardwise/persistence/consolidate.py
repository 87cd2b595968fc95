"""Whole weights in one process, as a plain state dict.

Owns the gathering, unit by unit. Refuses to know checkpoints.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint import first_line
from shardwise.checkpoint.datafile import refuse
from shardwise.errors import CheckpointError, explain
from shardwise.trainer import Parts

__all__ = ["consolidate", "save_consolidated"]


def consolidate(parts: Parts, *, without_frozen: bool = False) -> OrderedDict[str, Tensor] | None:
    """The model's state dict with whole weights, in host memory. Collective; at most one unit is gathered at a time.

    Weights come in the dtype in which the model computes. Tied weights are one tensor under all their names.

    Args:
        parts: of the engine.
        without_frozen: leave weights that do not require gradients out.

    Returns:
        on the first rank; None on the others.
    """
    parts.runtime.backward.finish()
    first = parts.mesh.data.index == 0
    whole: dict[int, Tensor] = {}
    for unit in parts.runtime.units:
        with unit.pinned():
            for buffer in unit.buffers if first else ():
                for _, _, parameter in buffer.present():
                    if parameter.requires_grad or not without_frozen:
                        whole[id(parameter)] = parameter.detach().to("cpu", copy=True)
    if not first:
        return None
    others = parts.runtime.other_state()
    named = dict(parts.model.named_parameters(remove_duplicate=False))
    state: OrderedDict[str, Tensor] = OrderedDict()
    for name in parts.model.state_dict(keep_vars=True):
        if name in named:
            if id(named[name]) in whole:
                state[name] = whole[id(named[name])]
        else:
            value = others[name]
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return state


def save_consolidated(parts: Parts, path: Path, *, without_frozen: bool = False) -> None:
    """Write `consolidate`'s result as one file: safetensors where the name ends so, torch.save otherwise. Collective.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    state, problem = consolidate(parts, without_frozen=without_frozen), ""
    if state is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(state, path)
        except OSError as error:
            problem = str(refuse(path, error, sum(value.nbytes for value in state.values() if isinstance(value, Tensor))))
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - torch has errors of its own for a disk that is full
            problem = explain(f"{path} cannot be written", found=first_line(error), do="check the disk").rstrip(".")
    told = parts.comm.all_gather_object(problem, parts.mesh.data, "are the weights saved")
    if told[0]:
        raise CheckpointError(told[0])


def _write(state: OrderedDict[str, Tensor], path: Path) -> None:
    """Under another name first, so that a file under this one is complete."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(state, beside)
        else:
            torch.save(state, beside)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _write_safetensors(state: OrderedDict[str, Tensor], path: Path) -> None:
    from shardwise.checkpoint.datafile import write_tensors

    once: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            problem = f"{name!r} has no place in a safetensors file"
            raise CheckpointError(explain(problem, expected="a tensor", found=type(value).__name__, do="save as .bin instead"))
        once.setdefault(value.data_ptr() if value.numel() else -id(value), name)
    write_tensors(path, {name: state[name].contiguous() for name in once.values()}, {"format": "pt"})
