"""What a checkpoint holds, whatever file format it is in: named tensors of known shape, and facts that are no tensors.

Owns the terms that everything in this room speaks in. Refuses to know files, ranks and engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, explain

__all__ = ["DTYPES", "Facts", "Key", "Kind", "Part", "Source", "Spec", "dtype_called", "dtype_name", "real_dtype"]

Kind = Literal["weight", "buffer", "optimizer", "random", "local"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""Names of dtypes in the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Key(NamedTuple):
    """Which tensor.

    Args:
        kind: a weight in full precision (the master, where there is one), a module buffer, optimizer state, the state of
            random generators, or a module buffer of one rank on which it is not that of the first.
        name: first name of the parameter or buffer in the model; for random generators, the number of the rank.
        state: which optimizer state, by torch's name ("exp_avg", ...); for a rank's own buffer, the number of the rank; empty
            for the other kinds.
    """

    kind: Kind
    name: str
    state: str = ""

    def __str__(self) -> str:
        return f"{self.state} of {self.name}" if self.state else self.name


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its values.

    Args:
        shape: global shape.
        dtype: of the values as they are stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Storage elements: the number of elements, twice that for complex numbers, which are stored as pairs of reals."""
        return prod(self.shape) * (2 if self.dtype in _REAL else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.length * real_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """Storage elements `[start, start + len(values))` of a tensor, row-major.

    Args:
        key: of which tensor.
        spec: the whole tensor.
        start: the first element.
        values: 1-D, contiguous, in the real dtype of `spec`: what to save, or where to load to.
    """

    key: Key
    spec: Spec
    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.values.numel()


@dataclass
class Facts:
    """What a training run is besides tensors: plain values only.

    Args:
        counters: global_steps, global_samples, micro_steps, skipped_steps.
        groups: of the optimizer: `{"options": {...}, "parameters": [names]}`.
        steps: how many updates each parameter has had, by name.
        numbers: optimizer state that is no tensor of the parameter's length: by parameter, then by name of the state.
        loss_scale, schedule, loader: what their `state_dict` gave; empty where there was none.
        extra: what modules save besides parameters and buffers, by its name in the state dict.
        ties: other names of weights and the first one.
        excluded: names of frozen weights that were left out on purpose.
        weight_dtypes: the dtype in which the model computes, where it is not that of the stored weight, by name.
        origin: what wrote it, and how it was laid out: for people, and to tell whether the layout is the same.
    """

    counters: dict[str, int] = field(default_factory=dict[str, int])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    steps: dict[str, int] = field(default_factory=dict[str, int])
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    loss_scale: dict[str, Any] = field(default_factory=dict[str, Any])
    schedule: dict[str, Any] = field(default_factory=dict[str, Any])
    loader: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    excluded: list[str] = field(default_factory=list[str])
    weight_dtypes: dict[str, str] = field(default_factory=dict[str, str])
    origin: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        """As a dict of plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Facts:
        """The inverse; what a later version added is left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in found.items() if key in known})


class Source(Protocol):
    """A checkpoint that can be read, of this package or another's."""

    @property
    def where(self) -> str:
        """Its path, for messages."""
        ...

    @property
    def specs(self) -> Mapping[Key, Spec]:
        """All tensors that are in it. Ties are there once."""
        ...

    @property
    def facts(self) -> Facts:
        """Everything else."""
        ...

    def read(self, parts: list[Part]) -> None:
        """Fill the values of each part, whose `spec` is the one found in `specs`.

        Reads no more than it must, in the order in which things lie on disk.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        ...

    def close(self) -> None:
        """Close files."""
        ...


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of storage elements: that of real and imaginary part for complex numbers."""
    return _REAL.get(dtype, dtype)


def dtype_name(dtype: torch.dtype, about: str) -> str:
    """The safetensors name of a dtype.

    Raises:
        CheckpointError: it has none.
    """
    if dtype not in _NAMES:
        raise CheckpointError(explain(f"{about} cannot be stored", expected="a plain number format", found=str(dtype)))
    return _NAMES[dtype]


def dtype_called(name: Any, about: str) -> torch.dtype:
    """The dtype with a safetensors name.

    Raises:
        CheckpointError: there is none.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(
            explain(f"{about} has an unknown dtype", expected=f"one of {', '.join(DTYPES)}", found=repr(name))
        )
    return DTYPES[name]
