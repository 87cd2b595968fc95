"""What every transport must do, through `Comm`: torch.distributed on several ranks, one rank alone, and the dry run."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import Comm, NullTransport
from shardwise.mesh import Axis, DataMesh
from tests.harness import ranks

SUMMED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
CARRIED = [*SUMMED, torch.uint8, torch.int8, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
LENGTHS = [1, 7, 1000]


class Case:
    """One transport on one axis, and the data of each rank: its own, or the same everywhere."""

    def __init__(self, comm: Comm, axis: Axis, *, alike: bool = False) -> None:
        self.comm = comm
        self.axis = axis
        self.alike = alike

    def data(self, index: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """What the rank with that index holds: small whole numbers, so that every sum is exact."""
        index = self.axis.index if self.alike else index
        values = (torch.arange(length) * 3 + index * 5) % 11
        return (values > 4) if dtype == torch.bool else values.to(dtype)

    def mine(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """What this rank holds."""
        return self.data(self.axis.index, length, dtype)

    def everyone(self, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What all ranks hold."""
        return [self.data(index, length, dtype) for index in range(self.axis.size)]


def bits(tensor: torch.Tensor) -> list[int]:
    """For comparing dtypes that cannot be compared."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist()


def check_all_gather(case: Case, length: int, dtype: torch.dtype) -> None:
    size, axis = case.axis.size, case.axis
    expected = torch.cat(case.everyone(length, dtype))
    out = torch.zeros(size * length).to(dtype)
    case.comm.all_gather(out, case.mine(length, dtype), axis, "gather").wait()
    assert bits(out) == bits(expected)
    in_place = torch.zeros(size * length).to(dtype)
    own = in_place[axis.index * length : (axis.index + 1) * length]
    own.copy_(case.mine(length, dtype))
    case.comm.all_gather(in_place, own, axis, "gather in place").wait()
    assert bits(in_place) == bits(expected)


def check_sums(case: Case, length: int, dtype: torch.dtype) -> None:
    size, axis = case.axis.size, case.axis
    total = torch.stack([each.to(torch.float64) for each in case.everyone(size * length, dtype)]).sum(0).to(dtype)
    slot = slice(axis.index * length, (axis.index + 1) * length)
    out = torch.zeros(length, dtype=dtype)
    full = case.mine(size * length, dtype)
    case.comm.reduce_scatter(out, full, axis, "reduce").wait()
    assert torch.equal(out, total[slot])
    full = case.mine(size * length, dtype)
    case.comm.reduce_scatter(full[slot], full, axis, "reduce in place").wait()
    assert torch.equal(full[slot], total[slot])
    whole = case.mine(size * length, dtype).view(size, length)
    case.comm.all_reduce(whole, axis, "sum").wait()
    assert torch.equal(whole.view(-1), total)


def check_one_to_all(case: Case, length: int, dtype: torch.dtype) -> None:
    size, axis = case.axis.size, case.axis
    for source in {0, size - 1}:
        sent = case.data(source, size * length, dtype)
        tensor = case.mine(size * length, dtype).view(length, size)
        case.comm.broadcast(tensor, axis, source, "broadcast").wait()
        assert bits(tensor) == bits(sent)
        out = torch.zeros(length).to(dtype)
        # A dry run has no source but itself, so there every rank brings what it would send.
        full = sent if axis.index == source or case.alike else None
        case.comm.scatter(out, full, axis, source, "scatter").wait()
        assert bits(out) == bits(sent.view(size, length)[axis.index])


def check_order(case: Case) -> None:
    """Many operations in flight on one axis finish as issued, in whatever order they are waited for."""
    size, axis = case.axis.size, case.axis
    gathered = [torch.zeros(size * 3) for _ in range(5)]
    shards = [case.mine(3, torch.float32) + step for step in range(5)]
    sums = [case.mine(4, torch.float32) + step for step in range(5)]
    handles = []
    for step in range(5):
        handles.append(case.comm.all_gather(gathered[step], shards[step], axis, f"gather {step}"))
        handles.append(case.comm.all_reduce(sums[step], axis, f"sum {step}"))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    for step in range(5):
        assert torch.equal(gathered[step], torch.cat(case.everyone(3, torch.float32)) + step)
        assert torch.equal(sums[step], torch.stack(case.everyone(4, torch.float32)).sum(0) + size * step)


def check_storage(case: Case) -> None:
    size, axis, comm = case.axis.size, case.axis, case.comm
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        for resident in (False, True):
            storage = comm.allocate(5, axis, dtype, "cpu", resident=resident)
            full = storage.full
            assert (storage.shard.numel(), full.numel()) == (5, 5 * size)
            for step in range(2):
                storage.open("write storage")
                storage.shard.copy_(case.mine(5, dtype).roll(step))
                storage.close()
                storage.gather("gather storage").wait()
                assert storage.full is full
                assert bits(full) == bits(torch.cat([each.roll(step) for each in case.everyone(5, dtype)]))
                storage.release()
                assert storage.is_live == (resident or size == 1)
            storage.gather("gather and discard")
            storage.release()
    assert comm.ledger.resident("gathered") == 0


def check_the_rest(case: Case) -> None:
    size, axis, comm = case.axis.size, case.axis, case.comm
    comm.barrier(axis, "barrier")
    objects = comm.all_gather_object({"index": axis.index, "text": "x" * 10}, axis, "objects")
    assert [item["index"] for item in objects] == ([axis.index] * size if case.alike else list(range(size)))
    comm.ledger.reset()
    empty = torch.zeros(0)
    comm.all_gather(empty, empty, axis, "nothing").wait()
    comm.reduce_scatter(empty, empty, axis, "nothing").wait()
    comm.all_reduce(empty, axis, "nothing").wait()
    comm.broadcast(empty, axis, 0, "nothing").wait()
    comm.scatter(empty, empty, axis, 0, "nothing").wait()
    comm.allocate(0, axis, torch.float32, "cpu", resident=False).gather("nothing").wait()
    assert comm.ledger.snapshot()["calls"] == {}


def check_counters(case: Case) -> None:
    size, axis, comm = case.axis.size, case.axis, case.comm
    comm.ledger.reset()
    halves = torch.zeros(3 * size, dtype=torch.bfloat16)
    comm.all_gather(halves, halves[:3].clone(), axis, "x").wait()
    comm.reduce_scatter(halves[:3].clone(), halves, axis, "x").wait()
    comm.all_reduce(torch.zeros(7), axis, "x").wait()
    comm.fence(axis, "x").wait()
    comm.broadcast(torch.zeros(5, dtype=torch.bool), axis, 0, "x").wait()
    comm.scatter(torch.zeros(2), torch.zeros(2 * size) if axis.index == 0 else None, axis, 0, "x").wait()
    comm.all_gather_object(None, axis, "x")
    comm.barrier(axis, "x")
    found = comm.ledger.snapshot()
    expected = {"all_gather": 6 * size, "reduce_scatter": 6 * size, "all_reduce": 28, "broadcast": 5, "scatter": 8 * size}
    expected |= {"all_gather_object": 0, "barrier": 0, "fence": 0}
    assert found["bytes"] == (expected if size > 1 else {})
    assert found["calls"] == (dict.fromkeys(expected, 1) if size > 1 else {})


def check_everything(case: Case) -> None:
    for dtype in CARRIED:
        for length in LENGTHS:
            check_all_gather(case, length, dtype)
            check_one_to_all(case, length, dtype)
    for dtype in SUMMED:
        for length in LENGTHS:
            check_sums(case, length, dtype)
    check_order(case)
    check_storage(case)
    check_the_rest(case)
    check_counters(case)


@ranks(1, 2, 3)
@pytest.mark.parametrize("share", [False, "required"], ids=["process group", "shared memory"])
def test_transports(world_size: int, share: bool | Literal["required"]) -> None:
    axis = Axis("data", tuple(range(world_size)), dist.get_rank())
    comm = Comm(axis, share=share)
    check_everything(Case(comm, axis))
    comm.close()


@ranks(3)
@pytest.mark.parametrize("share", [False, "required"], ids=["process group", "shared memory"])
def test_scattered_sums_of_16_bit_numbers_are_rounded_once(share: bool | Literal["required"]) -> None:
    axis = Axis("data", (0, 1, 2), dist.get_rank())
    comm = Comm(axis, share=share)
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        full = torch.full((12,), large if axis.index == 0 else 1.0, dtype=dtype)
        out = torch.zeros(4, dtype=dtype)
        comm.reduce_scatter(out, full, axis, "x").wait()
        assert out.tolist() == [large + 2] * 4  # adding one after the other would lose both ones
    comm.close()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_null_transport(size: int) -> None:
    for rank in range(size):
        axis = Axis("data", tuple(range(size)), rank)
        check_everything(Case(Comm(axis, transport=NullTransport()), axis, alike=True))


@ranks(4)
@pytest.mark.parametrize("share", [False, "required"], ids=["process group", "shared memory"])
def test_axes_of_a_grid(share: bool | Literal["required"]) -> None:
    mesh = DataMesh.grid(dist.get_rank(), 4, 2)
    comm = Comm(mesh.data, share=share)
    for axis in (mesh.shard, mesh.replicate, mesh.data):
        case = Case(comm, axis)
        check_all_gather(case, 7, torch.float32)
        check_sums(case, 7, torch.float32)
        check_one_to_all(case, 7, torch.int16)
        check_order(case)
        check_storage(case)
    found = comm.ledger.snapshot()["axes"]
    assert set(found) == {"shard", "replicate", "data"}
    comm.close()


@ranks(3)
def test_a_group_that_is_not_the_default_one() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank != 1:
        axis = Axis("data", (0, 2), rank)
        comm = Comm(axis, group=group)
        check_everything(Case(comm, axis))
        comm.close()
    dist.barrier()


@ranks(2)
def test_several_at_once_and_one_after_another() -> None:
    axis = Axis("data", (0, 1), dist.get_rank())
    first, second = Comm(axis), Comm(axis)
    for step in range(3):
        for number, comm in enumerate((first, second)):
            tensor = torch.full((3,), float(axis.index + 10 * number + step))
            comm.all_reduce(tensor, axis, "sum").wait()
            assert tensor.tolist() == [20.0 * number + 2 * step + 1] * 3
    first.close()
    check_order(Case(second, axis))
    third = Comm(axis)
    second.close()
    check_order(Case(third, axis))
    third.close()
    for comm in (first, second, third):
        with pytest.raises(RuntimeError, match="this Comm is closed"):
            comm.barrier(axis, "x")


@ranks(2)
def test_large_objects() -> None:
    axis = Axis("data", (0, 1), dist.get_rank())
    comm = Comm(axis)
    mine = bytes([axis.index + 1]) * ((9 << 20) + axis.index)
    for _ in range(2):
        found = comm.all_gather_object(mine, axis, "objects of 9 MiB")
        assert [(item[0], len(item)) for item in found] == [(1, 9 << 20), (2, (9 << 20) + 1)]
    comm.close()
