"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3 of data parallel training, at any number of ranks.

Owns what becomes a weight, a buffer, optimizer state or a fact. Refuses to know where parameters lie in flat groups
(`deepspeed_zero`), which files there are (`deepspeed_files`) and how a pickle is read without running it (`unpickle`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoint.contents import Facts, Key, Spec, dtype_name
from shardwise.checkpoint.foreign.deepspeed_facts import COUNTERS, make_facts
from shardwise.checkpoint.foreign.deepspeed_files import find_folder, number_of, shape_of, take
from shardwise.checkpoint.foreign.deepspeed_whole import collect_whole
from shardwise.checkpoint.foreign.deepspeed_zero import GroupedLayout, Optimized, PartitionedLayout, Shards, collect
from shardwise.checkpoint.foreign.files import Files, damaged
from shardwise.checkpoint.foreign.narrow import as_dict, as_list
from shardwise.checkpoint.foreign.pieces import Piece, PieceSource, plain_items, whole
from shardwise.checkpoint.foreign.stored import StridedTensor
from shardwise.errors import CheckpointError, explain

__all__ = ["DeepSpeedSource"]

# What DeepSpeed itself puts into the file of the model; all else is the user's `client_state`.
_OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "universal_checkpoint_info",
}
_log = logging.getLogger(__name__)


class DeepSpeedSource(PieceSource):
    """A DeepSpeed checkpoint.

    Weights are the fp32 masters, where it has them. Frozen weights and buffers have the dtype in which they were saved. Only
    what describes the tensors is read at first; their values are read from disk when they are asked for.

    Args:
        path: a directory of checkpoints with a file `latest`, or one checkpoint.
        tag: which one; the newest if not given.

    Raises:
        CheckpointError: it is none, files of some ranks are missing, one is damaged or names code to run, or it is of a kind
            that cannot be read (pipeline, tensor or expert parallel).
    """

    def __init__(self, path: str | Path, tag: str | None = None) -> None:
        folder = find_folder(Path(path), tag)
        if folder is None:
            do = "give the directory that has the file 'latest', or the one with the files"
            problem = f"{path} is no DeepSpeed checkpoint"
            raise CheckpointError(explain(problem, expected="files called *_model_states.pt", found="none", do=do))
        super().__init__(str(folder.path))
        self._folder = folder
        self._state = folder.read_model()
        self._path = folder.models[0]
        self._module: dict[str, Any] = take(self._state, "module", dict, self._path)
        self._ties = self._find_ties()
        self._stage, self._world = 0, 1
        self._optimizer: dict[str, Any] = {}
        self._found = self._read_optimizer()
        self._add_tensors()
        for what in self._found.left_out:
            _log.warning("%s: left out: %s", self.where, what)

    @cached_property
    def client_state(self) -> dict[str, Any]:
        """What the user gave to `save_checkpoint` besides, as far as it is plain values."""
        given = {key: value for key, value in self._state.items() if key not in _OWN and key not in COUNTERS}
        with Files() as files:
            return plain_items(given, files)

    def _make_facts(self) -> Facts:
        with Files() as files:
            facts = make_facts(self._state, self._optimizer, self._found, files)
        facts.ties = dict(self._ties)
        facts.weight_dtypes = self._weight_dtypes()
        facts.origin |= {"zero_stage": self._stage, "world_size": self._world}
        return facts

    def _weight_dtypes(self) -> dict[str, str]:
        """Stage 3 leaves an empty tensor of the right dtype in the place of each weight."""
        found: dict[str, str] = {}
        for name, (spec, _) in self._found.weights.items():
            tensor = self._module.get(name)
            if isinstance(tensor, StridedTensor) and tensor.spec.dtype != spec.dtype:
                found[name] = dtype_name(tensor.spec.dtype, name)
        return found

    # Tensors

    def _find_ties(self) -> dict[str, str]:
        """Other names of weights."""
        listed = as_dict(self._state.get("shared_params"))
        if listed is not None:
            return {name: first for name, first in listed.items() if isinstance(name, str) and isinstance(first, str)}
        first_of: dict[Any, str] = {}
        ties: dict[str, str] = {}
        for name, tensor in self._module.items():
            if isinstance(tensor, StridedTensor) and tensor.spec.length:
                first = first_of.setdefault(tensor.identity, name)
                if first != name:
                    ties[name] = first
        return ties

    def _buffers(self) -> set[str]:
        return {name for name in as_list(self._state.get("buffer_names")) or () if isinstance(name, str)}

    def _own_weights(self) -> dict[str, StridedTensor]:
        """Weights that the file of the model has in full, each once."""
        apart = self._buffers() | self._ties.keys()
        found = {name: tensor for name, tensor in self._module.items() if isinstance(tensor, StridedTensor)}
        return {name: tensor for name, tensor in found.items() if name not in apart}

    def _add_tensors(self) -> None:
        for name in sorted(self._buffers()):
            tensor = self._module.get(name)
            if isinstance(tensor, StridedTensor):
                self.add(Key("buffer", name), tensor.spec, whole(tensor))
        for name, (spec, pieces) in self._found.weights.items():
            self.add(Key("weight", name), spec, pieces)
        for (name, state), (spec, pieces) in self._found.states.items():
            self.add(Key("optimizer", name, state), spec, pieces)
        self._add_frozen()
        # Names of empty tensors count as tied to one another in DeepSpeed; they are not.
        known = {key.name for key in self.specs if key.kind == "weight"}
        self._ties = {name: first for name, first in self._ties.items() if name not in known and first in known}

    def _add_frozen(self) -> None:
        shapes = as_dict(self._state.get("frozen_param_shapes"))
        if shapes and self._stage == 3:
            self._add_partitioned(shapes)
        elif shapes:
            fragments = take(self._state, "frozen_param_fragments", dict, self._path)
            for name in shapes:
                tensor: StridedTensor = take(fragments, name, StridedTensor, self._path)
                self.add(Key("weight", name), tensor.spec, whole(tensor))
        if self._stage < 3:
            for name, tensor in self._own_weights().items():
                if Key("weight", name) not in self.specs:
                    self.add(Key("weight", name), tensor.spec, whole(tensor))

    def _add_partitioned(self, shapes: dict[Any, Any]) -> None:
        """Frozen weights in stage 3: each rank has an equal part of each, in its file of the model."""
        fragments: list[dict[str, Any]] = []
        for rank in range(self._world):
            state = self._folder.read_model(rank) if rank else self._state
            fragments.append(take(state, "frozen_param_fragments", dict, self._folder.models[rank]))
        for name in shapes:
            shape = shape_of(shapes[name], self._path)
            parts = [take(held, name, StridedTensor, self._folder.models[rank]) for rank, held in enumerate(fragments)]
            spec = Spec(shape, parts[0].spec.dtype)
            size = -(-spec.length // self._world)
            places = [(rank * size, part) for rank, part in enumerate(parts)]
            pieces = [Piece(at, max(0, min(size, spec.length - at, part.spec.length)), part) for at, part in places]
            self.add(Key("weight", name), spec, pieces)

    # The optimizer

    def _read_optimizer(self) -> Optimized:
        shapes = self._state.get("param_shapes")
        if shapes is None:
            self._world = number_of(self._state.get("dp_world_size", 1), self._path)
            optimizer = as_dict(self._state.get("optimizer"))
            if optimizer is None:
                return Optimized()
            self._optimizer = optimizer
            with Files() as files:
                return collect_whole(self._own_weights(), optimizer, self._path, files)
        self._optimizer = first = self._folder.read_optimizer()
        path = self._folder.optimizers[0]
        stage = first.get("zero_stage")  # absent where bf16 training keeps its own masters, in the layout of stage 1
        self._stage = 1 if stage is None else number_of(stage, path)
        self._world = _world(first, path)
        self._folder.require(self._world, self._stage == 3)
        every = [first, *(self._folder.read_optimizer(rank) for rank in range(1, self._world))]
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        masters = [_masters(found, key, self._folder.optimizers[rank]) for rank, found in enumerate(every)]
        if len({len(rank) for rank in masters}) != 1:
            raise damaged(self.where, "different numbers of groups on different ranks")
        states = [_states(found, len(masters[0]), self._folder.optimizers[rank]) for rank, found in enumerate(every)]
        return self._collect(_shapes(shapes, self._path), Shards(self.where, masters, states))

    def _collect(self, shapes: list[dict[str, tuple[int, ...]]], shards: Shards) -> Optimized:
        if self._stage == 3:
            layout = PartitionedLayout(shapes, shards)
        else:
            layout = GroupedLayout(shapes, shards, self._optimizer.get("param_alignment_paddings") or ())
        found = collect(shapes, shards, layout)
        path = self._folder.optimizers[0]
        base = as_dict(_base(self._optimizer, path))
        # Where ranks may be added, the options of the groups are not saved.
        groups: list[Any] = take(base, "param_groups", list, path) if base else [{"params": [at]} for at in range(len(shapes))]
        for group in groups:
            flat = take(group, "params", list, path)
            found.groups.append((group, [name for name in found.weights if layout.group(name) in flat]))
        return found


def _shapes(found: Any, path: Path) -> list[dict[str, tuple[int, ...]]]:
    listed = as_list(found)
    groups = [as_dict(group) for group in (listed if listed is not None else [found])]  # old versions have one, not in a list
    if any(group is None for group in groups):
        raise damaged(path, "param_shapes that are none")
    return [{str(name): shape_of(shape, path) for name, shape in (group or {}).items()} for group in groups]


def _world(state: Mapping[str, Any], path: Path) -> int:
    """Ranks that the optimizer was divided among."""
    count = take(state, "partition_count", (int, list), path)
    world = max((number_of(each, path) for each in as_list(count) or [count]), default=0)
    if world < 1:
        raise damaged(path, f"{world} ranks")
    return world


def _masters(state: Mapping[str, Any], key: str, path: Path) -> list[StridedTensor]:
    found = take(state, key, list, path)
    return [take(found, at, StridedTensor, path) for at in range(len(found))]


def _base(state: Mapping[str, Any], path: Path) -> Any:
    """The state of the torch optimizer inside; a list with the state of each group, if ranks may be added."""
    key = "optimizer_state_dict" if "optimizer_state_dict" in state else "base_optimizer_state"
    return take(state, key, (dict, list), path)


def _states(state: Mapping[str, Any], count: int, path: Path) -> list[dict[str, Any]]:
    """Optimizer state by flat group."""
    base = _base(state, path)
    if as_dict(base) is not None:
        held: dict[Any, Any] = take(base, "state", dict, path)
        base = [held.get(at, {}) for at in range(count)]
    found = [take(base, at, dict, path) for at in range(len(base))]
    if len(found) != count:
        raise damaged(path, f"optimizer state of {len(found)} groups", str(count))
    return found
