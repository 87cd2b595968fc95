"""Ranks that ask for different things, or stop: a named error on every rank within seconds, never a hang or mixed data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import Comm, Handle
from shardwise.errors import DivergenceError, PeerLostError, StallError, UsageError
from shardwise.mesh import Axis
from tests.harness import ranks

LIMIT_S = 10.0


SHARE = pytest.mark.parametrize(
    "share", [pytest.param(True, id="shared memory"), pytest.param(False, id="sockets", marks=pytest.mark.slow)]
)


def start(**options: Any) -> tuple[Comm, Axis]:
    axis = Axis("data", tuple(range(dist.get_world_size())), dist.get_rank())
    return Comm(axis, **options), axis


def use(comm: Comm, axis: Axis, *names: str) -> None:
    """One collective after the other, all of the same length, so that only the names tell them apart."""
    for name in names:
        tensor = torch.full((4,), float(axis.index))
        comm.all_reduce(tensor, axis, name).wait()
        assert tensor.tolist() == [sum(range(axis.size))] * 4


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


@contextmanager
def soon(error: type[Exception], match: str) -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(error, match=match):
        yield
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("warm", [0, 5], ids=["first step", "after five steps"])
@SHARE
@ranks(2, 3)
def test_different_names_of_equal_length(warm: int, share: bool) -> None:
    comm, axis = start(share=share)
    for _ in range(warm):
        use(comm, axis, "embed", "expert 0", "head")
    expert = 1 if axis.index == axis.size - 1 else 0
    with soon(DivergenceError, r"rank.? 0.*: asks for 'expert 0' .*; rank . *: asks for 'expert 1'"):
        use(comm, axis, "embed", f"expert {expert}", "head")
    with pytest.raises(UsageError, match="cannot be used again: found the reason: the ranks of axis 'data' ask for"):
        use(comm, axis, "embed")
    comm.close()


@pytest.mark.parametrize("warm", [0, 5], ids=["first step", "after five steps"])
@SHARE
@ranks(2)
def test_the_same_in_another_order(warm: int, share: bool) -> None:
    comm, axis = start(share=share)
    for _ in range(warm):
        use(comm, axis, "a", "b", "c")
    with soon(DivergenceError, r"rank 0: asks for 'b' .*; rank 1: asks for 'c'"):
        use(comm, axis, "a", *("bc" if axis.index == 0 else "cb"))


@SHARE
@ranks(2, 3)
def test_one_rank_skips_a_collective(share: bool) -> None:
    comm, axis = start(share=share)
    for _ in range(3):
        use(comm, axis, "a", "b", "c")
    with soon(DivergenceError, r"rank 0: asks for 'c' .*asks for 'b' "):
        use(comm, axis, "a", *(["b"] if axis.index else []), "c", "a", "b")


@pytest.mark.parametrize("warm", [0, 5], ids=["first step", "after five steps"])
@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "sockets"])
@ranks(2, 3)
def test_two_engines_of_one_process_group_used_in_different_orders(warm: int, share: bool) -> None:
    """Same names, same lengths. Over sockets the data of one would arrive in the other; through memory each waits for ever."""
    first, axis = start(share=share)
    second, _ = start(share=share)
    for step in range(warm):
        for comm in (first, second) if step % 2 else (second, first):
            use(comm, axis, "embed", "head")
    order = (second, first) if axis.index == axis.size - 1 else (first, second)
    mixed = r"for 'embed' \(all_reduce of 4 x float32\).*for 'embed' .* engine 2 of this process group"
    crossed = r"ranks use two engines in different orders: found rank \d waits for 'embed' .*; rank \d waits for 'embed' "
    # Over sockets it depends on who looks up first whether they are seen to ask, or to wait, for different things.
    with soon(DivergenceError, crossed if share else f"{mixed}|{crossed}"):
        for comm in order:
            use(comm, axis, "embed", "head")
    # What a rank that has closed both would be seen to do is another error.
    store, told = dist.distributed_c10d._get_default_store(), f"told {warm} {share} {axis.size}"
    store.add(told, 1)
    until(lambda: store.add(told, 0) >= axis.size)
    if not share:
        for comm in order:
            with pytest.raises(UsageError, match="cannot be used again: found the reason: "):
                use(comm, axis, "embed")
    for comm in order:
        comm.close()


@ranks(2, 3)
def test_two_engines_used_in_one_order_with_long_pauses_are_no_error() -> None:
    """A rank that comes late lets the others look around: at what they have let pass, and at what they have not come to."""
    first, axis = start()
    second, _ = start()
    for late in range(axis.size):
        if axis.index == late:
            time.sleep(2.5)  # the others look up once a second
        for comm in (first, second, second, first):
            use(comm, axis, "embed", "head")
    second.close()
    first.close()


@ranks(2)
@pytest.mark.parametrize("share", [True, False], ids=["shared memory", "sockets"])
def test_an_engine_goes_on_when_another_of_its_process_group_is_closed(share: bool) -> None:
    first, axis = start(share=share)
    second, _ = start(share=share)
    for comm in (first, second, first, second):
        use(comm, axis, "a", "b")
    # Not at the same place of the order on every rank: what closes sends nothing.
    if axis.index:
        first.close()
    use(second, axis, "a", "b")
    first.close()
    third, _ = start(share=share)
    for comm in (second, third) * 3:
        use(comm, axis, "a", "b")
    third.close()
    second.close()


def every_operation(comm: Comm, axis: Axis) -> dict[str, Callable[[], Handle]]:
    size = axis.size
    return {
        "all_gather": lambda: comm.all_gather(torch.zeros(3 * size), torch.zeros(3), axis, "x"),
        "reduce_scatter": lambda: comm.reduce_scatter(torch.zeros(3), torch.zeros(3 * size), axis, "x"),
        "all_reduce": lambda: comm.all_reduce(torch.zeros(3), axis, "x"),
        "broadcast": lambda: comm.broadcast(torch.zeros(3), axis, 1, "x"),
        "scatter": lambda: comm.scatter(torch.zeros(3), torch.zeros(3 * size) if axis.index == 1 else None, axis, 1, "x"),
    }


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter"])
@SHARE
@ranks(2)
def test_a_rank_that_waits_in_any_operation_learns_that_another_has_closed(operation: str, tmp_path: Path, share: bool) -> None:
    """What is in flight on one rank must not keep it from looking up, whatever the backend does to carry it out."""
    comm, axis = start(share=share)
    begin = every_operation(comm, axis)[operation]
    for _ in range(3):
        begin().wait()
    if axis.index == 0:
        with soon(DivergenceError, f"rank 1 has closed its engine while others go on: found rank 0 waits for 'x' .{operation}"):
            begin().wait()
        (tmp_path / "raised").touch()
    else:
        comm.close()
        until((tmp_path / "raised").exists)  # and stays in the process group


@SHARE
@ranks(2)
def test_one_rank_goes_a_step_further_than_one_that_closes(share: bool) -> None:
    comm, axis = start(share=share)
    for _ in range(3):
        use(comm, axis, "a", "b")
    if axis.index == 1:
        with soon(DivergenceError, "rank 0 has closed its engine while others go on: found rank 1 waits for 'a'"):
            use(comm, axis, "a", "b")
    comm.close()


@SHARE
@ranks(2)
def test_one_rank_evaluates_while_the_other_trains(share: bool) -> None:
    comm, axis = start(share=share)
    for phase in ("forward", "inference", "forward", "inference"):
        comm.set_phase(phase)
        use(comm, axis, "a", "b", "c")
    comm.set_phase("forward" if axis.index else "inference")
    with soon(DivergenceError, r"rank 0: .*phase 'inference'\); rank 1: .*phase 'forward'"):
        use(comm, axis, "a", "b", "c")


@SHARE
@ranks(2)
def test_different_lengths_of_one_name(share: bool) -> None:
    comm, axis = start(share=share)
    use(comm, axis, "a")
    with soon(DivergenceError, r"rank 0: asks for 'b' \(all_reduce of 3 x float32\); rank 1: .* 4 x float32"):
        comm.all_reduce(torch.zeros(3 + axis.index), axis, "b").wait()


@SHARE
@ranks(2)
def test_broadcasts_from_different_sources(share: bool) -> None:
    comm, axis = start(share=share)
    with soon(DivergenceError, r"rank 0: .*from index 0\); rank 1: .*from index 1\)"):
        comm.broadcast(torch.zeros(3), axis, axis.index, "edit").wait()


@SHARE
@ranks(4)
def test_only_the_ranks_of_an_axis_must_agree(share: bool) -> None:
    rank = dist.get_rank()
    data = Axis("data", (0, 1, 2, 3), rank)
    pair = Axis("pair", (0, 1) if rank < 2 else (2, 3), rank)
    comm = Comm(data, share=share)
    for _ in range(2):  # the pairs ask for different things, and that is their affair
        tensor = torch.ones(3 + rank // 2)
        comm.all_reduce(tensor, pair, f"pair {rank // 2}").wait()
        assert tensor[0] == 2
    comm.all_reduce(torch.ones(2), data, "all").wait()
    if rank < 2:
        with soon(DivergenceError, r"of axis 'pair' .*rank 0: asks for 'x 0' .*; rank 1: asks for 'x 1'"):
            comm.all_reduce(torch.ones(1), pair, f"x {rank}").wait()
    else:
        with soon(DivergenceError, r"rank . has stopped: found the ranks of axis 'pair'"):
            comm.all_reduce(torch.ones(2), data, "all").wait()


@SHARE
@ranks(2)
def test_a_stage_that_one_rank_never_reaches(tmp_path: Path, share: bool) -> None:
    """The watchdog's error on the rank that waits, and then on the other when it comes."""
    stalled, told = tmp_path / "stalled", tmp_path / "told"
    comm, axis = start(share=share, watchdog_s=2.0)
    for _ in range(2):
        use(comm, axis, "gather layers.2", "gather layers.3")
    use(comm, axis, "gather layers.2")
    if axis.index == 0:
        with soon(StallError, r"'gather layers.3' .* did not finish within 2 s: expected rank 1 to take part, found rank 0: "):
            use(comm, axis, "gather layers.3")
        stalled.touch()
        until(told.exists)
    else:
        until(stalled.exists)
        with soon(StallError, "rank 0 has stopped: found 'gather layers.3'"):
            use(comm, axis, "gather layers.3")
        told.touch()


def die_alone(victim: int, names: list[str], warm: int, share: bool) -> None:
    comm, axis = start(share=share)
    for _ in range(warm):
        use(comm, axis, "a", "b")
    dist.barrier()
    if axis.index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with soon(PeerLostError, f"rank {victim}|'a'"):
        use(comm, axis, *names)


@SHARE
@pytest.mark.parametrize("warm", [pytest.param(0, marks=pytest.mark.slow), 3], ids=["first step", "after three steps"])
@ranks(2, 3, dies=[1])
def test_a_rank_is_killed(warm: int, share: bool) -> None:
    die_alone(1, ["a", "b"], warm, share)


@SHARE
@pytest.mark.parametrize("warm", [pytest.param(0, marks=pytest.mark.slow), 3], ids=["first step", "after three steps"])
@ranks(2, 3, dies=[0])
def test_the_rank_with_the_side_channel_is_killed(warm: int, share: bool) -> None:
    die_alone(0, ["a", "b"], warm, share)


@SHARE
@ranks(2, 3)
def test_a_comm_that_is_dropped_without_closing_leaves_nobody_behind(share: bool) -> None:
    for _ in range(8):
        comm, axis = start(share=share)
        assert comm.all_gather_object(axis.index, axis, "objects") == list(range(axis.size))
        comm.barrier(axis, "end")
        del comm


@SHARE
@ranks(2)
def test_nothing_is_left_of_many_comms(share: bool) -> None:
    def use_and_close() -> None:
        comm, axis = start(share=share)
        use(comm, axis, "a")
        comm.all_reduce(torch.ones(1), Axis("single", (axis.rank,), axis.rank), "b").wait()
        comm.close()

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0

    use_and_close()
    before = open_files(), len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 0
    for _ in range(20):
        use_and_close()
    after = open_files(), len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 0
    assert after == before


STALLED = """
import sys, time, torch, torch.distributed as dist
from shardwise.comm import Comm, Handle
from shardwise.mesh import Axis

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
axis = Axis("data", (0, 1), rank)
comm = Comm(axis, watchdog_s=1.0)
comm.all_reduce(torch.ones(1), axis, "a").wait()
comm.all_reduce(torch.ones(1), axis, "a").wait()
if rank == 1:
    print("sleeps", flush=True)
    time.sleep(1000)
comm.all_reduce(torch.ones(1), axis, "a").wait()
"""


@pytest.mark.slow
def test_a_process_whose_collective_never_ended_can_end(tmp_path: Path) -> None:
    """The interpreter destroys process groups when it shuts down, and gloo waits there for what is in flight."""
    command = [sys.executable, "-c", STALLED]
    output = tmp_path / "output"
    with output.open("w") as file:
        processes = [
            subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=file, stderr=file) for rank in (0, 1)
        ]
        try:
            code = processes[0].wait(timeout=50)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert code == 1
    assert "StallError: 'a' (all_reduce of 1 x float32) on axis 'data' did not finish within 1 s" in output.read_text()
