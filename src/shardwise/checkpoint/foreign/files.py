"""Reading byte ranges of files straight into tensors.

Owns open files, short reads and names that must not lead out of a directory. Refuses to know what the bytes mean.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, explain

__all__ = ["Files", "beside", "damaged", "read_small"]

_SMALL = 64 * 2**20  # bytes of a text file (an index, a tag) that is read as a whole


def damaged(path: str | Path, found: str, expected: str = "") -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(explain(f"{path} is damaged", expected=expected, found=found))


def beside(directory: Path, name: object, listed_in: Path) -> Path:
    """The file of that name in a directory.

    Args:
        directory: where it must be.
        name: as some file says.
        listed_in: that file, for the error.

    Raises:
        CheckpointError: the name is not a plain file name, so it could lead elsewhere.
    """
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or any(mark in name for mark in "/\\\0"):
        raise damaged(listed_in, f"the file name {name!r}", "the name of a file in the same directory")
    return directory / name


def read_small(path: Path, largest: int = _SMALL) -> bytes:
    """All bytes of a small file.

    Raises:
        CheckpointError: it cannot be read, or is too large to be what it is taken for.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise CheckpointError(explain(f"{path} cannot be read", found=error.strerror or str(error))) from None
    if len(data) > largest:
        raise damaged(path, "more", f"at most {largest} bytes")
    return data


class Files(AbstractContextManager["Files"]):
    """Reads at positions; the file read last stays open, so reading in the order of files opens each once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return os.fstat(self._open(path)).st_size

    def read(self, path: Path, at: int, length: int) -> bytes:
        """That many bytes from there on.

        Raises:
            CheckpointError: the file is missing, or ends before.
        """
        # Checked first: a length that a damaged file asks for must not be allocated.
        if at < 0 or length < 0 or at + length > self.size(path):
            raise damaged(path, f"{self.size(path)} bytes", f"at least {at + length}")
        data = bytearray(length)
        self._fill(path, at, memoryview(data))
        return bytes(data)

    def read_into(self, path: Path, at: int, values: Tensor) -> None:
        """Fill a 1-D contiguous tensor with the bytes from there on.

        Raises:
            CheckpointError: the file is missing, or ends before.
        """
        if values.device.type != "cpu":
            host = torch.empty_like(values, device="cpu")
            self.read_into(path, at, host)
            values.copy_(host)
        elif values.numel():
            self._fill(path, at, memoryview(cast("bytearray", values.detach().view(torch.uint8).numpy())))

    def _fill(self, path: Path, at: int, view: memoryview) -> None:
        file = self._open(path)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(file, [view[done:]], at + done)
            except OSError as error:
                raise CheckpointError(explain(f"{path} cannot be read", found=error.strerror or str(error))) from None
            if count == 0:
                raise damaged(path, f"the end at byte {at + done}", f"at least {at + len(view)} bytes")
            done += count

    def _open(self, path: Path) -> int:
        if path != self._path:
            self._close()
            try:
                self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise CheckpointError(explain(f"{path} cannot be read", found=error.strerror or str(error))) from None
            self._path = path
        return self._file

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None
