"""Whole weights as files that other programs load: a directory for Hugging Face's `from_pretrained`, or for torch's DCP.

Owns which tensor goes into which file under which name. Refuses to know how bytes are read and written, and how the directory
gets its name. At no time is more in memory than a few megabytes.

The names of files and the index are those of `save_pretrained`; see
https://huggingface.co/docs/transformers/big_models#sharded-checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from shardwise.checkpoint.contents import Key, Source, Spec, real_dtype
from shardwise.checkpoint.datafile import Progress, to_bytes, write_file
from shardwise.checkpoint.outdirectory import OutDirectory
from shardwise.checkpoint.outfiles import OutFile, SafetensorsFile, TorchFile
from shardwise.checkpoint.streaming import Converted, chunks, compute_dtypes, float_dtypes
from shardwise.errors import CheckpointError, explain

__all__ = ["ExportFile", "ExportPlan", "Format", "export", "parse_size", "plan_export"]

Format = Literal["safetensors", "torch", "dcp"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_NAMES = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}


@dataclass
class ExportFile:
    """A file of an export.

    Args:
        name: of the file.
        tensors: what it will hold, by name, in the order in which it lies there.
        aliases: other names of tensors among these.
        others: values that are no tensors.
        nbytes: of all values.
    """

    name: str
    tensors: dict[str, Key] = field(default_factory=dict[str, Key])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    others: dict[str, Any] = field(default_factory=dict[str, Any])
    nbytes: int = 0


@dataclass
class ExportPlan:
    """What an export writes.

    Args:
        format: of the files.
        specs: all tensors in it.
        files: the data files; none for DCP, which chooses them by itself.
        index: name of the file that says which tensor is where; empty where a single file has all.
        notes: what those who use the files should know.
    """

    format: Format
    specs: dict[Key, Spec]
    files: list[ExportFile] = field(default_factory=list[ExportFile])
    index: str = ""
    notes: list[str] = field(default_factory=list[str])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(spec.nbytes for spec in self.specs.values())

    def dumps_index(self) -> str:
        """The text of the index."""
        where = {name: file.name for file in self.files for name in (*file.tensors, *file.aliases, *file.others)}
        return json.dumps({"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


def export(
    source: Source,
    out_dir: str | Path,
    *,
    format: Format = "safetensors",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportPlan:
    """Write the weights and persistent buffers of a checkpoint for other programs.

    Args:
        source: the checkpoint.
        out_dir: a directory, which appears when everything is in it.
        format: "safetensors" gives `model.safetensors`, or shards of it and their index, which `from_pretrained` loads; tied
            weights are there once, under their first name. "torch" gives `pytorch_model.bin` likewise, for `torch.load`, with
            tied weights under all names. "dcp" is for `torch.distributed.checkpoint`, with the optimizer's state.
        dtype: "fp32", "bf16" or "fp16" for all floating-point weights. None: the dtype in which the model computed, which is
            what its `save_pretrained` would write; for "dcp", from which training goes on, that of the master weights. Buffers
            and integers stay as they are.
        max_shard_size: a number of bytes, or text such as "5GB" or "500MiB", that a file may have before another is begun. A
            larger tensor gets a file of its own. Means nothing for "dcp".
        overwrite: replace the weights in a directory that has something in it. Other files there (config.json, a tokenizer)
            stay.
        progress: told of bytes as they are written.

    Returns:
        what was written.

    Raises:
        CheckpointError: the directory has something in it, the disk is full, or the checkpoint is damaged.
    """
    plan = plan_export(source, format=format, dtype=dtype, max_shard_size=max_shard_size)
    with OutDirectory(Path(out_dir), overwrite=overwrite, nbytes=plan.nbytes) as directory:
        dtypes = {key: spec.dtype for key, spec in plan.specs.items()}
        converted = Converted(source, dtypes, progress=progress if format == "dcp" else None)
        if format == "dcp":
            from shardwise.checkpoint.foreign.dcp_write import write_dcp

            write_dcp(converted, directory)
        for file in plan.files:
            _write(directory / file.name, file, converted, progress)
        if plan.index:
            write_file(directory / plan.index, plan.dumps_index().encode())
    return plan


def plan_export(
    source: Source,
    *,
    format: Format = "safetensors",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
) -> ExportPlan:
    """What `export` would write; see there. Reads no values.

    Raises:
        CheckpointError: an option has a value that it cannot have, or there are no weights.
    """
    if format not in get_args(Format):
        raise _wrong("format", "one of " + ", ".join(get_args(Format)), format)
    if dtype is not None and dtype not in _DTYPES:
        raise _wrong("dtype", f"one of {', '.join(_DTYPES)}, or none for that of the model", dtype)
    limit = parse_size(max_shard_size)
    dtypes: dict[Key, torch.dtype] = {}
    if dtype is not None:
        dtypes = float_dtypes(source, _DTYPES[dtype])
    elif format != "dcp":
        dtypes = compute_dtypes(source)
    kinds = ("weight", "buffer", "optimizer") if format == "dcp" else ("weight", "buffer")
    specs = {key: Spec(spec.shape, dtypes.get(key, spec.dtype)) for key, spec in source.specs.items() if key.kind in kinds}
    if not any(key.kind == "weight" for key in specs):
        raise CheckpointError(explain(f"{source.where} has no weights", do="choose another checkpoint"))
    plan = ExportPlan(format, specs, notes=_notes(source, format))
    if format != "dcp":
        _fill(plan, source, limit)
    return plan


def _fill(plan: ExportPlan, source: Source, limit: int) -> None:
    """Choose the files."""
    stem, suffix = _NAMES[plan.format]
    groups = list(_groups(plan.specs, limit))
    for number, keys in enumerate(groups, 1):
        name = f"{stem}.{suffix}" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}"
        # Wider dtypes first, so that each tensor begins at a multiple of its width: some readers map the file into memory.
        ordered = sorted(keys, key=lambda key: -real_dtype(plan.specs[key].dtype).itemsize)
        nbytes = sum(plan.specs[key].nbytes for key in keys)
        plan.files.append(ExportFile(name, {key.name: key for key in ordered}, nbytes=nbytes))
    if len(groups) > 1:
        plan.index = f"{stem}.{suffix}.index.json"
    if plan.format == "torch":
        for file in plan.files:
            file.aliases.update({alias: name for alias, name in source.facts.ties.items() if name in file.tensors})
        plan.files[0].others.update(source.facts.extra)


def _groups(specs: dict[Key, Spec], limit: int) -> Iterator[list[Key]]:
    group: list[Key] = []
    size = 0
    for key, spec in specs.items():
        if group and size + spec.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(key)
        size += spec.nbytes
    yield group


def _notes(source: Source, format: Format) -> list[str]:
    facts, notes = source.facts, list[str]()
    if facts.excluded:
        notes.append(f"frozen weights that were left out when it was saved are not in it: {', '.join(facts.excluded)}")
    if format == "safetensors" and facts.ties:
        tied = ", ".join(f"{alias} ({name})" for alias, name in facts.ties.items())
        notes.append(f"tied weights are there once, under the name in brackets: {tied}")
    if format == "safetensors" and facts.extra:
        notes.append(f"what is no tensor has no place in safetensors: {', '.join(facts.extra)}")
    return notes


def parse_size(text: int | str) -> int:
    """Bytes, from a number or from text such as "5GB" (10^9 bytes each) or "500MiB" (2^20 bytes each).

    Raises:
        CheckpointError: it is no such text.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", str(text).upper())
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise _wrong("max_shard_size", "bytes, for example 5GB or 500MiB", text)
    return size


def _wrong(option: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(explain(f"{option} has a wrong value", expected=expected, found=repr(found)))


def _write(path: Path, file: ExportFile, source: Source, progress: Progress | None) -> None:
    specs = {name: source.specs[key] for name, key in file.tensors.items()}
    opened: OutFile
    if path.suffix == ".safetensors":
        opened = SafetensorsFile(path, specs)
    else:
        opened = TorchFile(path, specs, file.aliases, file.others)
    try:
        for parts in chunks(source, file.tensors.values()):
            for part in parts:
                data = to_bytes(part.values)
                opened.write(data)
                if progress:
                    progress(len(data))
        opened.finish()
    finally:
        opened.close()
