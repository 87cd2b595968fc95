"""A loader without an end.

Owns the restart at the end of each pass. Works around any iterable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.errors import UsageError, explain

__all__ = ["RepeatingLoader"]


class RepeatingLoader:
    """Hands out batches for ever: when the loader inside is exhausted it is begun again.

    `len`, `state_dict`, `load_state_dict` and every other attribute are those of the loader inside. A loader whose sampler has
    `set_epoch` (torch's DistributedSampler) is told the number of the pass, so that it shuffles anew.

    Args:
        loader: what to repeat.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None
        self._passes = 0

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(self.loader)  # pyright: ignore[reportArgumentType] - the loader's own error if it has no length

    def __next__(self) -> Any:
        for _ in range(3):  # what is left of a resumed pass may be nothing, and the pass after it must have something
            if self._iterator is None:
                self._iterator = self._begin()
            for batch in self._iterator:
                return batch
            self._iterator = None
        raise UsageError(explain("the loader to repeat is empty", expected="at least one batch per pass", found="none"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position into the loader inside and go on from there."""
        self.loader.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._iterator = None

    def _begin(self) -> Iterator[Any]:
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._passes)  # pyright: ignore[reportOptionalMemberAccess]
        self._passes += 1
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as in unpickling: nothing to ask
            raise AttributeError(name)
        return getattr(self.loader, name)
