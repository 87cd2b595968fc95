"""The package itself: what importing it does and does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardwise


def test_names_are_loaded_when_they_are_first_used() -> None:
    code = (
        "import sys, gc, shardwise\n"
        "assert 'torch' not in sys.modules\n"
        "assert shardwise.errors.ConfigError\n"
        "assert 'shardwise.entry' not in sys.modules\n"
        "assert shardwise.initialize and 'shardwise.entry' in sys.modules\n"
        "assert gc.isenabled()\n"
        "gc.disable()\n"
        "assert shardwise.utils and not gc.isenabled()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_all_names_exist_and_others_do_not() -> None:
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None
        assert name in dir(shardwise)
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'inizialize'"):
        _ = shardwise.inizialize
