"""`shardwise env`: what this installation and this machine are, in one table to paste into a question.

Owns the collection and never fails: a part that cannot be found out is said to be unknown.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from shardwise.cli.hardware import usable_cores

__all__ = ["describe"]

_PACKAGES = ("shardwise", "torch", "pydantic", "rich", "numpy", "transformers", "accelerate")
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "CXX")


def describe() -> str:
    """Lines of `name: value`."""
    rows = [(name, _safely(lambda name=name: _version(name))) for name in _PACKAGES]
    rows += [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        ("memory", _safely(_memory)),
        ("accelerator", _safely(_accelerator)),
        ("backend", _safely(_backend)),
        ("C++ compiler", _safely(_compiler)),
        ("shared memory", _safely(_shared_memory)),
    ]
    rows += [(name, os.environ[name]) for name in _VARIABLES if name in os.environ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _safely(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - a broken driver is exactly what this command is called for
        return f"unknown ({type(error).__name__}: {error})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _shared_memory() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB in /dev/shm"


def _accelerator() -> str:
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return "none (training runs on the CPU)"
    count = torch.accelerator.device_count()
    module = torch.get_device_module(device)
    names = sorted({str(module.get_device_name(index)) for index in range(count)}) if hasattr(module, "get_device_name") else []
    return f"{count} x {device.type}" + (f" ({', '.join(names)})" if names else "")


def _backend() -> str:
    from shardwise.comm.bootstrap import default_backend

    return default_backend()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return "none (compiled optimizer steps fall back to torch's own kernels)"
