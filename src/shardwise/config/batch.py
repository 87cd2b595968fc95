"""Batch arithmetic: samples per step = samples per micro-batch x micro-batches x data-parallel ranks.

Pure integers; refuses to know the file they came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError, explain

__all__ = ["ACCUMULATION", "BATCH_KEYS", "MICRO", "TOTAL", "Batch", "resolve_batch"]

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
BATCH_KEYS = (TOTAL, MICRO, ACCUMULATION)

GIVEN = "given"


@dataclass(frozen=True)
class Batch:
    """The three numbers, `total == micro * accumulation * ranks`, and where each came from."""

    total: int
    micro: int
    accumulation: int
    origin: Mapping[str, str]

    def as_keys(self) -> dict[str, int]:
        """The numbers under their names in the file."""
        return {TOTAL: self.total, MICRO: self.micro, ACCUMULATION: self.accumulation}


def resolve_batch(total: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Batch:
    """The three batch numbers from any of them.

    Two give the third. One alone means one micro-batch per step. None at all means micro-batches of one sample.

    Args:
        total: samples per optimizer step, over all ranks.
        micro: samples per micro-batch and rank.
        accumulation: micro-batches per step.
        ranks: data-parallel ranks.

    Raises:
        ConfigError: no whole numbers fit; the message names each number, its origin and the arithmetic.
    """
    origin = {name: GIVEN for name, value in zip(BATCH_KEYS, (total, micro, accumulation), strict=True) if value is not None}
    if accumulation is None and (total is None or micro is None):
        accumulation = 1
        origin[ACCUMULATION] = "default: one micro-batch per step"
    if total is None:
        if micro is None:
            micro = 1
            origin[MICRO] = "default: no batch size was given"
        return _with_total(micro, accumulation or 1, ranks, origin)
    if micro is None:
        micro = _quotient(total, ranks, (ACCUMULATION, accumulation or 1), origin)
        origin[MICRO] = f"derived from {TOTAL} {total} / ({ACCUMULATION} {accumulation} x {_ranks(ranks)})"
    elif accumulation is None:
        accumulation = _quotient(total, ranks, (MICRO, micro), origin)
        origin[ACCUMULATION] = f"derived from {TOTAL} {total} / ({MICRO} {micro} x {_ranks(ranks)})"
    elif total != micro * accumulation * ranks:
        raise ConfigError(_disagreement(total, micro, accumulation, ranks))
    return Batch(total, micro, accumulation or 1, origin)


def _with_total(micro: int, accumulation: int, ranks: int, origin: dict[str, str]) -> Batch:
    origin[TOTAL] = f"derived from {MICRO} {micro} x {ACCUMULATION} {accumulation} x {_ranks(ranks)}"
    return Batch(micro * accumulation * ranks, micro, accumulation, origin)


def _quotient(total: int, ranks: int, factor: tuple[str, int], origin: Mapping[str, str]) -> int:
    """`total / (factor * ranks)`, which must be whole and at least 1."""
    name, value = factor
    parts = value * ranks
    if total % parts:
        lower = total - total % parts
        raise ConfigError(
            explain(
                f"{TOTAL}: {total} samples cannot be divided evenly",
                expected=f"a multiple of {parts} = {name} {value} ({origin[name]}) x {_ranks(ranks)}",
                found=f"{total} ({origin[TOTAL]})",
                do=f"Use {lower} or {lower + parts}" if lower else f"Use {parts}",
            )
        )
    return total // parts


def _disagreement(total: int, micro: int, accumulation: int, ranks: int) -> str:
    product = micro * accumulation * ranks
    return explain(
        f"{TOTAL}: the batch numbers do not agree",
        expected=f"{product} = {MICRO} {micro} (given) x {ACCUMULATION} {accumulation} (given) x {_ranks(ranks)}",
        found=f"{total} (given)",
        do=f"Set {TOTAL} to {product}, or leave one of the three out",
    )


def _ranks(ranks: int) -> str:
    return f"{ranks} data-parallel rank{'' if ranks == 1 else 's'}"
