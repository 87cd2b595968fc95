"""Other people's checkpoints, read as they are: DeepSpeed, torch.distributed.checkpoint, Hugging Face.

Owns everything that knows a foreign format. Nothing in a file is trusted: no code that it names is run or imported, and lengths
are checked against the file before anything of that size is allocated.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.contents import Source
from shardwise.checkpoint.foreign.dcp import DcpSource
from shardwise.checkpoint.foreign.deepspeed import DeepSpeedSource
from shardwise.checkpoint.foreign.deepspeed_files import find_folder
from shardwise.checkpoint.foreign.huggingface import HUGGING_FACE_FILES, HuggingFaceSource

__all__ = ["DcpSource", "DeepSpeedSource", "HuggingFaceSource", "open_foreign"]


def open_foreign(path: str | Path) -> Source | None:
    """The source for a directory of another library's, told by the files in it; None if it is none of those known.

    Where there are several (trainers put exported weights beside their checkpoints), the one that holds the most: DeepSpeed,
    then torch.distributed.checkpoint, then Hugging Face.

    Raises:
        CheckpointError: it is one, but damaged, incomplete, or of a kind that cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    if find_folder(folder, None) is not None:
        return DeepSpeedSource(folder)
    if (folder / ".metadata").is_file() or any(folder.glob("__*_*.distcp")):
        return DcpSource(folder)
    if any((folder / name).is_file() for name in HUGGING_FACE_FILES):
        return HuggingFaceSource(folder)
    return None
