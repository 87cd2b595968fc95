"""The index of a checkpoint: which elements of which tensor lie where in which file, and the checksums of the files.

Owns the record and its text. The text carries a checksum of itself. Everything in it is checked before it is believed, since it
may come from anywhere. Refuses to know how bytes are moved.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast, get_args
from zlib import crc32

from shardwise.checkpoint import plain
from shardwise.checkpoint.contents import Facts, Key, Kind, Spec, dtype_called, dtype_name
from shardwise.checkpoint.datafile import Checksums
from shardwise.errors import CheckpointDamagedError, CheckpointError, explain

__all__ = ["Index", "Piece", "Share", "is_plain_name"]

_FORMAT, _VERSION = "shardwise", 1
_HEAD = re.compile(rb'\{"crc32":"[0-9a-f]{8}","index":\{"format":"shardwise","version":\d+,"written":([0-9.]+)')
_KINDS = get_args(Kind)


class Piece(NamedTuple):
    """Elements `[start, stop)` of a tensor.

    Args:
        start, stop: storage elements of the whole tensor.
        file: number of the file.
        offset: where they begin in it, in bytes.
    """

    start: int
    stop: int
    file: int
    offset: int


@dataclass
class Share:
    """What one rank has written.

    Args:
        file: name of its data file.
        sums: its checksums.
        specs: the tensors of which it has a piece.
        pieces: where they are; `file` of each is not known yet, and 0.
        steps, numbers: see `Facts`, of the parameters of which it has a piece.
    """

    file: str
    sums: Checksums
    specs: dict[Key, Spec] = field(default_factory=dict[Key, Spec])
    pieces: dict[Key, list[Piece]] = field(default_factory=dict[Key, list[Piece]])
    steps: dict[str, int] = field(default_factory=dict[str, int])
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def dumps(self) -> str:
        """As text."""
        return json.dumps(
            {
                "file": self.file,
                "sums": self.sums.to_dict(),
                "tensors": _tensors_to_json(self.specs, self.pieces),
                "steps": self.steps,
                "numbers": plain.to_json(self.numbers, "optimizer state"),
            }
        )

    @classmethod
    def loads(cls, text: str) -> Share:
        """The inverse."""
        found = json.loads(text)
        specs, pieces = _tensors_from_json(found["tensors"], "a rank's share", files=1)
        numbers = plain.from_json(found["numbers"])
        return cls(found["file"], Checksums.from_dict(found["sums"]), specs, pieces, found["steps"], numbers)


@dataclass
class Index:
    """What a checkpoint consists of.

    Args:
        facts: everything but tensors.
        specs: all tensors.
        pieces: of each tensor, in order, without gap or overlap.
        files: data files, with their checksums, by number.
        client_state: the file in which the user's own state is, with its checksums; None if there is none.
    """

    facts: Facts
    specs: dict[Key, Spec]
    pieces: dict[Key, list[Piece]]
    files: list[tuple[str, Checksums]]
    client_state: tuple[str, Checksums] | None = None

    @classmethod
    def combine(cls, shares: Iterable[Share], specs: Mapping[Key, Spec], facts: Facts) -> Index:
        """The index of what all ranks have written.

        Args:
            shares: of all ranks.
            specs: tensors that must be there; those without elements have no piece.
            facts: what is the same on all ranks; the ranks' own is put into it.
        """
        index = cls(facts, dict(specs), {key: [] for key in specs}, [])
        for number, share in enumerate(shares):
            index.files.append((share.file, share.sums))
            index.specs.update(share.specs)
            for key, pieces in share.pieces.items():
                index.pieces.setdefault(key, []).extend(piece._replace(file=number) for piece in pieces)
            facts.steps.update(share.steps)
            facts.numbers.update(share.numbers)
        for key, pieces in index.pieces.items():
            pieces.sort()
            _check_cover(key, index.specs[key], pieces, "the checkpoint that was written")
        return index

    @staticmethod
    def when(path: Path) -> float | None:
        """When an index was written, in seconds since the epoch, by the first bytes of the file; None if it is no index."""
        try:
            with path.open("rb") as file:
                found = _HEAD.match(file.read(200))
        except OSError:
            return None
        return float(found[1]) if found else None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(sums.size for _, sums in self.files) + (self.client_state[1].size if self.client_state else 0)

    def dumps(self) -> str:
        """As text."""
        body = json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "written": time.time(),
                "facts": plain.to_json(self.facts.to_dict(), "the state of training"),
                "files": [{"name": name, **sums.to_dict()} for name, sums in self.files],
                "client_state": None if self.client_state is None else _file_to_json(*self.client_state),
                "tensors": _tensors_to_json(self.specs, self.pieces),
            },
            separators=(",", ":"),
        )
        return f'{{"crc32":"{crc32(body.encode()):08x}","index":{body}}}\n'

    @classmethod
    def loads(cls, text: str, where: str) -> Index:
        """The inverse.

        Args:
            text: of the file.
            where: its path, for messages.

        Raises:
            CheckpointError: the text is damaged, or describes something that cannot be.
        """
        try:
            index = cls._parse(text, where)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise _damaged(where, f"{type(error).__name__}: {error}") from None
        for key, pieces in index.pieces.items():
            _check_cover(key, index.specs[key], pieces, where)
            _check_places(key, index.specs[key], pieces, index.files, where)
        return index

    @classmethod
    def _parse(cls, text: str, where: str) -> Index:
        head, separator, body = text.strip().partition(',"index":')
        body, end = body[:-1], body[-1:]
        if not separator or end != "}" or head != f'{{"crc32":"{crc32(body.encode()):08x}"':
            raise ValueError("the checksum of the index is not that of its text")
        found = json.loads(body)
        if found["format"] != _FORMAT or type(found["version"]) is not int:
            raise ValueError(f"format {found['format']!r}, version {found['version']!r}")
        if found["version"] > _VERSION:
            raise CheckpointError(
                explain(
                    f"{where} was written by a later version",
                    expected=f"format version {_VERSION}",
                    found=str(found["version"]),
                    do="use a newer version of shardwise to read it",
                )
            )
        files = [_file_from_json(each) for each in found["files"]]
        client = None if found["client_state"] is None else _file_from_json(found["client_state"])
        specs, pieces = _tensors_from_json(found["tensors"], where, files=len(files))
        return cls(Facts.from_dict(plain.from_json(found["facts"])), specs, pieces, files, client)


def is_plain_name(name: Any) -> bool:
    """Whether something is the name of a file, and leads nowhere else."""
    return isinstance(name, str) and bool(name) and name not in (".", "..") and PurePath(name).name == name and "\\" not in name


def _file_to_json(name: str, sums: Checksums) -> dict[str, Any]:
    return {"name": name, **sums.to_dict()}


def _file_from_json(found: dict[str, Any]) -> tuple[str, Checksums]:
    if not is_plain_name(found["name"]):
        raise ValueError(f"{found['name']!r} is not the name of a file")
    return found["name"], Checksums.from_dict(found)


def _tensors_to_json(specs: Mapping[Key, Spec], pieces: Mapping[Key, list[Piece]]) -> dict[str, Any]:
    """By kind (and state), then by name, as the text is read by people too."""
    found: dict[str, Any] = {}
    for key, spec in specs.items():
        kind = f"{key.kind}:{key.state}" if key.state else key.kind
        found.setdefault(kind, {})[key.name] = {
            "dtype": dtype_name(spec.dtype, str(key)),
            "shape": list(spec.shape),
            "pieces": [list(piece) for piece in pieces.get(key, [])],
        }
    return found


def _tensors_from_json(found: dict[str, Any], where: str, *, files: int) -> tuple[dict[Key, Spec], dict[Key, list[Piece]]]:
    specs: dict[Key, Spec] = {}
    pieces: dict[Key, list[Piece]] = {}
    for label, tensors in found.items():
        kind, _, state = label.partition(":")
        if kind not in _KINDS:
            raise ValueError(f"there is no kind of tensor {kind!r}")
        for name, entry in tensors.items():
            key = Key(cast("Kind", kind), name, state)
            specs[key] = Spec(tuple(map(_whole, entry["shape"])), dtype_called(entry["dtype"], f"{key} in {where}"))
            pieces[key] = [Piece(*map(_whole, piece)) for piece in entry["pieces"]]
            if any(piece.file >= files for piece in pieces[key]):
                raise ValueError(f"{key} lies in a file that is not listed")
    return specs, pieces


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _check_cover(key: Key, spec: Spec, pieces: list[Piece], where: str) -> None:
    """Every element exactly once."""
    end = 0
    for piece in pieces:
        if piece.start != end or piece.stop <= piece.start:
            break
        end = piece.stop
    else:
        if end == spec.length:
            return
    found = f"pieces {[(piece.start, piece.stop) for piece in pieces[:8]]}"
    raise _damaged(where, found, f"{key} whole: elements 0 to {spec.length}, each once")


def _check_places(key: Key, spec: Spec, pieces: list[Piece], files: list[tuple[str, Checksums]], where: str) -> None:
    width = spec.nbytes // spec.length if spec.length else 1
    for piece in pieces:
        size = files[piece.file][1].size
        if piece.offset + (piece.stop - piece.start) * width > size:
            raise _damaged(
                where, f"{key} at byte {piece.offset} of {files[piece.file][0]}, which has {size}", "pieces inside their files"
            )


def _damaged(where: str, found: str, expected: str = "the index of a checkpoint") -> CheckpointDamagedError:
    return CheckpointDamagedError(explain(f"{where} is damaged", expected=expected, found=found, do="load another checkpoint"))
