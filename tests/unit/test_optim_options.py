"""The arguments that the configuration describes are those that the update rules take, with the same defaults.

They are written down in two rooms that do not know each other: `config/` says what a file may hold, `optim/` what a rule does
with what is absent, which for the rules that torch has too is what torch does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardwise.config.fields import kind_of
from shardwise.config.optimizers import OPTIMIZER_PARAMS
from shardwise.optim import plan_groups


def options(kind: str, **params: Any) -> dict[str, Any]:
    """The options of a group whose section holds these arguments only."""
    plan = plan_groups(None, None, [("weight", Parameter(torch.zeros(2)))], {"type": kind, "params": params})
    assert plan is not None
    return {key: value for key, value in plan.param_groups[0].items() if key not in ("params", "decoupled_weight_decay")}


@pytest.mark.parametrize("kind", OPTIMIZER_PARAMS)
def test_described_defaults_are_those_of_the_rule(kind: str) -> None:
    fields = OPTIMIZER_PARAMS[kind].model_fields
    described = {name: field.default for name, field in fields.items() if kind_of(field) == "works"}
    described.pop("adam_w_mode", None)  # chooses between two rules
    assert options(kind) == described


@pytest.mark.parametrize("kind", OPTIMIZER_PARAMS)
def test_what_is_described_as_inert_changes_nothing(kind: str) -> None:
    fields = OPTIMIZER_PARAMS[kind].model_fields
    inert = {name: not field.default for name, field in fields.items() if kind_of(field) == "inert"}
    assert inert
    assert options(kind, **inert) == options(kind)
