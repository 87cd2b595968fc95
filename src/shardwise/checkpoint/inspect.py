"""What a checkpoint is, for people and programs: its tensors by module, its facts, its neighbours, whether it is whole.

Owns what is found out. Refuses to know how it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.contents import Key, Source, Spec
from shardwise.checkpoint.datafile import DataFile, Progress, Stats
from shardwise.checkpoint.folder import INDEX, Folder
from shardwise.checkpoint.opening import find_native, open_path
from shardwise.checkpoint.streaming import chunks
from shardwise.errors import CheckpointError, ShardwiseError

__all__ = ["Branch", "Finding", "Leaf", "Listed", "list_checkpoints", "tree_of", "verify"]


# -- the tensors of one --------------------------------------------------------------------------------------------------------


@dataclass
class Leaf:
    """A weight or buffer.

    Args:
        key: which.
        spec: as it is stored.
        computed: the dtype in which the model computes, where it is another one.
        tied: further names of it.
        state: bytes of optimizer state that belongs to it.
    """

    key: Key
    spec: Spec
    computed: str = ""
    tied: list[str] = field(default_factory=list[str])
    state: int = 0


@dataclass
class Branch:
    """A module: what is in it by the last part of its name.

    Args:
        modules: modules in it.
        leaves: its own weights and buffers.
    """

    modules: dict[str, Branch] = field(default_factory=dict[str, "Branch"])
    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])

    def all_leaves(self) -> Iterator[Leaf]:
        """Those of the module and of all modules in it."""
        yield from self.leaves.values()
        for module in self.modules.values():
            yield from module.all_leaves()

    @property
    def elements(self) -> int:
        """Numbers in all weights (not in buffers)."""
        return sum(leaf.spec.length for leaf in self.all_leaves() if leaf.key.kind == "weight")

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and buffers."""
        return sum(leaf.spec.nbytes for leaf in self.all_leaves())

    @property
    def state(self) -> int:
        """Bytes of optimizer state."""
        return sum(leaf.state for leaf in self.all_leaves())


def tree_of(source: Source) -> Branch:
    """The weights and buffers of a checkpoint by module, with the optimizer state that belongs to them."""
    root = Branch()
    by_name: dict[str, Leaf] = {}
    for key, spec in source.specs.items():
        if key.kind in ("weight", "buffer"):
            *modules, last = key.name.split(".")
            branch = root
            for module in modules:
                branch = branch.modules.setdefault(module, Branch())
            computed = source.facts.weight_dtypes.get(key.name, "") if key.kind == "weight" else ""
            branch.leaves[last] = leaf = Leaf(key, spec, computed)
            by_name[key.name] = leaf
    for alias, name in source.facts.ties.items():
        if name in by_name:
            by_name[name].tied.append(alias)
    for key, spec in source.specs.items():
        if key.kind == "optimizer" and key.name in by_name:
            by_name[key.name].state += spec.nbytes
    return root


# -- all of a run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """One of a run's checkpoints.

    Args:
        tag: its name.
        step: optimizer steps it was saved after; None if it does not say.
        nbytes: of its files.
        saved_at: seconds since 1970.
        latest: whether it is the one that is loaded if no tag is given.
        problem: what is wrong with its index; empty if nothing.
    """

    tag: str
    step: int | None
    nbytes: int
    saved_at: float
    latest: bool
    problem: str = ""


def list_checkpoints(directory: str | Path) -> list[Listed]:
    """All complete checkpoints of a run, the newest first. Reads their indexes only."""
    folder = Folder(directory)
    try:
        latest = folder.latest()
    except CheckpointError:
        latest = None
    found: list[Listed] = []
    for tag in folder.tags():
        saved_at = (folder.path / tag / INDEX).stat().st_mtime
        try:
            index = folder.read_index(tag)
        except CheckpointError as error:
            found.append(Listed(tag, None, _size(folder.path / tag), saved_at, tag == latest, str(error)))
        else:
            step = index.facts.counters.get("global_steps")
            found.append(Listed(tag, step, index.nbytes, saved_at, tag == latest))
    return found


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


# -- whether one is whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What was found out about a file.

    Args:
        name: of the file; of the whole checkpoint where it is not of this package's format.
        nbytes: that were read.
        problem: what is wrong; empty if nothing.
    """

    name: str
    nbytes: int
    problem: str = ""


def verify(
    path: str | Path,
    tag: str | None = None,
    progress: Progress | None = None,
    begin: Callable[[int], object] | None = None,
) -> Iterator[Finding]:
    """Read every byte of a checkpoint and compare it with its checksum, file by file; goes on after a damaged one.

    Checkpoints of other programs have no checksums: there it is tried whether everything can be read.

    Args:
        path, tag: which; see `open_path`.
        progress: told of bytes as they are read.
        begin: told of the number of all bytes before any is read.

    Raises:
        CheckpointError: there is no such checkpoint, or its index is damaged, so that its files are not known.
    """
    native = find_native(path, tag)
    if native is None:
        yield from _verify_foreign(open_path(path, tag), progress, begin)
        return
    folder, name = native
    index = folder.read_index(name)
    if begin:
        begin(index.nbytes)
    yield Finding(INDEX, 0)
    for file, sums in [*index.files, *([index.client_state] if index.client_state else [])]:
        stats, problem = Stats(), ""
        try:
            opened = DataFile(folder.path / name / file, sums, stats)
            try:
                opened.verify(progress)
            finally:
                opened.close()
        except CheckpointError as error:
            problem = str(error)
        yield Finding(file, stats.bytes_read, problem)


def _verify_foreign(source: Source, progress: Progress | None, begin: Callable[[int], object] | None) -> Iterator[Finding]:
    try:
        if begin:
            begin(sum(spec.nbytes for spec in source.specs.values()))
        whole = True
        for key in source.specs:
            size, problem = 0, ""
            try:
                for parts in chunks(source, [key]):
                    read = sum(part.values.nbytes for part in parts)
                    size += read
                    if progress:
                        progress(read)
            except (ShardwiseError, OSError) as error:
                problem = str(error)
            if problem:
                whole = False
                yield Finding(str(key), size, problem)
        if whole:
            yield Finding(source.where, sum(spec.nbytes for spec in source.specs.values()))
    finally:
        source.close()
