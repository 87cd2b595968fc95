"""One thing that is wrong with a configuration, and how all of them are told at once.

Owns the wording. Refuses to know how problems are found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from shardwise.errors import ConfigError, explain

__all__ = ["Notes", "Problem", "dotted", "raise_for", "show"]

_SECRET = ("api_key", "token", "password", "secret")
_LONGEST = 72


@dataclass(frozen=True)
class Problem:
    """One line of the error.

    Args:
        path: dotted path of the key, as it stands in the file.
        what: what is wrong, read after the path; may be empty when `expected` and `found` say it.
        expected: what is allowed.
        found: the value in the file, already printable.
        do: what to do about it.
        text: a complete line that replaces the other parts.
    """

    path: str = ""
    what: str = ""
    expected: str = ""
    found: str = ""
    do: str = ""
    text: str = ""

    def line(self) -> str:
        """The problem as one line."""
        if self.text:
            return self.text
        subject = f"{self.path} {self.what}" if self.what else self.path
        return explain(subject, expected=self.expected, found=self.found, do=self.do)


@dataclass
class Notes:
    """What has been found so far while one configuration is read.

    Args:
        problems: what is wrong, in the order it was found.
        inert: dotted paths of keys in the file that have no effect.
        warnings: what is legal and worth a line.
        spelled: present dotted path -> path in the file, where an older name was used.
        bad: dotted paths whose values were refused; nothing may be concluded from them.
        unfilled: dotted paths that still hold "auto".
    """

    problems: list[Problem] = field(default_factory=list[Problem])
    inert: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    spelled: dict[str, str] = field(default_factory=dict[str, str])
    bad: set[str] = field(default_factory=set[str])
    unfilled: set[str] = field(default_factory=set[str])

    def refuse(self, problem: Problem) -> None:
        """Record a problem; its path is where the model has the key, and is printed as it stands in the file."""
        self.bad.add(problem.path)
        self.problems.append(replace(problem, path=self.as_written(problem.path)))

    def as_written(self, path: str) -> str:
        """The path under which the file has a key."""
        for present, old in self.spelled.items():
            if path == present or path.startswith(present + "."):
                return old + path[len(present) :]
        return path

    def knows_bad(self, *paths: str) -> bool:
        """Whether any of these values was refused already."""
        return any(path in self.bad for path in paths)


def dotted(*parts: object) -> str:
    """Join the parts of a path; empty parts vanish, list positions become `[n]`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "":
            text += f".{part}" if text else str(part)
    return text


def show(value: object, path: str = "") -> str:
    """A value of the file as JSON, shortened; secrets stay secret."""
    value = _without_secrets(value, path.rpartition(".")[2])
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _without_secrets(value: object, key: object) -> object:
    if isinstance(key, str) and key.lower() in _SECRET:
        return "..."
    if isinstance(value, Mapping):
        return {name: _without_secrets(item, name) for name, item in cast("Mapping[object, object]", value).items()}
    return value


def raise_for(problems: Sequence[Problem], name: str) -> None:
    """Raise one `ConfigError` that lists every problem, if there is any.

    Args:
        problems: what is wrong.
        name: what was read ("zero3.json").
    """
    if not problems:
        return
    lines = list(dict.fromkeys(problem.line() for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError("\n".join([f"{name} has {count}:", *(f"  - {line}" for line in lines)]))
