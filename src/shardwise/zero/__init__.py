"""Sharded parameters: buffers, units, the hooks that gather and release them, gradients, sharded construction.

Refuses to know optimizers, losses, batches and checkpoints. Users need three names: `Init`, `GatheredParameters`,
`register_external_parameter`.
"""

from shardwise.zero.buffer import Buffer, Member, as_storage
from shardwise.zero.build import Site, build_units, check_parameters
from shardwise.zero.discovery import UnitPlan, leaf_modules
from shardwise.zero.external import register_external_parameter, unregister_external_parameter
from shardwise.zero.gathered import DiscardedEditWarning, GatheredParameters, commit
from shardwise.zero.gradients import Gradients
from shardwise.zero.init import Init
from shardwise.zero.master import Master, OwnMaster, SameMaster
from shardwise.zero.released import ReleasedParameter, homes
from shardwise.zero.runtime import Runtime
from shardwise.zero.trees import find_tensors, map_tensors
from shardwise.zero.unit import Home, State, Unit

__all__ = [
    "Buffer",
    "DiscardedEditWarning",
    "GatheredParameters",
    "Gradients",
    "Home",
    "Init",
    "Master",
    "Member",
    "OwnMaster",
    "ReleasedParameter",
    "Runtime",
    "SameMaster",
    "Site",
    "State",
    "Unit",
    "UnitPlan",
    "as_storage",
    "build_units",
    "check_parameters",
    "commit",
    "homes",
    "leaf_modules",
    "find_tensors",
    "map_tensors",
    "register_external_parameter",
    "unregister_external_parameter",
]
