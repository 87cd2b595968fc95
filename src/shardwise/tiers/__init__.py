"""Where resting bytes sleep: tiers of storage behind one interface, on a disk or in host memory.

Owns putting, getting and prefetching byte ranges, the files and buffers that takes, and measuring how fast a disk is. Refuses
to know what the bytes mean.
"""

from __future__ import annotations

from shardwise.tiers.disk import DiskSettings, DiskTier
from shardwise.tiers.failures import StorageError
from shardwise.tiers.host import HostTier
from shardwise.tiers.memory import aligned_bytes
from shardwise.tiers.meter import TierStats
from shardwise.tiers.tier import Loan, Range, Tier

__all__ = [
    "DiskSettings",
    "DiskTier",
    "HostTier",
    "Loan",
    "Range",
    "StorageError",
    "Tier",
    "TierStats",
    "aligned_bytes",
]
