"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes.

Owns that format, and the refusal of headers that lie. Refuses to know what the tensors are. The format is described at
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint.contents import dtype_called, dtype_name
from shardwise.errors import CheckpointDamagedError, CheckpointError, explain

__all__ = ["Header", "Stored", "encode_header", "read_header"]

_LENGTH = struct.Struct("<Q")
_LARGEST = 100_000_000  # bytes of JSON; the format's own limit
_ALIGN = 64  # bytes at whose multiple the data begins, so that they can be mapped into memory as any dtype


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is in a file.

    Args:
        dtype: of its values.
        shape: its shape.
        start, stop: its bytes in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Args:
        tensors: by name, in the order in which they lie.
        metadata: text by name.
        size: bytes of the whole file.
    """

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    size: int = 0


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The first bytes of a file that holds these tensors one after the other, and where they will be.

    Raises:
        CheckpointError: a dtype that the format does not have, or too many tensors for one file.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        described[name] = {"dtype": dtype_name(dtype, repr(name)), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-(len(text) + _LENGTH.size) // _ALIGN) * _ALIGN - _LENGTH.size)
    if len(text) > _LARGEST:
        problem = "a data file would hold too many tensors"
        raise CheckpointError(explain(problem, expected=f"a header of at most {_LARGEST} bytes", found=str(len(text))))
    first = _LENGTH.size + len(text)
    places: dict[str, Stored] = {}
    for name, (dtype, shape) in tensors.items():
        begin, end = described[name]["data_offsets"]
        places[name] = Stored(dtype, shape, first + begin, first + end)
    return _LENGTH.pack(len(text)) + text, Header(places, metadata, first + end)


def read_header(path: str | Path) -> Header:
    """What a file holds. Reads the header only.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is not one.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _read_text(path, file, size)
    except OSError as error:
        raise CheckpointDamagedError(explain(f"{path} cannot be read", found=error.strerror or str(error))) from None
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError("not an object")
        return _parse(path, cast("dict[str, Any]", found), _LENGTH.size + len(text), size)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _read_text(path: Path, file: Any, size: int) -> bytes:
    head = file.read(_LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    if not 2 <= length <= min(_LARGEST, size - _LENGTH.size):
        raise _damaged(path, f"a header of {length} bytes in a file of {size}" if length >= 0 else f"{size} bytes in all")
    return file.read(length)


def _parse(path: Path, found: dict[str, Any], first: int, size: int) -> Header:
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise TypeError("__metadata__ is not an object")
    tensors: dict[str, Stored] = {}
    for name, entry in found.items():
        dtype = dtype_called(entry["dtype"], f"{name!r} in {path}")
        shape = tuple(_whole(size) for size in entry["shape"])
        begin, end = map(_whole, entry["data_offsets"])
        if end - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} has {end - begin} bytes, which is not what {shape} {dtype} takes")
        if first + end > size:
            raise ValueError(f"{name!r} ends at byte {first + end} of {size}")
        tensors[name] = Stored(dtype, shape, first + begin, first + end)
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    last = first
    for name, stored in ordered.items():
        if stored.start < last:
            raise ValueError(f"{name!r} overlaps another tensor")
        last = stored.stop
    return Header(ordered, {str(key): str(value) for key, value in cast("dict[Any, Any]", metadata).items()}, size)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _damaged(path: Path, found: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(explain(f"{path} is damaged", expected="a safetensors file", found=found))
