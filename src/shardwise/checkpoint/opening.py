"""From a path to something that can be read.

Owns the recognition of formats. Refuses to know what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint.contents import Source
from shardwise.checkpoint.folder import INDEX, Folder, check_tag
from shardwise.checkpoint.reader import NativeSource
from shardwise.errors import CheckpointDamagedError, CheckpointError, explain

__all__ = ["find_native", "holds_one", "open_checkpoint", "open_path"]


def open_checkpoint(directory: Path, tag: str, *, trusted: bool = False) -> tuple[Source, dict[str, Any]]:
    """Open the checkpoint of a run, of this package or DeepSpeed; or what is in the directory itself, where there is no tag.

    Args:
        directory, tag: where.
        trusted: unpickle whatever the user saved along with it.

    Returns:
        the checkpoint, and what the user saved along with it.

    Raises:
        CheckpointError: it is not there, damaged, or of no known format.
    """
    where = directory / tag if tag else directory
    if not (where / INDEX).exists() and not any(where.glob("rank-*.safetensors")):
        foreign = _open_foreign(where)
        if foreign is not None:
            return foreign, getattr(foreign, "client_state", {})
    source = NativeSource(Folder(directory), tag)
    try:
        return source, source.client_state(trusted=trusted)
    except BaseException:
        source.close()
        raise


def holds_one(directory: Path) -> bool:
    """Whether a directory itself is a checkpoint of another program's that has no tags."""
    return _open_foreign(directory) is not None


def open_path(path: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Open whatever checkpoint is at a path.

    Args:
        path: a run's directory or one checkpoint in it, of this package or DeepSpeed; a directory that torch's DCP or
            Hugging Face's `save_pretrained` has written.
        tag: which of a run's checkpoints; None for the latest.

    Raises:
        CheckpointError: there is nothing that can be read, or it is damaged.
    """
    native = find_native(path, tag)
    if native is not None:
        return NativeSource(*native)
    where = Path(path).expanduser().absolute()
    if tag is not None:
        where = where / check_tag(tag)
    if not where.exists():
        raise CheckpointError(explain(f"there is nothing at {where}", expected="a checkpoint", do="check the path"))
    source = _open_foreign(where)
    if source is None:
        expected = "a checkpoint of this package, DeepSpeed, torch.distributed.checkpoint or Hugging Face"
        raise CheckpointError(explain(f"{where} is no checkpoint", expected=expected, found=_found(where)))
    return source


def find_native(path: str | os.PathLike[str], tag: str | None = None) -> tuple[Folder, str] | None:
    """The run and the tag that a path means, where they are of this package's format; None otherwise.

    Raises:
        CheckpointError: there is a run, but not that checkpoint.
    """
    where = Path(path).expanduser().absolute()
    if (where / INDEX).is_file():
        if tag not in (None, where.name):
            problem = f"{where} is one checkpoint, and a tag was given"
            raise CheckpointError(explain(problem, found=repr(tag), do="leave the tag out, or give the run's directory"))
        return Folder(where.parent), where.name
    if any(where.glob("rank-*.safetensors")):
        raise CheckpointDamagedError(
            explain(f"{where / INDEX} is missing", expected="the index of this checkpoint", do="load another checkpoint")
        )
    folder = Folder(where)
    if not folder.tags():
        return None
    found = folder.newest() if tag is None else check_tag(tag)
    return None if found is None else (folder, found)


def _open_foreign(path: Path) -> Source | None:
    from shardwise.checkpoint.foreign import open_foreign  # what reads others' pickles is rarely needed

    return open_foreign(path)


def _found(path: Path) -> str:
    """What is there instead, in a few words."""
    if not path.is_dir():
        return "a file"
    names = sorted(entry.name for entry in path.iterdir())
    return (", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) or "an empty directory"
