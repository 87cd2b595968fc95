"""The parts of an engine's state that saving and loading both walk through.

Owns where they are. Refuses to know checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shardwise.trainer import Parts
from shardwise.zero import Buffer, Member, as_storage

__all__ = ["COUNTERS", "flat_of", "members_of", "optimizer_name"]

_SAME_STATE = {"AdamW": "Adam"}

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""What a trainer counts."""


def members_of(parts: Parts, *, without_frozen: bool = False) -> Iterator[tuple[Buffer, Member]]:
    """All parameters with the buffers they are in."""
    for unit in parts.runtime.units:
        for buffer in unit.buffers:
            for member in buffer.members:
                if member.parameter.requires_grad or not without_frozen:
                    yield buffer, member


def flat_of(value: Tensor) -> Tensor:
    """The elements of a tensor as they are stored: 1-D, contiguous, complex numbers as pairs; in place where possible."""
    return as_storage(value.detach().contiguous())


def optimizer_name(parts: Parts) -> str:
    """What tells whether the state of one optimizer means something to another; empty without one."""
    name = "" if parts.step_path is None else parts.step_path.driver.name
    return _SAME_STATE.get(name, name)
