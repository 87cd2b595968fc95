"""What this machine offers to a job: processor cores and accelerators.

Owns the counting, and does it without importing torch unless there is a sign of an accelerator, so that starting a job on a
CPU machine costs nothing. Refuses to know what the numbers are used for.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["accelerator_count", "default_processes", "usable_cores"]

# Device files that the drivers of accelerators create: NVIDIA, AMD, Intel, and the generic accelerator class of Linux.
_DEVICE_FILES = ("nvidia[0-9]*", "nvidia-caps", "kfd", "dri/renderD*", "accel/accel*", "accel*", "dxg")
_COUNT = "import torch; print(torch.accelerator.device_count())"
_COUNT_SECONDS = 120.0


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut to the container's CPU quota where there is one; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cpu_quota(path: Path) -> float | None:
    """Cores granted by a cgroup (version 2), or None where the file is missing, unreadable or unlimited."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return None


def accelerator_count(devices: Path = Path("/dev")) -> int:
    """Accelerators torch can use here, 0 on a machine without any.

    Only where a driver's device file exists is torch asked, in a process of its own: its answer honours variables such as
    CUDA_VISIBLE_DEVICES, and the launcher itself must hold no context on any device.
    """
    if not any(next(devices.glob(pattern), None) for pattern in _DEVICE_FILES):
        return 0
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0


def default_processes() -> int:
    """Ranks for `--nproc auto`: one per accelerator; without any, 2 where there are two cores, else 1.

    Two is the smallest world in which anything is sharded. More ranks than that on one CPU only divide the same cores.
    """
    return accelerator_count() or min(2, usable_cores())
