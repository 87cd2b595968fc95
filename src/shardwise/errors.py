"""The exceptions a user of Shardwise can meet.

Owns the classes and the one form every message has: what was expected, what was found, what to do about it, and where
(parameter, rank, file or configuration path). Imports nothing of Shardwise.
"""

from __future__ import annotations

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "LaunchError",
    "LayoutError",
    "NonFiniteError",
    "OptimizerError",
    "ParameterError",
    "PeerLostError",
    "ShardwiseError",
    "StallError",
    "UsageError",
    "explain",
]


class ShardwiseError(Exception):
    """Base of every error that Shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """The configuration is wrong. The message lists every problem found, not only the first."""


class LayoutError(ShardwiseError, ValueError):
    """A layout was described that cannot exist."""


class ParameterError(ShardwiseError, ValueError):
    """A parameter or module cannot be managed, or does not belong to this engine."""


class OptimizerError(ShardwiseError, ValueError):
    """An optimizer or schedule cannot be used on sharded parameters."""


class UsageError(ShardwiseError, RuntimeError):
    """A call came at the wrong time or in the wrong order."""


class NonFiniteError(ShardwiseError, ArithmeticError):
    """Training cannot go on because gradients stay Inf or NaN."""


class DivergenceError(ShardwiseError, RuntimeError):
    """The ranks of one job asked for different collectives, or were started with different models or configurations."""


class StallError(ShardwiseError, RuntimeError):
    """A collective did not finish within the time the watchdog allows."""


class PeerLostError(ShardwiseError, RuntimeError):
    """Another rank died, or its connection broke, while this rank was waiting for it."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint cannot be written or read: it is damaged, missing, or of another model; or the disk refuses."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing or is not as it was written; another checkpoint may be whole."""


class LaunchError(ShardwiseError, RuntimeError):
    """A job could not be started as asked."""


def explain(problem: str, *, expected: str = "", found: str = "", do: str = "") -> str:
    """One message in the form every error of Shardwise has.

    >>> print(explain("parameter 'w' has no gradient", expected="a float32 tensor", found="None", do="call backward() first"))
    parameter 'w' has no gradient: expected a float32 tensor, found None. call backward() first.
    """
    facts = ", ".join(part for part in (f"expected {expected}" if expected else "", f"found {found}" if found else "") if part)
    text = f"{problem}: {facts}" if facts else problem
    return f"{text}. {do}." if do else f"{text}."
