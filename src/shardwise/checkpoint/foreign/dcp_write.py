"""Writes a checkpoint as a directory of torch.distributed.checkpoint.

Owns the state dict that users of that library expect, and that no more than a little of it is in memory at a time. The files
are written by torch's own public writer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.contents import Key, Part, Source, real_dtype
from shardwise.errors import CheckpointError, explain

__all__ = ["write_dcp"]


def write_dcp(source: Source, directory: str | Path, *, flatten_optimizer: bool = False) -> None:
    """Write a checkpoint as `torch.distributed.checkpoint.load` reads it, on any number of ranks.

    The state dict is `{"model": ..., "optim": ...}`, as `torch.distributed.checkpoint.state_dict.get_state_dict` gives them and
    `set_state_dict` takes them: weights (in full precision) and buffers by name, tied weights under each of their names;
    optimizer state by name of the parameter, options by parameter group. Options that torch's optimizer has and the checkpoint
    does not are filled in with torch's defaults, since loading asks for all. What the format has no place for (schedule, loss
    scale, counters) is left out.

    One process writes; the others need not call this. Memory above what was used before: the largest tensor, and while it is
    written a batch of smaller ones of at most that size, so up to twice the largest tensor. Each batch is a file.

    Args:
        source: what to write.
        directory: new or empty.
        flatten_optimizer: as `StateDictOptions(flatten_optimizer_state_dict=True)` has it: options are kept by parameter.

    Raises:
        CheckpointError: the directory is not empty, or cannot be written, or the source cannot be read.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        problem = f"{directory} cannot be written"
        raise CheckpointError(explain(problem, expected="a new or empty directory", found="one with files in it"))
    places: dict[str, Key] = {}
    state = {"model": _model(source, places), "optim": _optimizer(source, places, flatten_optimizer)}
    planner = _Planner(source, places)
    writer = _Writer(directory, planner.batch, overwrite=False, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        # It warns that it takes this for a single process, which is what was asked for.
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)  # pyright: ignore
        except CheckpointException as failed:  # torch's envelope for whatever went wrong on a rank
            raise _reason(failed, directory) from None


def _reason(failed: CheckpointException, directory: Path) -> BaseException:
    """What to raise for a failure."""
    error = next((failure[0] for failure in failed.failures.values()), failed)
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    found = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return CheckpointError(explain(f"{directory} cannot be written", found=found))


def _model(source: Source, places: dict[str, Key]) -> dict[str, Tensor]:
    """The model's part, with tensors that have no values yet."""
    found = {key.name: key for key in source.specs if key.kind in ("weight", "buffer")}
    for name, first in source.facts.ties.items():
        if first in found:
            found.setdefault(name, found[first])
    places |= {f"model.{name}": key for name, key in found.items()}
    return {name: _empty(source, key) for name, key in found.items()}


def _optimizer(source: Source, places: dict[str, Key], flatten: bool) -> dict[str, Any]:
    facts = source.facts
    state: dict[str, dict[str, Any]] = {}
    for key in source.specs:
        if key.kind == "optimizer":
            places[f"optim.state.{key.name}.{key.state}"] = key
            state.setdefault(key.name, {})[key.state] = _empty(source, key)
    for name, step in facts.steps.items():
        state.setdefault(name, {})["step"] = torch.tensor(float(step))
    for name, numbers in facts.numbers.items():
        state.setdefault(name, {}).update(numbers)
    if not state:
        return {}
    groups = _groups(source, list(state))
    if not flatten:
        return {"state": state, "param_groups": groups}
    flat: dict[str, Any] = {f"state.{name}.{key}": value for name, held in state.items() for key, value in held.items()}
    for group in groups:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _groups(source: Source, names: Sequence[str]) -> list[dict[str, Any]]:
    """Parameter groups with all options that torch's optimizer has."""
    states = {key.state for key in source.specs}
    kinds = {"exp_avg_sq": torch.optim.AdamW, "momentum_buffer": torch.optim.SGD, "sum": torch.optim.Adagrad}
    kind = next((kind for state, kind in kinds.items() if state in states), None)
    defaults: dict[str, Any] = kind([torch.zeros(1)], lr=1e-3).param_groups[0] if kind is not None else {}
    groups = source.facts.groups or [{"options": {}, "parameters": list(names)}]
    return [{**defaults, **group["options"], "params": list(group["parameters"])} for group in groups]


def _empty(source: Source, key: Key) -> Tensor:
    spec = source.specs[key]
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


class _Planner(DefaultSavePlanner):
    """Reads a tensor from the source when the writer asks for it."""

    def __init__(self, source: Source, places: Mapping[str, Key]) -> None:
        super().__init__()
        self._source = source
        self._places = places

    @property
    def batch(self) -> int:
        """Bytes of the largest tensor."""
        return max((self._source.specs[key].nbytes for key in self._places.values()), default=0)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of one item."""
        key = self._places.get(write_item.index.fqn)
        if key is None:
            return super().resolve_data(write_item)
        spec = self._source.specs[key]
        values = torch.empty(spec.length, dtype=real_dtype(spec.dtype))
        self._source.read([Part(key, spec, 0, values)])
        return values.view(spec.dtype).view(spec.shape)


class _Writer(FileSystemWriter):
    """Writes in batches: torch's writer keeps all tensors of a file until the file is complete.

    Args:
        path: the directory.
        batch: bytes of a batch.
        options: of torch's writer.
    """

    def __init__(self, path: Path, batch: int, **options: Any) -> None:
        super().__init__(path, **options)  # pyright: ignore
        self._batch = batch

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items, each batch to files of its own."""
        results: list[WriteResult] = []
        for number, items in enumerate(self._batches(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"__{number}_")
            written = super().write_data(replace(plan, items=items, storage_data=prefix), planner)
            results += written.wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _batches(self, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
        batches: list[list[WriteItem]] = []
        left = -1
        for item in items:
            size = item.tensor_storage_size() or 0
            if size > left or not batches:
                batches.append([])
                left = self._batch
            batches[-1].append(item)
            left -= size
        return batches
