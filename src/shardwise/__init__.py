"""Shardwise trains PyTorch models that do not fit in one device's memory, behind one JSON configuration.

Names are imported when they are first used, so that `import shardwise` costs little more than `import torch`.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import comm, utils, zero
    from shardwise.comm import init_distributed
    from shardwise.engine import Engine
    from shardwise.entry import initialize
    from shardwise.persistence import load_pretrained

__version__ = "0.1.0"

__all__ = ["Engine", "__version__", "comm", "init_distributed", "initialize", "load_pretrained", "utils", "zero"]

_HOMES = {
    "Engine": "shardwise.engine",
    "init_distributed": "shardwise.comm",
    "initialize": "shardwise.entry",
    "load_pretrained": "shardwise.persistence",
}
_MODULES = ("comm", "utils", "zero", "errors")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(f"shardwise.{name}")
    if name in _HOMES:
        return getattr(_load(_HOMES[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def _load(module: str) -> Any:
    # Modules stay, so there is nothing to collect; and each collection would walk through all of torch (a third of the time).
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted(__all__)
