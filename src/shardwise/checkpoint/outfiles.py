"""Files of whole weights for other programs, written from front to back with no tensor in memory.

Owns the two formats: safetensors, whose header is known before any value, and the zip file of `torch.save`, which writes the
frame with holes where values go. Holes get their checksums when they are filled, so that any reader of zip files is content. Of
that format (APPNOTE.TXT, sections 4.3.7, 4.3.9 and 4.3.12) it knows where a record begins and where checksums are: behind the
record, and in the central directory. Refuses to know where values come from.
"""

from __future__ import annotations

import errno
import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch

from shardwise.checkpoint.contents import Spec
from shardwise.checkpoint.safetensors import encode_header

__all__ = ["OutFile", "SafetensorsFile", "TorchFile"]

_DESCRIPTOR = 16  # bytes behind a small record: a signature, its checksum, its sizes


class OutFile(Protocol):
    """A file that is being written: the bytes of its tensors come in order."""

    def write(self, data: memoryview) -> None:
        """The next bytes, of one tensor."""
        ...

    def finish(self) -> None:
        """Return when all is on disk for good."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class SafetensorsFile:
    """One safetensors file.

    Args:
        path: must not exist yet.
        tensors: what it will hold.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec]) -> None:
        first, _ = encode_header({name: (spec.dtype, spec.shape) for name, spec in tensors.items()}, {"format": "pt"})
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._at = _write_all(self._descriptor, memoryview(first), 0)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> None:
        """See `OutFile.write`."""
        self._at = _write_all(self._descriptor, data, self._at)

    def finish(self) -> None:
        """See `OutFile.finish`."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """See `OutFile.close`."""
        os.close(self._descriptor)


@dataclass
class _Hole:
    start: int
    size: int
    filled: int = 0
    checksum: int = 0


class TorchFile:
    """One file for `torch.load`: a state dict. Its tensors take address space while the frame is written, and no memory.

    Args:
        path: must not exist yet.
        tensors: what it will hold.
        aliases: other names of tensors among these.
        others: values that are no tensors.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec], aliases: Mapping[str, str], others: Mapping[str, Any]) -> None:
        state: OrderedDict[str, Any] = OrderedDict()
        for name, spec in tensors.items():
            state[name] = torch.empty(spec.shape, dtype=spec.dtype)
        state.update({alias: state[name] for alias, name in aliases.items()}, **others)
        with torch.serialization.skip_data():
            torch.save(state, path)
        with zipfile.ZipFile(path) as archive:
            self._records = archive.infolist()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # torch numbers storages in the order in which it meets them, and each of these tensors has one of its own.
            places = {record.filename.partition("/data/")[2]: record for record in self._records}
            self._holes = [self._hole(places[str(number)], spec) for number, spec in enumerate(tensors.values())]
        except BaseException:
            self.close()
            raise
        self._waiting = iter(self._holes)
        self._hole_now = _Hole(0, 0)

    def _hole(self, record: zipfile.ZipInfo, spec: Spec) -> _Hole:
        if record.file_size != spec.nbytes:
            raise OSError(errno.EIO, f"torch.save has left {record.file_size} bytes for a tensor of {spec.nbytes}")
        return _Hole(self._begin(record), record.file_size)

    def _begin(self, record: zipfile.ZipInfo) -> int:
        lengths = struct.unpack("<HH", os.pread(self._descriptor, 4, record.header_offset + 26))
        return record.header_offset + 30 + sum(lengths)

    def write(self, data: memoryview) -> None:
        """See `OutFile.write`."""
        while self._hole_now.filled == self._hole_now.size:
            self._hole_now = next(self._waiting)
        hole = self._hole_now
        hole.filled = _write_all(self._descriptor, data, hole.start + hole.filled) - hole.start
        hole.checksum = crc32(data, hole.checksum)

    def finish(self) -> None:
        """See `OutFile.finish`."""
        sums = {hole.start: hole.checksum for hole in self._holes}
        last = max(self._records, key=lambda record: record.header_offset)
        entry = self._begin(last) + last.file_size + _DESCRIPTOR
        for record in self._records:
            if os.pread(self._descriptor, 4, entry) != b"PK\x01\x02":
                break  # not as expected; torch.load asks for no checksums
            begin = self._begin(record)
            if begin in sums and record.file_size:
                checksum = struct.pack("<I", sums[begin])
                os.pwrite(self._descriptor, checksum, entry + 16)
                if os.pread(self._descriptor, 4, begin + record.file_size) == b"PK\x07\x08":
                    os.pwrite(self._descriptor, checksum, begin + record.file_size + 4)
            entry += 46 + sum(struct.unpack("<HHH", os.pread(self._descriptor, 6, entry + 28)))
        os.fsync(self._descriptor)

    def close(self) -> None:
        """See `OutFile.close`."""
        os.close(self._descriptor)


def _write_all(descriptor: int, data: memoryview, at: int) -> int:
    """Write at a place, whatever number of calls that takes; returns the place after it."""
    while len(data):
        done = os.pwrite(descriptor, data, at)
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        at += done
        data = data[done:]
    return at
