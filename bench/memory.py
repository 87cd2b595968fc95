"""Memory of processes as Linux tells it. Elsewhere every answer is None.

Two readings. The high-water mark of one process is exact, and counts shared pages in every process that has touched them. What
some processes hold together, shared pages counted once, has to be sampled while they run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Sampler", "available", "held_by", "own_peak", "reset_own_peak"]


def reset_own_peak() -> int | None:
    """Forget this process's high-water mark; what it holds now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _field("/proc/self/status", ("VmRSS:",))


def own_peak() -> int | None:
    """Most physical memory that this process held since the reset, in bytes."""
    return _field("/proc/self/status", ("VmHWM:",))


def held_by(pids: Sequence[int]) -> int | None:
    """Private and proportional shared memory of some processes together, files left out, in bytes."""
    parts = [_field(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids]
    return sum(part or 0 for part in parts) if all(part is not None for part in parts) else None


def available() -> int | None:
    """Bytes that new processes could take."""
    return _field("/proc/meminfo", ("MemAvailable:",))


class Sampler(threading.Thread):
    """Watches what some processes hold together for as long as it is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._done = threading.Event()
        self.peak = held_by(pids)

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.005):
            now = held_by(self._pids)
            if now is not None and self.peak is not None:
                self.peak = max(self.peak, now)


def _field(path: str, names: tuple[str, ...]) -> int | None:
    """Sum of `name: 123 kB` lines of a file, in bytes."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return None
    found = [int(words[1]) * 1024 for words in lines if words and words[0] in names]
    return sum(found) if found else None
