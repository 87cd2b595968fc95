"""Checkpoints: what they hold, how they are written and read, in this package's format and others'.

Refuses to know the engine. What is saved comes as parts of named tensors and plain facts, whatever they are of; what is loaded
is read from a `Source`, whatever wrote it.
"""

from shardwise.checkpoint import plain
from shardwise.checkpoint.background import Background, Snapshot
from shardwise.checkpoint.contents import Facts, Key, Part, Source, Spec
from shardwise.checkpoint.folder import Folder, check_tag
from shardwise.checkpoint.opening import holds_one, open_checkpoint
from shardwise.checkpoint.reader import NativeSource, first_line
from shardwise.checkpoint.saving import ByCollective, ByFiles, Contents, Destination, write_checkpoint

__all__ = [
    "Background",
    "ByCollective",
    "ByFiles",
    "Contents",
    "Destination",
    "Facts",
    "Folder",
    "Key",
    "NativeSource",
    "Part",
    "Snapshot",
    "Source",
    "Spec",
    "check_tag",
    "first_line",
    "holds_one",
    "open_checkpoint",
    "plain",
    "write_checkpoint",
]
