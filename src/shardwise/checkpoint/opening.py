"""From a path to something that can be read.

Owns the recognition of formats. Refuses to know what is in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.checkpoint.contents import Source
from shardwise.checkpoint.folder import Folder
from shardwise.checkpoint.reader import NativeSource

__all__ = ["open_checkpoint"]


def open_checkpoint(directory: Path, tag: str) -> tuple[Source, dict[str, Any]]:
    """Open the checkpoint of a run.

    Returns:
        the checkpoint, and what the user saved along with it.

    Raises:
        CheckpointError: it is not there, damaged, or of no known format.
    """
    source = NativeSource(Folder(directory), tag)
    try:
        return source, source.client_state()
    except BaseException:
        source.close()
        raise
