"""Pickles without trust: a pickle names functions to call, and here only the few known to be harmless are ever called.

Owns which names those are. What torch writes becomes tensors on disk (`stored`), plain containers become plain containers, and
objects of classes that a reader expects become `Record`s: bags of attributes that can do nothing. No module is imported.
Everything else is refused by name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint.contents import Spec
from shardwise.checkpoint.foreign.files import damaged
from shardwise.checkpoint.foreign.narrow import as_dict, as_list
from shardwise.checkpoint.foreign.stored import Storage, StridedTensor
from shardwise.errors import CheckpointError, explain

__all__ = ["LARGEST", "Record", "StorageKind", "unpickle"]

LARGEST = 2**30
"""Bytes of the largest pickle that is read; tensors are not in it."""

_INERT = ("argparse", "numpy", "pathlib")
"""Modules whose objects become records in any file."""


class Record:
    """An object of a class that was not imported.

    `arguments` is what its class would have been called with, `attributes` are its own, `state` what a class of an unusual kind
    would have been given, `items` what was put into it.
    """

    __slots__ = ("arguments", "attributes", "items", "state")
    name = ""
    """Module and name of the class."""

    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    items: dict[Any, Any]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:
        """What unpickling calls, unlike `__init__`."""
        made = super().__new__(cls)
        made.arguments, made.attributes, made.items, made.state = arguments, {}, {}, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state
        parts = as_list(state) or [state]
        # A dict, or a pair of dicts: attributes, and those with slots.
        for part in parts if len(parts) == 2 else parts[:1]:
            self.attributes.update(as_dict(part) or {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


class _Maker:
    """A function that a pickle may call. Cannot be changed, which a pickle could otherwise do for the whole process."""

    __slots__ = ("_make",)
    _make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set")


@dataclass(frozen=True, slots=True)
class StorageKind:
    """What a pickle names as the class of a storage.

    Args:
        dtype: of its elements; None for one of plain bytes.
    """

    dtype: torch.dtype | None


def unpickle(
    data: bytes,
    about: str | Path,
    *,
    records: Sequence[str] = (),
    storage: Callable[[Any], Storage] | None = None,
) -> Any:
    """What a pickle holds.

    Args:
        data: the pickle.
        about: which file, for errors.
        records: modules whose objects, and those of modules inside them, become records.
        storage: finds the bytes that a persistent id of torch's stands for.

    Raises:
        CheckpointError: it is damaged, or names a function or class that is not allowed.
    """
    try:
        _check_memo(data)
        return _Unpickler(data, about, (*_INERT, *records), storage).load()
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - what a hostile pickle makes the interpreter raise cannot be enumerated
        raise damaged(about, f"{type(error).__name__}: {error}", "a pickle that torch wrote") from None


def _check_memo(data: bytes) -> None:
    """Refuses memo numbers that no pickler writes: the interpreter would allocate a table as long as the number says."""
    limit = len(data)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("BINPUT", "LONG_BINPUT", "PUT") and cast("int", argument) > limit:
            raise ValueError(f"memo number {argument}")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, about: str | Path, records: tuple[str, ...], storage: Callable[[Any], Storage] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._about = about
        self._records = records
        self._storage = storage
        # Fresh ones for each pickle: what one does to such a class stays with it.
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        full = f"{module_name}.{global_name}"
        if full in _MAKERS:
            return _MAKERS[full]
        if module_name in ("torch", "torch.storage"):
            kind = _STORAGES.get(global_name)
            if kind is not None:
                return kind
            dtype = getattr(torch, global_name, None) if global_name.isidentifier() else None
            if isinstance(dtype, torch.dtype):
                return dtype
        if any(module_name == known or module_name.startswith(f"{known}.") for known in self._records):
            return self._classes.setdefault(full, type("Record", (Record,), {"__slots__": (), "name": full}))
        raise CheckpointError(
            explain(
                f"{self._about} cannot be trusted",
                expected="tensors and plain values",
                found=f"a pickle that names {full}",
                do="if you trust it, load it with the library that wrote it and save it without such objects",
            )
        )

    def persistent_load(self, pid: Any, /) -> Any:
        if self._storage is None:
            raise ValueError("a reference to a storage outside of an archive")
        return self._storage(pid)


def _member(owner: Any, name: Any) -> Record:
    """A member of an enumeration, which some versions of Python write as `getattr` of its class. Nothing else has any here."""
    if not (isinstance(owner, type) and issubclass(owner, Record) and isinstance(name, str)):
        raise TypeError(f"the attribute {name!r} of {owner!r}")
    return owner(name)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: torch.dtype | None = None) -> StridedTensor:
    dtype = dtype or storage.dtype
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a storage")
    metadata = rest[2] if len(rest) > 2 else None
    if metadata:
        raise ValueError("a conjugate or negative view, whose values are not those in the file")
    return StridedTensor(storage, Spec(tuple(shape), dtype), tuple(strides), offset)


def _tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Any:
    return _tensor(storage, offset, shape, strides, grad, hooks, *rest, dtype=dtype)


def _first(tensor: Any, *rest: Any) -> Any:
    return tensor


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    return complex(float(real), float(imaginary))


def _from_type(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if not isinstance(make, _Maker):
        raise TypeError("a tensor made by something unknown")
    return make(*arguments)


def _concrete(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """A container of what is there already: from a number, `bytearray` and others would allocate what they are told."""

    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | dict | set | frozenset | bytes | str):
            raise TypeError(f"a container of {type(items).__name__}")
        return kind(cast("Iterable[Any]", items))

    return make


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes in an unknown encoding")
    return text.encode("latin1")


def _no_factory(*arguments: Any) -> dict[Any, Any]:
    return {}


def _bytearray(*arguments: Any) -> bytearray:
    return bytearray(_encode(*arguments) if arguments and isinstance(arguments[0], str) else _concrete(bytes)(*arguments))


def _device(*arguments: Any) -> str:
    return ":".join(str(argument) for argument in arguments)


def _reconstruct(kind: Any, *rest: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise TypeError("an object of an unknown class")
    return kind()


_BUILTINS: dict[str, Callable[..., Any]] = {
    "bytearray": _bytearray,
    "complex": _complex,
    "dict": _concrete(dict),
    "frozenset": _concrete(frozenset),
    "list": _concrete(list),
    "set": _concrete(set),
    "slice": slice,
    "tuple": _concrete(tuple),
    # Only as arguments (of a defaultdict, or as the base of an object); never called.
    **dict.fromkeys(("bool", "bytes", "float", "int", "object", "str"), _no_factory),
}
_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    # Only as arguments: of which class a tensor was.
    **dict.fromkeys(("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"), _no_factory),
}
_MAKERS: dict[str, _Maker] = {
    name: _Maker(make)
    for name, make in {
        **{f"{module}.{name}": make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()},
        **{f"{module}.getattr": _member for module in ("builtins", "__builtin__")},
        **_TENSORS,
        "torch.Size": _concrete(tuple),
        "torch.device": _device,
        "torch.serialization._get_layout": _device,
        "collections.OrderedDict": _concrete(OrderedDict),
        "collections.defaultdict": _no_factory,
        "collections.Counter": _concrete(Counter),
        "_codecs.encode": _encode,
        "copyreg._reconstructor": _reconstruct,
        "copy_reg._reconstructor": _reconstruct,
    }.items()
}
_STORAGES: dict[str, StorageKind] = {
    "UntypedStorage": StorageKind(None),
    "BoolStorage": StorageKind(torch.bool),
    "ByteStorage": StorageKind(torch.uint8),
    "CharStorage": StorageKind(torch.int8),
    "ShortStorage": StorageKind(torch.int16),
    "IntStorage": StorageKind(torch.int32),
    "LongStorage": StorageKind(torch.int64),
    "HalfStorage": StorageKind(torch.float16),
    "BFloat16Storage": StorageKind(torch.bfloat16),
    "FloatStorage": StorageKind(torch.float32),
    "DoubleStorage": StorageKind(torch.float64),
    "ComplexFloatStorage": StorageKind(torch.complex64),
    "ComplexDoubleStorage": StorageKind(torch.complex128),
}
