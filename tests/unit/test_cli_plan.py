"""From a job to commands, ports and numbers of processes: nothing is started here."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from shardwise.cli.hardware import accelerator_count, default_processes, usable_cores
from shardwise.cli.plan import Job, Machine, Program, describe, rank_commands
from shardwise.cli.ports import HeldPort
from shardwise.errors import LaunchError


def job(*slots: int, **options: object) -> Job:
    machines = tuple(Machine(f"host{number}", count) for number, count in enumerate(slots))
    return Job(Program("script", "train.py", ("a b",)), machines, "127.0.0.1", 1234, cores=8, **options)  # pyright: ignore


def test_ranks_are_numbered_along_the_machines() -> None:
    commands = rank_commands(job(2, 3), {})
    seen = [(c.rank, c.local_rank, c.machine, c.variables["NODE_RANK"], c.variables["LOCAL_WORLD_SIZE"]) for c in commands]
    assert seen == [(0, 0, "host0", "0", "2"), (1, 1, "host0", "0", "2"), *[(2 + n, n, "host1", "1", "3") for n in range(3)]]
    assert {c.variables["WORLD_SIZE"] for c in commands} == {"5"}
    assert {(c.variables["MASTER_ADDR"], c.variables["MASTER_PORT"]) for c in commands} == {("127.0.0.1", "1234")}
    assert [c.variables["OMP_NUM_THREADS"] for c in commands] == ["4", "4", "2", "2", "2"]
    assert "GLOO_SOCKET_IFNAME" not in commands[0].variables  # ranks on two machines do not meet on the loopback


def test_defaults_give_way_to_what_the_user_has_set() -> None:
    variables = rank_commands(job(4), {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0"})[0].variables
    assert not {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"} & set(variables)
    assert rank_commands(job(4, omp_threads=3), {"OMP_NUM_THREADS": "7"})[0].variables["OMP_NUM_THREADS"] == "3"
    assert rank_commands(job(16), {})[0].variables["OMP_NUM_THREADS"] == "1"
    extra = {"OMP_NUM_THREADS": "2", "MINE": "x"}
    variables = rank_commands(job(4, omp_threads=3, extra=extra), {})[0].variables
    assert (variables["OMP_NUM_THREADS"], variables["MINE"]) == ("2", "x")


def test_the_environment_of_a_rank() -> None:
    command = rank_commands(job(2), {})[1]
    environment = command.environment({"HOME": "/h", "RANK": "9", "TORCHELASTIC_RUN_ID": "x"})
    assert (environment["HOME"], environment["RANK"]) == ("/h", "1")
    assert "TORCHELASTIC_RUN_ID" not in environment


def test_the_description_is_made_of_shell_lines() -> None:
    text = describe(rank_commands(job(1, extra={"NOTE": "it's"}), {}))
    assert text.startswith("# rank 0 on host0\nenv RANK=0 LOCAL_RANK=0")
    assert "NOTE='it'\"'\"'s'" in text
    assert text.endswith("train.py 'a b'")
    assert sys.executable in text


def test_held_ports_are_distinct_and_can_still_be_listened_on() -> None:
    with HeldPort() as one, HeldPort() as two:
        assert one.port != two.port
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", one.port))
            server.listen()
            with pytest.raises(LaunchError, match=f"port {one.port} is in use"):
                HeldPort(one.port)
        with pytest.raises(LaunchError, match=f"port {two.port} is in use"):
            HeldPort(two.port)
        port = one.port
    with HeldPort(port) as again:
        assert again.port == port


def test_cores_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() >= 1
    assert accelerator_count(tmp_path) == 0
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("shardwise.cli.hardware._COUNT", "print('a warning'); print(3)")
    assert accelerator_count(tmp_path) == 3
    monkeypatch.setattr("shardwise.cli.hardware._COUNT", "raise RuntimeError('broken driver')")
    assert accelerator_count(tmp_path) == 0
    for accelerators, cores, expected in [(0, 1, 1), (0, 2, 2), (0, 64, 2), (1, 64, 1), (8, 2, 8)]:
        monkeypatch.setattr("shardwise.cli.hardware.accelerator_count", lambda value=accelerators: value)
        monkeypatch.setattr("shardwise.cli.hardware.usable_cores", lambda value=cores: value)
        assert default_processes() == expected


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("x y", None)])
def test_a_container_may_grant_fewer_cores(tmp_path: Path, text: str, cores: float | None) -> None:
    from shardwise.cli.hardware import _cpu_quota

    (tmp_path / "cpu.max").write_text(text)
    assert _cpu_quota(tmp_path / "cpu.max") == cores
    assert _cpu_quota(tmp_path / "missing") is None
