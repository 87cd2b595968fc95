"""From what the user gave (an optimizer, a class, a function, a configuration section, or nothing) to groups and a driver.

Owns that choice. The groups come first, because the shards are laid out by group; the driver comes when the shards exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwise.errors import OptimizerError, explain
from shardwise.optim.builtin import RuleDriver
from shardwise.optim.driver import Driver, Groups, PieceState
from shardwise.optim.elementwise import check_elementwise, is_torch_elementwise, refuse_whole_tensor
from shardwise.optim.lamb import LambDriver
from shardwise.optim.optimizer import ShardedOptimizer, check_group
from shardwise.optim.paged import Paging, page_state
from shardwise.optim.rules import AdagradRule, AdamRule, LionRule, Rule, SgdRule, check_options
from shardwise.optim.section import nearest_name, read_section, reject_unknown, same_name
from shardwise.optim.shards import Shard
from shardwise.optim.torch_adopt import TorchDriver

__all__ = ["OptimizerPlan", "plan_groups"]

_log = logging.getLogger(__name__)

MakeDriver = Callable[[Sequence[Shard]], Driver]


@dataclass(frozen=True)
class _BuiltIn:
    """A rule of this package: its defaults, and how to drive it."""

    defaults: Mapping[str, Any]
    make: Callable[[Groups], MakeDriver]


def _by_rule(rule: Rule) -> Callable[[Groups], MakeDriver]:
    return lambda groups: partial(RuleDriver, rule=rule, groups=groups)


_COMMON: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "maximize": False}
_MOMENTS: dict[str, Any] = {**_COMMON, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
_ADAM: dict[str, Any] = {**_MOMENTS, "amsgrad": False, "decoupled_weight_decay": False}
_SGD: dict[str, Any] = {**_COMMON, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
_ADAGRAD: dict[str, Any] = {**_COMMON, "lr": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
_LAMB: dict[str, Any] = {**_MOMENTS, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01}
_LION: dict[str, Any] = {**_COMMON, "lr": 1e-4, "betas": (0.9, 0.99)}

# The first four have torch's defaults, the others those of DeepSpeed.
_BUILT_IN = {
    "Adam": _BuiltIn(_ADAM, _by_rule(AdamRule(decoupled=False))),
    "AdamW": _BuiltIn({**_ADAM, "weight_decay": 1e-2, "decoupled_weight_decay": True}, _by_rule(AdamRule(decoupled=True))),
    "SGD": _BuiltIn(_SGD, _by_rule(SgdRule())),
    "Adagrad": _BuiltIn(_ADAGRAD, _by_rule(AdagradRule())),
    "Lion": _BuiltIn(_LION, _by_rule(LionRule())),
    "Lamb": _BuiltIn(_LAMB, lambda groups: partial(LambDriver, groups=groups)),
}
# Options that choose an implementation; there is one.
_INERT = ("torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none")


@dataclass
class OptimizerPlan:
    """How a model will be updated.

    Args:
        optimizer: the object that users hold; its `param_groups` are the groups.
        description: the update rule or class, for messages.
    """

    optimizer: ShardedOptimizer
    description: str
    make: MakeDriver
    adopted: Optimizer | None = None
    names: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups, with parameters and options; some may be empty."""
        return self.optimizer.param_groups

    def group_of(self, param: Tensor) -> int | None:
        """Index of the group that holds `param`; None for a parameter that is not to be trained."""
        return self._groups_by_id().get(id(param))

    def _groups_by_id(self) -> dict[int, int]:
        return {id(param): number for number, group in enumerate(self.param_groups) for param in group["params"]}

    def driver(self, shards: Sequence[Shard], paging: Paging | None = None) -> Driver:
        """The driver for these shards. State that the user's optimizer already holds moves into it.

        Args:
            shards: what to update.
            paging: that state rests elsewhere.

        Raises:
            OptimizerError: state of this optimizer cannot.
        """
        driver = self.make(shards)
        if paging is not None:
            driver = page_state(driver, paging)
        if self.adopted is not None and self.adopted.state:
            driver.carry_over(_states_by_name(self.adopted, self.names))
            self.adopted.state.clear()
        return driver


def plan_groups(
    optimizer: Optimizer | type[Optimizer] | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    named_parameters: Iterable[tuple[str, Tensor]],
    config_optimizer: Any = None,
) -> OptimizerPlan | None:
    """Decide on groups and update rule.

    Args:
        optimizer: an instance (adopted: its group dicts stay the live ones), a class or a function of the parameters; it wins
            over the configuration.
        model_parameters: parameters, (name, parameter) pairs or group dicts; None for all that require gradients.
        named_parameters: all parameters of the model.
        config_optimizer: the configuration's section: a mapping or object with `type` and `params`.

    Returns:
        None when there is nothing to optimize or nothing to do it with.

    Raises:
        OptimizerError: the optimizer needs whole tensors, holds a foreign parameter, or has options it does not take.
    """
    named = list(named_parameters)
    if optimizer is None and config_optimizer is None:
        return None
    if optimizer is not None and config_optimizer is not None:
        _log.info("the optimizer given in code is used; the configuration's 'optimizer' section is not")
    names = {id(param): name for name, param in reversed(named)}
    given: Any = optimizer  # whatever the annotation says
    if not (given is None or callable(given) or isinstance(given, Optimizer)):
        raise OptimizerError(
            explain(
                "the optimizer cannot be used",
                expected="a torch.optim.Optimizer, its class, or a function that makes one from the parameters",
                found=type(given).__name__,
                do="name an optimizer in the configuration, or pass optimizer=torch.optim.AdamW, for example",
            )
        )
    if isinstance(optimizer, Optimizer):
        return _adopt(optimizer, names)
    groups = _as_groups(model_parameters, named)
    if not any(group["params"] for group in groups):
        return None
    if optimizer is None:
        return _from_config(config_optimizer, groups, names)
    if isinstance(optimizer, type):
        return _from_class(optimizer, groups, {}, names)
    return _adopt(_made(optimizer(groups)), names)


def _made(result: Any) -> Optimizer:
    if not isinstance(result, Optimizer):
        raise OptimizerError(
            explain(
                "the function given as optimizer did not make one",
                expected="a torch.optim.Optimizer",
                found=type(result).__name__,
            )
        )
    return result


def _adopt(user: Optimizer, names: dict[int, str]) -> OptimizerPlan:
    if isinstance(user, ShardedOptimizer):
        raise OptimizerError(explain("this optimizer already belongs to an engine", do="give each engine its own optimizer"))
    _check_members(user.param_groups, names)
    rule = _built_in(type(user))
    if rule is None:
        check_elementwise(user)
    face = _face(user.param_groups, user.defaults, user)
    label = type(user).__name__
    make: MakeDriver = partial(TorchDriver, template=user) if rule is None else _BUILT_IN[rule].make(face.param_groups)
    return OptimizerPlan(face, label if rule else f"{label} (torch)", make, user, names)


def _from_class(kind: type[Any], groups: list[dict[str, Any]], params: dict[str, Any], names: dict[int, str]) -> OptimizerPlan:
    if not issubclass(kind, Optimizer):
        raise OptimizerError(explain(f"{kind.__name__} is not an optimizer", expected="a subclass of torch.optim.Optimizer"))
    refuse_whole_tensor(kind)
    rule = _built_in(kind)
    if rule is not None:
        return _from_rule(rule, groups, params, names)
    try:
        if not is_torch_elementwise(kind):
            return _adopt(kind(groups, **params), names)
        # Torch's own classes need not see the parameters.
        blank = kind([Parameter(torch.zeros(1))], **params)
    except (TypeError, ValueError) as error:
        raise OptimizerError(explain(f"{kind.__name__} cannot be made", found=str(error))) from error
    face = _face(groups, blank.defaults)
    _check_members(face.param_groups, names)
    blank.param_groups = [{**group, "params": []} for group in face.param_groups]
    return OptimizerPlan(face, f"{kind.__name__} (torch)", partial(TorchDriver, template=blank), None, names)


def _from_config(section: Any, groups: list[dict[str, Any]], names: dict[int, str]) -> OptimizerPlan:
    kind, params = read_section(section)
    params = {key: value for key, value in params.items() if key not in _INERT}
    rule = same_name(kind, _BUILT_IN)
    if rule is not None:
        decoupled = bool(params.pop("adam_w_mode", True))
        params = {"weight_decay": 0.0, **params}  # torch's AdamW decays unless told otherwise, DeepSpeed's does not
        return _from_rule("AdamW" if rule == "Adam" and decoupled else rule, groups, params, names)
    classes = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"]
    known = same_name(kind, classes)
    if known is None:
        usable = [*_BUILT_IN, *(name for name in classes if is_torch_elementwise(getattr(torch.optim, name)))]
        usable = list(dict.fromkeys(usable))
        raise OptimizerError(
            explain(
                f"optimizer type {kind!r} is not known",
                expected=f"one of {', '.join(usable)}",
                do=f"{nearest_name(kind, usable)}Any other optimizer can be passed to initialize() as a class or object",
            )
        )
    return _from_class(getattr(torch.optim, known), groups, params, names)


def _from_rule(kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: dict[int, str]) -> OptimizerPlan:
    rule = _BUILT_IN[kind]
    reject_unknown(kind, params, set(rule.defaults) - {"decoupled_weight_decay"})
    face = _face(groups, {**rule.defaults, **params})
    _check_members(face.param_groups, names)
    for group in face.param_groups:
        check_options(kind, group)
    return OptimizerPlan(face, kind, rule.make(face.param_groups), None, names)


def _built_in(kind: type[Optimizer]) -> str | None:
    """The rule that does exactly what a torch class does."""
    return next((name for name in _BUILT_IN if getattr(torch.optim, name, None) is kind), None)


def _face(groups: Sequence[dict[str, Any]], defaults: dict[str, Any], adopted: Optimizer | None = None) -> ShardedOptimizer:
    return ShardedOptimizer(groups, defaults, adopted)


def _as_groups(model_parameters: Iterable[Any] | None, named: Sequence[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Parameters, pairs or dicts as a list of group dicts. The user's dicts are kept."""
    if model_parameters is None:
        model_parameters = [param for _, param in named if param.requires_grad]
    items: list[Any] = list(model_parameters)
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    if not all(isinstance(item, dict) and "params" in item for item in items):
        found = ", ".join(sorted({type(item).__name__ for item in items}))
        raise OptimizerError(
            explain("model_parameters mixes groups with something else", expected="dicts with 'params'", found=found)
        )
    return [check_group(group, number) for number, group in enumerate(items)]


def _check_members(groups: Groups, names: Mapping[int, str]) -> None:
    foreign = [
        f"{tuple(param.shape)} in group {number}"
        for number, group in enumerate(groups)
        for param in group["params"]
        if id(param) not in names
    ]
    if foreign:
        raise OptimizerError(
            explain(
                "the optimizer holds parameters that the model does not have",
                found=f"shapes {', '.join(foreign[:5])}{' and more' if len(foreign) > 5 else ''}",
                do="make the optimizer from the parameters of the model that is given to initialize()",
            )
        )


def _states_by_name(user: Optimizer, names: Mapping[int, str]) -> dict[str, PieceState]:
    return {names[id(param)]: dict(state) for param, state in user.state.items() if id(param) in names and state}
