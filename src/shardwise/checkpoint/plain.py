"""Plain Python values as JSON and back, without pickle: what JSON cannot say is written as a tagged object.

Owns which types are plain. Refuses to know what the values mean.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, explain

__all__ = ["checked", "dumps", "from_json", "loads", "to_json"]

_TAG = "!"
_LARGEST = 1 << 16  # elements of a tensor among plain values; more belongs into a data file


def dumps(value: Any, about: str) -> str:
    """JSON text of a plain value.

    Args:
        value: numbers, text, None, bytes, small tensors, and lists, tuples, sets and dicts of them, with any plain keys.
        about: what it is, for the error.

    Raises:
        CheckpointError: something in it is not plain; says where.
    """
    return json.dumps(to_json(value, about), separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes, about: str) -> Any:
    """The value whose JSON text was made by `dumps`.

    Raises:
        CheckpointError: it is no such text.
    """
    try:
        return from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        problem = f"{about} cannot be read"
        raise CheckpointError(explain(problem, expected="JSON text", found=f"{type(error).__name__}: {error}")) from None


def checked(value: Any, about: str) -> Any:
    """A deep copy of a plain value, as it will come back. Raises CheckpointError if it is not plain."""
    return from_json(to_json(value, about))


def to_json(value: Any, about: str) -> Any:
    """A value as `json` can write it; see `dumps`."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, int):  # an enum's number, or a numpy one that is an int
        return int(value)
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _tensor_to_json(value, about)
    if isinstance(value, torch.dtype | torch.device):
        return {_TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _mapping_to_json(cast("Mapping[Any, Any]", value), about)
    if isinstance(value, tuple | set | frozenset):
        items = cast("tuple[Any, ...]", tuple(value))
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {_TAG: kind, "value": [to_json(item, f"{about}[{at}]") for at, item in enumerate(items)]}
    if isinstance(value, list):
        return [to_json(item, f"{about}[{at}]") for at, item in enumerate(cast("list[Any]", value))]
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a numpy scalar
        return to_json(value.item(), about)
    raise CheckpointError(
        explain(
            f"{about} cannot be saved",
            expected="numbers, text, None, bytes, tensors, and lists, tuples, sets or dicts of them",
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            do="leave it out of state_dict(), or put it into client_state, which is saved by torch.save",
        )
    )


def _mapping_to_json(value: Mapping[Any, Any], about: str) -> Any:
    if all(isinstance(key, str) for key in value) and _TAG not in value and type(value) in (dict, OrderedDict, defaultdict):
        return {key: to_json(item, f"{about}[{key!r}]") for key, item in value.items()}
    kind = "Counter" if isinstance(value, Counter) else "dict"
    pairs = [[to_json(key, f"a key of {about}"), to_json(item, f"{about}[{key!r}]")] for key, item in value.items()]
    return {_TAG: kind, "value": pairs}


def _tensor_to_json(value: Tensor, about: str) -> Any:
    if value.numel() > _LARGEST or value.is_sparse or value.is_quantized or value.is_complex():
        expected = f"a dense real tensor of at most {_LARGEST} elements"
        raise CheckpointError(
            explain(f"{about} cannot be saved", expected=expected, found=f"{tuple(value.shape)} {value.dtype}")
        )
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return {
        _TAG: "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "value": base64.b64encode(bytes(flat.numpy())).decode(),
    }


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    if _TAG not in found:
        return {key: from_json(item) for key, item in found.items()}
    return _DECODERS[found[_TAG]](found)


def _tensor_from_json(found: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, found["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found['dtype']} is no dtype")
    data = bytearray(base64.b64decode(found["value"], validate=True))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape([int(size) for size in found["shape"]])


def _dtype_from_json(found: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, found["value"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found['value']} is no dtype")
    return dtype


def _pairs(found: dict[str, Any]) -> dict[Any, Any]:
    return {from_json(key): from_json(item) for key, item in found["value"]}


_DECODERS: dict[str, Any] = {
    "float": lambda found: float(found["value"]),
    "bytes": lambda found: base64.b64decode(found["value"], validate=True),
    "tensor": _tensor_from_json,
    "dtype": _dtype_from_json,
    "device": lambda found: torch.device(found["value"]),
    "tuple": lambda found: tuple(from_json(item) for item in found["value"]),
    "set": lambda found: {from_json(item) for item in found["value"]},
    "dict": _pairs,
    "Counter": lambda found: Counter(_pairs(found)),
}
