"""How fast a disk is, and which settings of the disk tier get that out of it.

Owns the measurement: plain sequential transfers as the floor, the tier at several settings beside it. Refuses to know how the
numbers are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError, explain
from shardwise.tiers.disk import DiskSettings, DiskTier
from shardwise.tiers.failures import StorageError, free_bytes
from shardwise.tiers.files import SwapFile
from shardwise.tiers.memory import Bytes, aligned_bytes, bytes_of

__all__ = ["Measurement", "Progress", "Speed", "Trial", "measure_disk"]

Progress = Callable[[int, int, str], object]
"""Called before each step with the steps done, the steps in all, and what comes now."""

_MIB = 1 << 20
_THREADS = (1, 2, 4)
_BLOCKS = (1 * _MIB, 4 * _MIB, 8 * _MIB)
_BUFFERS = (8 * _MIB, 32 * _MIB)
_MARGIN = 64 * _MIB
_ROUNDS = 3
_GOOD_ENOUGH = 0.95
"""A smaller buffer is recommended if it gives this share of the best speed: memory is dearer than the rest."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second."""

    read: float = 0.0
    write: float = 0.0

    @property
    def both(self) -> float:
        """Bytes per second of reading something and writing it back."""
        return 2 / (1 / self.read + 1 / self.write)

    def best(self, other: Speed) -> Speed:
        """The higher of both, each way: what disturbs a measurement only ever makes it slower."""
        return Speed(max(self.read, other.read), max(self.write, other.write))


@dataclass(frozen=True, slots=True)
class Trial:
    """The tier with one set of settings."""

    settings: DiskSettings
    speed: Speed


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was found out about one disk."""

    directory: Path
    nbytes: int
    """Bytes that were moved each way for every number."""
    direct: bool
    """Whether transfers bypass the system's cache. If not, the speeds are those of the cache as much as of the disk."""
    plain: Speed
    """One thread, one large block after the other, nothing else."""
    trials: tuple[Trial, ...]
    streamed: float = field(default=0.0)
    """Bytes per second, read and written together, of the best settings in a pipeline that writes everything back."""

    @property
    def best(self) -> Trial:
        """The trial to copy: the fastest of reading and writing back; of those that come close, the one with least memory."""
        fastest = max(trial.speed.both for trial in self.trials)
        close = [trial for trial in self.trials if trial.speed.both >= _GOOD_ENOUGH * fastest]
        return min(close, key=lambda trial: (trial.settings.buffer_size, -trial.speed.both))

    def config(self) -> dict[str, Any]:
        """The sections of a Shardwise configuration that use what was found."""
        settings, device = self.best.settings, {"device": "nvme", "nvme_path": str(self.directory)}
        pipeline = {"pipeline_read": settings.pipeline_read, "pipeline_write": settings.pipeline_write}
        buffers = {"buffer_count": settings.buffer_count, "buffer_size": settings.buffer_size}
        return {
            "aio": {
                "block_size": settings.block_bytes,
                "queue_depth": settings.queue_depth,
                "intra_op_parallelism": settings.threads,
            },
            "zero_optimization": {"offload_optimizer": {**device, **buffers, **pipeline}},
        }


def measure_disk(
    directory: str | Path,
    nbytes: int,
    *,
    threads: Sequence[int] = _THREADS,
    blocks: Sequence[int] = _BLOCKS,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the disk under a folder. Nothing stays on it, also if this is interrupted.

    Args:
        directory: made when missing.
        nbytes: how much is written and read for each number, at least 1 MiB; as much must be free.
        threads: numbers of threads to try.
        blocks: bytes per request to try.
        progress: told about each step.

    Raises:
        StorageError: too little room, or the disk fails.
        ConfigError: fewer than 1 MiB.
    """
    if nbytes < _MIB:
        raise ConfigError(explain("size of the disk measurement", expected="at least 1 MiB", found=f"{nbytes:,} bytes"))
    return _Bench(Path(directory).absolute(), nbytes, progress or (lambda done, total, text: None)).run(threads, blocks)


class _Bench:
    """One measurement. At most one file, of `nbytes` bytes, exists at a time."""

    def __init__(self, directory: Path, nbytes: int, progress: Progress) -> None:
        self._directory = directory
        self._buffer_size = min(max(_BUFFERS), nbytes - nbytes % _MIB)
        self._nbytes = nbytes - nbytes % self._buffer_size
        self._progress = progress
        self._steps = self._done = 0
        self._settings = DiskSettings(buffer_size=self._buffer_size)
        self._memory: list[torch.Tensor] = []

    def run(self, threads: Sequence[int], blocks: Sequence[int]) -> Measurement:
        base = self._settings
        grid = [replace(base, threads=count, block_bytes=block) for count in threads for block in blocks]
        smaller = [size for size in _BUFFERS if size < self._buffer_size]
        self._steps = _ROUNDS * (1 + len(grid) + len(smaller)) + 1
        with self._plain_file() as file:
            direct = file.direct
        self._memory = [self._random(self._buffer_size) for _ in range(base.buffer_count)]
        plain, speeds = Speed(), {settings: Speed() for settings in grid}
        # In rounds, so that a slow minute of the machine hits all alike.
        for _ in range(_ROUNDS):
            plain = plain.best(self._plain())
            for settings in grid:
                speeds[settings] = speeds[settings].best(self._trial(settings))
        fastest = max(speeds, key=lambda settings: speeds[settings].both)
        for settings in [replace(fastest, buffer_size=size) for size in smaller] * _ROUNDS:
            speeds[settings] = speeds.get(settings, Speed()).best(self._trial(settings))
        trials = tuple(Trial(settings, speed) for settings, speed in speeds.items())
        found = Measurement(self._directory, self._nbytes, direct, plain, trials)
        return replace(found, streamed=self._stream(found.best.settings))

    def _plain(self) -> Speed:
        self._announce("plain sequential transfers")
        with self._plain_file() as file:
            file.grow(self._nbytes)
            block = bytes_of(self._memory[0], self._buffer_size)
            places = range(0, self._nbytes, self._buffer_size)
            write = self._rate(lambda: _each(file.write_from, block, places))
            return Speed(self._rate(lambda: _each(file.read_into, block, places)), write)

    def _trial(self, settings: DiskSettings) -> Speed:
        self._announce(f"{settings.threads} threads, blocks of {settings.block_bytes >> 20} MiB")
        with self._tier(settings) as tier:
            parts = tier.reserve(self._nbytes).split(settings.buffer_size)
            memory = [buffer[: settings.buffer_size] for buffer in self._memory]

            def go(start: Callable[..., object]) -> None:
                for index, part in enumerate(parts):  # the tier waits by itself where a buffer is still in flight
                    start(part, memory[index % len(memory)][: part.nbytes])
                tier.flush()

            write = self._rate(lambda: go(tier.start_write))
            return Speed(self._rate(lambda: go(tier.start_read)), write)

    def _stream(self, settings: DiskSettings) -> float:
        self._announce("reading, and writing back, in a pipeline")
        with self._tier(settings) as tier:
            parts = tier.reserve(self._nbytes).split(settings.buffer_size)
            return 2 * max(self._rate(lambda: sum(1 for _ in tier.stream(parts, write_back=True))) for _ in range(_ROUNDS))

    @contextmanager
    def _plain_file(self) -> Generator[SwapFile, None, None]:
        file = SwapFile(self._directory, "measurement")
        try:
            self._check_room()
            yield file
        finally:
            file.close()

    @contextmanager
    def _tier(self, settings: DiskSettings) -> Generator[DiskTier, None, None]:
        with DiskTier(self._directory, settings, name="measurement") as tier:
            self._check_room()
            yield tier

    def _check_room(self) -> None:
        free = free_bytes(self._directory)
        if free is not None and free < self._nbytes + _MARGIN:
            raise StorageError(
                explain(
                    f"too little room to measure the disk at {self._directory}",
                    expected=f"{self._nbytes + _MARGIN:,} bytes free",
                    found=f"{free:,}",
                    do="free space there, or measure with a smaller size",
                )
            )

    def _announce(self, text: str) -> None:
        self._progress(self._done, self._steps, text)
        self._done += 1

    def _rate(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return self._nbytes / (time.perf_counter() - began)

    @staticmethod
    def _random(nbytes: int) -> torch.Tensor:
        """Bytes that no disk can compress, from a generator of their own."""
        return aligned_bytes(nbytes, 65536).random_(0, 256, generator=torch.Generator().manual_seed(nbytes))


def _each(move: Callable[[Bytes, int], None], block: Bytes, places: Sequence[int]) -> None:
    for place in places:
        move(block, place)
