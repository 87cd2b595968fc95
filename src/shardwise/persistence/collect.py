"""What this rank has to save.

Owns what of a training run is saved. Refuses to know files, and when ranks meet.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from shardwise.checkpoint import Contents, Facts, Key, Part, Spec, plain
from shardwise.checkpoint.datafile import to_bytes
from shardwise.errors import CheckpointError, explain
from shardwise.persistence.state import COUNTERS, flat_of, members_of, optimizer_name
from shardwise.trainer import Parts, Trainer
from shardwise.zero import Buffer, Member

__all__ = ["buffer_digests", "collect", "without_equal_buffers"]

log = logging.getLogger("shardwise")


def collect(trainer: Trainer, schedule: Any, *, without_frozen: bool) -> Contents:
    """What this rank has to save. Tensors are views of what trains; nothing is copied.

    Args:
        trainer: of the engine.
        schedule: its learning-rate schedule, or None.
        without_frozen: leave weights that do not require gradients out.

    Raises:
        CheckpointError: something has no plain form.
    """
    parts = trainer.parts
    _check_known(parts)
    share = Facts()
    found = [*_weights(parts, without_frozen), *_optimizer_state(parts, share), _random_state(parts)]
    buffers, extra = _split_state(parts)
    rank = parts.mesh.data.index
    specs: dict[Key, Spec] = {}
    for name, value in buffers.items():
        key, spec = Key("local", name, str(rank)) if rank else Key("buffer", name), Spec(tuple(value.shape), value.dtype)
        specs[key] = spec
        if spec.length:
            found.append(Part(key, spec, 0, flat_of(value)))
    if rank:
        return Contents(found, share)
    for buffer, member in members_of(parts, without_frozen=without_frozen):
        specs[Key("weight", member.name)] = _spec(member, buffer)
    return Contents(found, share, specs, _facts(trainer, schedule, extra, without_frozen))


def buffer_digests(contents: Contents) -> dict[str, int]:
    """What tells the module buffers of one rank from those of another, by name."""
    kinds = ("buffer", "local")
    return {part.key.name: crc32(to_bytes(part.values)) for part in contents.parts if part.key.kind in kinds}


def without_equal_buffers(contents: Contents, own: Mapping[str, int], first: Mapping[str, int]) -> Contents:
    """The same without this rank's own buffers that are those of the first rank, who saves them for all."""

    def is_own(part: Part) -> bool:
        return part.key.kind != "local" or own[part.key.name] != first.get(part.key.name)

    return replace(contents, parts=[part for part in contents.parts if is_own(part)])


def _check_known(parts: Parts) -> None:
    """Every parameter of the model must be one that the engine holds."""
    held = {id(member.parameter) for _, member in members_of(parts)}
    late = [name for name, parameter in parts.model.named_parameters() if id(parameter) not in held]
    if late:
        problem = f"parameter {late[0]!r} was registered after initialize, so that the engine does not hold it"
        raise CheckpointError(explain(problem, do="build the whole model before initialize"))


def _spec(member: Member, buffer: Buffer) -> Spec:
    """Of the master weight."""
    dtype = buffer.precise.dtype
    return Spec(member.slot.shape, dtype.to_complex() if member.slot.request.width == 2 else dtype)


def _weights(parts: Parts, without_frozen: bool) -> Iterator[Part]:
    """This rank's elements of every parameter; where several ranks hold the same, each saves a part of them."""
    for unit in parts.runtime.units:
        for buffer in unit.buffers:
            start, _ = buffer.interval
            share = buffer.layout.chunk // buffer.key.replicate.size
            low = buffer.key.replicate.index * share
            for member, first, last in buffer.own_pieces():
                first, last = max(first, low), min(last, low + share)
                if first < last and (member.parameter.requires_grad or not without_frozen):
                    values = buffer.precise.read(first, last)
                    yield Part(Key("weight", member.name), _spec(member, buffer), start + first - member.slot.offset, values)


def _optimizer_state(parts: Parts, share: Facts) -> Iterator[Part]:
    """This rank's elements of the optimizer's state; what is no tensor of the piece's length goes into `share`."""
    if parts.step_path is None:
        return
    shapes = {member.name: _spec(member, buffer) for buffer, member in members_of(parts)}
    for number, shard in enumerate(parts.shards):
        low, high = shard.counted_range()
        for position, piece in enumerate(shard.pieces):
            state = parts.step_path.driver.piece_state(number, position)
            if state:
                share.steps[piece.name] = shard.steps[position]
            for name, value in state.items():
                if not (isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.stop - piece.start):
                    if name != "step" or isinstance(value, Tensor):
                        # A copy: optimizers count in place, and a save in the background writes it later.
                        about = f"state {name!r} of {piece.name!r}"
                        share.numbers.setdefault(piece.name, {})[name] = plain.checked(value, about)
                    continue
                first, last = max(piece.start, low), min(piece.stop, high)
                if first < last:
                    shape, whole = shapes[piece.name].shape, shapes[piece.name].dtype
                    spec = Spec(shape, value.dtype.to_complex() if whole.is_complex else value.dtype)
                    cut = value[first - piece.start : last - piece.start]
                    yield Part(Key("optimizer", piece.name, name), spec, piece.offset + first - piece.start, cut)


def _split_state(parts: Parts) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the model's state dict holds besides parameters: tensors, and other things."""
    state = parts.runtime.other_state()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def _facts(trainer: Trainer, schedule: Any, extra: dict[str, Any], without_frozen: bool) -> Facts:
    parts = trainer.parts
    named = list(parts.model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named)}
    kept = {member.name for _, member in members_of(parts, without_frozen=without_frozen)}
    members = list(members_of(parts))
    return Facts(
        counters={name: getattr(trainer, name) for name in COUNTERS},
        groups=[] if parts.optimizer is None else [_describe_group(group, first) for group in parts.optimizer.param_groups],
        loss_scale=parts.scaler.state_dict(),
        schedule=_state_of(schedule, "the learning-rate schedule"),
        loader=_state_of(parts.data_loader, "the data loader"),
        extra=plain.checked(extra, "the model's extra state"),
        ties={name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name},
        excluded=[member.name for _, member in members if member.name not in kept],
        weight_dtypes={
            member.name: str(buffer.dtype_of(member)).removeprefix("torch.")
            for buffer, member in members
            if buffer.key.dtype != buffer.precise.dtype
        },
        origin={
            "shardwise": sys.modules["shardwise"].__version__,  # also where the package runs without being installed
            "torch": str(torch.__version__),
            "stage": parts.policy.stage.number,
            "ranks": parts.mesh.data.size,
            "optimizer": optimizer_name(parts),
            "schedule": type(schedule).__name__ if schedule is not None else "",
        },
    )


def _describe_group(group: Mapping[str, Any], first: Mapping[int, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            try:
                options[key] = plain.checked(value, key)
            except CheckpointError:
                log.warning("option %r of a parameter group is no plain value (%s): it is not saved", key, type(value).__name__)
    return {"options": options, "parameters": [first[id(parameter)] for parameter in group["params"] if id(parameter) in first]}


def _state_of(thing: Any, about: str) -> dict[str, Any]:
    state = getattr(thing, "state_dict", None)
    return {} if not callable(state) else plain.checked(state(), about)


def _random_state(parts: Parts) -> Part:
    """The states of all random generators of this process, as bytes of text."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = cast("Any", sys.modules["numpy"]).random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if parts.device.type != "cpu":
        states["accelerator"] = torch.get_device_module(parts.device).get_rng_state(parts.device)
    data = torch.frombuffer(bytearray(plain.dumps(states, "random state").encode()), dtype=torch.uint8)
    return Part(Key("random", str(parts.mesh.data.index)), Spec((data.numel(),), torch.uint8), 0, data)
