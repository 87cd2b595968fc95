"""Filling a model from a checkpoint, whatever has written it, without having it whole anywhere.

Owns the way to the parameters of a model that may be plain, built under `zero.Init`, or an engine's, or partly each; and when
the ranks meet on it. Refuses to know file formats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardwise.checkpoint import Key, Source
from shardwise.checkpoint.opening import open_path
from shardwise.errors import CheckpointDamagedError, CheckpointError, ParameterError, ShardwiseError, explain
from shardwise.persistence.filling import Filling
from shardwise.persistence.match import Report, match, state_of
from shardwise.persistence.state import flat_of
from shardwise.trainer import Trainer
from shardwise.zero import Home, ReleasedParameter, State, Unit, commit, homes

__all__ = ["load_pretrained"]

log = logging.getLogger("shardwise")

Result = TypeVar("Result")


def load_pretrained(model: nn.Module, path: str | Path | Source, strict: bool = True, *, tag: str | None = None) -> Report:
    """Fill a model's weights and persistent buffers from a checkpoint of this package, DeepSpeed, torch's DCP or Hugging Face.

    Each rank reads the elements that rest on it, straight to where they rest. Where the checkpoint has another dtype, they pass
    through some tens of megabytes. So a model built under `zero.Init` is never whole on any rank. In an engine, master weights
    follow, and the state of the optimizer stays as it is.

    Args:
        model: a plain module, one that was built under `zero.Init`, or an engine. Collective in the latter cases.
        path: a run's directory or one checkpoint in it; a directory in another program's format; or a source that is open.
        strict: every weight and buffer must be on both sides. False fills what fits; a weight of another shape is an error in
            any case. Tied weights may be stored under any of their names.
        tag: which of a run's checkpoints; None for the latest.

    Returns:
        names that the checkpoint lacked (`missing`) and the model lacked (`unexpected`); and `notes`.

    Raises:
        CheckpointError: it does not fit, or is not there; on every rank.
        CheckpointDamagedError: a file is not as it was written. The weights are partly those of before.
        ParameterError: the model has parameters on the meta device, or whose engine is gone.
    """
    target = _Target(model)
    source, names, report = target.together(lambda: _open(target.model, path, tag, strict))
    try:
        target.fill(source, names)
    finally:
        if source is not path:
            source.close()
    if report.text and target.first:
        log.warning("loaded %s: %s", source.where, report.text)
    return report


def _open(model: nn.Module, path: str | Path | Source, tag: str | None, strict: bool) -> tuple[Source, dict[str, Key], Report]:
    if not (isinstance(path, str | Path) or hasattr(path, "specs")):
        raise CheckpointError(explain("this is no checkpoint", expected="a path, or a source", found=repr(path)))
    source = open_path(path, tag) if isinstance(path, str | Path) else path
    try:
        return source, *match(model, source, strict=strict)
    except BaseException:
        if source is not path:
            source.close()
        raise


class _Target:
    """A model, as something to be filled. Collective where ranks hold parts of it.

    Args:
        model: it, or an engine around it.
    """

    def __init__(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            home = homes.get(parameter)
            if home is not None and home.reference() is not None and home.unit.settle is not None:
                home.unit.settle(home.unit)  # lent weights are shards again, or equal on all ranks
        units: dict[int, Unit] = {}
        trainers: dict[int, Trainer] = {}
        for name, parameter in model.named_parameters():
            home = homes.get(parameter)
            if home is None or home.reference() is None:
                _check_plain(name, parameter)
                continue
            units[id(home.unit)] = home.unit
            trainer = home.unit.owner() if home.unit.owner is not None else None
            if trainer is not None:
                trainers[id(trainer)] = trainer
        self.units = list(units.values())
        self._trainers = list(trainers.values())
        inside = [trainer.parts.model for trainer in self._trainers if trainer.parts.model is getattr(model, "module", None)]
        self.model = inside[0] if inside else model
        for trainer in self._trainers:
            trainer.check_open()
            trainer.parts.comm.set_phase("checkpoint")
            trainer.parts.runtime.backward.finish()

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return not self.units or self.units[0].data.index == 0

    def together(self, work: Callable[[], Result]) -> Result:
        """Do something on every rank; where it fails on one, raise the same on all."""
        if not self.units:
            return work()
        result: Any = None
        problem, damaged = "", False
        try:
            result = work()
        except (ShardwiseError, OSError, MemoryError) as error:
            problem = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
            damaged = isinstance(error, CheckpointDamagedError | OSError)
        unit = self.units[0]
        notes = unit.comm.all_gather_object((problem, damaged), unit.data, "is the checkpoint read")
        for rank, (text, _) in zip(unit.data.ranks, notes, strict=True):
            if text:
                kind = CheckpointDamagedError if any(damaged for _, damaged in notes) else CheckpointError
                raise kind(f"rank {rank}: {text}" if len(notes) > 1 else text)
        return result

    def fill(self, source: Source, names: Mapping[str, Key]) -> None:
        """Read everything to where it belongs.

        Args:
            source: what is read.
            names: where the values of each parameter and buffer are, by its first name in the model.
        """
        for trainer in self._trainers:
            trainer.unusable = f"loading {source.where} did not end well, so that its weights are partly those of before"
        for unit in self.units:
            unit.open("load")
            if unit.provisional and unit.state is State.LENT:
                for home in unit.homes():
                    commit(home)
        try:
            self.together(lambda: _read(self.model, source, names))
        finally:
            for unit in self.units:
                unit.shut()
        for trainer in self._trainers:
            trainer.unusable = ""
            runtime = trainer.parts.runtime
            runtime.reducer.clear()
            trainer.window.restart()
            runtime.weights_changed([unit for unit in self.units if unit in runtime.units])
        for unit in self.units:
            if unit.provisional:
                unit.changed()


def _check_plain(name: str, parameter: nn.Parameter) -> None:
    """A parameter that no unit holds must have memory of its own."""
    if isinstance(parameter, ReleasedParameter):
        problem, do = "has no values, as the engine that held it is gone", "build the model anew"
    elif parameter.is_meta:
        problem = "is on the meta device and has no memory to load into"
        do = "build the model under `with shardwise.zero.Init():`, or call model.to_empty(device=...) first"
    else:
        return
    raise ParameterError(explain(f"parameter {name!r} {problem}", do=do))


def _read(model: nn.Module, source: Source, names: Mapping[str, Key]) -> None:
    filling = Filling(source)
    plain: list[Tensor] = []
    for name, value in state_of(model).items():
        if name in names:
            home = homes.get(value)
            if home is None or home.reference() is None:
                _add_plain(filling, names[name], value)
                plain.append(value)
            else:
                _add_shard(filling, names[name], home)
        elif name in source.facts.extra and not isinstance(value, Tensor):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(source.facts.extra[name])
    filling.run()
    increment_version(plain)


def _add_plain(filling: Filling, key: Key, value: Tensor) -> None:
    flat = flat_of(value)
    filling.add(key, 0, flat)
    if flat.data_ptr() != value.data_ptr():  # it is not row-major: through a copy, one tensor at a time
        shaped = torch.view_as_complex(flat.view(*value.shape, 2)) if value.is_complex() else flat.view(value.shape)
        filling.then(lambda: value.detach().copy_(shaped))
        filling.run()


def _add_shard(filling: Filling, key: Key, home: Home) -> None:
    """This rank's elements of a parameter: of the masters, and the weights that follow them."""
    buffer = home.buffer
    begin, _ = buffer.interval
    for member, first, last in buffer.own_pieces():
        if member is home.member:
            filling.add_weight(key, begin + first - member.slot.offset, buffer, slice(first, last))
