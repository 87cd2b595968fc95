"""When to gather, reduce and release, where bytes rest, and in which precision: frozen data, decided once.

`STAGES` is the one place that knows what a ZeRO stage is; everywhere else a stage is only the row taken from this table.
Refuses to know modules and the format of the configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

import torch

__all__ = ["STAGES", "Policy", "Precision", "Reduce", "Release", "Stage", "matches_module"]


class Reduce(Enum):
    """When gradients are summed over the data ranks."""

    LAST = "once per step, in the last backward of the accumulation"
    EVERY = "in every backward"


class Release(Enum):
    """When the gathered copy of the parameters goes away."""

    NEVER = "each rank keeps all parameters"
    STEP = "kept between steps, refreshed from the shards after each optimizer step"
    USE = "freed after every use, gathered before the next"


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table: how one ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054) treats the bytes.

    Args:
        number: what users call it.
        sharded: whether optimizer state is cut over the data ranks (else every rank holds all of it).
        reduce: when gradients are summed.
        release: when gathered parameters go away.
    """

    number: int
    sharded: bool
    reduce: Reduce
    release: Release


STAGES = (
    Stage(0, sharded=False, reduce=Reduce.LAST, release=Release.NEVER),
    Stage(1, sharded=True, reduce=Reduce.LAST, release=Release.STEP),
    Stage(2, sharded=True, reduce=Reduce.EVERY, release=Release.STEP),
    Stage(3, sharded=True, reduce=Reduce.EVERY, release=Release.USE),
)

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Precision:
    """Which dtype each kind of byte has.

    Args:
        compute: dtype that floating-point parameters are cast to; None keeps each parameter's own.
        low_precision_master: 16-bit parameters are their own master weights (no fp32 copy).
        accumulate: dtype in which gradients are accumulated; None means float32 (float64 for float64 parameters).
        communicate: dtype in which gradients travel; None means the accumulation dtype.
        narrow: class names of modules whose parameters' gradients travel in the autocast dtype.
        pinned: parameter names, module names, patterns or class names that stay float32.
        predivide: gradients are divided by this before they are summed, and multiplied back afterwards.
        autocast: dtype of `torch.autocast` around the forward pass; None for no autocast.
        cast_inputs: whether floating-point inputs of the engine are cast to `compute`.
    """

    compute: torch.dtype | None = None
    low_precision_master: bool = False
    accumulate: torch.dtype | None = None
    communicate: torch.dtype | None = None
    narrow: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    predivide: float = 1.0
    autocast: torch.dtype | None = None
    cast_inputs: bool = False

    def storage_dtype(self, dtype: torch.dtype, pinned: bool) -> torch.dtype:
        """Dtype a parameter has while training. Integer, complex and float64 parameters are never cast."""
        if self.compute is None or not dtype.is_floating_point or dtype == torch.float64:
            return dtype
        return torch.float32 if pinned else self.compute

    def master_dtype(self, storage: torch.dtype) -> torch.dtype:
        """Dtype of the weights that the optimizer updates."""
        return torch.float32 if storage in _SIXTEEN_BIT and not self.low_precision_master else storage

    def gradient_dtype(self, storage: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of such parameters are accumulated."""
        if storage == torch.float64:
            return storage
        return self.accumulate or torch.float32


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that decides how a model's bytes are handled.

    Args:
        stage: the row of `STAGES`.
        precision: the dtypes.
        persist_below: parameters with at most this many elements are never released.
        prefetch_elements: how many elements may be gathered ahead of use.
        units: module class names or patterns of module names to gather as one; empty to find them.
        leaf_modules: class names, module names or name suffixes of modules whose inside may run differently on different ranks.
    """

    stage: Stage
    precision: Precision = field(default_factory=Precision)
    persist_below: int = 100_000
    prefetch_elements: int = 50_000_000
    units: tuple[str, ...] = ()
    leaf_modules: tuple[str, ...] = ()


def matches_module(patterns: tuple[str, ...], name: str, class_names: tuple[str, ...]) -> bool:
    """Whether a module (dotted name, its class's names) or a parameter (no class names) is meant by one of the patterns."""
    return any(pattern in class_names or fnmatchcase(name, pattern) for pattern in patterns)
