"""Helpers under the names that scripts written for DeepSpeed call.

Owns no logic but the marking of leaf modules. `zero_to_fp32` is imported when it is first used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from shardwise.errors import ParameterError, explain
from shardwise.zero import leaf_modules

if TYPE_CHECKING:
    from shardwise.utils import zero_to_fp32

__all__ = [
    "get_z3_leaf_modules",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

logger = logging.getLogger("shardwise")


def __getattr__(name: str) -> Any:
    if name == "zero_to_fp32":
        return import_module("shardwise.utils.zero_to_fp32")
    raise AttributeError(f"module 'shardwise.utils' has no attribute {name!r}")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Declare that the inside of some modules may run differently on different ranks (mixture of experts, for one).

    Call it before `initialize`. Their parameters are gathered and reduced with the unit around them.

    Args:
        model: where to look.
        leaf_module_classes: classes, or names of classes.
        raise_if_not_found: whether a class that does not occur is an error.

    Returns:
        the modules found.
    """
    found = [module for module in model.modules() if _is_one_of(module, leaf_module_classes)]
    missing = [kind for kind in leaf_module_classes if not any(_is_one_of(module, [kind]) for module in found)]
    if missing and raise_if_not_found:
        names = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in missing)
        raise ParameterError(
            explain(f"{type(model).__name__} has no module of class {names}", do="print(model) shows the classes")
        )
    _mark(found)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for some classes."""
    found = [module for module in model.modules() if _is_one_of(module, leaf_module_classes)]
    if not found and raise_if_not_found:
        raise ParameterError(explain(f"{type(model).__name__} has no such module", do="print(model) shows the classes"))
    for module in found:
        leaf_modules.discard(module)
    return found


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Declare one module, or take the declaration back."""
    if flag:
        _mark([module])
    else:
        leaf_modules.discard(module)


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether the module was declared."""
    return module in leaf_modules


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All declared modules of a model."""
    return [module for module in model.modules() if module in leaf_modules]


def _mark(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        leaf_modules.add(module)


def _is_one_of(module: nn.Module, kinds: Sequence[type[nn.Module] | str]) -> bool:
    return any(type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind) for kind in kinds)
