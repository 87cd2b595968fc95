"""What goes wrong with storage, in one form.

Owns the error class and the sentence that names the path, the bytes and what the system said. Refuses to know who asked.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardwise.errors import ShardwiseError, explain

__all__ = ["StorageError", "again", "free_bytes", "storage_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


class StorageError(ShardwiseError, OSError):
    """Bytes could not be stored or fetched. `errno` is what the system said; None if it said nothing."""


def storage_error(
    problem: str, where: Path, cause: BaseException | str, *, do: str = "check the disk and its mount"
) -> StorageError:
    """An error that says what the system said and, where the trouble is room, how much is left.

    Args:
        problem: what could not be done, with the number of bytes and the path.
        where: a place on the disk in question.
        cause: the system's error, or words for what was found.
        do: what the user can do about it.
    """
    if not isinstance(cause, OSError):
        return StorageError(explain(problem, found=str(cause) or type(cause).__name__, do=do))
    found = cause.strerror or str(cause)
    free = free_bytes(where) if cause.errno in _FULL else None
    error = StorageError(explain(problem, found=found if free is None else f"{found!r}, {free:,} bytes free", do=do))
    error.errno = cause.errno
    return error


def again(error: StorageError) -> StorageError:
    """The same error to raise once more: one object raised twice would collect the frames, and all they hold, of both."""
    copy = StorageError(*error.args)
    copy.errno = error.errno
    return copy


def free_bytes(where: Path) -> int | None:
    """Bytes that an unprivileged user may still write to the file system of `where`; None if it does not say."""
    try:
        facts = os.statvfs(where)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
