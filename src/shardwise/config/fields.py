"""The building blocks of the format's models: value types, and what each key says about itself.

Owns how a key is declared (`key`, `inert`, `later`, `section`), the strict value types, and the one sentence that says which
values a key allows. Refuses to know any particular key.
"""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

__all__ = [
    "DTYPE_SPELLINGS",
    "DtypeName",
    "FutureSection",
    "Interval",
    "Kind",
    "Lower",
    "Names",
    "Number",
    "Pair",
    "Section",
    "Upper",
    "Whole",
    "accepted",
    "allowed",
    "bare_type",
    "inert",
    "is_switched_on",
    "key",
    "kind_of",
    "later",
    "needs_value",
    "section",
    "section_class",
]

Kind = Literal["works", "inert", "later"]
"""works: does what its name says. inert: accepted, no effect. later: accepted only while off."""


class Section(BaseModel):
    """One object of the JSON file. Frozen; unknown keys and values of a wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    available: ClassVar[bool] = True
    """Whether the section can be switched on at all."""


class FutureSection(Section):
    """The object of a capability that does not exist yet."""

    available: ClassVar[bool] = False


AnySection = TypeVar("AnySection", bound=Section)


# --- value types ------------------------------------------------------------------------------------------------------


def _whole(value: object) -> object:
    """An int for any integral number but a bool; everything else is left for the strict check to refuse."""
    number = _number(value)
    if not isinstance(number, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return int(number) if number.is_integer() else value


def _number(value: object) -> object:
    """A float for any real number but a bool (NumPy's scalars are real numbers)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _interval(value: object) -> object:
    found = _whole(value)
    if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
        return found
    if isinstance(found, float) and found == math.inf:
        return found
    raise ValueError("not an interval")


def _listed(value: object) -> object:
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value


def _paired(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(_number(item) for item in cast("list[object]", value))


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


DTYPE_SPELLINGS = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}


def _dtype_name(value: object) -> object:
    """`fp32`, `fp16` or `bf16` for any of their usual spellings, a `torch.dtype` included (recognised by its name)."""
    return DTYPE_SPELLINGS.get(str(value).lower().removeprefix("torch."), value)


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number; `5e8` is one, `1.5` and `true` are not."""

Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
"""A finite number."""

Interval = Annotated[int | float, BeforeValidator(_interval)]
"""A whole number of at least 1, or infinity for "never"."""

Names = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)]
"""A list of names or patterns, none of them empty."""

Pair = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_paired)]
"""Two decay rates, each in [0, 1)."""

DtypeName = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype_name)]
"""A floating-point format, whichever of its usual names was used."""

Lower = BeforeValidator(_lower)
Upper = BeforeValidator(_upper)


# --- declaring keys ---------------------------------------------------------------------------------------------------


def key(
    default: object,
    doc: str,
    *,
    kind: Kind = "works",
    allowed: str = "",
    auto_is_error: bool = False,
    off: tuple[object, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Declare one key.

    Args:
        default: the value when the key is absent; `...` when it must be given.
        doc: one line for the reference and the JSON Schema.
        kind: see `Kind`.
        allowed: which values are legal, where the type and bounds do not say it well.
        auto_is_error: whether a value that is still "auto" when the engine starts is a problem, not the default.
        off: for a `later` key, the values that keep the capability switched off.
        ge, gt, le: bounds.
    """
    extra = {"kind": kind, "allowed": allowed, "auto_is_error": auto_is_error, "off": list(off)}
    return Field(default, description=doc, json_schema_extra=cast("dict[str, Any]", extra), ge=ge, gt=gt, le=le)


def inert(
    default: object,
    doc: str,
    *,
    allowed: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Declare a key that is accepted and has no effect."""
    return key(default, doc, kind="inert", allowed=allowed, ge=ge, gt=gt, le=le)


def later(default: object, doc: str, *, off: tuple[object, ...] = (), ge: float | None = None) -> Any:
    """Declare the switch of a capability that does not exist yet: only `default` and the values in `off` pass."""
    return key(default, doc, kind="later", off=(default, *off), ge=ge)


def section(cls: type[AnySection], doc: str) -> Any:
    """Declare a nested object, present with its defaults when absent from the file."""
    return Field(default_factory=cls, description=doc, json_schema_extra={"kind": "works"})


# --- reading declarations ---------------------------------------------------------------------------------------------


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    return cast("Mapping[str, Any]", extra) if isinstance(extra, dict) else {}


def kind_of(field: FieldInfo) -> Kind:
    """What happens with the key."""
    return cast("Kind", _extra(field).get("kind", "works"))


def needs_value(field: FieldInfo) -> bool:
    """Whether "auto" must have been replaced by a value before the engine starts."""
    return bool(_extra(field).get("auto_is_error", False))


def accepted(field: FieldInfo) -> list[object]:
    """The values of a `later` key that pass."""
    return list(_extra(field).get("off", []))


def is_switched_on(field: FieldInfo, value: object) -> bool:
    """Whether a `later` key holds a value that asks for the missing capability."""
    return kind_of(field) == "later" and value not in accepted(field)


def bare_type(field: FieldInfo) -> Any:
    """The field's type without `None`."""
    return _without_none(field.annotation)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        kept = [part for part in get_args(annotation) if part is not type(None)]
        return _without_none(kept[0]) if len(kept) == 1 else annotation
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def section_class(field: FieldInfo) -> type[Section] | None:
    """The nested model of a field, None for a plain value."""
    inner = bare_type(field)
    is_class = isinstance(inner, type) and get_origin(inner) is None  # Python 3.10 calls list[str] a class
    return inner if is_class and issubclass(inner, Section) else None


def allowed(field: FieldInfo) -> str:
    """Which values the key allows, as messages and the reference print it."""
    text = str(_extra(field).get("allowed", ""))
    if text:
        return text
    inner = bare_type(field)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(inner))
    nested = section_class(field)
    if nested is not None:
        return "an object in braces"
    return _TYPE_TEXT.get(get_origin(inner) or inner, "a value") + _bounds(field)


_TYPE_TEXT: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list of names",
    dict: "an object in braces",
    tuple: "two numbers, each at least 0 and below 1",
}


def _bounds(field: FieldInfo) -> str:
    low, high, first = "", "", cast("object", "the smallest")
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            low, first = f" >= {limit.ge}", limit.ge
        elif isinstance(limit, annotated_types.Gt):
            low = f" > {limit.gt}"
        elif isinstance(limit, annotated_types.Le):
            high = f" from {first} to {limit.le}"
    return high or low
