"""From a source to the resolved configuration, or to one error that lists everything that is wrong with it.

Owns the order of the checks. Refuses to know single keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.config.batch import ACCUMULATION, BATCH_KEYS, MICRO, TOTAL, Batch, resolve_batch
from shardwise.config.judge import judge, judge_typed, refuse_missing
from shardwise.config.model import Config, ConfigView, Findings
from shardwise.config.problems import Notes, Problem, raise_for, show
from shardwise.config.rules import apply_rules
from shardwise.config.settle import Settler
from shardwise.config.source import Source, Text, read_source
from shardwise.errors import ConfigError, explain

__all__ = ["Examination", "examine", "init_view", "load_config"]


@dataclass(frozen=True)
class Examination:
    """Everything found in one configuration, right or wrong.

    Args:
        text: the configuration as it was found.
        settled: the values that were judged.
        view: every key with its value; refused values are at their defaults.
        notes: problems, inert keys and warnings.
        batch: the batch numbers, None where they cannot be known.
    """

    text: Text
    settled: Mapping[str, Any]
    view: ConfigView
    notes: Notes = field(default_factory=Notes)
    batch: Batch | None = None

    def findings(self) -> Findings:
        """What the configuration object remembers of its reading."""
        origin = dict(self.batch.origin) if self.batch else dict[str, str]()
        return Findings(self.text.data, origin, tuple(self.notes.inert), tuple(self.notes.warnings))


def load_config(
    source: Source,
    world_size: int,
    data_parallel_size: int | None = None,
    *,
    unknown_top_level: Literal["error", "warn"] = "error",
) -> Config:
    """Read, check and resolve a configuration.

    Args:
        source: a dict, the path of a JSON file, JSON text that starts with a brace, or None for all defaults.
        world_size: ranks of the job.
        data_parallel_size: ranks that see different samples; all of them when None.
        unknown_top_level: "warn" lets unknown top-level keys pass with a warning.

    Raises:
        ConfigError: something is wrong. The message has one line per problem: dotted path, value found, what is allowed, and
            the nearest valid key of an unknown one.
    """
    examined = examine(source, world_size, data_parallel_size, forgive_top_level=unknown_top_level == "warn")
    raise_for(examined.notes.problems, examined.text.name)
    if examined.batch is None:
        raise AssertionError("no problem was noted and the batch numbers are unknown")
    config = Config.model_validate({**examined.settled, **examined.batch.as_keys()})
    config.attach(examined.findings())
    return config


def init_view(source: Source, *, unknown_top_level: Literal["error", "warn"] = "error") -> ConfigView:
    """What sharded construction may read from a configuration whose "auto" values are not filled in yet.

    Every "auto" counts as absent, batch numbers may stay None and are not compared; all else is checked as by `load_config`.

    Raises:
        ConfigError: as `load_config`.
    """
    text = read_source(source)
    notes = Notes(problems=list(text.duplicates))
    settler = Settler(notes, allow_auto=True, forgive_top_level=unknown_top_level == "warn")
    settled, view = _judge_all(text, settler)
    raise_for(notes.problems, text.name)
    view.attach(Examination(text, settled, view, notes).findings())
    return view


def examine(
    source: Source, world_size: int, data_parallel_size: int | None = None, *, forgive_top_level: bool = False
) -> Examination:
    """Find everything there is to say about a configuration, without raising for its content.

    Raises:
        ConfigError: there is no configuration to examine (missing file, bad JSON), or no such world.
    """
    ranks = _data_ranks(world_size, data_parallel_size)
    text = read_source(source)
    notes = Notes(problems=list(text.duplicates))
    settled, view = _judge_all(text, Settler(notes, forgive_top_level=forgive_top_level))
    _check_data_axis(view, ranks, notes)
    batch = _batch(view, ranks, notes)
    return Examination(text, settled, view, notes, batch)


def _judge_all(text: Text, settler: Settler) -> tuple[dict[str, Any], ConfigView]:
    notes = settler.notes
    settled = settler.settle(ConfigView, text.data)
    judge_typed(settled, settler)
    view = judge(ConfigView, settled, notes) or ConfigView()
    refuse_missing(view, notes)
    apply_rules(view, notes)
    return settled, view


def _data_ranks(world_size: int, data_parallel_size: int | None) -> int:
    for name, value in (("world_size", world_size), ("data_parallel_size", data_parallel_size)):
        if value is not None and value < 1:
            raise ConfigError(explain(name, expected="at least 1 rank", found=str(value)))
    ranks = world_size if data_parallel_size is None else data_parallel_size
    if world_size % ranks:
        raise ConfigError(explain("data_parallel_size", expected=f"a divisor of the world size {world_size}", found=str(ranks)))
    return ranks


def _check_data_axis(view: ConfigView, ranks: int, notes: Notes) -> None:
    asked = view.data_parallel_size
    if asked is not None and asked != ranks:
        what = "is not available yet below the number of data-parallel ranks"
        notes.refuse(Problem("data_parallel_size", what, str(ranks), show(asked), "Remove it"))


def _batch(view: ConfigView, ranks: int, notes: Notes) -> Batch | None:
    """The batch numbers; None, with the problem noted, when they cannot be known."""
    if notes.knows_bad(*BATCH_KEYS):
        return None
    total, micro, accumulation = (getattr(view, name) for name in (TOTAL, MICRO, ACCUMULATION))
    try:
        batch = resolve_batch(total, micro, accumulation, ranks)
    except ConfigError as error:
        notes.refuse(Problem(TOTAL, text=str(error)))
        return None
    if total is None and micro is None and accumulation is not None:
        notes.warnings.append(f"no batch size is given beside {ACCUMULATION}: {MICRO} is 1")
    return batch
