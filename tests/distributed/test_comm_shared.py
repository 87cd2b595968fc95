"""The transport through shared memory: large tensors, tensors read in place, falling back, and what is left behind."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import Comm
from shardwise.errors import PeerLostError, UsageError
from shardwise.mesh import Axis
from tests.harness import ranks

LONG = 300_007  # more elements than fit into a slot, and no multiple of anything
SUMMED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


def data_axis(world_size: int) -> Axis:
    return Axis("data", tuple(range(world_size)), dist.get_rank())


def values(index: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    return ((torch.arange(length) * 7 + index * 3) % 13).to(dtype)


def total(size: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((values(index, length, dtype) for index in range(1, size)), values(0, length, dtype))


@ranks(2, 3)
def test_tensors_larger_than_a_slot(world_size: int) -> None:
    axis, size = data_axis(world_size), world_size
    comm = Comm(axis, share="required")
    own = slice(axis.index * LONG, (axis.index + 1) * LONG)
    gathered = torch.empty(size * LONG)
    handles = [comm.all_gather(gathered, values(axis.index, LONG), axis, "gather")]
    summed, scattered = values(axis.index, LONG), torch.empty(LONG)
    handles.append(comm.all_reduce(summed, axis, "sum"))
    handles.append(comm.reduce_scatter(scattered, values(axis.index, size * LONG), axis, "reduce"))
    sent = values(axis.index, LONG)
    handles.append(comm.broadcast(sent, axis, 1, "send"))
    piece = torch.empty(LONG)
    handles.append(comm.scatter(piece, values(5, size * LONG) if axis.index == 0 else None, axis, 0, "scatter"))
    for handle in reversed(handles):
        handle.wait()
    assert torch.equal(gathered, torch.cat([values(index, LONG) for index in range(size)]))
    assert torch.equal(summed, total(size, LONG))
    assert torch.equal(scattered, total(size, size * LONG)[own])
    assert torch.equal(sent, values(1, LONG))
    assert torch.equal(piece, values(5, size * LONG)[own])
    comm.close()


@ranks(2, 3)
def test_scratch_is_summed_where_it_lies(world_size: int) -> None:
    """Several at once, also where the result goes into a part of the operand; and the same memory again."""
    axis, size = data_axis(world_size), world_size
    comm = Comm(axis, share="required")
    own = slice(axis.index * LONG, (axis.index + 1) * LONG)
    for dtype in SUMMED if size == 2 else (torch.bfloat16, torch.float32):
        fulls = [comm.scratch(size * LONG, dtype, "cpu") for _ in range(3)]
        assert not any(full.any() for full in fulls)
        for _ in range(2):
            for full in fulls:
                full.copy_(values(axis.index, size * LONG, dtype))
            apart = torch.empty(LONG, dtype=dtype)
            handles = [
                comm.reduce_scatter(apart, fulls[0], axis, "apart"),
                comm.reduce_scatter(fulls[1][own], fulls[1], axis, "inside"),
                comm.all_reduce(fulls[2], axis, "whole"),
            ]
            for handle in handles:
                handle.wait()
            right = total(size, size * LONG, dtype)
            assert torch.equal(apart, right[own])
            assert torch.equal(fulls[1][own], right[own])
            assert torch.equal(fulls[2], right)
    comm.close()


@ranks(3)
def test_all_ranks_get_the_same_bits() -> None:
    axis = data_axis(3)
    comm = Comm(axis, share="required")
    torch.manual_seed(axis.index)
    for tensor in (torch.randn(11), torch.randn(LONG), comm.scratch(LONG, torch.float32, "cpu").normal_()):
        comm.all_reduce(tensor, axis, "sum").wait()
        everyone = comm.all_gather_object(tensor.numpy().tobytes(), axis, "compare")
        assert everyone[0] == everyone[1] == everyone[2]
    comm.close()


@ranks(2)
def test_shared_storage_is_one_memory() -> None:
    axis = data_axis(2)
    comm = Comm(axis, share="required")
    storage = comm.allocate(1000, axis, torch.float32, "cpu", resident=False)
    assert storage.shared
    for step in range(3):
        storage.open("write")
        storage.shard.fill_(10 * step + axis.index)
        storage.close()
        storage.gather("read").wait()
        assert storage.full.unique().tolist() == [10 * step, 10 * step + 1]
        storage.release()
    # Counted as on any transport; what did move is the address of the memory, to begin with.
    assert comm.ledger.snapshot()["calls"] == {"fence": 6, "all_gather": 3 + 1, "all_reduce": 1}
    assert comm.ledger.resident("gathered") == 0
    for kind in ({"resident": True}, {"resident": False, "provisional": True}):
        assert not comm.allocate(1000, axis, torch.float32, "cpu", **kind).shared
    comm.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shardwise")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@ranks(2)
def test_nothing_is_left_of_many_comms() -> None:
    """No mapping and no descriptor, of whatever was allocated; what is in use stays in use."""
    axis = data_axis(2)
    counts = []
    for _ in range(5):
        comm = Comm(axis, share="required")
        storages = [comm.allocate(5000, axis, torch.float32, "cpu", resident=False) for _ in range(4)]
        full = comm.scratch(2 * LONG, torch.float32, "cpu").fill_(1.0)
        out = torch.empty(LONG)
        comm.reduce_scatter(out, full, axis, "sum").wait()
        comm.close()
        del comm
        assert full.sum() == 2 * LONG
        del storages, full
        gc.collect()
        counts.append((mappings(), descriptors()))
    assert counts[-1] == counts[0]
    assert counts[-1][0] == 0


@contextmanager
def no_files() -> Iterator[None]:
    """The system gives no more memory that can be shared."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@ranks(2)
def test_where_memory_cannot_be_shared() -> None:
    """On one rank only: all fall back to sockets, rank 0 with a line in the log, or all raise where it was required."""
    axis = data_axis(2)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # pyright: ignore
    logging.getLogger("shardwise").addHandler(handler)
    try:
        if axis.index:
            with no_files():
                comm = Comm(axis)
        else:
            comm = Comm(axis)
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    assert [("memory cannot be shared" in line) for line in lines] == [True] * (axis.index == 0)
    tensor = torch.full((LONG,), 1.0)
    comm.all_reduce(tensor, axis, "sum").wait()
    assert tensor.unique().tolist() == [2.0]
    assert not comm.allocate(10, axis, torch.float32, "cpu", resident=False).shared
    comm.close()
    with pytest.raises(UsageError, match=r'memory cannot be shared.*"transport": "gloo"'):
        if axis.index:
            with no_files():
                Comm(axis, share="required")
        else:
            Comm(axis, share="required")


@ranks(2)
def test_a_buffer_for_which_there_is_no_memory_is_not_shared() -> None:
    axis = data_axis(2)
    comm = Comm(axis, share="required")
    with no_files():
        storage = comm.allocate(100_000, axis, torch.float32, "cpu", resident=False)
        with pytest.raises(UsageError, match="no shared memory for gradients"):
            comm.scratch(100_000, torch.float32, "cpu")
    assert not storage.shared
    storage.shard.fill_(axis.index)
    storage.gather("read").wait()
    assert storage.full.unique().tolist() == [0.0, 1.0]
    storage.release()
    comm.close()


@ranks(3, dies=(1,))
def test_a_rank_that_is_killed_in_the_middle() -> None:
    axis = data_axis(3)
    comm = Comm(axis, share="required")
    tensor = torch.ones(LONG)
    comm.all_reduce(tensor, axis, "sum").wait()
    if axis.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"rank 1 has ended"):
        for _ in range(2):
            comm.all_reduce(tensor, axis, "sum").wait()
