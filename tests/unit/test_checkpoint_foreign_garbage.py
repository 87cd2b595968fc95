"""Each value in a checkpoint replaced by something else: an error that names the file, or values, but nothing unforeseen."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.foreign import DeepSpeedSource, open_foreign
from shardwise.errors import CheckpointError
from tests.unit.foreign_invented import GROUPS, adam_state, invent, save_whole
from tests.unit.foreign_support import save_dcp, state_of, trained, whole

GARBAGE: list[Any] = [
    *(None, 3, -1, "x", float("nan"), [], {}, (2**70,), [[1]], {3: 4}),
    *(torch.zeros(2), [torch.zeros(3)], {"a": torch.Size([1])}),
]
Steps = tuple[tuple[str, Any], ...]
"""The way to a value: by items and attributes."""


def ways(value: Any, way: Steps = ()) -> Iterator[Steps]:
    """To all values inside a value."""
    if way:
        yield way
    if isinstance(value, dict):
        items = [("item", key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [("item", at, item) for at, item in enumerate(value)]
    elif isinstance(value, torch.Tensor | type):
        items = []
    else:
        items = [("attribute", name, item) for name, item in vars(value).items()] if hasattr(value, "__dict__") else []
    for kind, key, item in items:
        yield from ways(item, (*way, (kind, key)))


def put(value: Any, way: Steps, garbage: Any) -> None:
    for kind, key in way[:-1]:
        value = value[key] if kind == "item" else vars(value)[key]
    kind, key = way[-1]
    (value if kind == "item" else vars(value))[key] = garbage


def read_all(folder: Path) -> None:
    """All that can be asked for."""
    source = open_foreign(folder)
    assert source is not None
    _ = source.facts
    if isinstance(source, DeepSpeedSource):
        _ = source.client_state
    for key, spec in source.specs.items():
        if spec.length < 10**6:
            whole(source, key)


def replace_each(folder: Path, path: Path, value: Any, save: Callable[[Any, Path], object]) -> None:
    """Read after each replacement; every value gets two pieces of garbage, in turn."""
    logging.disable(logging.WARNING)
    try:
        read_all(folder)
        for number, way in enumerate(ways(value)):
            for garbage in (GARBAGE[number % len(GARBAGE)], GARBAGE[(5 * number + 2) % len(GARBAGE)]):
                changed = copy.deepcopy(value)
                put(changed, way, garbage)
                try:
                    save(changed, path)
                except (TypeError, ValueError, AttributeError):  # what cannot be pickled cannot be met
                    continue
                try:
                    read_all(folder)
                except CheckpointError as error:
                    assert str(folder) in str(error), (way, garbage)
        save(value, path)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("which", ["model", "optim"])
def test_sharded_checkpoints_of_deepspeed(tmp_path: Path, stage: int, which: str) -> None:
    invent(tmp_path, GROUPS, stage, 2)
    path = sorted(tmp_path.glob(f"*{which}*"))[-1]
    replace_each(tmp_path, path, torch.load(path, weights_only=True), torch.save)


@pytest.mark.parametrize("kind", ["plain", "masters", "flat masters"])
def test_whole_checkpoints_of_deepspeed(tmp_path: Path, kind: str) -> None:
    module = {name: torch.randn(2, 3) for name in "ab"}
    tensors = list(module.values())
    joined = [torch.cat([tensor.view(-1) for tensor in tensors])]
    state = adam_state(joined if kind == "flat masters" else tensors)
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 1.0, "params": list(state)}]}
    if kind != "plain":
        masters = {"fp32_groups_flat": joined} if kind == "flat masters" else {"fp32_groups": [tensors]}
        counts = {"cur_scale": 8.0, "dynamic_loss_scale": True, "scale_window": 3, "cur_iter": 5, "last_overflow_iter": 1}
        optimizer = {"optimizer_state_dict": optimizer, **masters, **counts}
    save_whole(tmp_path, optimizer, module)
    path = tmp_path / "mp_rank_00_model_states.pt"
    replace_each(tmp_path, path, torch.load(path, weights_only=True), torch.save)


def test_metadata_of_torch(tmp_path: Path) -> None:
    save_dcp(state_of(*trained()), tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = dict(list(metadata.storage_data.items())[:12])
    metadata.state_dict_metadata = {index.fqn: metadata.state_dict_metadata[index.fqn] for index in metadata.storage_data}
    replace_each(tmp_path, path, metadata, lambda value, to: to.write_bytes(pickle.dumps(value)))
