"""From what the user gave (an optimizer, a class, a function, a configuration section, or nothing) to groups and a driver.

Owns that choice. The groups come first, because the shards are laid out by group; the driver comes when the shards exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwise.errors import OptimizerError, explain
from shardwise.optim.builtin import RuleDriver
from shardwise.optim.driver import Driver, Groups, PieceState
from shardwise.optim.elementwise import check_elementwise, is_torch_elementwise, refuse_whole_tensor
from shardwise.optim.lamb import LambDriver
from shardwise.optim.optimizer import ShardedOptimizer
from shardwise.optim.rules import AdagradRule, AdamRule, LionRule, Rule, SgdRule, check_options
from shardwise.optim.section import read_section, reject_unknown, same_name
from shardwise.optim.shards import Shard
from shardwise.optim.torch_adopt import TorchDriver

__all__ = ["OptimizerPlan", "plan_groups"]

_log = logging.getLogger(__name__)

MakeDriver = Callable[[Sequence[Shard]], Driver]

_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
    "Lamb": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "weight_decay": 0.0,
        "bias_correction": True,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "maximize": False,
    },
}
_TORCH_RULES: dict[str, Callable[[], Rule]] = {
    "Adam": partial(AdamRule, decoupled=False),
    "AdamW": partial(AdamRule, decoupled=True),
    "SGD": SgdRule,
    "Adagrad": AdagradRule,
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

    def driver(self, shards: Sequence[Shard]) -> Driver:
        """The driver for these shards. State that the user's optimizer already holds moves into it."""
        driver = self.make(shards)
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
    if isinstance(optimizer, Optimizer):
        return _adopt(optimizer, names)
    groups = _as_groups(model_parameters, named)
    if not any(group["params"] for group in groups):
        return None
    if optimizer is None:
        return _from_config(config_optimizer, groups, names)
    if isinstance(optimizer, type):
        return _from_class(optimizer, groups, {}, names)
    if not callable(optimizer):
        raise OptimizerError(
            explain(
                "the optimizer cannot be used",
                expected="a torch.optim.Optimizer, its class, or a function that makes one from the parameters",
                found=type(optimizer).__name__,
            )
        )
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
    rule = _rule_for(type(user))
    if rule is None:
        check_elementwise(user)
    face = _face(user.param_groups, user.defaults, user)
    label = type(user).__name__
    make: MakeDriver = partial(TorchDriver, template=user) if rule is None else _rule_maker(rule(), face.param_groups)
    return OptimizerPlan(face, label if rule else f"{label} (torch)", make, user, names)


def _from_class(kind: type[Any], groups: list[dict[str, Any]], params: dict[str, Any], names: dict[int, str]) -> OptimizerPlan:
    if not issubclass(kind, Optimizer):
        raise OptimizerError(explain(f"{kind.__name__} is not an optimizer", expected="a subclass of torch.optim.Optimizer"))
    refuse_whole_tensor(kind)
    try:
        if not is_torch_elementwise(kind):
            return _adopt(kind(groups, **params), names)
        # Torch's own classes need not see the parameters, and some would allocate full-size state for them.
        blank = kind([Parameter(torch.zeros(1))], **params)
    except (TypeError, ValueError) as error:
        raise OptimizerError(explain(f"{kind.__name__} cannot be made", found=str(error))) from error
    face = _face(groups, blank.defaults)
    _check_members(face.param_groups, names)
    rule = _rule_for(kind)
    if rule is not None:
        return OptimizerPlan(face, kind.__name__, _rule_maker(rule(), face.param_groups), None, names)
    blank.state.clear()
    blank.param_groups = [{**group, "params": []} for group in face.param_groups]
    return OptimizerPlan(face, f"{kind.__name__} (torch)", partial(TorchDriver, template=blank), None, names)


def _from_config(section: Any, groups: list[dict[str, Any]], names: dict[int, str]) -> OptimizerPlan:
    kind, params = read_section(section)
    params = {key: value for key, value in params.items() if key not in _INERT}
    own = same_name(kind, _OWN_DEFAULTS)
    if own is not None:
        return _own_rule(own, groups, params, names)
    known = same_name(kind, [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)])
    if known is None:
        raise OptimizerError(
            explain(
                f"optimizer type {kind!r} is not known",
                expected="Adam, AdamW, SGD, Adagrad, Lion, Lamb, or a class of torch.optim",
                do="or give an optimizer object or class to initialize()",
            )
        )
    if known in ("Adam", "AdamW"):
        return _adam(known, groups, params, names)
    return _from_class(getattr(torch.optim, known), groups, params, names)


def _adam(kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: dict[int, str]) -> OptimizerPlan:
    """Adam by configuration: decoupled weight decay unless `adam_w_mode` is false, and `bias_correction` can be turned off."""
    decoupled = bool(params.pop("adam_w_mode", True)) or kind == "AdamW"
    extra = {"bias_correction": bool(params.pop("bias_correction", True)), "decoupled_weight_decay": decoupled}
    cls = torch.optim.AdamW if kind == "AdamW" else torch.optim.Adam
    known = set(cls([Parameter(torch.zeros(1))]).defaults) - {"decoupled_weight_decay"}
    reject_unknown(kind, params, {*known, "adam_w_mode", "bias_correction"} - set(_INERT))
    plan = _from_class(cls, [{**extra, **group} for group in groups], params, names)
    plan.description = "AdamW" if decoupled else "Adam"
    return plan


def _own_rule(kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: dict[int, str]) -> OptimizerPlan:
    defaults = _OWN_DEFAULTS[kind]
    reject_unknown(kind, params, defaults)
    face = _face(groups, {**defaults, **params})
    _check_members(face.param_groups, names)
    for group in face.param_groups:
        check_options(kind, group)
    if kind == "Lion":
        return OptimizerPlan(face, kind, _rule_maker(LionRule(), face.param_groups), None, names)
    return OptimizerPlan(face, kind, partial(LambDriver, groups=face.param_groups), None, names)


def _rule_for(kind: type[Optimizer]) -> Callable[[], Rule] | None:
    """The built-in rule that does exactly what a torch class does."""
    return next((rule for name, rule in _TORCH_RULES.items() if getattr(torch.optim, name) is kind), None)


def _rule_maker(rule: Rule, groups: Groups) -> MakeDriver:
    return partial(RuleDriver, rule=rule, groups=groups)


def _face(groups: Sequence[dict[str, Any]], defaults: dict[str, Any], adopted: Optimizer | None = None) -> ShardedOptimizer:
    try:
        return ShardedOptimizer(groups, defaults, adopted)
    except (TypeError, ValueError) as error:
        raise OptimizerError(explain("the parameter groups cannot be used", found=str(error))) from error


def _as_groups(model_parameters: Iterable[Any] | None, named: Sequence[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Parameters, pairs or dicts as a list of group dicts, each parameter once. The user's dicts are kept."""
    if model_parameters is None:
        model_parameters = [param for _, param in named if param.requires_grad]
    items: list[Any] = list(model_parameters)
    if not any(isinstance(item, Mapping) for item in items):
        return [{"params": _unique(items)}]
    groups: list[dict[str, Any]] = []
    for item in items:
        group = cast("dict[str, Any]", item)
        if not isinstance(item, dict) or "params" not in group:
            raise OptimizerError(
                explain(
                    "model_parameters mixes groups with something else",
                    expected="dicts with 'params'",
                    found=repr(group),
                )
            )
        members: Any = group["params"]
        group["params"] = [members] if isinstance(members, Tensor) else _unique(members)
        groups.append(group)
    return groups


def _unique(items: Iterable[Any]) -> list[Any]:
    """Without repeats; an item is a parameter or a (name, parameter) pair."""
    seen: set[int] = set()
    kept: list[Any] = []
    for item in items:
        param = cast("Any", item[1] if isinstance(item, tuple) else item)
        if id(param) not in seen:
            seen.add(id(param))
            kept.append(item)
    return kept


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
