"""How many bytes the parameters and gradients of a model take on this rank, and would take unsharded.

Owns what is counted as what. Refuses to know the optimizer, which has state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.comm import Ledger
from shardwise.zero.gradients import Gradients
from shardwise.zero.unit import State, Unit

__all__ = ["footprint", "missing_bytes"]


def footprint(units: Iterable[Unit], gradients: Sequence[Gradients], ledger: Ledger, *, sharded: bool) -> dict[str, int]:
    """Bytes under the keys of `Engine.memory_report`, and "masters" and "unsharded_masters": separate master weights.

    Args:
        units: all units.
        gradients: of all trainable buffers.
        ledger: what this rank holds.
        sharded: whether gradients are reduced in every backward. Then full-length buffers are transport, a few units' worth;
            else they are what the gradients accumulate in.
    """
    buffers = [buffer for unit in units for buffer in unit.buffers]
    separate = [(b, b.master.dtype) for b in buffers if b.master is not None and b.master.separate]
    full = ledger.resident("full gradients")
    return {
        "parameters_resting": sum(b.storage.nbytes_resting for b in buffers),
        "parameters_live_peak": ledger.peak("gathered"),
        "masters": ledger.resident("master weights"),
        "gradients": ledger.resident("gradients") + (0 if sharded else full),
        "gradients_in_flight": full if sharded else 0,
        "padding": sum(b.layout.padding * b.key.dtype.itemsize for b in buffers),
        "unsharded_parameters": sum(b.layout.used * b.key.dtype.itemsize for b in buffers),
        "unsharded_gradients": sum(item.buffer.layout.used * item.dtype.itemsize for item in gradients),
        "unsharded_masters": sum(b.layout.used * dtype.itemsize for b, dtype in separate),
    }


def missing_bytes(units: Iterable[Unit]) -> int:
    """Bytes that gathering all units would take now."""
    resting = [unit for unit in units if unit.state is State.RESTING]
    return sum(buffer.storage.nbytes_full for unit in resting for buffer in unit.moving)
