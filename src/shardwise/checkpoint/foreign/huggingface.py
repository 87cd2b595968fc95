"""Directories of Hugging Face's `save_pretrained`: weights in safetensors files, or in older files of `torch.save`.

Owns which files those are. Everything is read slice by slice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shardwise.checkpoint.contents import Facts, Spec
from shardwise.checkpoint.foreign.archive import read_archive
from shardwise.checkpoint.foreign.files import beside, damaged, read_small
from shardwise.checkpoint.foreign.pieces import PieceSource, guess_kind, whole
from shardwise.checkpoint.foreign.stored import FileTensor, StridedTensor
from shardwise.checkpoint.safetensors import read_header
from shardwise.errors import CheckpointError, explain

__all__ = ["HUGGING_FACE_FILES", "HuggingFaceSource"]

HUGGING_FACE_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What such a directory has one of, the preferred ones first."""


class HuggingFaceSource(PieceSource):
    """The weights in a directory of `save_pretrained`.

    The format does not tell weights from buffers (`facts.origin["kinds"]` is "guessed").

    Args:
        path: the directory.

    Raises:
        CheckpointError: it has no weights, or a file is missing or damaged, or names code to run.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path))
        folder = Path(path)
        first = next((folder / name for name in HUGGING_FACE_FILES if (folder / name).is_file()), None)
        if first is None:
            problem = f"{folder} has no weights"
            raise CheckpointError(explain(problem, expected=f"one of {', '.join(HUGGING_FACE_FILES)}", found="none"))
        self._ties: dict[str, str] = {}
        self._known: dict[Any, str] = {}
        listed = _read_index(first) if first.suffix == ".json" else None
        files = {first: None} if listed is None else _by_file(listed, folder, first)
        for file, names in files.items():
            self._add_file(file, names, first)

    def _make_facts(self) -> Facts:
        return Facts(ties=self._ties, origin={"format": "huggingface", "kinds": "guessed"})

    def _add_file(self, file: Path, names: list[str] | None, index: Path) -> None:
        """Announce the tensors of a file: those that the index lists in it, or all."""
        if not file.is_file():
            do = "copy or download all files that the index lists"
            raise CheckpointError(explain(f"{file} is missing", expected=f"all files listed in {index.name}", do=do))
        held = self._read_header(file) if file.suffix == ".safetensors" else self._read_pickle(file)
        missing = sorted(set(names or ()) - held.keys() - self._ties.keys())
        if missing:
            raise damaged(file, f"no {missing[0]}", f"what {index.name} lists")
        for name in held if names is None else names:
            if name in held:
                self.add(guess_kind(name, held[name].spec), held[name].spec, whole(held[name]))

    def _read_header(self, file: Path) -> Mapping[str, FileTensor]:
        header = read_header(file)
        # `safetensors.torch.save_model` notes the names it leaves out, and which ones they are the same as.
        self._ties |= {
            name: first for name, first in header.metadata.items() if name not in header.tensors and first in header.tensors
        }
        return {name: FileTensor(file, Spec(each.shape, each.dtype), each.start) for name, each in header.tensors.items()}

    def _read_pickle(self, file: Path) -> Mapping[str, StridedTensor]:
        found = read_archive(file)
        if not isinstance(found, dict):
            raise damaged(file, type(found).__name__, "a state dict")
        held: dict[str, StridedTensor] = {}
        for name, tensor in cast("dict[Any, Any]", found).items():
            if not isinstance(name, str) or not isinstance(tensor, StridedTensor):
                continue
            first = self._known.setdefault(tensor.identity, name) if tensor.spec.length else name
            if first == name:
                held[name] = tensor
            else:
                self._ties[name] = first
        return held


def _read_index(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_small(path))
        listed = found["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}", "an index with a weight_map") from None
    if not isinstance(listed, dict):
        raise damaged(path, "a weight_map that is none")
    return cast("dict[str, Any]", listed)


def _by_file(listed: Mapping[str, Any], folder: Path, index: Path) -> dict[Path, list[str] | None]:
    files: dict[Path, list[str] | None] = {}
    for name, file in listed.items():
        names = files.setdefault(beside(folder, file, index), [])
        if names is not None:
            names.append(name)
    return files
