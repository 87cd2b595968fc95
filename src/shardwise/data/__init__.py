"""The distributed, resumable loader.

Owns which sample goes to which rank and when, and how to go on from the middle of an epoch. Refuses to know the model, the
engine and collectives: every rank computes its own share from plain integers.
"""

from __future__ import annotations

from shardwise.data.loader import ShardedLoader, build_loader
from shardwise.data.order import SampleOrder
from shardwise.data.repeating import RepeatingLoader

__all__ = ["RepeatingLoader", "SampleOrder", "ShardedLoader", "build_loader"]
