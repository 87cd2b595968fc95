"""Measuring a disk, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import load_config
from shardwise.errors import ConfigError
from shardwise.tiers import DiskSettings, StorageError
from shardwise.tiers.measure import Measurement, Speed, Trial, measure_disk
from shardwise.tiers.report import main, parse_size, render

MIB = 1 << 20


def trial(buffer_mib: int, read: float, write: float, threads: int = 2) -> Trial:
    return Trial(DiskSettings(buffer_size=buffer_mib * MIB, threads=threads, block_bytes=4 * MIB), Speed(read, write))


FOUND = Measurement(
    Path("/fast"),
    64 * MIB,
    True,
    Speed(2e9, 1e9),
    (trial(32, 2e9, 0.9e9), trial(32, 2.1e9, 1e9, threads=4), trial(8, 2e9, 1e9, threads=4), trial(8, 1e9, 1e9)),
    1.4e9,
)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    found = measure_disk(tmp_path / "new", 3 * MIB, threads=(1, 2), blocks=(MIB,), progress=lambda *step: steps.append(step))
    assert (found.directory, found.nbytes) == (tmp_path / "new", 3 * MIB)
    assert [(trial.settings.threads, trial.settings.block_bytes) for trial in found.trials] == [(1, MIB), (2, MIB)]
    assert all(trial.settings.buffer_size == 3 * MIB for trial in found.trials)
    assert min(found.plain.read, found.plain.write, found.streamed) > 0
    assert min(min(trial.speed.read, trial.speed.write) for trial in found.trials) > 0
    assert [done for done, _, _ in steps] == list(range(10))
    assert {total for _, total, _ in steps} == {10}
    assert steps[0][2] == "plain sequential transfers"
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_a_size_that_is_no_multiple_of_the_buffers_is_cut(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, 8 * MIB + 5, threads=(1,), blocks=(MIB,)).nbytes == 8 * MIB


def test_too_little_room_and_too_small_a_size_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=rf"too little room to measure the disk at {tmp_path}: expected .* bytes free, found"
    ):
        measure_disk(tmp_path, 1 << 60)
    with pytest.raises(ConfigError, match="at least 1 MiB, found 1,000 bytes"):
        main(tmp_path, "1kB")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_disk(tmp_path, 2 * MIB, threads=(1,), blocks=(MIB,), progress=stop)
    assert not list(tmp_path.iterdir())


def test_the_smallest_buffers_that_are_fast_enough_are_recommended() -> None:
    assert FOUND.best is FOUND.trials[2]
    slower = Measurement(Path("/fast"), MIB, True, FOUND.plain, (*FOUND.trials[:2], FOUND.trials[3]))
    assert slower.best is FOUND.trials[1]
    assert Speed(2e9, 1e9).both == pytest.approx(4e9 / 3)
    assert Speed(1, 5).best(Speed(2, 3)) == Speed(2, 5)


def test_the_recommended_keys_are_those_of_the_configuration() -> None:
    config = FOUND.config()
    assert config["aio"] == {"block_size": 4 * MIB, "queue_depth": 8, "intra_op_parallelism": 4}
    pipeline = {"pipeline_read": True, "pipeline_write": True}
    place = {"device": "nvme", "nvme_path": "/fast"}
    offload = {**place, "buffer_count": 4, "buffer_size": 8 * MIB, **pipeline}
    assert config["zero_optimization"] == {"offload_optimizer": offload}
    config["zero_optimization"]["stage"] = 2
    assert load_config({"train_batch_size": 1, **config}, world_size=1).inert == []


def test_the_report_is_a_table_and_a_configuration() -> None:
    lines = render(FOUND).splitlines()
    assert lines[:11] == [
        "disk under /fast: 0.07 GB each way, past the system's cache",
        "",
        "                                    read  of plain      write  of plain",
        "plain, one thread              2.00 GB/s      100%  1.00 GB/s      100%",
        "2 x 4 MiB, buffers of 8 MiB    1.00 GB/s       50%  1.00 GB/s      100%",
        "4 x 4 MiB, buffers of 8 MiB *  2.00 GB/s      100%  1.00 GB/s      100%",
        "2 x 4 MiB, buffers of 32 MiB   2.00 GB/s      100%   900 MB/s       90%",
        "4 x 4 MiB, buffers of 32 MiB   2.10 GB/s      105%  1.00 GB/s      100%",
        "",
        "Rows: threads x bytes per request of the disk tier, and its buffers. Columns: the best of the rounds.",
        "Recommended (*), in a pipeline that writes everything back: 1.40 GB/s, read and written together.",
    ]
    assert '  "aio": {' in lines
    cached = Measurement(Path("/tmp"), MIB, False, FOUND.plain, FOUND.trials, 1.0)
    assert "through the system's cache: its speed counts" in render(cached)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("1GiB", "1.5 mb", "4096", " 2 kib ", "3T", "7B")] == [
        1 << 30, 1_500_000, 4096, 2048, 3 * 10**12, 7,
    ]  # fmt: skip
    for text in ("", "big", "1 GiBs", "-1MB", "1i"):
        with pytest.raises(ConfigError, match="this is no size"):
            parse_size(text)
