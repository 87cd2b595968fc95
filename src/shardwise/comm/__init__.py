"""Communication between ranks: collectives on (contiguous tensor, axis), each returning a `Handle`.

Owns the transports, the names and counts of every collective, the guard against ranks that diverge, and the start of the
process group. The only importer of torch.distributed's collectives. Refuses to know parameters.
"""

from __future__ import annotations

from shardwise.comm.bootstrap import get_local_rank, get_rank, get_world_size, init_distributed, is_initialized
from shardwise.comm.communicator import Comm
from shardwise.comm.handle import DONE, Handle
from shardwise.comm.ledger import Ledger, Snapshot, difference
from shardwise.comm.transport import LocalTransport, NullTransport, Storage, StorageSpec, Transport

__all__ = [
    "Comm",
    "DONE",
    "Handle",
    "Ledger",
    "LocalTransport",
    "NullTransport",
    "Snapshot",
    "Storage",
    "StorageSpec",
    "Transport",
    "difference",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]
