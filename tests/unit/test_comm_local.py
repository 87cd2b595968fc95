"""`Comm` where no other process takes part: an axis of one rank, and the dry run as one rank of many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import DONE, Comm, NullTransport
from shardwise.errors import UsageError
from shardwise.mesh import Axis, DataMesh

ONE = Axis("data", (0,), 0)
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    comm = Comm(ONE)
    shard, out = torch.arange(5.0), torch.zeros(5)
    assert comm.all_gather(out, shard, ONE, "x") is DONE
    assert torch.equal(out, shard)
    out.zero_()
    comm.reduce_scatter(out, shard, ONE, "x").wait()
    assert torch.equal(out, shard)
    out.zero_()
    comm.scatter(out, shard, ONE, 0, "x").wait()
    assert torch.equal(out, shard)
    comm.all_reduce(out, ONE, "x").wait()
    comm.broadcast(out, ONE, 0, "x").wait()
    comm.reduce_scatter(out, out, ONE, "in place").wait()
    assert torch.equal(out, torch.arange(5.0))
    thing = {"a": 1}
    assert comm.all_gather_object(thing, ONE, "x") == [thing]
    comm.barrier(ONE, "x")
    assert comm.ledger.snapshot()["calls"] == {}
    comm.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_gathers_every_dtype(dtype: torch.dtype) -> None:
    shard = torch.tensor([1, 0, 1]).to(dtype)
    out = torch.zeros(3).to(dtype)
    Comm(ONE).all_gather(out, shard, ONE, "x").wait()
    assert torch.equal(out.view(torch.uint8), shard.view(torch.uint8))


def test_storage_of_one_rank_is_whole() -> None:
    storage = Comm(ONE).allocate(7, ONE, torch.bfloat16, "cpu", resident=False)
    assert storage.full is storage.shard
    assert storage.full.shape == (7,)
    assert (storage.nbytes_full, storage.nbytes_resting) == (14, 14)
    storage.shard.fill_(2)
    assert storage.gather("x") is DONE
    storage.release()
    assert storage.is_live
    assert storage.full.tolist() == [2] * 7


def test_more_ranks_need_a_process_group() -> None:
    with pytest.raises(UsageError, match=r"'data' has 2 ranks and there is no process group.*init_distributed"):
        Comm(Axis("data", (0, 1), 0))


def dry(rank: int = 1, size: int = 4) -> tuple[Comm, Axis]:
    axis = Axis("data", tuple(range(size)), rank)
    return Comm(axis, transport=NullTransport()), axis


def test_a_dry_run_is_as_if_all_ranks_held_the_same() -> None:
    comm, axis = dry()
    out = torch.zeros(8)
    comm.all_gather(out, torch.tensor([1.0, 2.0]), axis, "x").wait()
    assert out.tolist() == [1, 2] * 4
    shard = torch.zeros(2)
    comm.reduce_scatter(shard, torch.arange(8.0), axis, "x").wait()
    assert shard.tolist() == [8, 12]
    comm.all_reduce(shard, axis, "x").wait()
    assert shard.tolist() == [32, 48]
    comm.broadcast(shard, axis, 2, "x").wait()
    comm.scatter(shard, torch.arange(8.0), axis, 1, "x").wait()
    assert shard.tolist() == [2, 3]
    assert comm.all_gather_object("x", axis, "x") == ["x"] * 4
    comm.barrier(axis, "x")


def test_a_dry_run_counts_what_a_real_one_counts() -> None:
    mesh = DataMesh.grid(5, 1024, 512)
    comm = Comm(mesh.data, transport=NullTransport())
    comm.all_gather(torch.zeros(512 * 3, dtype=torch.bfloat16), torch.zeros(3).bfloat16(), mesh.shard, "x")
    comm.all_reduce(torch.zeros(3), mesh.replicate, "x")
    comm.all_reduce(torch.zeros(0), mesh.replicate, "nothing")
    comm.scatter(torch.zeros(2), None, Axis("pair", (4, 5), 5), 0, "x")
    comm.barrier(mesh.data, "x")
    found = comm.ledger.snapshot()
    assert found["calls"] == {"all_gather": 1, "all_reduce": 1, "scatter": 1, "barrier": 1}
    assert found["bytes"] == {"all_gather": 512 * 3 * 2, "all_reduce": 12, "scatter": 16, "barrier": 0}
    assert found["axes"]["replicate"] == {"all_reduce": 12}


def test_a_dry_run_works_on_fake_tensors() -> None:
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    comm, axis = dry(size=1000)
    with fake.FakeTensorMode():
        storage = comm.allocate(1 << 30, axis, torch.float32, "cpu", resident=False)
        assert not storage.is_live
        storage.gather("x").wait()
        assert storage.full.untyped_storage().nbytes() == 4000 << 30
        comm.reduce_scatter(storage.shard, storage.full, axis, "x").wait()
        storage.release()
        assert storage.full.untyped_storage().nbytes() == 0
    assert comm.ledger.peak("gathered") == 4000 << 30
    assert comm.ledger.resident("gathered") == 0


def test_released_storage_has_no_memory_and_refills_the_same_tensor() -> None:
    comm, axis = dry(rank=1, size=3)
    storage = comm.allocate(4, axis, torch.float32, "cpu", resident=False)
    full = storage.full
    assert (storage.nbytes_resting, storage.nbytes_full) == (16, 48)
    assert full.untyped_storage().nbytes() == 0
    assert not storage.is_live
    storage.shard.copy_(torch.arange(4.0))
    storage.gather("x").wait()
    view = full[4:8]
    assert storage.is_live
    assert full.tolist() == [0, 1, 2, 3] * 3
    assert comm.ledger.resident("gathered") == 48
    storage.gather("again, while live").wait()
    assert comm.ledger.resident("gathered") == 48
    storage.release()
    storage.release()
    assert full.untyped_storage().nbytes() == 0
    assert comm.ledger.resident("gathered") == 0
    storage.shard.add_(10)
    storage.gather("x").wait()
    assert storage.full is full
    assert view.tolist() == [10, 11, 12, 13]  # a view taken before the release sees what came later


def test_resident_storage_keeps_its_shard_inside() -> None:
    comm, axis = dry(rank=2, size=3)
    storage = comm.allocate(2, axis, torch.float64, "cpu", resident=True)
    assert storage.is_live
    assert (storage.nbytes_resting, storage.nbytes_full) == (48, 48)
    storage.full.zero_()
    storage.shard.fill_(5)
    assert storage.full.tolist() == [0, 0, 0, 0, 5, 5]
    storage.gather("x").wait()
    assert storage.full.tolist() == [5] * 6
    storage.release()
    assert storage.full.untyped_storage().nbytes() == 48
    assert comm.ledger.peak("gathered") == 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    comm, axis = dry(rank=0, size=2)
    floats = torch.zeros(4)
    with pytest.raises(UsageError, match="all_gather of 'w' cannot be done: expected 1-D tensors of one dtype, one 2 times"):
        comm.all_gather(floats, torch.zeros(3), axis, "w")
    with pytest.raises(UsageError, match=r"found \(4,\) torch.float32 and \(2,\) torch.float64"):
        comm.reduce_scatter(torch.zeros(2).double(), floats, axis, "w")
    with pytest.raises(UsageError, match="one 2 times as long"):
        comm.all_gather(torch.zeros(2, 2), torch.zeros(2), axis, "w")
    with pytest.raises(UsageError, match="a contiguous tensor, found shape"):
        comm.all_reduce(torch.zeros(3, 2).t(), axis, "w")
    with pytest.raises(UsageError, match=r"expected one of .*torch.float32.*found torch.bool"):
        comm.all_reduce(torch.zeros(2, dtype=torch.bool), axis, "w")
    with pytest.raises(UsageError, match="expected a source index below 2, found 2"):
        comm.broadcast(floats, axis, 2, "w")
    with pytest.raises(UsageError, match="expected the tensor to scatter on the source, found None"):
        comm.scatter(floats, None, axis, 0, "w")


def test_a_closed_comm_says_so() -> None:
    comm = Comm(ONE)
    comm.close()
    comm.close()
    with pytest.raises(UsageError, match="this Comm is closed"):
        comm.all_reduce(torch.zeros(1), ONE, "x")
