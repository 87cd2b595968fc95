"""The start of the process group: every way in, and every way in which it can go wrong, within a time limit."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import bootstrap, get_local_rank, get_rank, get_world_size, init_distributed, is_initialized
from shardwise.comm.bootstrap import find_placement
from shardwise.comm.meeting import Placement, file_opener, meet, tcp_opener
from shardwise.errors import LaunchError

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
VARIABLES = (*TWO, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_placement_comes_from_the_variables_and_arguments_win() -> None:
    assert find_placement({}) == Placement(0, 1)
    assert find_placement({"WORLD_SIZE": "1"}) == Placement(0, 1)
    assert find_placement({"RANK": "0", "WORLD_SIZE": "1"}) == Placement(0, 1)
    assert find_placement({"MASTER_ADDR": "host", "MASTER_PORT": "1"}) == Placement(0, 1)
    assert find_placement(TWO) == Placement(1, 2, "127.0.0.1", 29500)
    assert find_placement(TWO, rank=2, world_size=4, port=7) == Placement(2, 4, "127.0.0.1", 7)
    agent = {**TWO, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert find_placement(agent) == Placement(1, 2, "127.0.0.1", 29500, agent=True, attempt="3")
    assert not find_placement(agent, port=7).agent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": None}, ["RANK=1", "WORLD_SIZE is not"]),
        ({"RANK": None}, ["WORLD_SIZE=2", "RANK is not"]),
        ({"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "-1"}, ["RANK=-1"]),
        ({"RANK": "one"}, ["RANK=one"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"MASTER_ADDR": None}, ["RANK=1", "WORLD_SIZE=2", "MASTER_ADDR not"]),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["MASTER_ADDR and MASTER_PORT"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT=http"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": "1"}, ["LOCAL_RANK=1"]),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(change: dict[str, str | None], words: list[str]) -> None:
    environment = {name: value for name, value in {**TWO, **change}.items() if value is not None}
    with pytest.raises(LaunchError) as caught:
        find_placement(environment)
    for word in words:
        assert word in str(caught.value)


def test_without_a_launcher_the_world_is_one_rank_and_no_port_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (is_initialized(), get_rank(), get_world_size(), get_local_rank()) == (False, 0, 1, 0)
    init_distributed(timeout=5.0)
    group = dist.group.WORLD
    total = torch.full((3,), 2.0)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    assert "mpi4py" not in sys.modules
    assert (is_initialized(), get_rank(), get_world_size(), get_local_rank(), dist.get_backend()) == (True, 0, 1, 0, "gloo")
    init_distributed("gloo", rank=3, world_size=9)  # a group that exists is taken as it is
    assert dist.group.WORLD is group
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_local_rank() == 3
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(LaunchError, match="LOCAL_RANK=x"):
        get_local_rank()


def test_other_libraries_ways_of_calling(tmp_path: Path) -> None:
    """DeepSpeed's argument names, as Accelerate and Lightning pass them."""
    init_distributed(
        dist_backend=None,
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=5),
        config={},
        dist_init_required=True,
        verbose=False,
    )
    dist.destroy_process_group()
    init_distributed("gloo", distributed_port=29500, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert is_initialized()


def test_a_group_that_must_exist() -> None:
    with pytest.raises(LaunchError, match="dist_init_required=False"):
        init_distributed(dist_init_required=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dist_backend": "nccll"}, "nccll"),
        ({"dist_backend": "cpu:gloo,cuda:nope"}, "nope"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": timedelta(seconds=-1)}, "timeout"),
        ({"init_method": "tcp://no-port", "rank": 0, "world_size": 2}, "tcp://host:port"),
        ({"init_method": "odd://x", "rank": 0, "world_size": 2}, "odd"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        init_distributed(**options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator that nccl may serve")
def test_nccl_without_a_gpu_is_explained() -> None:
    with pytest.raises(LaunchError, match="nccl"):
        init_distributed("nccl")


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int, address: str = "127.0.0.1") -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def refused_within(seconds: float, words: list[str]) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        init_distributed(timeout=1.0)
    assert time.monotonic() - began < seconds
    for word in words:
        assert word in str(caught.value)


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    as_rank(monkeypatch, 1, free_port)
    refused_within(10, ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port}", "nothing listens there"])


def test_a_name_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    as_rank(monkeypatch, 1, free_port, "no-such-host.invalid")
    refused_within(20, ["MASTER_ADDR=no-such-host.invalid", "cannot be resolved"])


def test_something_else_answers_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own client would wait for ever here."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        as_rank(monkeypatch, 1, mute.getsockname()[1])
        refused_within(15, ["MASTER_PORT=", "does not answer as the store of a job"])


def test_a_busy_port_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        as_rank(monkeypatch, 0, port)
        refused_within(10, [f"MASTER_PORT={port} is in use"])


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    as_rank(monkeypatch, 0, free_port)
    refused_within(10, ["rank 0 waited in vain for rank 1", "WORLD_SIZE=2"])


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """What each call returned or raised, made side by side."""
    results: list[object] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            results[number] = calls[number]()
        except LaunchError as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_that_were_told_different_world_sizes(tmp_path: Path) -> None:
    def come(rank: int, world: int) -> object:
        place = Placement(rank, world)
        return meet(file_opener(str(tmp_path / "store"), place), place, time.monotonic() + 2)

    first, second = in_threads(lambda: come(0, 3), lambda: come(1, 2))
    assert "waited in vain for rank 2" in str(first)
    assert "WORLD_SIZE=3 as on rank 0" in str(second)
    assert "WORLD_SIZE=2 on rank 1" in str(second)


def test_ranks_meet_again_on_a_store_that_lives_on(tmp_path: Path) -> None:
    """The second meeting sees nothing of the first, although the keys of the first are still there."""
    places = [Placement(rank, 2) for rank in (0, 1)]

    def come(place: Placement) -> Any:
        return meet(file_opener(str(tmp_path / "store"), place), place, time.monotonic() + 10)

    first = in_threads(*[lambda place=place: come(place) for place in places])
    first[0].set("address", "old")  # pyright: ignore[reportAttributeAccessIssue]
    assert first[1].get("address") == b"old"  # pyright: ignore[reportAttributeAccessIssue]
    second = in_threads(*[lambda place=place: come(place) for place in places])
    assert not second[1].check(["address"])  # pyright: ignore[reportAttributeAccessIssue]


def test_a_store_on_one_machine_is_not_offered_to_the_network(free_port: int) -> None:
    place = Placement(0, 1, "127.0.0.1", free_port)
    store = tcp_opener(place)(time.monotonic() + 10)
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert f"0100007F:{free_port:04X}" in listening
    assert not any(
        line.split()[1].endswith(f":{free_port:04X}") for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]
    )
    store.set("key", "value")
    assert tcp_opener(replace(place, rank=1))(time.monotonic() + 10).get("key") == b"value"


def test_the_module_is_reached_through_comm() -> None:
    assert bootstrap.init_distributed is init_distributed
