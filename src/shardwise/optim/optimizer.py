"""The optimizer object that users hold.

Owns being a `torch.optim.Optimizer` in every way that user code and learning-rate schedulers rely on. Refuses to know how a
step is taken: that is a function the engine binds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import OptimizerError, UsageError, explain
from shardwise.optim.step import StepPath

__all__ = ["ShardedOptimizer", "check_group"]


class ShardedOptimizer(Optimizer):
    """An optimizer over sharded parameters, with the interface of `torch.optim.Optimizer`.

    `param_groups` are live: what a scheduler or the user changes there is used by the next step. `overflow` tells whether the
    last step was skipped for non-finite gradients, `cur_scale` is the loss scale, `optimizer` the torch optimizer that does the
    work (this object, when a built-in rule does).

    Args:
        groups: parameter groups as torch takes them; the dicts themselves are kept.
        defaults: options for groups that do not have them.
        adopted: the user's own optimizer, whose groups these are.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any], adopted: Optimizer | None = None) -> None:
        self._path: StepPath | None = None
        self._on_step: Callable[[], object] | None = None
        self._on_zero_grad: Callable[[bool], object] | None = None
        self._params: Mapping[str, Tensor] = {}
        self._adopted = adopted
        self._sealed = False
        self._muted = False
        self._announced: list[object] = []
        super().__init__(groups, defaults)
        if adopted is not None:
            self.param_groups = adopted.param_groups
        self._sealed = True

    def bind(
        self,
        path: StepPath,
        params: Mapping[str, Tensor],
        on_step: Callable[[], object],
        on_zero_grad: Callable[[bool], object],
    ) -> None:
        """Connect to the engine.

        Args:
            path: the step path, for the state of the local shard.
            params: the model's parameters by the names that pieces have.
            on_step: takes a step.
            on_zero_grad: drops gradients; the argument is torch's `set_to_none`.
        """
        self._path, self._params, self._on_step, self._on_zero_grad = path, params, on_step, on_zero_grad

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because some gradient was Inf or NaN."""
        last = self._path.last if self._path else None
        return last is not None and not last.applied

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self._path.scaler.scale if self._path else 1.0

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that does the work."""
        return (self._path.driver.inner if self._path else None) or self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step on all ranks.

        Args:
            closure: evaluated once, before the step; what it returns is returned.

        Raises:
            UsageError: this optimizer does not belong to an engine.
        """
        if self._muted:
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._on_step is None:
            raise UsageError(explain("this optimizer is not connected to an engine", do="use what initialize() returns"))
        self._on_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients gathered so far."""
        if self._on_zero_grad is not None:
            self._on_zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def announce_step(self) -> None:
        """Let learning-rate schedulers know that a step was taken, when it was not taken through `step()` of this object.

        Torch's schedulers wrap the `step` of the instance they are attached to and warn if the wrapper was not called before
        their own first step. This calls the wrappers, of this optimizer and of the user's own, with no effect on parameters.
        """
        for owner in (self, self._adopted):
            wrapper = vars(owner).get("step") if owner is not None else None
            if owner is None or wrapper is None or any(wrapper is known for known in self._announced):
                continue
            self._announced.append(wrapper)
            groups = owner.param_groups
            try:
                self._muted = True
                owner.param_groups = [{**group, "params": []} for group in groups]
                wrapper()
            finally:
                owner.param_groups, self._muted = groups, False

    # In torch it is a plain attribute.
    @property
    def state(self) -> defaultdict[Tensor, Any]:  # pyright: ignore
        """State of this rank's pieces, by parameter: 1-D views of its part, and numbers."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        if self._path is not None:
            for number, shard in enumerate(self._path.shards):
                for position, piece in enumerate(shard.pieces):
                    state = self._path.driver.piece_state(number, position)
                    if state and piece.name in self._params:
                        found[self._params[piece.name]] = state
        return found

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:  # pyright: ignore
        # torch's constructor assigns an empty dict.
        if value:
            raise UsageError(explain("the state of a sharded optimizer cannot be replaced", do="use load_state_dict()"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the shards exist.

        Raises:
            UsageError: always, after construction.
        """
        if self._sealed:
            raise UsageError(
                explain(
                    "parameter groups cannot be added to a sharded optimizer",
                    do="give all groups to initialize(); parameters that train only later can be in a group from the start, "
                    "with requires_grad=True and learning rate 0",
                )
            )
        # Not torch's own method: its first call imports torch.compile's machinery, which takes seconds.
        group = check_group(param_group, len(self.param_groups))
        taken = {id(param) for other in self.param_groups for param in other["params"]}
        if any(id(param) in taken for param in group["params"]):
            raise OptimizerError(explain("a parameter is in more than one parameter group", expected="each parameter once"))
        for key, value in self.defaults.items():
            group.setdefault(key, value)
        self.param_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: options of the groups, state of its pieces, and the loss scale."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        if self._path is None:
            return {"param_groups": groups, "shards": [], "loss_scale": {}}
        return {
            "param_groups": groups,
            "shards": self._path.driver.state_dict(),
            "loss_scale": self._path.scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank of the same number of ranks.

        Raises:
            OptimizerError: another number of groups.
            UsageError: state of other shards, or no engine.
        """
        if self._path is None:
            raise UsageError(explain("this optimizer is not connected to an engine", do="call initialize() first"))
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise OptimizerError(
                explain(
                    "optimizer state does not fit",
                    expected=f"{len(self.param_groups)} parameter groups",
                    found=str(len(groups)),
                )
            )
        self._path.driver.load_state_dict(state_dict["shards"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if state_dict["loss_scale"]:
            self._path.scaler.load_state_dict(state_dict["loss_scale"])


def check_group(group: dict[str, Any], number: int) -> dict[str, Any]:
    """The same dict, with "params" a list of distinct tensors, and "param_names" if they came as (name, parameter) pairs.

    Raises:
        OptimizerError: something that cannot be optimized.
    """
    given: Any = group["params"]
    unique: dict[int, Any] = {}
    for item in [given] if isinstance(given, Tensor) else list(given):
        unique.setdefault(id(cast("Any", item)[1] if isinstance(item, tuple) else item), item)
    pairs = list(unique.values())
    params: list[Any] = [item[1] if isinstance(item, tuple) else item for item in pairs]
    if pairs and all(isinstance(item, tuple) for item in pairs):
        group["param_names"] = [item[0] for item in pairs]
    group["params"] = params
    wrong: Any = next((param for param in params if not (isinstance(param, Tensor) and param.is_leaf)), None)
    if wrong is not None:
        what = "a tensor that was computed from others" if isinstance(wrong, Tensor) else type(wrong).__name__
        problem, do = f"parameter group {number} cannot be used", "pass model.parameters(), or some of them"
        raise OptimizerError(explain(problem, expected="parameters", found=what, do=do))
    return group
