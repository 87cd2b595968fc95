"""Taking a checkpoint over into an engine.

Owns what is done with what was read. Refuses to know files, and when ranks meet.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.checkpoint import Facts, Key, Part, Source, plain
from shardwise.errors import CheckpointError, ShardwiseError, explain
from shardwise.persistence.filling import Filling
from shardwise.persistence.state import COUNTERS, flat_of, optimizer_name
from shardwise.trainer import Parts, Trainer
from shardwise.zero import GatheredParameters

__all__ = ["Wishes", "load_by_user", "restore"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Wishes:
    """What to take besides weights and buffers; see `Engine.load_checkpoint`.

    Args:
        weights: weights and buffers themselves.
        optimizer: its state, the options of its groups, the loss scale and random generators.
        schedule: how far the learning-rate schedule is.
        only_weights: nothing else at all.
    """

    weights: bool = True
    optimizer: bool = True
    schedule: bool = True
    only_weights: bool = False


def restore(trainer: Trainer, schedule: Any, source: Source, names: Mapping[str, Key], wishes: Wishes) -> list[str]:
    """Take what this rank needs from a checkpoint that fits. Collective: ranks that share memory wait for each other.

    Returns:
        notes on what was left as it is.

    Raises:
        CheckpointError: a file is damaged. The engine's state is then partly old, partly new.
    """
    parts = trainer.parts
    if wishes.weights:
        for unit in parts.runtime.units:
            unit.open("load")
        try:
            _load_weights(parts, source, names)
        finally:
            for unit in parts.runtime.units:
                unit.shut()
        _load_buffers(parts, source, names)
    parts.runtime.reducer.clear()
    trainer.window.restart()
    if wishes.only_weights:
        return []
    notes: list[str] = []
    if wishes.optimizer and parts.step_path is not None:
        notes += _load_optimizer(parts, source, names)
        _load_random_state(parts, source)
    return [*notes, *_load_facts(trainer, schedule, source.facts, wishes)]


def load_by_user(parts: Parts, source: Source, load: Callable[..., object], together: Callable[..., Any]) -> None:
    """Let a function of the user's put weights into the model: `load(src=..., dst=...)`, on every rank. Collective.

    Where it fails on one rank, it fails on all, and what it has written is not taken over.

    Args:
        parts: of the engine; `dst` is the model, with all its weights gathered.
        source: all weights and buffers of it, in host memory, are `src`.
        load: the function. What it writes on the first rank counts.
        together: does something on every rank, and raises on all of them if it fails on one.
    """
    state: dict[str, Tensor] = {}
    wanted: list[Part] = []
    for key, spec in source.specs.items():
        if key.kind in ("weight", "buffer"):
            state[key.name] = torch.empty(spec.shape, dtype=spec.dtype)
            wanted.append(Part(key, spec, 0, flat_of(state[key.name])))
    together(lambda: source.read(wanted))
    state.update({alias: state[name] for alias, name in source.facts.ties.items() if name in state})
    with GatheredParameters(parts.model.parameters(), modifier_rank=parts.mesh.data.ranks[0]):
        together(lambda: load(src=state, dst=parts.model))


def _load_weights(parts: Parts, source: Source, names: Mapping[str, Key]) -> None:
    filling = Filling(source)
    for unit in parts.runtime.units:
        for buffer in unit.buffers:
            start, _ = buffer.interval
            for member, first, last in buffer.own_pieces():
                if member.name in names:
                    begin = start + first - member.slot.offset
                    filling.add_weight(names[member.name], begin, buffer, slice(first, last))
    filling.run()


def _load_buffers(parts: Parts, source: Source, names: Mapping[str, Key]) -> None:
    """Those of the first rank, or this rank's own where they differed and as many ranks load as have saved."""
    filling = Filling(source)
    ranks = _ranks_of(source)
    for name, value in parts.runtime.other_state().items():
        if isinstance(value, Tensor) and name in names:
            flat = flat_of(value)
            own = Key("local", names[name].name, str(parts.mesh.data.index))
            filling.add(own if own in source.specs and ranks == parts.mesh.data.size else names[name], 0, flat)
            if flat.data_ptr() != value.data_ptr():
                filling.then(_unflatten(value, flat))
        elif name in source.facts.extra:
            parts.model.get_submodule(name.rpartition(".")[0]).set_extra_state(source.facts.extra[name])
    filling.run()


def _unflatten(value: Tensor, flat: Tensor) -> Callable[[], object]:
    shaped = torch.view_as_complex(flat.view(*value.shape, 2)) if value.is_complex() else flat.view(value.shape)
    return lambda: value.detach().copy_(shaped)


def _load_optimizer(parts: Parts, source: Source, names: Mapping[str, Key]) -> list[str]:
    assert parts.step_path is not None
    ours, theirs = optimizer_name(parts), source.facts.origin.get("optimizer", "")
    states: dict[str, list[str]] = {}
    for key in source.specs:
        if key.kind == "optimizer":
            states.setdefault(key.name, []).append(key.state)
    if ours != theirs and theirs and (states or source.facts.steps):
        raise _other_optimizer(source, ours, theirs)
    known, found = parts.step_path.driver.state_names(), {state for each in states.values() for state in each}
    if not theirs and known is not None and not found <= known:
        raise _other_optimizer(
            source, f"{ours} (state {', '.join(sorted(known)) or 'none'})", f"state {', '.join(sorted(found))}"
        )
    filling, fresh = Filling(source), set[str]()
    for number, shard in enumerate(parts.shards):
        for position, piece in enumerate(shard.pieces):
            name = names[piece.name].name if piece.name in names else None
            if name is not None and name not in source.facts.steps and name not in states:
                fresh.add(piece.name)
            _load_piece(parts, filling, (number, position), name, states.get(name or "", []))
    filling.run()
    return (
        [f"without optimizer state in the checkpoint: {', '.join(sorted(fresh))}"]
        if fresh and (states or source.facts.counters.get("global_steps"))
        else []
    )


def _other_optimizer(source: Source, ours: str, theirs: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"the optimizer state in {source.where} is of another optimizer",
            expected=ours,
            found=theirs,
            do="pass load_optimizer_states=False to begin with fresh optimizer state",
        )
    )


def _load_piece(parts: Parts, filling: Filling, place: tuple[int, int], name: str | None, states: list[str]) -> None:
    """State of one piece: made first, with zeros that take no memory of their own, then filled where it is."""
    assert parts.step_path is not None
    driver, source = parts.step_path.driver, filling.source
    piece = parts.shards[place[0]].pieces[place[1]]
    if name is None:
        driver.load_piece_state(*place, {})
        return
    length = piece.stop - piece.start
    made: dict[str, Any] = {state: torch.zeros(()).expand(length) for state in states}
    made.update(source.facts.numbers.get(name, {}))
    if name in source.facts.steps and "step" not in made:
        made["step"] = source.facts.steps[name]
    driver.load_piece_state(*place, made)
    views = driver.piece_state(*place)
    for state in states:
        if state in views and driver.in_memory:
            filling.add(Key("optimizer", name, state), piece.offset, views[state])
        elif state in views:
            store = partial(driver.set_piece_state, *place, state)
            filling.add_elsewhere(Key("optimizer", name, state), piece.offset, length, store)


def _ranks_of(source: Source) -> int:
    """How many ranks have saved; 0 for a checkpoint of another program."""
    return sum(each.kind == "random" for each in source.specs)


def _load_random_state(parts: Parts, source: Source) -> None:
    """Only on as many ranks as saved it: with others, samples meet other ranks in any case."""
    key = Key("random", str(parts.mesh.data.index))
    if _ranks_of(source) != parts.mesh.data.size:
        if parts.mesh.data.index == 0:
            log.info("random generators are left as they are: %s was saved on another number of ranks", source.where)
        return
    data = torch.empty(source.specs[key].length, dtype=torch.uint8)
    source.read([Part(key, source.specs[key], 0, data)])
    states = plain.loads(bytes(data.numpy()), f"the random state in {source.where}")
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        cast("Any", sys.modules["numpy"]).random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "accelerator" in states and parts.device.type != "cpu":
        torch.get_device_module(parts.device).set_rng_state(states["accelerator"], parts.device)


def _load_facts(trainer: Trainer, schedule: Any, facts: Facts, wishes: Wishes) -> list[str]:
    parts = trainer.parts
    notes: list[str] = []
    for name, value in facts.counters.items():
        if name in COUNTERS:
            setattr(trainer, name, int(value))
    if wishes.optimizer and parts.optimizer is not None:
        first = {id(parameter): name for name, parameter in reversed(list(parts.model.named_parameters()))}
        notes += _load_groups(parts.optimizer.param_groups, facts.groups, first)
        if facts.loss_scale:
            parts.scaler.load_state_dict(facts.loss_scale)
    if wishes.schedule and facts.schedule:
        saved = facts.origin.get("schedule") or type(schedule).__name__
        if schedule is None or not hasattr(schedule, "load_state_dict"):
            notes.append("the checkpoint has a learning-rate schedule, and the engine has none")
        elif saved != type(schedule).__name__:
            notes.append(f"the learning-rate schedule is left as it is: the checkpoint's is of another kind, {saved}")
        else:
            schedule.load_state_dict(facts.schedule)
    if facts.loader and hasattr(parts.data_loader, "load_state_dict"):
        try:
            parts.data_loader.load_state_dict(facts.loader)
        except ShardwiseError as error:
            notes.append(f"the data loader begins anew: {error}")
    return notes


def _load_groups(groups: Iterable[dict[str, Any]], saved: list[dict[str, Any]], first: Mapping[int, str]) -> list[str]:
    """Options of parameter groups, which may be cut in another way now."""
    by_member = {name: group["options"] for group in saved for name in group["parameters"]}
    notes: list[str] = []
    for number, group in enumerate(groups):
        members = [first[id(parameter)] for parameter in group["params"] if id(parameter) in first]
        found = [by_member[name] for name in members if name in by_member]
        if not members and number < len(saved) and not saved[number]["parameters"]:
            found = [saved[number]["options"]]
        if not found:
            continue
        if any(options != found[0] for options in found):
            notes.append(f"parameter group {number} keeps its options, as its parameters were in groups with different ones")
            continue
        for key, value in found[0].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    return notes
