"""Which modules are gathered as one unit, and which unit each parameter belongs to.

Owns reading the module tree. Refuses to know buffers, ranks and dtypes.

A unit is found, in this order: what the user named; Hugging Face's `_no_split_modules`; else the repeated block class of a
`ModuleList` or `Sequential`. The model itself is always a unit, for what belongs to no other. A module declared as leaf (its
inside may run differently on different ranks) is never a unit and contains none: its parameters come and go with the unit
around it, which all ranks enter alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from weakref import WeakSet

from torch import nn

from shardwise.errors import ParameterError, explain
from shardwise.policy import Policy, matches_module

__all__ = ["Named", "UnitPlan", "class_names", "find_units", "leaf_modules", "named_modules", "plan_units"]

leaf_modules: MutableSet[nn.Module] = WeakSet()
"""Modules that `utils.set_z3_leaf_modules` marked. The call comes before any engine exists, so the mark needs a place of its
own."""


@dataclass(slots=True)
class Named:
    """A parameter, the first of its names, and the others if it is shared."""

    parameter: nn.Parameter
    name: str
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class UnitPlan:
    """A module that becomes a unit, and the parameters it will hold."""

    name: str
    module: nn.Module
    parameters: list[Named] = field(default_factory=list[Named])


def named_modules(model: nn.Module, *, aliases: bool = False) -> list[tuple[str, nn.Module]]:
    """`model.named_modules()`, which torch leaves untyped: dotted names and modules, the model itself first.

    A module with several names comes once, under the first, or with `aliases` under each.
    """
    untyped: Any = model
    return list(untyped.named_modules(remove_duplicate=not aliases))


def class_names(module: nn.Module) -> tuple[str, ...]:
    """The names by which a configuration may mean the class of a module: short and fully qualified."""
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def plan_units(model: nn.Module, policy: Policy) -> list[UnitPlan]:
    """All units of a model, the root first, then in module order, with every parameter assigned to exactly one.

    A parameter registered in several units belongs to the innermost unit around all of them.

    Raises:
        ParameterError: the policy names a unit or leaf module that the model does not have.
    """
    plans = {id(model): UnitPlan("", model)}
    for name, module in find_units(model, policy):
        plans[id(module)] = UnitPlan(name, module)
    modules = dict(named_modules(model, aliases=True))
    owners: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter].append(name)
    for parameter, names in owners.items():
        lines = [_units_around(name, modules, plans) for name in names]
        common = [unit for unit in lines[0] if all(unit in line for line in lines)]
        plans[common[-1]].parameters.append(Named(parameter, names[0], tuple(names[1:])))
    return list(plans.values())


def find_units(model: nn.Module, policy: Policy) -> list[tuple[str, nn.Module]]:
    """Modules to gather as one, as `(dotted name, module)`, without the model itself; shared modules once."""
    leaves = _find_leaves(model, policy)
    closed = {id(module) for leaf in leaves for module in leaf.modules()}
    candidates = [(name, module) for name, module in named_modules(model) if name and id(module) not in closed]
    if policy.units:
        everyone = named_modules(model, aliases=True)
        meant = [(name, m) for name, m in everyone if matches_module(policy.units, name, class_names(m))]
        _check_all_matched(policy.units, meant, model, "zero_optimization.units")
        _check_some_open(policy.units, meant, closed)
        chosen = {id(module) for _, module in meant}
        return [(name, module) for name, module in candidates if id(module) in chosen]
    blocks = {str(block) for module in model.modules() for block in getattr(module, "_no_split_modules", None) or ()}
    found = [(name, module) for name, module in candidates if type(module).__name__ in blocks and _has_parameters(module)]
    if not found:
        repeated = {id(block) for block in _repeated_blocks(model)}
        found = [(name, module) for name, module in candidates if id(module) in repeated]
    return found


def _check_some_open(patterns: Sequence[str], found: Sequence[tuple[str, nn.Module]], closed: Collection[int]) -> None:
    for pattern in patterns:
        if all(id(module) in closed for name, module in found if matches_module((pattern,), name, class_names(module))):
            raise ParameterError(
                explain(
                    f"zero_optimization.units names {pattern!r}, which is found only inside modules declared as leaf",
                    do="ranks may run the inside of a leaf differently, so nothing in it is gathered on its own: "
                    "name a module around the leaf, or take the declaration back",
                )
            )


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Children of containers whose class occurs more than once there; the innermost that still have children of their own."""
    for child in module.children():
        yield from _repeated_blocks_below(module, child)


def _repeated_blocks_below(parent: nn.Module, child: nn.Module) -> Iterator[nn.Module]:
    inner = list(_repeated_blocks(child))
    if isinstance(parent, (nn.ModuleList, nn.Sequential)) and _has_parameters(child):
        siblings = Counter(type(sibling) for sibling in parent if _has_parameters(sibling))  # one used twice counts twice
        composed_inside = any(any(True for _ in block.children()) for block in inner)
        if siblings[type(child)] > 1 and not composed_inside:
            yield child
            return
    yield from inner


def _find_leaves(model: nn.Module, policy: Policy) -> list[nn.Module]:
    named = [
        (name, module)
        for name, module in named_modules(model, aliases=True)
        if matches_module(policy.leaf_modules, name, class_names(module))
    ]
    _check_all_matched(policy.leaf_modules, named, model, "zero_optimization.leaf_module")
    return [module for _, module in named] + [module for module in model.modules() if module in leaf_modules]


def _check_all_matched(patterns: Sequence[str], found: Iterable[tuple[str, nn.Module]], model: nn.Module, path: str) -> None:
    found = list(found)
    for pattern in patterns:
        if not any(matches_module((pattern,), name, class_names(module)) for name, module in found):
            known = sorted({type(module).__name__ for module in model.modules()} | {name for name, _ in named_modules(model)})
            near = get_close_matches(pattern, known, n=3)
            raise ParameterError(
                explain(
                    f"{path} names {pattern!r}, which matches no module of {type(model).__name__}",
                    expected="a module class name, or a pattern of dotted module names",
                    do=f"nearest: {', '.join(near)}" if near else "print(model) shows both",
                )
            )


def _units_around(parameter_name: str, modules: Mapping[str, nn.Module], plans: Mapping[int, UnitPlan]) -> list[int]:
    """The keys in `plans` of the units around a parameter, outermost first."""
    parts = parameter_name.split(".")[:-1]
    around = (id(modules[".".join(parts[:end])]) for end in range(len(parts) + 1))
    return [key for key in around if key in plans]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
