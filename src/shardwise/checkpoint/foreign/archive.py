"""The files of `torch.save`: a zip archive of one pickle and, uncompressed, the bytes of each storage.

Owns where in the file those are. Tensors stay on disk until they are read.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from shardwise.checkpoint.foreign.files import Files, damaged
from shardwise.checkpoint.foreign.stored import Storage
from shardwise.checkpoint.foreign.unpickle import LARGEST, StorageKind, unpickle
from shardwise.errors import CheckpointError, explain

__all__ = ["read_archive"]

# Of the header before each file in a zip archive: a magic number, then at 26 the lengths of the name and of extra fields.
_LOCAL = 30
_LENGTHS = struct.Struct("<HH")


def read_archive(
    path: Path, *, records: Sequence[str] = (), start: int = 0, length: int | None = None, files: Files | None = None
) -> Any:
    """What `torch.save` was given, with a `StridedTensor` in place of each tensor.

    Args:
        path: of the file.
        records: modules whose objects become records; see `unpickle`.
        start, length: where in the file the archive is, when it is not all of it.
        files: to read with.

    Raises:
        CheckpointError: it is no such file, or its pickle names something that is not allowed.
    """
    if files is None:
        with Files() as opened:
            return read_archive(path, records=records, start=start, length=length, files=opened)
    size = files.size(path)
    length = size - start if length is None else length
    if start < 0 or length < 0 or start + length > size:
        raise damaged(path, f"{size} bytes", f"at least {start + length}")
    return _Archive(path, start, length, files).load(records)


class _Archive:
    def __init__(self, path: Path, start: int, length: int, files: Files) -> None:
        self._path = path
        self._start = start
        self._length = length
        self._files = files
        self._storages: dict[tuple[str, StorageKind], Storage] = {}
        try:
            window = cast("IO[bytes]", io.BufferedReader(_Window(files, path, start, length)))
            with zipfile.ZipFile(window) as opened:
                self._entries = {entry.filename: entry for entry in opened.infolist()}
        # What the standard library raises for archives that are not.
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, KeyError, OSError) as error:
            raise self._no_archive(f"{type(error).__name__}: {error}") from None
        pickles = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise self._no_archive(f"{len(pickles)} files called data.pkl in a zip archive")
        self._root = pickles[0].removesuffix("data.pkl")

    def _no_archive(self, found: str) -> CheckpointError:
        expected = "a file of torch.save, in the format it has had since torch 1.6"
        return CheckpointError(explain(f"{self._path} cannot be read", expected=expected, found=found))

    def load(self, records: Sequence[str]) -> Any:
        order = self._bytes("byteorder", 16) if f"{self._root}byteorder" in self._entries else sys.byteorder.encode()
        if order != sys.byteorder.encode():
            raise damaged(self._path, f"{order!r}", f"the byte order of this machine, {sys.byteorder}")
        return unpickle(self._bytes("data.pkl", LARGEST), self._path, records=records, storage=self._storage)

    def _bytes(self, name: str, largest: int) -> bytes:
        entry = self._entry(self._root + name)
        if entry.file_size > largest:
            raise damaged(self._path, f"{name} of {entry.file_size} bytes", f"at most {largest}")
        return self._files.read(self._path, self._locate(entry, self._files), entry.file_size)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._entries.get(name)
        if entry is None:
            raise damaged(self._path, f"no {name} in it")
        # torch stores; a compressed entry could unpack to anything.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise damaged(self._path, f"{name} is compressed or encrypted", "stored bytes")
        return entry

    def _locate(self, entry: zipfile.ZipInfo, files: Files) -> int:
        """The first byte of an entry in the file."""
        end = self._start + self._length
        header = self._start + entry.header_offset
        if not self._start <= header <= end - _LOCAL:
            raise damaged(self._path, f"{entry.filename} at byte {header} of {end}")
        local = files.read(self._path, header, _LOCAL)
        first = header + _LOCAL + sum(_LENGTHS.unpack_from(local, 26))
        if not local.startswith(b"PK\x03\x04") or first + entry.file_size > end:
            raise damaged(self._path, f"no {entry.filename} at byte {header}")
        return first

    def _storage(self, identity: Any) -> Storage:
        word, kind, key, _, count = identity
        if word != "storage" or not isinstance(kind, StorageKind) or not isinstance(key, str) or not isinstance(count, int):
            raise ValueError("a storage that is not described as torch does")
        found = self._storages.get((key, kind))
        if found is None:
            entry = self._entry(f"{self._root}data/{key}")
            nbytes = count * (kind.dtype.itemsize if kind.dtype is not None else 1)
            if not 0 <= nbytes <= entry.file_size:
                raise damaged(self._path, f"{entry.file_size} bytes of {entry.filename}", f"{nbytes}")
            found = self._storages[key, kind] = Storage(self._path, nbytes, partial(self._locate, entry), kind.dtype)
        return found


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, files: Files, path: Path, start: int, length: int) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise OSError("a position before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        buffer[:count] = self._files.read(self._path, self._start + self._at, count)
        self._at += count
        return count
