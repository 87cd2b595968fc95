"""The JSON configuration in DeepSpeed's format: reading, checking, resolving, describing.

Owns every key, its default, what it allows and what becomes of it. The only room that imports pydantic. Refuses to know the
engine, torch and any process group.
"""

from __future__ import annotations

from shardwise.config.loading import init_view, load_config
from shardwise.config.model import Config, ConfigView
from shardwise.config.report import doctor_report
from shardwise.config.schema import json_schema

__all__ = ["Config", "ConfigView", "doctor_report", "init_view", "json_schema", "load_config"]
