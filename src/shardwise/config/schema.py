"""The format as JSON Schema (draft 2020-12), for editors and other tools.

Built from the models, so that it cannot drift. Describes the file, not the resolved configuration: "auto" and `null` are legal
where the loader accepts them. Refuses to judge combinations of keys.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, cast, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from shardwise.config.fields import DTYPE_SPELLINGS, Section, bare_type, kind_of, section_class
from shardwise.config.model import ConfigView
from shardwise.config.optimizers import OPTIMIZER_PARAMS
from shardwise.config.schedulers import SCHEDULER_PARAMS
from shardwise.config.spellings import REFUSED, RENAMED

__all__ = ["json_schema"]

Schema = dict[str, Any]

_ABSENT: list[Schema] = [{"const": "auto"}, {"type": "null"}]


def json_schema() -> Schema:
    """JSON Schema of the configuration file; every key has a description that teaches."""
    schema = _object(ConfigView)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardwise configuration"
    schema["description"] = "How a model is trained. DeepSpeed's format; every key is optional."
    tables = (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS))
    for name, table in tables:
        _object_at(schema, name)["allOf"] = [_arguments(kind, model) for kind, model in table.items()]
    for path, instead in REFUSED.items():
        _add_old(schema, path, f"Not supported. {instead}.")
    for path, renamed in RENAMED.items():
        _add_old(schema, path, f"Older spelling of {renamed.name}.")
    return schema


def _object(model: type[Section]) -> Schema:
    properties = {name: _property(field) for name, field in model.model_fields.items()}
    schema: Schema = {"type": "object", "description": _first_line(model), "properties": properties}
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    return schema


def _first_line(model: type[Section]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]


def _property(field: FieldInfo) -> Schema:
    nested = section_class(field)
    schema: Schema = {"description": field.description or ""}
    if nested is not None:
        return {**schema, "anyOf": [_object(nested), {"type": "null"}]}
    schema["anyOf"] = [_value(bare_type(field), field), *_ABSENT]
    if not field.is_required():
        schema["default"] = json.loads(json.dumps(field.get_default(call_default_factory=True)))
    if kind_of(field) != "works":
        schema["x-shardwise"] = kind_of(field)
    return schema


def _value(kind: Any, field: FieldInfo) -> Schema:
    origin = get_origin(kind)
    if origin is Literal:
        return {"enum": _spellings(cast("tuple[str, ...]", get_args(kind)))}
    if origin in (Union, types.UnionType):  # an interval: a whole number, or infinity, which JSON cannot write
        return {"type": "integer", "minimum": 1}
    if origin is list:
        return {"type": "array", "items": {"type": "string", "minLength": 1}}
    if origin is tuple:
        rate: Schema = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
        return {"type": "array", "items": rate, "minItems": 2, "maxItems": 2}
    if origin is dict:
        return {"type": "object"}
    names: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[kind], **_bounds(field)}


def _spellings(choices: tuple[str, ...]) -> list[str]:
    """What may stand in the file: any letter case, and every name of a format."""
    if set(choices) <= set(DTYPE_SPELLINGS.values()):
        return [name for name, short in DTYPE_SPELLINGS.items() if short in choices]
    cased = (variant for choice in choices for variant in (choice, choice.lower(), choice.upper(), choice.capitalize()))
    return list(dict.fromkeys(cased))


def _bounds(field: FieldInfo) -> Schema:
    bounds: Schema = {}
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            bounds["minimum"] = limit.ge
        elif isinstance(limit, annotated_types.Gt):
            bounds["exclusiveMinimum"] = limit.gt
        elif isinstance(limit, annotated_types.Le):
            bounds["maximum"] = limit.le
    return bounds


def _arguments(kind: str, model: type[Section]) -> Schema:
    """The arguments of one optimizer or schedule, when it is the one chosen."""
    chosen: Schema = {"properties": {"type": {"enum": list(dict.fromkeys((kind, kind.lower())))}}, "required": ["type"]}
    return {"if": chosen, "then": {"properties": {"params": {"anyOf": [_object(model), {"type": "null"}]}}}}


def _object_at(schema: Schema, *path: str) -> Schema:
    """The schema of a nested object."""
    for name in path:
        schema = schema["properties"][name]["anyOf"][0]
    return schema


def _add_old(schema: Schema, path: str, description: str) -> None:
    """A key that is not part of the format any more, so that editors strike it out instead of calling it unknown."""
    *parents, name = path.split(".")
    if parents == ["optimizer", "params"]:
        places = [case["then"]["properties"]["params"]["anyOf"][0] for case in _object_at(schema, "optimizer")["allOf"]]
    else:
        places = [_object_at(schema, *parents)]
    for place in places:
        place["properties"][name] = {"description": description, "deprecated": True}
