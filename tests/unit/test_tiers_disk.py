"""The disk tier at work: what overlaps and what does not, who hears of an error, and what it costs."""

from __future__ import annotations

import array
import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError, UsageError
from shardwise.tiers import DiskSettings, DiskTier, StorageError, aligned_bytes
from shardwise.tiers.files import SwapFile
from shardwise.tiers.memory import Bytes
from shardwise.tiers.meter import Meter
from shardwise.tiers.pool import BufferPool
from tests.unit.tiers_support import Failing, Gated, Strict, random_bytes

PAGE = 4096
ONE = DiskSettings(buffer_count=4, buffer_size=PAGE, threads=1, block_bytes=PAGE, queue_depth=8)


def page(value: int) -> torch.Tensor:
    return aligned_bytes(PAGE).fill_(value)


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# The pipeline.


def test_while_one_item_is_used_the_next_is_read_and_the_last_is_written(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, ONE, system=gate) as tier:
        ranges = tier.reserve(4 * PAGE).split(PAGE)
        stream = tier.stream(ranges, write_back=True)
        gate.let()  # the read of item 0; what comes after is let go once the loop holds an item
        for index in range(4):
            number, tensor = next(stream)
            assert (number, int(tensor[0])) == (index, 0)
            tensor.fill_(index + 1)
            begun = [gate.next()] if index == 0 else []
            while len(begun) < (index > 0) + (index < 3) + (index == 0):
                begun.append(gate.next())
                gate.let()
            expected = {0: {("read", 0), ("read", PAGE)}, 3: {("write", 2 * PAGE)}}
            assert set(begun) == expected.get(index, {("write", (index - 1) * PAGE), ("read", (index + 1) * PAGE)})
        gate.let()
        assert next(stream, None) is None
        assert gate.order[-1] == ("write", 3 * PAGE)
        gate.let(4)
        assert [int(tensor[-1]) for _, tensor in tier.stream(ranges)] == [1, 2, 3, 4]
        stats = tier.stats()
        assert (stats.reads, stats.writes, stats.bytes_read, stats.bytes_written) == (8, 4, 8 * PAGE, 4 * PAGE)


def test_without_pipelines_nothing_happens_while_an_item_is_used(tmp_path: Path) -> None:
    gate = Gated()
    gate.let(1000)
    plain = replace(ONE, pipeline_read=False, pipeline_write=False)
    with DiskTier(tmp_path, plain, system=gate) as tier:
        ranges = tier.reserve(3 * PAGE).split(PAGE)
        for index, _ in tier.stream(ranges, write_back=True):
            assert gate.order[-1] == ("read", index * PAGE)
            assert len(gate.order) == 2 * index + 1
        assert gate.order == [(kind, index * PAGE) for index in range(3) for kind in ("read", "write")]
        assert tier.stats().peak_buffers == 3


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize(("count", "items", "buffers"), [(1, 9, 1), (2, 9, 2), (3, 9, 3), (4, 9, 4), (9, 2, 6), (4, 0, 0)])
def test_memory_is_the_stated_number_of_buffers(tmp_path: Path, write_back: bool, count: int, items: int, buffers: int) -> None:
    settings = DiskSettings(buffer_count=count, buffer_size=10_000, threads=2, block_bytes=PAGE)
    with DiskTier(tmp_path, settings, system=Strict()) as tier:
        assert tier.buffer_size == 12_288
        ranges = [tier.reserve(9000) for _ in range(items)]
        for _ in range(3):
            for _, tensor in tier.stream(ranges, write_back=write_back):
                tensor += 1
        stats = tier.stats()
    assert stats.peak_buffers == buffers
    assert stats.staging_bytes == 0
    assert stats.bytes_read == 3 * items * 9000
    assert stats.bytes_written == (3 * items * 9000 if write_back else 0)


def test_tensors_that_are_not_aligned_cost_one_block_per_thread(tmp_path: Path) -> None:
    settings = DiskSettings(threads=2, block_bytes=PAGE)
    with DiskTier(tmp_path, settings, system=Strict()) as tier:
        held = tier.reserve(100 * PAGE)
        tier.start_write(held, aligned_bytes(100 * PAGE)).wait()
        assert tier.stats().staging_bytes == 0
        for _ in range(5):
            tier.start_write(held, torch.zeros(100 * PAGE + 1, dtype=torch.uint8)[1:]).wait()
        assert tier.stats().staging_bytes in (2 << 20, 4 << 20)
        assert tier.stats().peak_buffers == 0


def test_threads_share_a_transfer(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, replace(ONE, threads=3), system=gate) as tier:
        handle = tier.start_write(tier.reserve(3 * PAGE), random_bytes(3 * PAGE))
        assert {gate.next() for _ in range(3)} == {("write", 0), ("write", PAGE), ("write", 2 * PAGE)}
        gate.let(3)
        handle.wait()


def test_a_stream_left_early_gives_its_buffers_back(tmp_path: Path) -> None:
    with DiskTier(tmp_path, replace(ONE, timeout=5)) as tier:
        ranges = tier.reserve(8 * PAGE).split(PAGE)
        for _ in range(3):
            for index, tensor in tier.stream(ranges, ahead=2, write_back=True):
                tensor += 1
                if index == 2:
                    break
        found = [int(tensor[0]) for _, tensor in tier.stream(ranges)]
        assert found == [3, 3, 0, 0, 0, 0, 0, 0], "the item at which a loop is left is not written"


def test_read_ahead_takes_only_what_is_free(tmp_path: Path) -> None:
    with DiskTier(tmp_path, replace(ONE, buffer_count=2, timeout=0.05)) as tier:
        ranges = tier.reserve(3 * PAGE).split(PAGE)
        with tier.lend(ranges[0]):
            assert [index for index, _ in tier.stream(ranges, ahead=2)] == [0, 1, 2]
            with (
                tier.lend(ranges[1]),
                pytest.raises(UsageError, match=r"item 0 of a stream got no buffer within 0.05 s.*4,096 bytes at 0, a loan of"),
            ):
                next(tier.stream(ranges))
        with pytest.raises(UsageError, match="a range of 8,192 bytes does not fit in a buffer: expected at most 4,096"):
            tier.lend(tier.reserve(2 * PAGE))


# Order.


def test_memory_that_is_being_written_is_filled_again_only_afterwards(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, replace(ONE, threads=2), system=gate) as tier:
        first, second, memory = tier.reserve(PAGE), tier.reserve(PAGE), page(7)
        tier.start_write(first, memory)
        read = tier.start_read(second, memory)
        other = tier.start_read(second, page(0))
        assert {gate.next(), gate.next()} == {("write", 0), ("read", PAGE)}
        assert not gate.order
        gate.let(2)
        other.wait()
        gate.let()
        read.wait()
        assert int(memory[0]) == 0
        gate.let()
        with tier.lend(first) as lent:
            assert int(lent[0]) == 7


def test_what_shares_bytes_waits_and_what_does_not_goes_on(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, replace(ONE, threads=2), system=gate) as tier:
        first, second = tier.reserve(PAGE), tier.reserve(PAGE)
        written, found, other = page(7), page(0), page(9)
        tier.start_write(first, written)
        read = tier.start_read(first, found)
        assert gate.next() == ("write", 0)
        free = tier.start_write(second, other)
        assert gate.next() == ("write", PAGE), "the read waits for the write of its range, the other write does not"
        gate.let(2)
        free.wait()
        assert gate.next() == ("read", 0)
        gate.let()
        read.wait()
        assert torch.equal(found, written)


def test_reads_of_one_range_run_side_by_side_and_a_write_waits_for_both(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, replace(ONE, threads=3), system=gate) as tier:
        held, targets = tier.reserve(PAGE), [page(1), page(2)]
        for target in targets:
            tier.start_read(held, target)
        last = tier.start_write(held, page(3))
        assert [gate.next(), gate.next()] == [("read", 0), ("read", 0)]
        gate.let(2)
        assert gate.next() == ("write", 0)
        gate.let()
        last.wait()
        assert [int(target[0]) for target in targets] == [0, 0]


def test_no_more_transfers_are_started_than_allowed(tmp_path: Path) -> None:
    gate = Gated()
    with DiskTier(tmp_path, replace(ONE, queue_depth=2), system=gate) as tier:
        ranges = tier.reserve(3 * PAGE).split(PAGE)
        started: list[int] = []

        def start_all() -> None:
            for index, held in enumerate(ranges):
                tier.start_write(held, page(index))
                started.append(index)

        thread = in_background(start_all)
        assert gate.next() == ("write", 0)
        thread.join(0.05)
        assert started in ([0], [0, 1]), "the third waits for the first"
        gate.let(3)
        thread.join(20)
        tier.flush()
        assert started == [0, 1, 2]


def test_a_tier_may_be_used_by_several_threads(tmp_path: Path) -> None:
    with DiskTier(tmp_path, DiskSettings(threads=3, block_bytes=PAGE, queue_depth=3)) as tier:

        def work(seed: int) -> bool:
            held, found = tier.reserve(50_000), torch.empty(50_000, dtype=torch.uint8)
            good = True
            for step in range(10):
                data = random_bytes(50_000, 100 * seed + step)
                tier.start_write(held, data)
                tier.start_read(held, found).wait()
                good = good and torch.equal(found, data)
            return good

        with ThreadPoolExecutor(4) as workers:
            assert all(workers.map(work, range(4)))


# Errors.


def test_an_error_in_a_thread_reaches_who_waits_each_time(tmp_path: Path) -> None:
    system = Failing(lambda kind, offset: kind == "read" and offset == PAGE)
    with DiskTier(tmp_path, ONE, name="optimizer state", system=system) as tier:
        held = tier.reserve(3 * PAGE)
        handle = tier.start_read(held, page(0).new_empty(3 * PAGE))
        expected = rf"cannot read 4,096 bytes at 4,096 of the optimizer state in {tmp_path}: found Input/output error"
        for _ in range(2):
            with pytest.raises(StorageError, match=expected) as caught:
                handle.wait()
            assert caught.value.errno == errno.EIO
        tier.flush()
        with pytest.raises(StorageError, match=expected), tier.lend(held.part(PAGE, 2 * PAGE)):
            pass
        with pytest.raises(StorageError, match=expected):
            list(tier.stream(held.split(PAGE)))
        assert len(list(tier.stream(held.split(PAGE)[2:]))) == 1
        assert tier.stats().bytes_read < 6 * PAGE


@pytest.mark.parametrize("how", ["write", "read", "flush", "stream", "lend"])
def test_a_failed_write_that_nobody_waits_for_is_told_once(tmp_path: Path, how: str) -> None:
    system = Failing(lambda kind, offset: kind == "write" and offset == 0, errno.ENOSPC)
    with DiskTier(tmp_path, ONE, system=system) as tier:
        bad, good = tier.reserve(PAGE), tier.reserve(PAGE)
        tier.start_write(bad, page(1))
        while tier._queue._live:
            time.sleep(0.001)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: tier.start_write(good, page(2)).wait(),
            "read": lambda: tier.start_read(good, page(2)).wait(),
            "flush": tier.flush,
            "stream": lambda: list(tier.stream([good])),
            "lend": lambda: tier.lend(good).give(),
        }
        with pytest.raises(StorageError, match=r"cannot write 4,096 bytes at 0 .*No space left on device', .* bytes free"):
            calls[how]()
        calls[how]()
        tier.flush()
        handle = tier.start_write(bad, page(1))
        with pytest.raises(StorageError):
            handle.wait()
        tier.flush()


def test_what_reads_a_range_fails_with_the_write_before_it(tmp_path: Path) -> None:
    gate = Gated()
    gate.fail = lambda kind, offset: kind == "write" and offset == 0
    with DiskTier(tmp_path, ONE, system=gate) as tier:
        first, second = tier.reserve(PAGE), tier.reserve(PAGE)
        passing = page(5)
        write = tier.start_write(first, page(1))
        read = tier.start_read(first, passing)
        onward = tier.start_write(second, passing)
        over = tier.start_write(first.part(0, PAGE), page(3))
        gate.let(2)
        for handle in (write, read, onward):
            with pytest.raises(StorageError, match="cannot write 4,096 bytes at 0"):
                handle.wait()
        with pytest.raises(StorageError, match="cannot write"):
            over.wait()
        assert gate.order == [("write", 0), ("write", 0)], "neither the read nor the write of what it brings was tried"
        assert int(passing[0]) == 5


def test_errors_of_writing_back_surface_in_the_loop(tmp_path: Path) -> None:
    system = Failing(lambda kind, offset: kind == "write" and offset == 2 * PAGE)
    with DiskTier(tmp_path, ONE, system=system) as tier:
        ranges = tier.reserve(12 * PAGE).split(PAGE)
        seen = []
        with pytest.raises(StorageError, match="cannot write 4,096 bytes at 8,192"):
            seen.extend(index for index, _ in tier.stream(ranges, write_back=True))
        assert 3 <= len(seen) <= 3 + ONE.buffer_count
        tier.flush()
        assert len(list(tier.stream(ranges))) == 12, "all buffers came back"


class Broken(Gated):
    """Fails as no disk does."""

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        raise ZeroDivisionError("a bug")


def test_a_thread_outlives_a_bug(tmp_path: Path) -> None:
    with DiskTier(tmp_path, ONE, system=Broken()) as tier:
        held = tier.reserve(PAGE)
        for _ in range(3):
            with pytest.raises(StorageError, match=r"a write of 4,096 bytes at 0 failed: found ZeroDivisionError: a bug"):
                tier.start_write(held, page(1)).wait()


def test_settings_are_checked() -> None:
    for name in ("buffer_count", "buffer_size", "threads", "block_bytes", "queue_depth"):
        with pytest.raises(ConfigError, match=f"{name} of a disk tier: expected at least 1, found 0"):
            DiskSettings(**{name: 0})


# The end.


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def tier_threads() -> int:
    return sum(thread.name.startswith("shardwise-tier") for thread in threading.enumerate())


def test_closing_gives_up_what_is_in_flight(tmp_path: Path) -> None:
    gate = Gated()
    files, threads = open_files(), tier_threads()
    tier = DiskTier(tmp_path, replace(ONE, queue_depth=3), system=gate)
    ranges = tier.reserve(4 * PAGE).split(2 * PAGE)
    target = torch.full((2 * PAGE,), 9, dtype=torch.uint8)
    running = tier.start_read(ranges[0], target)
    queued = tier.start_write(ranges[1], torch.ones(2 * PAGE, dtype=torch.uint8))
    behind = tier.start_read(ranges[1], torch.ones(2 * PAGE, dtype=torch.uint8))
    refused: list[BaseException] = []

    def one_too_many() -> None:
        try:
            tier.start_read(ranges[0], target)
        except UsageError as error:
            refused.append(error)

    assert gate.next() == ("read", 0)
    waiting = in_background(one_too_many)
    closing = in_background(tier.close)
    while not tier._queue._closed:
        time.sleep(0.001)
    closing.join(0.05)
    assert closing.is_alive(), "a block is still being moved into the tensor"
    gate.let()
    closing.join(20)
    waiting.join(20)
    assert (target[:PAGE] == 0).all()
    assert (target[PAGE:] == 9).all()
    assert gate.order == [("read", 0)]
    for handle in (running, queued, behind):
        with pytest.raises(UsageError, match="the tier was closed before this transfer was over"):
            handle.wait()
    assert len(refused) == 1
    assert (open_files(), tier_threads()) == (files, threads)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("cycle", [True, False])
def test_a_tier_that_is_dropped_closes_itself(tmp_path: Path, used: bool, cycle: bool) -> None:
    gc.collect()
    files, threads = open_files(), tier_threads()
    tier = DiskTier(tmp_path, ONE)
    mine: list[threading.Thread] = []
    if used:
        tier.start_write(tier.reserve(PAGE), page(1)).wait()
        mine = list(tier._queue._threads)
    if cycle:
        tier.itself = tier  # type: ignore[attr-defined]
    del tier
    gc.collect()
    for thread in mine:
        thread.join(20)
    assert (open_files(), tier_threads()) == (files, threads)


@pytest.mark.parametrize("fails", [True, False])
def test_a_finished_transfer_holds_no_memory(tmp_path: Path, fails: bool) -> None:
    with DiskTier(tmp_path, ONE, system=Failing(lambda kind, offset: fails)) as tier:
        memory = array.array("B", bytes(PAGE))
        alive = weakref.ref(memory)
        handle = tier.start_read(tier.reserve(PAGE), torch.frombuffer(memory, dtype=torch.uint8))
        if fails:
            with pytest.raises(StorageError):
                handle.wait()
        else:
            handle.wait()
        del memory
        until = time.monotonic() + 20
        while alive() is not None and time.monotonic() < until:
            time.sleep(0.001)  # the thread is about to let go of its last transfer
        assert alive() is None
        assert handle is not None


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    with DiskTier(tmp_path, ONE) as tier:
        held = tier.reserve(PAGE)
        tier._queue._pid += 1  # as a child sees it; a real fork would copy the threads of this test session
        try:
            with pytest.raises(UsageError, match="used in a forked child"):
                tier.start_write(held, page(1))
        finally:
            tier._queue._pid -= 1


# Parts.


def test_a_pool_hands_out_what_it_has() -> None:
    pool = BufferPool(2, 5000)
    assert (pool.size, pool.made) == (8192, 0)
    first = pool.take("first")
    pool.give(first)
    second, third = pool.take("second"), pool.take("third")
    assert second is not first
    assert third is first
    assert (pool.held, pool.most_held, pool.made) == (2, 2, 2)
    assert pool.try_take("fourth") is None
    with pytest.raises(UsageError, match=r"fourth got no buffer within 0\.01 s.*all held by third, second.*buffer_count"):
        pool.take("fourth", 0.01)
    waiting = ThreadPoolExecutor(1)
    later = waiting.submit(pool.take, "later", 20)
    pool.give(second)
    assert later.result(20) is second
    waiting.shutdown()
    pool.give(first)
    pool.give(second)
    assert [pool.take("again"), pool.take("again")] == [first, second], "the one that was given back first"
    pool.give(first)
    for stranger in (first, BufferPool(1, 1).take("elsewhere")):
        with pytest.raises(UsageError, match="nobody holds"):
            pool.give(stranger)


def test_time_is_counted_once_and_its_hidden_share_follows() -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])
    assert meter.stats().read_hidden == 1.0
    for moment, begins in ((0.0, True), (1.0, True), (3.0, False), (4.0, False)):
        now[0] = moment
        (meter.begin if begins else meter.end)(write=False)
    meter.waited(1.0, write=False)
    stats = meter.stats()
    assert (stats.read_seconds, stats.read_waited_seconds, stats.read_hidden) == (4.0, 1.0, 0.75)
    assert (stats.write_seconds, stats.write_hidden) == (0.0, 1.0)
    meter.waited(9.0, write=False)
    assert meter.stats().read_hidden == 0.0


def test_a_file_serves_one_owner(tmp_path: Path) -> None:
    """Two tiers in one folder never share bytes."""
    with DiskTier(tmp_path, ONE) as one, DiskTier(tmp_path, ONE) as two:
        held = [tier.reserve(PAGE) for tier in (one, two)]
        one.start_write(held[0], page(1)).wait()
        two.start_write(held[1], page(2)).wait()
        with one.lend(held[0]) as first, two.lend(held[1]) as second:
            assert (int(first[0]), int(second[0])) == (1, 2)
    assert SwapFile(tmp_path).close() is None
