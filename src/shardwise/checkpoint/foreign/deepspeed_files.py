"""Which files a DeepSpeed checkpoint consists of, and what is in each.

Owns their names, which of them must be there, and the refusal of kinds of checkpoint that cannot be read. Refuses to know what
the values mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.archive import read_archive
from shardwise.checkpoint.foreign.files import beside, damaged, read_small
from shardwise.checkpoint.foreign.narrow import as_dict, as_shape
from shardwise.checkpoint.foreign.unpickle import Record
from shardwise.errors import CheckpointError, explain

__all__ = ["Folder", "find_folder", "number_of", "shape_of", "take"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARALLEL = re.compile(r"layer_.*states\.pt|expp_rank_.*states\.pt")
_TAG = 4096  # bytes of the file that names the newest tag


@dataclass
class Folder:
    """The files of one tag.

    Args:
        path: of the directory.
        models: files of the model by rank; only rank 0, where ranks do not have one each.
        optimizers: files of the optimizer by rank.
        prefix: how the names of the latter begin.
        partitioned: each rank has a file of the model.
    """

    path: Path
    models: dict[int, Path] = field(default_factory=dict[int, Path])
    optimizers: dict[int, Path] = field(default_factory=dict[int, Path])
    prefix: str = ""
    partitioned: bool = False

    def read_model(self, rank: int = 0) -> dict[str, Any]:
        """What a file of the model holds.

        Raises:
            CheckpointError: it is missing or cannot be read.
        """
        prefix = f"zero_pp_rank_{rank}_" if self.partitioned else ""
        return self._read(self.models, rank, f"{prefix}mp_rank_00_model_states.pt")

    def read_optimizer(self, rank: int = 0) -> dict[str, Any]:
        """What a file of the optimizer holds.

        Raises:
            CheckpointError: it is missing or cannot be read.
        """
        found = self._read(self.optimizers, rank, f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return take(found, "optimizer_state_dict", dict, self.optimizers[rank])

    def require(self, world: int, models: bool) -> None:
        """Check that there are files of that many ranks.

        Raises:
            CheckpointError: some are missing, or there are more; says which.
        """
        kinds = [(self.optimizers, f"{self.prefix}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt")]
        if models:
            kinds.append((self.models, "zero_pp_rank_{}_mp_rank_00_model_states.pt"))
        for files, name in kinds:
            wrong = sorted(set(range(world)) ^ set(files))
            if wrong:
                listed = ", ".join(name.format(rank) for rank in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
                what = "misses files" if wrong[0] < world and wrong[0] not in files else "has files of another run"
                do = "copy the files of all ranks here; each node may have kept its own"
                raise CheckpointError(
                    explain(f"{self.path} {what}: {listed}", expected=f"{world} ranks", found=f"{len(files)}", do=do)
                )

    def _read(self, files: dict[int, Path], rank: int, name: str) -> dict[str, Any]:
        if rank not in files:
            raise CheckpointError(explain(f"{self.path / name} is missing", do="copy the files of all ranks here"))
        found = as_dict(read_archive(files[rank], records=("deepspeed",)))
        if found is None:
            raise damaged(files[rank], "something else", "a DeepSpeed checkpoint")
        return found


def find_folder(path: Path, tag: str | None) -> Folder | None:
    """The files of a tag, or of the newest one; None if this is no DeepSpeed checkpoint.

    Args:
        path: a directory of checkpoints with a file `latest`, or one checkpoint.
        tag: which one.

    Raises:
        CheckpointError: it is of a kind that cannot be read, or the file `latest` is damaged.
    """
    folder = path
    latest = path / "latest"
    if tag is None and latest.is_file():
        tag = read_small(latest, _TAG).decode("utf-8", "replace").strip()
    for part in tag.split("/") if tag is not None else ():
        folder = beside(folder, part, latest)
    found = Folder(folder)
    try:
        names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(explain(f"{folder} cannot be read", found=error.strerror or str(error))) from None
    prefixes: dict[str, str] = {}
    models: dict[bool, str] = {}
    for name in names:
        model, optimizer = _MODEL.fullmatch(name), _OPTIMIZER.fullmatch(name)
        if _PARALLEL.fullmatch(name) or int((model and model[2]) or (optimizer and optimizer[3]) or 0):
            raise _unreadable(folder, name, "pipeline, tensor or expert parallel ranks")
        if model:
            models[model[1] is not None] = name
            found.models[int(model[1] or 0)] = folder / name
        if optimizer:
            prefixes[optimizer[1]] = name
            found.optimizers[int(optimizer[2])] = folder / name
    for kinds in (prefixes, models):
        if len(kinds) > 1:
            raise _unreadable(folder, " and ".join(kinds.values()), "two runs that were saved over one another")
    found.prefix = next(iter(prefixes), "")
    found.partitioned = True in models
    return found if found.models or found.optimizers else None


def _unreadable(folder: Path, name: str, what: str) -> CheckpointError:
    problem = f"{folder} cannot be read: it has files of {what}"
    return CheckpointError(explain(problem, expected="a checkpoint of data parallel training", found=name))


def take(found: Any, key: Any, kind: type[Any] | tuple[type[Any], ...], path: Path) -> Any:
    """An entry of a dict or list that must be there and of that kind.

    Raises:
        CheckpointError: it is not.
    """
    try:
        value = found[key]
    except (KeyError, IndexError, TypeError):
        raise damaged(path, f"no {key!r} in it", "a DeepSpeed checkpoint") from None
    if not isinstance(value, kind):
        raise damaged(path, f"{key!r} is a {type(value).__name__}", "a DeepSpeed checkpoint")
    return value


def number_of(value: Any, path: Path) -> int:
    """A whole number, which may be that of an enum.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, Record) and value.arguments:
        value = value.arguments[0]
    if type(value) is not int:
        raise damaged(path, type(value).__name__, "a whole number")
    return value


def shape_of(value: Any, path: Path) -> tuple[int, ...]:
    """A shape.

    Raises:
        CheckpointError: it is none.
    """
    shape = as_shape(value)
    if shape is None:
        raise damaged(path, "a shape that is none")
    return shape
