"""Where a configuration comes from: a dict, a file, or JSON text.

Owns reading and the problems of bad JSON. Refuses to know any key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from shardwise.config.problems import Problem, dotted, raise_for, show
from shardwise.errors import ConfigError, explain

__all__ = ["Source", "Text", "read_source"]

Source: TypeAlias = "Mapping[Any, Any] | str | os.PathLike[str] | None"
"""A dict, the path of a JSON file, JSON text that starts with a brace, or None for all defaults."""


@dataclass(frozen=True)
class Text:
    """A configuration as it was found.

    Args:
        name: how messages call it.
        data: the object; the very dict that was passed in, if one was.
        duplicates: one problem per key that stands twice in one object.
    """

    name: str
    data: Mapping[Any, Any]
    duplicates: tuple[Problem, ...] = ()


def read_source(source: Source) -> Text:
    """Find the object behind a source.

    Raises:
        ConfigError: the file is missing or not readable, or the text is not one JSON object.
    """
    if source is None:
        return Text("the configuration (all defaults)", {})
    if isinstance(source, Mapping):
        return Text("the configuration", source)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse("the configuration text", source)
    try:
        path = Path(source)
    except TypeError:
        expected = "a dict, the path of a JSON file, JSON text or None"
        found = type(source).__name__
        raise ConfigError(explain("the configuration cannot be read", expected=expected, found=found)) from None
    return _read_file(path)


def _read_file(path: Path) -> Text:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        do = "Check the path; JSON text must start with {"
        raise ConfigError(explain(f"{path}: no such configuration file", do=do)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        raise ConfigError(explain(f"{path}: cannot be read: {reason}")) from None
    return _parse(str(path), text)


def _parse(name: str, text: str) -> Text:
    twice: list[tuple[dict[str, Any], str, list[object]]] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        for key in built:
            values = [value for found, value in pairs if found == key]
            if len(values) > 1:
                twice.append((built, key, values))
        return built

    try:
        data: object = json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        raise ConfigError(_bad_json(name, text, error)) from None
    except RecursionError:
        raise ConfigError(explain(f"{name}: the objects are nested too deeply")) from None
    if not isinstance(data, dict):
        raise_for([Problem("the top level", expected="an object in braces", found=show(data))], name)
    found = cast("dict[str, Any]", data)
    places = {id(place): path for place, path in _objects(found, "")}
    duplicates = (
        Problem(
            dotted(places.get(id(place), ""), key),
            f"stands {len(values)} times in one object",
            found=" and ".join(show(value, key) for value in values),
            do="Keep one",
        )
        for place, key, values in twice
    )
    return Text(name, found, tuple(duplicates))


def _objects(value: object, path: str) -> list[tuple[object, str]]:
    """Every object inside a JSON value, with its dotted path."""
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value).items()
        return [(value, path), *(pair for key, item in inner for pair in _objects(item, dotted(path, key)))]
    if isinstance(value, list):
        items = enumerate(cast("list[object]", value))
        return [pair for index, item in items for pair in _objects(item, dotted(path, index))]
    return []


def _bad_json(name: str, text: str, error: json.JSONDecodeError) -> str:
    lines = text.splitlines() or [""]
    line = lines[min(error.lineno, len(lines)) - 1]
    return explain(
        f"{name}, line {error.lineno}, column {error.colno}: not JSON ({error.msg})",
        found=show(line.strip()),
        do=_hint(text, error),
    )


def _hint(text: str, error: json.JSONDecodeError) -> str:
    """What usually causes the fault at that place."""
    rest = text[error.pos :].lstrip()
    before = text[: error.pos].rstrip()
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments; remove it"
    if (rest.startswith(("}", "]")) and before.endswith(",")) or (rest.startswith(",") and error.msg.startswith("Ill")):
        return "Remove the comma before the closing bracket"
    if rest.startswith("'"):
        return "Use double quotes"
    if rest.startswith(("True", "False", "None")):
        return "Write true, false or null"
    return ""
