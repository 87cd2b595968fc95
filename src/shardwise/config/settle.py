"""From the raw object of the file to one that the models can judge: spellings, `null`, "auto", unknown and removed keys.

Owns the rules that hold for every key alike. Never changes what it is given. Refuses to judge values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast

from shardwise.config.fields import Section, allowed, kind_of, needs_value, section_class
from shardwise.config.model import ConfigView
from shardwise.config.nearest import nearest
from shardwise.config.optimizers import OPTIMIZER_PARAMS
from shardwise.config.problems import Notes, Problem, dotted, show
from shardwise.config.schedulers import SCHEDULER_PARAMS
from shardwise.config.spellings import REFUSED, RENAMED, Renamed, asks_for_something

__all__ = ["AUTO", "Settler", "all_paths"]

AUTO = "auto"


@cache
def all_paths() -> tuple[str, ...]:
    """Dotted paths of every key of the format, arguments of the known optimizers and schedules included."""
    paths = list(_paths(ConfigView, ""))
    for table, prefix in ((OPTIMIZER_PARAMS, "optimizer.params"), (SCHEDULER_PARAMS, "scheduler.params")):
        for model in table.values():
            paths += _paths(model, prefix)
    return tuple(dict.fromkeys(paths))


def _paths(model: type[Section], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = dotted(prefix, name)
        yield path
        nested = section_class(field)
        if nested is not None:
            yield from _paths(nested, path)


class Settler:
    """Settles the objects of one configuration.

    Args:
        notes: where findings go.
        allow_auto: whether "auto" may stay unresolved in the places where it normally must not.
        forgive_top_level: whether unknown top-level keys are a warning instead of a problem.
    """

    def __init__(self, notes: Notes, *, allow_auto: bool = False, forgive_top_level: bool = False) -> None:
        self.notes = notes
        self.allow_auto = allow_auto
        self.forgive_top_level = forgive_top_level

    def settle(self, model: type[Section], raw: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
        """A new dict that holds only known keys with real values; findings go to the notes."""
        settled: dict[str, Any] = {}
        for name, value in self._respell(raw, path).items():
            here = dotted(path, name)
            field = model.model_fields.get(name)
            if "." not in name and here in REFUSED:
                self._removed(here, value)
            elif field is None:
                self._unknown(model, path, name, value)
            elif value is not None:
                nested = section_class(field)
                if nested is not None and isinstance(value, Mapping):
                    settled[name] = self.settle(nested, cast("Mapping[Any, Any]", value), here)
                    continue
                if kind_of(field) == "inert":
                    self.notes.inert.append(here)
                if nested is not None or not self._is_auto(value, here, needs_value(field), allowed(field)):
                    settled[name] = value
        return settled

    def settle_free(self, raw: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """The same for an object whose keys are not known here; learning rates still must have a value."""
        settled: dict[str, Any] = {}
        for name, value in raw.items():
            here = dotted(path, name)
            if here in REFUSED:
                self._removed(here, value)
            elif not isinstance(name, str):
                self._not_text(path, name, value)
            elif value is not None and not self._is_auto(value, here, name.endswith("lr"), "a number"):
                settled[name] = value
        return settled

    def _is_auto(self, value: object, path: str, required: bool, expected: str) -> bool:
        """Whether a value is the placeholder; where it must have been replaced, that is a problem."""
        if not (isinstance(value, str) and value == AUTO):
            return False
        self.notes.unfilled.add(path)
        if required and not self.allow_auto:
            do = "Write the value, or start training from a library that fills it in"
            self.notes.refuse(Problem(path, 'is still "auto" when training starts', expected, do=do))
        return True

    def _respell(self, raw: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """The object with older names replaced by present ones."""
        result: dict[str, Any] = {}
        for name, value in raw.items():
            if not isinstance(name, str):
                self._not_text(path, name, value)
            elif _renamed(path, name) is None:
                result[name] = value
        for name, old in raw.items():
            renamed = _renamed(path, name)
            if renamed is not None and old is not None:
                self._take_over(result, dotted(path, name), old, dotted(path, renamed.name), renamed)
        return result

    def _take_over(self, result: dict[str, Any], here: str, old: object, there: str, renamed: Renamed) -> None:
        """Put the value of an older name under the present one."""
        notes = self.notes
        notes.warnings.append(f"{here} is an older spelling of {there}")
        if not renamed.understands(old):
            notes.refuse(Problem(here, expected="true or false", found=show(old), do=f"Better, use {there}"))
            return
        value, present = renamed.value(old), result.get(renamed.name)
        if value is None or value == present:
            return
        if present is not None:
            what = f"and {there} are two names of one key and disagree"
            notes.refuse(Problem(here, what, found=f"{show(old)} and {show(present)}", do=f"Keep only {there}"))
            return
        result[renamed.name] = value
        notes.spelled[dotted(there, "device") if renamed.device else there] = here

    def _removed(self, path: str, value: object) -> None:
        if value is None:
            return
        if asks_for_something(value):
            what = "is not supported and will not be"
            self.notes.refuse(Problem(path, what, found=show(value, path), do=REFUSED[path]))
        else:
            self.notes.warnings.append(f"{path} is switched off and does not exist here; it can be removed")

    def _unknown(self, model: type[Section], path: str, name: str, value: object) -> None:
        here = dotted(path, name)
        close = nearest(name, model.model_fields, (known for known in all_paths() if "." in name or known != here))
        meant = close if "." in close else dotted(path, close)
        do = f"The nearest valid key is {meant}"
        if meant == here:
            do = "Write nested objects instead of a key with dots"
        if self.forgive_top_level and not path:
            self.notes.warnings.append(f"{here} is not a known key and is ignored. {do}")
        else:
            self.notes.refuse(Problem(here, "is not a known key", found=show(value, here), do=do))

    def _not_text(self, path: str, name: object, value: object) -> None:
        self.notes.refuse(Problem(dotted(path, repr(name)), "is not a key: keys are text", found=show(value)))


def _renamed(path: str, name: object) -> Renamed | None:
    """The present name of a key, None when it is not an older one. A literal key with dots is not a path."""
    return RENAMED.get(dotted(path, name)) if isinstance(name, str) and "." not in name else None
