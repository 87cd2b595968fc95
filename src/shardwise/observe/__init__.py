"""What a person sees of a run: the progress line while it trains, the memory table when it ends.

Owns wording and layout of that output. Refuses to know the engine: it is given plain numbers.
"""

from __future__ import annotations

from shardwise.observe.memory import memory_table
from shardwise.observe.progress import TrainingProgress

__all__ = ["TrainingProgress", "memory_table"]
