"""Writing a checkpoint while training goes on.

Owns the copy of the state in host memory and the thread that writes it. Refuses to know what is written, and what is done about
a failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Part
from shardwise.checkpoint.saving import Contents
from shardwise.errors import ShardwiseError

__all__ = ["Background", "Snapshot"]

log = logging.getLogger("shardwise")

_ALIGN = 64  # bytes at whose multiples copies begin


class Snapshot:
    """A copy of what is to be saved. Its memory is kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        return self._memory.nbytes

    def take(self, contents: Contents) -> Contents:
        """The same contents, with values of their own in host memory."""
        sizes = [-(-part.values.nbytes // _ALIGN) * _ALIGN for part in contents.parts]
        if self._memory.nbytes < sum(sizes):
            pinned = any(part.values.device.type != "cpu" for part in contents.parts)
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the larger one comes
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        parts: list[Part] = []
        devices: set[torch.device] = set()
        offset = 0
        for part, size in zip(contents.parts, sizes, strict=True):
            values = _within(self._memory, offset, part.values)
            values.copy_(part.values, non_blocking=True)
            parts.append(replace(part, values=values))
            devices.add(part.values.device)
            offset += size
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return replace(contents, parts=parts)


def _within(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


class Background:
    """A thread that does one thing. The interpreter does not end before it has.

    Args:
        work: what to do.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except ShardwiseError as error:
            self._problem = str(error)
        except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
            self._problem = f"{type(error).__name__}: {error}"
        if self._problem:
            log.error("%s", self._problem)

    @property
    def busy(self) -> bool:
        """Whether it is at work."""
        return self._thread.is_alive()

    def wait(self) -> str:
        """Return when it is done: what went wrong, empty if nothing did."""
        self._thread.join()
        return self._problem
