"""Which device a rank computes on, and how much memory it has.

Owns device choice, the backend that fits a device, pinned memory and memory readings, all through `torch.accelerator`.
Refuses to know what the memory is used for. Importing it touches no device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, explain

__all__ = [
    "MemoryReading",
    "available_bytes",
    "backend_for",
    "check_unshared",
    "choose_device",
    "pin_memory",
    "read_memory",
    "reset_peak_memory",
    "use_device",
]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo"}
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of this process, in bytes."""

    current: int
    """Held now."""
    peak: int
    """Most held at once since the process began, or since `reset_peak_memory` where the system allows that."""
    kind: Literal["rss", "device"]
    """`rss`: physical memory of the process, shared pages included. `device`: what tensors hold on the accelerator."""


def choose_device(local_rank: int | None = None, *, world_size: int = 1) -> torch.device:
    """The device of a rank: its own accelerator if the machine has any, the CPU otherwise.

    Where a process sees a single accelerator, that one is its own, whatever its local rank: launchers that give each rank one
    device hide the others from it. That no other rank took the same one is for `check_unshared` to find out, when the ranks can
    talk.

    Args:
        local_rank: number of the rank on its machine; None means the accelerator that is current in this process.
        world_size: ranks of the job. Accelerators that ranks cannot talk through (mps) are used by a single rank only.

    Raises:
        LaunchError: the process sees several accelerators, but fewer than there are ranks on the machine.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or (accelerator.type == "mps" and world_size > 1):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if local_rank is None else local_rank
    if count == 1:
        index = 0
    if index >= count:
        raise LaunchError(
            explain(
                f"local rank {index} has no {accelerator.type} device",
                expected=f"at most {count} ranks on this machine",
                do="start fewer ranks per machine, let each rank see one device of its own, or hide all to run on the CPU",
            )
        )
    return torch.device(accelerator.type, index)


def check_unshared(device: torch.device, ranks: Sequence[int], exchange: Callable[[str], list[str]]) -> None:
    """Refuse ranks that compute on the same accelerator: their collectives would fail, or wait for each other for ever.

    Collective where `device` is an accelerator, and nothing on the CPU. Hardware that does not say who it is passes.

    Args:
        device: this rank's.
        ranks: all ranks that take part.
        exchange: gives what every rank was called with, in the order of `ranks`.

    Raises:
        LaunchError: on every rank.
    """
    if device.type == "cpu":
        return
    holders: dict[str, list[int]] = {}
    for rank, identity in zip(ranks, exchange(_identity(device)), strict=True):
        holders.setdefault(identity, []).append(rank)
    shared = next((held for identity, held in holders.items() if identity and len(held) > 1), None)
    if shared is not None:
        raise LaunchError(
            explain(
                f"ranks {', '.join(map(str, shared))} would compute on the same {device.type} device",
                expected="a device of its own for each rank",
                do="start no more ranks per machine than it has devices, and let each rank see all of them, or one of its own",
            )
        )


def _identity(device: torch.device) -> str:
    """What tells a device from all others, on any machine; empty if the system does not say."""
    with suppress(AttributeError, RuntimeError):
        return str(_device_module(device).get_device_properties(device).uuid)
    return ""


def use_device(device: torch.device) -> None:
    """Make an accelerator, given with its index, the current one of this process. Nothing for the CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_for(device: torch.device) -> str:
    """The torch.distributed backend for tensors on `device` ("gloo", "nccl", ...).

    Raises:
        LaunchError: none is known.
    """
    with suppress(AttributeError, ValueError):
        return str(dist.get_default_backend_for_device(device.type))
    if device.type not in _BACKENDS:
        raise LaunchError(
            explain(f"no communication backend is known for {device.type} devices", do="name one with dist_backend=")
        )
    return _BACKENDS[device.type]


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in page-locked memory, from which copies to an accelerator do not block; itself if there is none."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and torch.accelerator.is_available() else tensor


def read_memory(device: torch.device | str = "cpu") -> MemoryReading:
    """What this process holds on `device`: physical memory for the CPU, memory of tensors for an accelerator.

    Where the system does not say (no `/proc`), the peak stands in for the current value; 0 if that is unknown too.
    """
    device = torch.device(device)
    if device.type != "cpu":
        memory = _memory_functions(device)
        return MemoryReading(int(memory.memory_allocated(device)), int(memory.max_memory_allocated(device)), "device")
    status = _status()
    if "VmRSS" in status:
        return MemoryReading(status["VmRSS"], max(status["VmRSS"], status.get("VmHWM", 0)), "rss")
    peak = _peak_of_process()
    return MemoryReading(peak, peak, "rss")


def reset_peak_memory(device: torch.device | str = "cpu") -> bool:
    """Measure peaks from now on; says whether the system could do that."""
    device = torch.device(device)
    if device.type != "cpu":
        memory = _memory_functions(device)
        reset = getattr(memory, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(device)
        return reset is not None
    try:
        Path("/proc/self/clear_refs").write_text("5")  # what Linux takes as: forget the high-water mark
    except OSError:
        return False
    return True


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that could still be allocated on `device`; None if unknown. Other processes may take them first."""
    device = torch.device(device)
    if device.type != "cpu":
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            return int(_memory_functions(device).get_memory_info(device)[0])
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            return int(_device_module(device).mem_get_info(device)[0])
        return None
    limits = [limit for limit in (_free_in_system(), _free_in_container()) if limit is not None]
    return min(limits) if limits else None


def _memory_functions(device: torch.device) -> Any:
    """Where `memory_allocated` and its kind are: torch.accelerator since 2.9, the device's own module before."""
    return torch.accelerator if hasattr(torch.accelerator, "memory_allocated") else _device_module(device)


def _device_module(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    return module


def _kilobytes(text: str) -> dict[str, int]:
    """`name:  123 kB` lines, as the Linux kernel writes them, in bytes."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _status() -> dict[str, int]:
    try:
        return _kilobytes(_STATUS.read_text())
    except OSError:
        return {}


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _free_in_system() -> int | None:
    try:
        return _kilobytes(Path("/proc/meminfo").read_text()).get("MemAvailable")
    except OSError:
        return None


def _free_in_container() -> int | None:
    """What the memory limit of this control group leaves; cached file pages count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
