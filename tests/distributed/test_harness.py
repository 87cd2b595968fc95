"""The harness itself: what passes, what fails, and what the reader of a failure is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, ranks, run_on_ranks


@ranks(1, 2, 3)
def test_group_and_seed(world_size: int) -> None:
    assert dist.get_backend() == "gloo"
    assert dist.get_world_size() == world_size
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2
    assert torch.initial_seed() == 0


@ranks(2)
@pytest.mark.parametrize("value", [1.5, "text"])
def test_parameters_and_fixtures_reach_every_rank(value: object, tmp_path: Path) -> None:
    assert value in (1.5, "text")
    (tmp_path / f"{dist.get_rank()}").write_text(str(value))
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def identity(scale: float) -> tuple[int, int, int, torch.Tensor]:
    return dist.get_rank(), os.getpid(), torch.get_num_threads(), torch.full((2,), scale)


def test_results_come_back_and_workers_are_reused() -> None:
    first, second = run_on_ranks(2, identity, 3.0), run_on_ranks(2, identity, scale=4.0)
    assert [rank for rank, *_ in first] == [0, 1]
    assert {pid for _, pid, *_ in first} == {pid for _, pid, *_ in second}
    assert os.getpid() not in {pid for _, pid, *_ in first}
    assert all(threads == 1 for _, _, threads, _ in first)
    assert torch.equal(second[1][3], torch.full((2,), 4.0))


def add_up_then_fail(rank: int) -> None:
    print(f"a word from rank {dist.get_rank()}")
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    assert dist.get_rank() != rank or total.item() == 5.0, "the sum is wrong"
    dist.all_reduce(total)


def test_first_failing_rank_comes_first() -> None:
    with pytest.raises(RanksFailed) as info:
        run_on_ranks(2, add_up_then_fail, 1)
    text = str(info.value)
    assert text.index("rank 1 raised AssertionError") < text.index("rank 0 raised")
    assert "the sum is wrong" in text
    assert "2.0 == 5.0" in text  # pytest explains the assertion inside the worker
    assert "a word from rank 1" in text
    assert [report.kind for report in info.value.reports] == ["raised", "raised"]


def test_worker_survives_an_ordinary_failure() -> None:
    before = {pid for _, pid, *_ in run_on_ranks(2, identity, 1.0)}
    with pytest.raises(RanksFailed):
        run_on_ranks(2, add_up_then_fail, 0)
    assert {pid for _, pid, *_ in run_on_ranks(2, identity, 1.0)} == before


def wait_for_a_rank_that_left() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_hang_names_the_rank_that_did_not_finish() -> None:
    before = {pid for _, pid, *_ in run_on_ranks(2, identity, 1.0)}
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="finished without failure: rank 1") as info:
        run_on_ranks(2, wait_for_a_rank_that_left, timeout=3.0)
    assert time.monotonic() - started < 10.0
    assert [report.kind for report in info.value.reports] == ["hung", "passed"]
    assert "rank 0 still ran at the time limit of 3 s" in str(info.value)
    assert "in wait_for_a_rank_that_left" in str(info.value)  # the stack of the rank that hangs
    assert "in _serve" not in str(info.value)
    after = {pid for _, pid, *_ in run_on_ranks(2, identity, 1.0)}
    assert len(after) == 2
    assert before != after


def fail_while_a_peer_sleeps() -> None:
    if dist.get_rank() == 1:
        raise ValueError("gone early")
    time.sleep(30.0)


@pytest.mark.slow
def test_peers_of_a_failure_do_not_run_to_the_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="gone early") as info:
        run_on_ranks(2, fail_while_a_peer_sleeps)
    assert time.monotonic() - started < 15.0
    assert [report.kind for report in info.value.reports] == ["hung", "raised"]
    assert "rank 0 still ran 5 s after the first failure" in str(info.value)
    assert "in fail_while_a_peer_sleeps" in str(info.value)


def kill_one(rank: int, number: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    try:
        dist.barrier()
    except RuntimeError:
        return "saw its peer go"
    return "saw nothing"


def test_death_names_rank_and_signal() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 died with signal 9 \(SIGKILL\)") as info:
        run_on_ranks(2, kill_one, 1, signal.SIGKILL)
    assert info.value.reports[1].kind == "died"
    assert len(run_on_ranks(2, identity, 1.0)) == 2


def test_death_that_is_meant_is_no_failure() -> None:
    assert run_on_ranks(2, kill_one, 1, signal.SIGKILL, dies=[1]) == ["saw its peer go", None]
    with pytest.raises(RanksFailed, match="rank 0 did not die, but should have"):
        run_on_ranks(2, identity, 1.0, dies=[0])


def test_disposable_workers_are_thrown_away() -> None:
    thrown = {pid for _, pid, *_ in run_on_ranks(2, identity, 1.0, disposable=True)}
    assert thrown.isdisjoint(pid for _, pid, *_ in run_on_ranks(2, identity, 1.0))


def warn() -> None:
    warnings.warn("take care", UserWarning, stacklevel=1)


def test_warnings_are_errors_in_workers() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: take care"):
        run_on_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:take care")
def test_filters_of_the_test_hold_in_workers() -> None:
    run_on_ranks(1, warn)


def leave_behind(what: str) -> None:
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "environment":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "hook":
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    elif what == "thread":
        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=True).start()
    else:
        Unfinalizable()


class Unfinalizable:
    def __del__(self) -> None:
        raise ValueError("cannot be finalized")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "default dtype changed: torch.float32 -> torch.float64"),
        ("environment", "LEFT_BEHIND: None -> '1'"),
        ("hook", "_global_forward_hooks: 0 -> 1"),
        ("thread", "left-behind"),
        ("finalizer", "cannot be finalized"),
    ],
)
def test_what_is_left_behind_fails_the_test_and_not_the_next(what: str, message: str) -> None:
    with pytest.raises(RanksFailed, match="rank 0 left its worker unclean") as info:
        run_on_ranks(1, leave_behind, what)
    assert message in str(info.value)
    assert torch.equal(run_on_ranks(1, identity, 1.0)[0][3], torch.ones(2))


@ranks(2, group=False)
def test_group_can_be_left_to_the_test() -> None:
    assert not dist.is_initialized()


@ranks(2)
def skip_here() -> None:
    pytest.skip("not on this machine")


def test_skip_is_seen_by_the_session() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        skip_here()


def test_only_top_level_functions() -> None:
    def inner() -> None: ...

    with pytest.raises(ValueError, match="top-level function"):
        ranks(2)(inner)
    with pytest.raises(ValueError, match="world sizes"):
        ranks(inner)  # type: ignore[arg-type]


SESSION = """
import os, time
import torch.distributed as dist
from tests.harness import run_on_ranks
from tests.distributed.test_harness import announce_and_sleep
print("started", flush=True)
run_on_ranks(2, announce_and_sleep, {path!r})
"""


def announce_and_sleep(directory: str) -> None:
    (Path(directory) / f"{os.getpid()}").touch()
    time.sleep(60.0)


@pytest.mark.slow
def test_killed_session_leaves_no_workers(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SESSION.format(path=str(tmp_path))]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL) as session:
        _until(lambda: len(list(tmp_path.iterdir())) == 2, 60.0)
        session.kill()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    _until(lambda: not any(_alive(pid) for pid in pids), 10.0)


def _until(condition: object, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
