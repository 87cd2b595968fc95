"""From settled values to frozen models: types and ranges, arguments of optimizers and schedules, capabilities that are missing.

Owns the translation of pydantic's findings into problems. Refuses rules that look at more than one key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.config.fields import Section, allowed, is_switched_on, section_class
from shardwise.config.future import Pipeline, WeightQuantization
from shardwise.config.nearest import nearest
from shardwise.config.optimizers import OPTIMIZER_PARAMS, TORCH_ELEMENTWISE, TORCH_WHOLE_TENSOR
from shardwise.config.problems import Notes, Problem, dotted, show
from shardwise.config.schedulers import SCHEDULER_PARAMS
from shardwise.config.settle import Settler

__all__ = ["LATER_OPTIMIZERS", "judge", "judge_typed", "refuse_missing"]

Model = TypeVar("Model", bound=Section)

LATER_OPTIMIZERS = ("Muon",)


def judge(model: type[Model], settled: Mapping[str, Any], notes: Notes, path: str = "") -> Model | None:
    """The model of the settled values. Refused values are noted and replaced by their defaults, so that judging can go on.

    Returns:
        None when a key that must be given is missing.
    """
    values = _copied(settled)
    while True:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            refused = [_refuse(model, detail, values, notes, path) for detail in error.errors(include_url=False)]
            dropped = [_drop(values, location) for location in refused]
            if not any(dropped):
                return None


def _refuse(model: type[Section], detail: ErrorDetails, values: Mapping[str, Any], notes: Notes, path: str) -> list[str]:
    """Note one of pydantic's findings; gives the place to drop so that the rest can be judged."""
    location = _location(model, detail["loc"])
    here = dotted(path, *location)
    missing = detail["type"] == "missing" and len(location) == len(detail["loc"])
    if not (missing and (notes.knows_bad(here) or here in notes.unfilled)):
        notes.refuse(_problem(model, location, here, _at(values, location), missing=missing))
    return location[:-1] if missing else location


def _location(model: type[Section], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that lead to the field; what pydantic adds for list positions and union members is left out."""
    keys: list[str] = []
    current: type[Section] | None = model
    for part in loc:
        field = current.model_fields.get(str(part)) if current else None
        if field is None:
            break
        keys.append(str(part))
        current = section_class(field)
    return keys


def _problem(model: type[Section], location: list[str], path: str, value: object, *, missing: bool) -> Problem:
    field = model.model_fields[location[0]]
    for name in location[1:]:
        nested = section_class(field)
        if nested is None:
            break
        field = nested.model_fields[name]
    if missing:
        return Problem(path, "is missing", expected=allowed(field))
    return Problem(path, expected=allowed(field), found=show(value, path), do=_unquote(value, allowed(field)))


def _unquote(value: object, expected: str) -> str:
    """Advice for `"true"` and `"1e9"`."""
    if not isinstance(value, str):
        return ""
    bare = value.strip().lower()
    if expected == "true or false" and bare in ("true", "false"):
        return f"Write {bare} without quotes"
    try:
        float(bare)
    except ValueError:
        return ""
    return f"Write {value.strip()} without quotes" if "number" in expected else ""


def _copied(settled: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose objects can be edited; the leaves are shared."""
    return {
        name: _copied(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else value for name, value in settled.items()
    }


def _at(values: Mapping[str, Any], location: list[str]) -> object:
    """The value in the file, None where there is none."""
    found: object = values
    for name in location:
        found = cast("Mapping[str, object]", found).get(name) if isinstance(found, Mapping) else None
    return found


def _drop(values: dict[str, Any], location: list[str]) -> bool:
    """Remove one key; whether there was something to remove (its object may be gone already)."""
    if not location:
        return False
    for name in location[:-1]:
        values = values.get(name, {})
    return values.pop(location[-1], None) is not None


# --- optimizer and scheduler ------------------------------------------------------------------------------------------


def judge_typed(settled: dict[str, Any], settler: Settler) -> None:
    """Check the arguments of `optimizer` and `scheduler` against their type, and write type names in their one spelling.

    An empty object counts as absent. Changes `settled`.
    """
    for name in ("optimizer", "scheduler"):
        found = cast("object", settled.get(name))
        if isinstance(found, dict) and _says_nothing(cast("dict[str, Any]", found)):
            del settled[name]
        elif isinstance(found, dict):
            _judge_arguments(name, cast("dict[str, Any]", found), settler)


def _says_nothing(found: Mapping[str, Any]) -> bool:
    """Whether neither a type nor any argument is given."""
    arguments = cast("object", found.get("params", {}))
    if "type" in found or not isinstance(arguments, Mapping):
        return False
    return all(value is None for value in cast("Mapping[object, object]", arguments).values())


def _judge_arguments(name: str, found: dict[str, Any], settler: Settler) -> None:
    notes, path = settler.notes, dotted(name, "params")
    table = cast("Mapping[str, type[Section]]", OPTIMIZER_PARAMS if name == "optimizer" else SCHEDULER_PARAMS)
    if not isinstance(found.get("type"), str):
        return
    others = (*TORCH_ELEMENTWISE, *TORCH_WHOLE_TENSOR, *LATER_OPTIMIZERS) if name == "optimizer" else ()
    found["type"] = _one_spelling(found["type"], [*table, *others])
    arguments = found.get("params", {})
    if not isinstance(arguments, Mapping):
        return
    arguments = cast("Mapping[Any, Any]", arguments)
    model = table.get(found["type"])
    if model is not None:
        judged = judge(model, settler.settle(model, arguments, path), notes, path)
        kept = (
            {}
            if judged is None
            else {key: getattr(judged, key) for key in type(judged).model_fields if key in judged.model_fields_set}
        )
        found["params"] = {key: value for key, value in kept.items() if dotted(path, key) not in notes.inert}
        return
    found["params"] = settler.settle_free(arguments, path)
    if found["type"] not in others:
        _refuse_type(name, found["type"], list(table), notes)


def _one_spelling(name: str, known: list[str]) -> str:
    return {candidate.lower(): candidate for candidate in known}.get(name.lower(), name)


def _refuse_type(name: str, value: str, known: list[str], notes: Notes) -> None:
    more = list(TORCH_ELEMENTWISE) if name == "optimizer" else []
    expected = "one of " + ", ".join(f'"{candidate}"' for candidate in [*known, *more])
    what = "optimizer can be passed to initialize() as a class or an object"
    if name == "scheduler":
        what = "schedule can be passed to initialize() as an object or a callable"
    do = f"The nearest is {nearest(value, [*known, *more])}; any other {what}"
    notes.refuse(Problem(dotted(name, "type"), expected=expected, found=show(value), do=do))


# --- capabilities that come later -------------------------------------------------------------------------------------


def refuse_missing(judged: Section, notes: Notes, path: str = "") -> None:
    """Note every switch of a capability that does not exist yet and is on."""
    for name, field in type(judged).model_fields.items():
        value, here = getattr(judged, name), dotted(path, name)
        if name not in judged.model_fields_set:
            continue
        if isinstance(value, (Pipeline, WeightQuantization)) and _content_switches_on(value):
            _missing(here, value.model_dump(exclude_unset=True), notes, "Remove it")
        if isinstance(value, Section):
            refuse_missing(value, notes, here)
        elif is_switched_on(field, value):
            _missing(here, value, notes, f"Set it to {show(field.default)} or remove it")
    if path == "optimizer" and getattr(judged, "type", None) in LATER_OPTIMIZERS:
        _missing("optimizer.type", getattr(judged, "type", ""), notes, "Use " + ", ".join(OPTIMIZER_PARAMS))


def _content_switches_on(value: Pipeline | WeightQuantization) -> bool:
    """These two have no switch of their own: any content asks for them."""
    if value.enabled is not None:
        return value.enabled
    if isinstance(value, Pipeline) and value.stages in (0, 1):
        return False
    return bool(value.model_fields_set)


def _missing(path: str, value: object, notes: Notes, do: str) -> None:
    if notes.as_written(path) != path:  # an older switch, whose value in the file was true
        value, do = True, "Remove it"
    notes.refuse(Problem(path, "is not available yet", found=show(value, path), do=do))
