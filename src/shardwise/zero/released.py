"""What a parameter is while its bytes are not there.

The `nn.Parameter` object a user holds never changes identity. While its unit is released, two things stand in for it: its data
is a full-shape, stride-0 view of one NaN (so shape and numel stay true and a read is loudly NaN), and its class is
`ReleasedParameter`, through which torch tells us about every operation that touches it. An operation inside a running forward
pass fetches the weights on demand (a parameter used outside the module that owns it); elsewhere a write raises and says what to
do. A live parameter is a plain `nn.Parameter` again, so the normal path pays nothing. What shares the memory of the NaN
(`parameter.data`, a view) is a `ReleasedValue`, which refuses in the same way.

`homes` maps a parameter to the unit that holds it. It is the one directory of the process: `GatheredParameters(params)` and the
`safe_get_*` family receive bare parameters and have nothing else to start from. Entries die with their parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ParameterError

if TYPE_CHECKING:
    from shardwise.zero.unit import Home

__all__ = ["ReleasedParameter", "homes", "placeholder", "retype"]

homes: MutableMapping[Tensor, Home] = WeakIdKeyDictionary()

_HOW_TO_WRITE = """parameter {name!r} is sharded and cannot be {verb} here: only its shape is present on this rank.
Gather it first; edits made by the named rank reach every rank and the master weights:
    with shardwise.zero.GatheredParameters([parameter], modifier_rank=0):
        if rank == 0:
            parameter.data.normal_()"""

# Operations that ask about a parameter without reading or writing its values.
_ABOUT = frozenset(
    """shape size numel dim ndim dtype device layout requires_grad requires_grad_ is_leaf grad grad_fn output_nr names
    is_floating_point is_complex is_sparse is_quantized is_meta is_cuda is_cpu is_mps is_xpu is_xla is_mkldnn is_nested
    is_inference is_pinned is_shared is_signed is_contiguous stride storage_offset element_size itemsize nbytes get_device
    nelement ndimension register_hook register_post_accumulate_grad_hook retain_grad retains_grad _backward_hooks
    _post_accumulate_grad_hooks _version __len__ __repr__ __format__ __hash__""".split()  # noqa: SIM905 - one name a line would be a page
)
_NOT_IN_PLACE = frozenset(("__invert__", "__index__", "__int__", "__iter__", "__init__", "__instancecheck__"))
_ABOUT_AS_VALUE = frozenset(("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "result_type"))


class ReleasedParameter(nn.Parameter):
    """A parameter whose values rest in shards. Made and unmade by `Unit`; users see it only by its type."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Gather on demand, refuse a write, or let the placeholder answer."""
        return _answer(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """The one operation that torch does not tell about."""
        refuse(self, "written")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the values, where they can be fetched: a copy of the placeholder would be silently NaN."""
        home = homes.get(self)
        if home is None or not home.unit.fetch((home.unit,)):
            refuse(self, "copied")
        copied = copy.deepcopy(cast("nn.Parameter", self), memo)
        if home.unit.copied is not None:
            home.unit.copied(copied)
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        """Likewise for pickle: a file of placeholders would be silently NaN."""
        home = homes.get(self)
        if home is None or not home.unit.fetch((home.unit,)):
            refuse(self, "pickled")
        plain: Any = self
        return plain.__reduce_ex__(proto)


class ReleasedValue(Tensor):
    """A tensor that shares the memory of a placeholder. It can be read, and gives NaN; it cannot be written."""

    parameter_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse a write, or let the placeholder answer."""
        return _answer(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """As for parameters."""
        refuse(self, "written")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse(self, "copied")

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        refuse(self, "pickled")


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation with released parameters, or values of them, among its arguments."""
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    operation, is_set = _operation(func)
    about = operation in _ABOUT or operation in _ABOUT_AS_VALUE
    if not about:
        _fetch(tensors)
    still = [tensor for tensor in tensors if type(tensor) in _PLAIN]
    if not about:
        for tensor in still:
            assigned = is_set and tensor is args[0] and type(tensor) is ReleasedParameter
            if assigned or _writes(operation, tensor, args, kwargs):
                refuse(tensor, "written")
    before = [(tensor, type(tensor), _name(tensor)) for tensor in still]
    for tensor in still:
        retype(tensor, _PLAIN.get(type(tensor), Tensor))
    try:
        result = func(*args, **kwargs)
        return result if about else _mark(result, [(tensor, name) for tensor, _, name in before])
    finally:
        for tensor, kind, _ in before:
            retype(tensor, kind)


_PLAIN: dict[type, type[Tensor]] = {ReleasedParameter: nn.Parameter, ReleasedValue: Tensor}
"""What each class is for the time of an operation that it lets pass."""


def _fetch(tensors: Sequence[Tensor]) -> None:
    """Bring the values of all parameters of an operation, where that is allowed now."""
    lives = [home for tensor in tensors if (home := homes.get(tensor)) is not None]
    together = tuple({id(unit): unit for home in lives if (unit := home.reference()) is not None}.values())
    for tensor in tensors:
        home = homes.get(tensor) if type(tensor) is ReleasedParameter else None
        if home is not None:
            home.unit.fetch(together)


def _mark(result: Any, origins: Sequence[tuple[Tensor, str]]) -> Any:
    """Give tensors that share memory with one of the origins the class that refuses to be written."""
    if isinstance(result, Tensor):
        if not origins or isinstance(result, nn.Parameter) or result.layout != torch.strided or not result.numel():
            return result
        place = result.untyped_storage().data_ptr()
        for origin, name in origins:
            if origin is not result and origin.untyped_storage().data_ptr() == place:
                marked = result.as_subclass(ReleasedValue)
                marked.parameter_name = name
                return marked
        return result
    if type(result) in (tuple, list):
        return type(result)(_mark(item, origins) for item in result)
    return result


def _name(tensor: Tensor) -> str:
    if isinstance(tensor, ReleasedValue):
        return tensor.parameter_name
    home = homes.get(tensor)
    return home.name if home else "?"


def retype(tensor: Tensor, kind: type[Tensor]) -> None:
    """Change what class a tensor is of; the object stays the same."""
    cast("Any", tensor).__class__ = kind


def refuse(parameter: Tensor, verb: str) -> NoReturn:
    """Raise the error for an operation that needs values which are not here."""
    raise ParameterError(_HOW_TO_WRITE.format(name=_name(parameter), verb=verb))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A view of one NaN (0 for integers, which have none) with every stride 0: true shape, no memory."""
    nan = dtype.is_floating_point or dtype.is_complex
    return torch.full((), float("nan") if nan else 0, dtype=dtype, device=device).expand(shape)


def _operation(func: Callable[..., Any]) -> tuple[str, bool]:
    """Name of the operation, and whether it assigns the `data` attribute."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute, name == "__set__" and attribute == "data"
    return name, False


def _writes(operation: str, parameter: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(leaf is parameter for leaf in _leaves(kwargs.get("out"))):
        return True
    in_place = (
        (operation.endswith("_") and not operation.endswith("__"))
        or (operation.startswith("__i") and operation not in _NOT_IN_PLACE)
        or kwargs.get("inplace") is True
    )
    target = args[0] if args else next(iter(kwargs.values()), None)
    return (in_place or operation == "__setitem__") and any(leaf is parameter for leaf in _leaves(target))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from _leaves(item)
    else:
        yield value
