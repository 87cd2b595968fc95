"""What becomes of a sharded model in the plain module's `state_dict` and `load_state_dict`.

Owns the hooks for these two. Refuses to know engines and optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwise.errors import ParameterError, explain
from shardwise.zero.buffer import Member
from shardwise.zero.gathered import commit
from shardwise.zero.unit import State, Unit

__all__ = ["check_registered", "take_over", "warn_of_placeholders"]

log = logging.getLogger("shardwise")


def warn_of_placeholders(units: Iterable[Unit], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before `state_dict`: say so if released weights will be in it. Whoever keeps the variables asks for no values."""
    if not keep_vars and any(unit.state is State.RESTING for unit in units):
        log.warning(
            "state_dict() of a sharded model holds NaN in place of released weights; "
            "read it inside `with engine.inference():`, where they are whole"
        )


def check_registered(members: Iterable[Member], module: nn.Module, keys: Any) -> None:
    """After `load_state_dict` of the model: its parameters must still be the same objects.

    Raises:
        ParameterError: one was replaced.
    """
    registered = {id(parameter) for parameter in module.parameters()}
    lost = [member.name for member in members if id(member.parameter) not in registered]
    if lost:
        remedy = "load with assign=False, which copies into the parameters that the engine trains"
        raise ParameterError(explain(f"parameter {lost[0]!r} was replaced by load_state_dict", do=remedy))


def take_over(unit: Unit, module: nn.Module, keys: Any) -> None:
    """After `load_state_dict` of a unit's module: it has written into gathered weights; shards and master weights follow."""
    if unit.state in (State.LIVE, State.LENT):
        for buffer in unit.buffers:
            if buffer.resident or unit.state is State.LIVE:
                buffer.check_bound()
        for home in unit.homes():
            commit(home)
        unit.changed(lent_too=True)
