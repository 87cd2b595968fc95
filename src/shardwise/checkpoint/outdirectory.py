"""A directory that appears under its name when everything is in it.

Owns the way there: it is written beside the name it will have, and renamed. Refuses to know what is in it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import TracebackType

from shardwise.checkpoint.datafile import refuse
from shardwise.checkpoint.folder import Folder, sync_directory
from shardwise.errors import CheckpointError, explain

__all__ = ["OutDirectory"]

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|\.metadata|__\d+_\d+\.distcp")
_SHOWN = 5  # names in a message


class OutDirectory:
    """A context in which a directory of weights is written; at its end, unless by an exception, the directory is there.

    Where it replaces one that has only files, that happens in one step. Where that has directories, files are renamed one by
    one, the index last: a crash in between leaves no index, so that nobody loads half of each.

    Args:
        path: where it shall be.
        overwrite: replace the weights in a directory that has something in it, and leave its other files.
        nbytes: room that is needed.

    Raises:
        CheckpointError: the directory has something in it, or cannot be written.
    """

    def __init__(self, path: Path, *, overwrite: bool, nbytes: int) -> None:
        self._target = Path(path).expanduser().absolute()
        self._overwrite = overwrite
        self._nbytes = nbytes
        self._folder = Folder(self._target.parent)
        self._written = self._target

    def __enter__(self) -> Path:
        """The directory to write into."""
        if self._target.is_symlink():
            self._target = self._target.resolve()
            self._folder = Folder(self._target.parent)
        if self._target.exists() and not self._target.is_dir():
            raise CheckpointError(explain(f"{self._target} is a file", expected="a directory, or nothing yet"))
        there = self._there()
        if there and not self._overwrite:
            found = ", ".join(there[:_SHOWN]) + (", ..." if len(there) > _SHOWN else "")
            do = "name another directory, or ask to overwrite (--overwrite), which replaces weights and leaves other files"
            raise CheckpointError(explain(f"{self._target} is not empty", expected="an empty directory", found=found, do=do))
        self._written = self._folder.begin(self._target.name, over_anything=True)
        try:
            stats = os.statvfs(self._written)
            if stats.f_bavail * stats.f_frsize < self._nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._drop()
            raise refuse(self._target, error, self._nbytes) from None
        return self._written

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._install()
        except OSError as failure:
            raise refuse(self._target, failure, self._nbytes) from failure
        finally:
            self._drop()
        if isinstance(error, OSError):
            raise refuse(self._target, error, self._nbytes) from error

    def _there(self) -> list[str]:
        return sorted(entry.name for entry in self._target.iterdir()) if self._target.is_dir() else []

    def _drop(self) -> None:
        shutil.rmtree(self._written, ignore_errors=True)

    def _install(self) -> None:
        there = [self._target / name for name in self._there()]
        if any(path.is_dir() for path in there):
            self._merge(there)
            return
        for path in there:
            if not _WEIGHTS.fullmatch(path.name) and not (self._written / path.name).exists():
                _link(path, self._written / path.name)
        self._folder.commit(self._written, self._target.name, latest=False)

    def _merge(self, there: list[Path]) -> None:
        earlier = [path for path in there if _WEIGHTS.fullmatch(path.name)]
        for path in sorted(earlier, key=_is_index, reverse=True):
            path.unlink()
        for path in sorted(self._written.iterdir(), key=_is_index):
            path.rename(self._target / path.name)
        sync_directory(self._target)


def _is_index(path: Path) -> bool:
    return path.suffix == ".json" or path.name == ".metadata"


def _link(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # a file system without links
        shutil.copy2(path, other)
