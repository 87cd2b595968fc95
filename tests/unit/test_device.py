"""Device choice, backends and memory readings, on whatever machine this is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise import device as devices
from shardwise.device import (
    available_bytes,
    backend_for,
    check_unshared,
    choose_device,
    pin_memory,
    read_memory,
    reset_peak_memory,
    use_device,
)
from shardwise.errors import LaunchError

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int, current: int = 0) -> None:
    """A machine with `count` accelerators."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)


def test_a_machine_without_accelerators_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_device(7) == CPU
    use_device(CPU)


def test_each_local_rank_has_its_own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", 4, current=2)
    assert [choose_device(rank) for rank in range(4)] == [torch.device("cuda", index) for index in range(4)]
    assert choose_device() == torch.device("cuda", 2)


def test_more_ranks_than_accelerators_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", 2)
    with pytest.raises(LaunchError, match="local rank 2 has no cuda device: expected at most 2 ranks"):
        choose_device(2)


def test_the_only_accelerator_that_a_rank_sees_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers that give each rank one device hide the others; the local ranks still count up."""
    pretend(monkeypatch, "cuda", 1)
    assert [choose_device(rank) for rank in range(4)] == [torch.device("cuda", 0)] * 4


@pytest.mark.parametrize(
    ("identities", "shared"),
    [(["a", "b", "c"], ""), (["a", "b", "a"], "ranks 4, 6 "), (["", "", ""], ""), (["a", "", "a"], "ranks 4, 6 ")],
)
def test_ranks_on_one_accelerator_are_told(monkeypatch: pytest.MonkeyPatch, identities: list[str], shared: str) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(uuid=identities[0]) if identities[0] else SimpleNamespace()

    def exchange(own: str) -> list[str]:
        assert own == identities[0]
        return identities

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_device_properties=properties))
    device = torch.device("cuda", 0)
    if shared:
        with pytest.raises(LaunchError, match=f"{shared}would compute on the same cuda device.*let each rank see"):
            check_unshared(device, (4, 5, 6), exchange)
    else:
        check_unshared(device, (4, 5, 6), exchange)
    assert asked == [device]


def test_ranks_share_the_cpu() -> None:
    check_unshared(CPU, (0, 1), lambda own: pytest.fail("nothing to compare"))


def test_mps_serves_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "mps", 1)
    assert choose_device(0).type == "mps"
    assert choose_device(0, world_size=2) == CPU


def test_backends() -> None:
    assert backend_for(CPU) == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(LaunchError, match="no communication backend is known for meta"):
        backend_for(torch.device("meta"))


def test_pinning_without_an_accelerator_returns_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    tensor = torch.ones(3)
    assert pin_memory(tensor) is tensor


@pytest.mark.skipif(not devices._STATUS.exists(), reason="reads /proc")
def test_memory_of_the_process_follows_an_allocation() -> None:
    size = 64 << 20
    reset_peak_memory()
    before = read_memory()
    held = torch.ones(size // 4)
    during = read_memory()
    assert during.kind == "rss"
    assert 0.9 * size < during.current - before.current < 1.5 * size
    del held
    after = read_memory()
    assert after.current < during.current - size // 2
    assert after.peak > during.current - (1 << 20)  # the kernel counts pages in batches


@pytest.mark.skipif(not devices._STATUS.exists(), reason="reads /proc")
def test_the_peak_can_be_forgotten() -> None:
    size = 64 << 20
    torch.ones(size // 4)
    high = read_memory().peak
    if reset_peak_memory():
        assert read_memory().peak < high - size // 2
    else:
        assert read_memory().peak >= high


def test_memory_without_proc_is_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_STATUS", devices.Path("/nowhere"))
    reading = read_memory()
    assert reading.current == reading.peak > 0


def test_memory_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = SimpleNamespace(
        memory_allocated=lambda device: 5, max_memory_allocated=lambda device: 9, get_memory_info=lambda device: (7, 20)
    )
    monkeypatch.setattr(devices, "_memory_functions", lambda device: functions)
    reading = read_memory(torch.device("cuda", 0))
    assert (reading.current, reading.peak, reading.kind) == (5, 9, "device")
    assert available_bytes("cuda:0") == 7


def test_free_memory_respects_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: devices.Path) -> None:
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    unlimited = available_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert available_bytes() == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert (unlimited is None) == (available_bytes() is None)
