"""Update rules, the one step path, gradient norm, loss scale, schedulers, and adoption of `torch.optim` classes.

Owns everything that turns summed gradients into new weights. Refuses to know modules, hooks and process groups: the engine
hands it flat shards and functions that sum over ranks.
"""

from __future__ import annotations

from shardwise.optim.driver import Driver, StepSettings
from shardwise.optim.loss_scale import LossScale
from shardwise.optim.norm import BadGradient
from shardwise.optim.optimizer import ShardedOptimizer
from shardwise.optim.paged import PagedDriver, Paging, TierMaster
from shardwise.optim.plan import OptimizerPlan, plan_groups
from shardwise.optim.schedulers import GroupSchedule, adopt_scheduler, build_scheduler, check_scheduler
from shardwise.optim.shards import Piece, Shard
from shardwise.optim.step import StepPath, StepReport

__all__ = [
    "BadGradient",
    "Driver",
    "GroupSchedule",
    "LossScale",
    "OptimizerPlan",
    "PagedDriver",
    "Paging",
    "Piece",
    "Shard",
    "ShardedOptimizer",
    "StepPath",
    "StepReport",
    "StepSettings",
    "TierMaster",
    "adopt_scheduler",
    "build_scheduler",
    "check_scheduler",
    "plan_groups",
]
