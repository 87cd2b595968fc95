"""Directories of torch.distributed.checkpoint, as FSDP2 and others write them.

Owns what the entries of such a checkpoint mean: model and optimizer under whatever names the state dict gave them. `.metadata`
is a pickle and is read without being trusted. `dcp_write` writes such directories.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import Facts, Key, Spec
from shardwise.checkpoint.foreign.archive import read_archive
from shardwise.checkpoint.foreign.boxes import Block, assemble
from shardwise.checkpoint.foreign.dcp_names import Entry, Names
from shardwise.checkpoint.foreign.files import Files, beside, damaged, read_small
from shardwise.checkpoint.foreign.narrow import as_dict, as_list, as_shape
from shardwise.checkpoint.foreign.pieces import PieceSource, guess_kind, plain
from shardwise.checkpoint.foreign.stored import load
from shardwise.checkpoint.foreign.unpickle import LARGEST, Record, unpickle
from shardwise.errors import CheckpointError, explain

__all__ = ["DcpSource"]

_log = logging.getLogger(__name__)
_CLASSES = ("torch.distributed.checkpoint", "torch.distributed._shard")


class DcpSource(PieceSource):
    """A directory of torch.distributed.checkpoint.

    The state dict that was saved may be `{"model": ..., "optim": ...}` or the like, with the optimizer as
    `get_optimizer_state_dict` gives it (flattened or not), the same under a name of the application's (`{"app": ...}`), or a
    model's only. The format does not tell weights from buffers (`facts.origin["kinds"]` is "guessed"), and has ties as two
    tensors.

    Args:
        path: the directory.

    Raises:
        CheckpointError: it is none, or damaged, or names code to run.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        self._folder = Path(path)
        self._index = self._folder / ".metadata"
        if not self._index.is_file():
            problem = f"{self._folder} is no finished checkpoint of torch.distributed.checkpoint"
            raise CheckpointError(explain(problem, expected="a file .metadata", found="none", do="save it again"))
        metadata = unpickle(read_small(self._index, LARGEST), self._index, records=_CLASSES)
        if not isinstance(metadata, Record):
            raise damaged(self._index, type(metadata).__name__, "metadata of a checkpoint")
        self._infos = self._read_infos(metadata)
        listed = as_dict(metadata.get("state_dict_metadata"))
        if listed is None:
            raise damaged(self._index, "no state_dict_metadata")
        found = {key: record for key, record in listed.items() if isinstance(key, str) and isinstance(record, Record)}
        self._names = Names(list(found), as_dict(metadata.get("planner_data")) or {})
        self._values: dict[str, Entry] = {}
        self._numbers: dict[str, tuple[Entry, Block]] = {}
        entries = {key: entry for key in found if (entry := self._names.entry(key))}
        # Optimizer state after the weights, whose shapes tell what it is.
        for key, entry in sorted(entries.items(), key=lambda item: item[1].kind != "model"):
            if found[key].get("chunks") is not None:
                self._add_tensor(key, entry, found[key])
            else:
                self._values[key] = entry
        for what in self._names.left_out:
            _log.warning("%s: left out: %s", self.where, what)

    # What is in it

    def _add_tensor(self, key: str, entry: Entry, record: Record) -> None:
        spec = self._spec(record)
        blocks = self._blocks(key, record, spec)
        pieces = assemble(spec, blocks, self._index)
        if entry.kind == "model":
            self.add(guess_kind(entry.name, spec), spec, pieces)
            return
        weight = self.specs.get(Key("weight", entry.name))
        if spec.shape == () and len(blocks) == 1 and (weight is None or weight.shape or entry.state == "step"):
            self._numbers[key] = (entry, blocks[0])
        elif entry.kind == "state" and (weight is None or weight.shape == spec.shape):
            self.add(Key("optimizer", entry.name, entry.state), spec, pieces)
        else:
            self._names.leave_out(f"optimizer state {entry.state}, which is not laid out as the weights")

    def _spec(self, record: Record) -> Spec:
        properties = record.get("properties")
        # An object of a class that says how it is pickled: a tuple whose first item is the dtype.
        state = as_list(properties.state) if isinstance(properties, Record) else None
        dtype = state[0] if state else None
        shape = as_shape(record.get("size"))
        if not isinstance(dtype, torch.dtype) or shape is None:
            raise damaged(self._index, "a tensor without shape or dtype")
        return Spec(shape, dtype)

    def _blocks(self, key: str, record: Record, spec: Spec) -> list[Block]:
        blocks: list[Block] = []
        for chunk in as_list(record.get("chunks")) or ():
            offsets = as_shape(chunk.get("offsets")) if isinstance(chunk, Record) else None
            sizes = as_shape(chunk.get("sizes")) if isinstance(chunk, Record) else None
            if offsets is None or sizes is None:
                raise damaged(self._index, f"a block of {key} without offsets and sizes")
            if Spec(sizes, spec.dtype).length:
                path, at, length = self._info(key, offsets)
                blocks.append(Block(path, at, length, offsets, Spec(sizes, spec.dtype)))
        return blocks

    # Where it is

    def _read_infos(self, metadata: Record) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        infos: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in (as_dict(metadata.get("storage_data")) or {}).items():
            name = index.get("fqn") if isinstance(index, Record) else None
            if not isinstance(index, Record) or not isinstance(info, Record) or not isinstance(name, str):
                raise damaged(self._index, "an entry that does not say where it is")
            infos[name, as_shape(index.get("offset"))] = info
        return infos

    def _info(self, key: str, offsets: tuple[int, ...] | None) -> tuple[Path, int, int]:
        """File, first byte and number of bytes of a block."""
        info = self._infos.get((key, offsets))
        if info is None:
            raise damaged(self._index, f"no place of {key} at {offsets}")
        if info.get("transform_descriptors"):
            problem, do = f"{self._folder} cannot be read: it is compressed", "save it again without extensions"
            raise CheckpointError(explain(problem, expected="plain files", found="transform_descriptors", do=do))
        at, length = info.get("offset"), info.get("length")
        if type(at) is not int or type(length) is not int or at < 0 or length < 0:
            raise damaged(self._index, f"no bytes of {key}")
        return beside(self._folder, info.get("relative_path"), self._index), at, length

    def _value(self, key: str, files: Files) -> Any:
        """What was saved under a key, other than a tensor; None if it is no plain value."""
        path, at, length = self._info(key, None)
        try:
            return plain(read_archive(path, start=at, length=length, files=files), files)
        except ValueError:
            return None

    # Facts

    def _make_facts(self) -> Facts:
        facts = Facts(origin={"format": "dcp", "kinds": "guessed", "left_out": list(self._names.left_out)})
        options: dict[Entry, Any] = {}
        with Files() as files:
            for entry, block in self._numbers.values():
                self._note(facts, options, entry, load(block, files).item())
            for key, entry in self._values.items():
                if entry.kind != "model":
                    self._note(facts, options, entry, self._value(key, files))
        facts.groups = self._names.groups(options)
        return facts

    def _note(self, facts: Facts, options: dict[Entry, Any], entry: Entry, value: Any) -> None:
        if entry.kind == "options":
            options[entry] = value
        elif entry.state == "step" and isinstance(value, int | float):
            facts.steps[entry.name] = int(value)
        elif isinstance(value, int | float):
            facts.numbers.setdefault(entry.name, {})[entry.state] = value
