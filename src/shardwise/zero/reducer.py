"""`Reducer`: the sums of gradients over ranks, launched in one order that is the same everywhere.

Owns that order, what is in flight, and the agreement at the end of an accumulation window on which parameters have a gradient.
Refuses to know hooks: it is told when units may be reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.errors import UsageError
from shardwise.mesh import Axis
from shardwise.zero.gradients import GradientPool, Reduction
from shardwise.zero.traffic import BackwardPass, Traffic
from shardwise.zero.writes import Writes

__all__ = ["Reducer"]

_IN_FLIGHT = 2  # reductions that may be under way at once; bounds the full-length gradient buffers that exist


class Reducer:
    """Sums the gradients of all units.

    Args:
        traffics: all units, the root first.
        pool: where their gradients take full-length buffers from.
        comm: collectives.
        data: the axis over which samples differ.
    """

    def __init__(self, traffics: Sequence[Traffic], pool: GradientPool, comm: Comm, data: Axis) -> None:
        buffers = [buffer for traffic in traffics for buffer in traffic.unit.buffers]
        self.gradients = [gradients for traffic in traffics for gradients in traffic.gradients]
        self.delivered = bytearray(sum(len(buffer.members) for buffer in buffers))
        """By parameter, whether this rank got a gradient for it in this accumulation window."""
        self._order = [traffic for traffic in reversed(traffics) if traffic.gradients]
        self._pool = pool
        self._comm = comm
        self._data = data
        self._device = buffers[0].shard.device if buffers else torch.device("cpu")
        self._flying: deque[Reduction] = deque()

    def reduce_ready(self, current: BackwardPass) -> None:
        """Launch what is ready and is next in order."""
        while current.cursor < len(self._order) and self._order[current.cursor].ready:
            self._launch(self._order[current.cursor])
            current.cursor += 1

    def reduce_rest(self, current: BackwardPass) -> None:
        """Launch all that this pass has not reduced yet."""
        for traffic in self._order[current.cursor :]:
            self._launch(traffic)

    def drain(self) -> None:
        """Wait for what is in flight."""
        while self._flying:
            self._flying.popleft().finish()

    def complete(self, writes: Writes) -> list[bool]:
        """Reduce what any rank still has to be reduced, so that the shards of all gradients are complete. Collective.

        Args:
            writes: by users; they are agreed on in the same message.

        Returns:
            for each parameter, whether any rank has a gradient for it in this accumulation window.

        Raises:
            ParameterError: weights were written differently on different ranks.
        """
        pending = [any(gradients.pending for gradients in traffic.gradients) for traffic in self._order]
        flags = torch.tensor([*self.delivered, *pending], dtype=torch.int32, device=self._device)
        writes.announce(flags)
        self._comm.all_reduce(flags, self._data, "agree on gradients").wait()
        counts: Any = flags
        agreed = [count > 0 for count in writes.take_over(counts.tolist())]
        for traffic, due in zip(self._order, agreed[len(self.delivered) :], strict=True):
            if due:
                self._launch(traffic)
        self.drain()
        return agreed[: len(self.delivered)]

    def contributors(self, parameter: int) -> list[int]:
        """The ranks that brought an Inf or NaN to the buffer of a parameter in this window. Collective."""
        buffers = [item for item in self.gradients if any(m.index == parameter for m in item.buffer.members)]
        found = self._comm.all_gather_object(any(item.suspicious for item in buffers), self._data, "who brought Inf or NaN")
        return [rank for rank, guilty in zip(self._data.ranks, found, strict=True) if guilty]

    def clear(self) -> None:
        """Forget all gradients of this accumulation window."""
        self.drain()
        self.delivered = bytearray(len(self.delivered))
        for gradients in self.gradients:
            gradients.clear()

    def close(self) -> None:
        """Free the memory of all gradients."""
        for gradients in self.gradients:
            with suppress(UsageError):  # where communication has ended, what is in flight cannot be waited for
                gradients.close()
        self._pool.clear()

    def _launch(self, traffic: Traffic) -> None:
        for gradients in traffic.gradients:
            self._flying.append(gradients.start_reduce(f"reduce {traffic.unit.name}"))
            while len(self._flying) > _IN_FLIGHT:
                self._flying.popleft().finish()
