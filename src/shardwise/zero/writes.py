"""In-place writes of users to weights that stay gathered and that an optimizer updates.

Every rank writes its own copy, and each updates a part of the weights only: copies that differ would train on, differing. And a
16-bit weight is rounded from its master in each step, so that a write to the weight alone would be gone after the next one.
torch counts the in-place writes to a tensor (not those through its `.data`), and what is written through the flat buffer does
not count: a parameter whose count has moved since it was last noted was written by somebody else. Before a step the ranks agree
on which parameters these are, compare their values, and take them over into the master weights if all ranks have the same.
Released weights cannot be written.

Owns the counts and that decision. Refuses to know when there is a step, and who wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.errors import ParameterError, explain
from shardwise.mesh import Axis
from shardwise.zero.buffer import as_storage
from shardwise.zero.gathered import commit
from shardwise.zero.unit import Home, Unit

__all__ = ["Writes"]

_FLAG = 1 << 15  # one rank's writing in a sum of small flags over ranks; fewer than that many ranks take part


class Writes:
    """Notices writes to the parameters of one engine.

    Args:
        units: of the engine.
        comm: collectives.
        data: the ranks that must have the same weights.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, data: Axis) -> None:
        self._comm = comm
        self._data = data
        self._homes: dict[int, Home] = {
            home.member.index: home
            for unit in units
            for home in unit.homes()
            if home.buffer.resident and home.buffer.master is not None
        }
        self._watched = [(index, home.member.parameter) for index, home in self._homes.items()]
        self._counts = [parameter._version for _, parameter in self._watched]

    def found(self) -> set[int]:
        """Numbers of the parameters that were written since they were last noted."""
        pairs = zip(self._watched, self._counts, strict=True)
        return {index for (index, parameter), count in pairs if parameter._version != count}

    def note(self, *, but: Collection[int] = ()) -> None:
        """Whatever was written so far is known, except to the parameters in `but`."""
        pairs = zip(self._watched, self._counts, strict=True)
        self._counts = [count if index in but else parameter._version for (index, parameter), count in pairs]

    def settle(self) -> None:
        """Take over what was written so far, outside of a step. Collective.

        Raises:
            ParameterError: as `take_over`.
        """
        if self._homes:
            device = next(iter(self._homes.values())).buffer.shard.device
            flags = torch.zeros(max(self._homes) + 1, dtype=torch.int32, device=device)
            self.announce(flags)
            self._comm.all_reduce(flags, self._data, "agree on written weights").wait()
            counts: Any = flags
            self.take_over(counts.tolist())

    def announce(self, flags: Tensor) -> None:
        """Add to small flags, one for each parameter and perhaps more, that this rank has found writes."""
        found = sorted(self.found())
        if found:
            flags[found] += _FLAG

    def take_over(self, sums: Sequence[int]) -> list[int]:
        """Make written values the master weights. Collective if any rank has announced some, and nothing otherwise.

        Args:
            sums: the flags after `announce`, summed over the data ranks.

        Returns:
            the sums without what `announce` added.

        Raises:
            ParameterError: the ranks have different values. On every rank; the master weights stay as they are.
        """
        written = [index for index, total in enumerate(sums) if total >= _FLAG]
        if written:
            homes = [self._homes[index] for index in written]
            self._compare(homes)
            for home in homes:
                commit(home)
            self.note(but=self.found() - set(written))
        return [total % _FLAG for total in sums]

    def _compare(self, homes: Sequence[Home]) -> None:
        if self._data.size == 1:
            return
        mine = [_digest(home.member.parameter) for home in homes]
        first, *others = self._comm.all_gather_object(mine, self._data, "compare weights that were written")
        for rank, other in zip(self._data.ranks[1:], others, strict=True):
            for home, left, right in zip(homes, first, other, strict=True):
                if left != right:
                    raise ParameterError(
                        explain(
                            f"parameter {home.name!r} was written in place, and not alike on all ranks",
                            expected="the same values on every rank",
                            found=f"others on rank {rank} than on rank {self._data.ranks[0]}",
                            do="write the same on every rank, or write inside "
                            "`with shardwise.zero.GatheredParameters(..., modifier_rank=0)`",
                        )
                    )


def _digest(parameter: Tensor) -> str:
    flat: Any = as_storage(parameter.detach()).contiguous().cpu()
    return hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=16).hexdigest()
