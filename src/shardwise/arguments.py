"""What `initialize` is given besides the model and the configuration: whether it can be what it should be.

Owns the refusal of things of a wrong kind, before anything is built or sent. Refuses to use what it is given: iterators are
not begun, functions are not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from shardwise.errors import ParameterError, UsageError, explain

__all__ = ["check_arguments"]

_SHOWN = 60


def check_arguments(*, model_parameters: Any, training_data: Any, collate_fn: Any) -> None:
    """Refuse what is of a wrong kind. None is always fine. (Optimizers and schedules are judged where they are adopted.)

    Raises:
        ParameterError: `model_parameters` holds no parameters.
        UsageError: `training_data` is no dataset, or `collate_fn` is no function.
    """
    if model_parameters is not None:
        _check_parameters(model_parameters)
    if training_data is not None:
        _check_data(training_data)
    if collate_fn is not None and not callable(collate_fn):
        raise UsageError(
            explain(
                "initialize(collate_fn=...) cannot be used",
                expected="a function that makes a batch of a list of samples",
                found=_kind(collate_fn),
                do="leave it out for torch's default",
            )
        )


def _check_parameters(given: Any) -> None:
    wrong: object = None
    if isinstance(given, (Tensor, nn.Module, str, bytes, Mapping)) or not isinstance(given, Iterable):
        wrong = cast("object", given)
    elif isinstance(given, Sequence):  # of what can be gone through only once, the optimizer will see
        wrong = next((item for item in cast("Sequence[object]", given) if not _is_parameter(item)), None)
    if wrong is None:
        return
    raise ParameterError(
        explain(
            "initialize(model_parameters=...) cannot be used",
            expected="parameters, (name, parameter) pairs, or groups: dicts with 'params'",
            found=_kind(wrong) if wrong is given else f"{_kind(wrong)} among them",
            do=_remedy(wrong),
        )
    )


def _is_parameter(item: object) -> bool:
    if isinstance(item, tuple):
        pair = cast("tuple[object, ...]", item)
        return len(pair) == 2 and isinstance(pair[1], Tensor)
    return isinstance(item, (Tensor, Mapping))


def _remedy(wrong: object) -> str:
    if isinstance(wrong, nn.Module):
        return "pass model.parameters()"
    if isinstance(wrong, (Tensor, Mapping)):
        return "put it in a list"
    return "pass model.parameters(), or leave it out to train all parameters that require gradients"


def _check_data(data: Any) -> None:
    expected = "a dataset: an object with __getitem__ and __len__, or one that can be iterated over"
    do = ""
    if isinstance(data, DataLoader):
        do = "pass its dataset: the loader that initialize returns makes the batches, of the configuration's size"
    elif isinstance(data, Mapping):
        do = "pass one of its values, such as data['train']"
    elif isinstance(data, type):
        do = "pass an object of that class"
    elif isinstance(data, (str, bytes)) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        do = "pass a torch.utils.data.Dataset, or leave it out and bring batches of your own"
    elif hasattr(data, "__getitem__") and not hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        do = "give its class a __len__, or make it a torch.utils.data.IterableDataset"
    if do:
        found = f"{_kind(cast('object', data))} without __len__" if "__len__" in do else _kind(cast("object", data))
        raise UsageError(explain("initialize(training_data=...) cannot be used", expected=expected, found=found, do=do))


def _kind(value: object) -> str:
    """The kind of a value, and a small value itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shown = repr(value) if isinstance(value, (bool, int, float, str, bytes)) else ""
    return f"{type(value).__name__} {shown[:_SHOWN]}".rstrip()
