"""Reading `{"type": ..., "params": {...}}`, the form that optimizers and schedulers have in the configuration.

Owns names and unknown keys. Refuses to know what the parameters mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from shardwise.errors import OptimizerError, explain

__all__ = ["nearest_name", "read_section", "reject_unknown", "same_name"]


def read_section(section: Any) -> tuple[str, dict[str, Any]]:
    """Type and parameters of a section: a mapping, or an object with attributes `type` and `params`.

    Parameters that the user did not write, or wrote as null, are absent from the result.
    """
    kind, params = _get(section, "type"), _get(section, "params")
    if not isinstance(kind, str) or not kind:
        raise OptimizerError(explain("a section has no 'type'", expected="a name", found=repr(kind)))
    dump: Any = getattr(params, "model_dump", None)
    values: Mapping[str, Any] = (params or {}) if dump is None else dump(exclude_unset=True)
    return kind, {key: value for key, value in values.items() if value is not None}


def _get(section: Any, key: str) -> Any:
    return cast("Mapping[str, Any]", section).get(key) if isinstance(section, Mapping) else getattr(section, key, None)


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that equals `name`, whatever its case."""
    return next((one for one in known if one.lower() == name.lower()), None)


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A question that names the known name nearest to `name`, to begin the advice of an error with; empty if none is near."""
    by_lower = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? " if near else ""


def reject_unknown(what: str, params: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse parameters that `what` does not take.

    Raises:
        OptimizerError: naming all of them, with the nearest known ones.
    """
    known = sorted(known)
    unknown = [key for key in params if key not in known]
    if unknown:
        near = {key: get_close_matches(key, known, n=1) for key in unknown}
        named = ", ".join(f"{key!r}" + (f" (did you mean {near[key][0]!r}?)" if near[key] else "") for key in unknown)
        raise OptimizerError(explain(f"{what} does not take {named}", expected=f"some of {', '.join(known)}"))
