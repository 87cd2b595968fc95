"""What a person sees of a run: the progress line while it trains or works on files, the memory table when it ends.

Owns wording and layout of that output. Refuses to know the engine: it is given plain numbers.
"""

from __future__ import annotations

from shardwise.observe.memory import memory_table
from shardwise.observe.progress import TrainingProgress
from shardwise.observe.work import WorkProgress

__all__ = ["TrainingProgress", "WorkProgress", "memory_table"]
