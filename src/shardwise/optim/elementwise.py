"""Whether an optimizer works on each element by itself, so that it can work on a part of a tensor.

Owns the classes known to be so or not, and a numerical test for the others. Refuses to know shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwise.errors import OptimizerError, explain

__all__ = ["check_elementwise", "copy_onto", "is_torch_elementwise", "refuse_whole_tensor"]

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_WHOLE_TENSOR = {
    "LBFGS": "it builds one search direction from dot products over all parameters and calls the model again inside its step",
    "SparseAdam": "it takes sparse gradients, and gradients are summed into dense shards here",
    "Adafactor": "it keeps row and column means of whole matrices",
    "Muon": "it orthogonalises whole matrices",
}
_STEPS = 3
_SHAPE = (4, 6)
_SPLIT = 10


def is_torch_elementwise(kind: type[Optimizer]) -> bool:
    """Whether `kind` is one of torch's own classes known to be elementwise (exactly: a subclass may do anything)."""
    return any(kind is getattr(torch.optim, name, None) for name in _ELEMENTWISE)


def refuse_whole_tensor(kind: type[Optimizer]) -> None:
    """Refuse the classes known to need whole tensors.

    Raises:
        OptimizerError: with the reason.
    """
    for name, reason in _WHOLE_TENSOR.items():
        known = getattr(torch.optim, name, None)
        if known is not None and issubclass(kind, known):
            raise OptimizerError(_refusal(kind, reason))


def copy_onto(optimizer: Optimizer, params: Sequence[Sequence[Tensor]]) -> Optimizer:
    """An optimizer of the same class and options with other parameters and no state.

    The constructor does not run. A `step` that a learning-rate scheduler patched into the instance is left behind.

    Args:
        optimizer: what to copy.
        params: new parameters for each of its groups.
    """
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": list(new)}
        for group, new in zip(optimizer.param_groups, params, strict=True)
    ]
    return twin


def check_elementwise(optimizer: Optimizer) -> None:
    """Run the optimizer on a small matrix, and on two flattened parts of it, each by itself as on two ranks.

    Raises:
        OptimizerError: the results differ, or it cannot take a step at all.
    """
    refuse_whole_tensor(type(optimizer))
    if is_torch_elementwise(type(optimizer)):
        return
    tried: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if any(_same(options, other) for other in tried):
            continue
        tried.append(options)
        try:
            difference = _probe(optimizer, number)
        except Exception as error:
            raise OptimizerError(
                _refusal(type(optimizer), f"a trial step on a small tensor failed ({type(error).__name__}: {error})")
            ) from error
        if not difference <= 1e-4:
            reason = f"updating a tensor in two parts gives other values than updating it whole (by up to {difference:.2g})"
            raise OptimizerError(_refusal(type(optimizer), reason))


def _probe(optimizer: Optimizer, group: int) -> float:
    """Largest difference, relative to how far the values moved."""
    source = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=source)
    whole = Parameter(start.clone())
    parts = [Parameter(part.clone()) for part in (start.view(-1)[:_SPLIT], start.view(-1)[_SPLIT:])]
    sets = [[whole], [parts[0]], [parts[1]]]
    twins = [
        copy_onto(optimizer, [chosen if number == group else [] for number in range(len(optimizer.param_groups))])
        for chosen in sets
    ]
    for twin, chosen in zip(twins, sets, strict=True):
        _seed_state(optimizer, group, twin, chosen[0])
    for _ in range(_STEPS):
        # The parts have gradients of different size, so that a norm over them shows.
        gradient = torch.randn(_SHAPE, generator=source) * torch.linspace(0.01, 3.0, start.numel()).view(_SHAPE)
        whole.grad = gradient.clone()
        for part, values in zip(parts, (gradient.view(-1)[:_SPLIT], gradient.view(-1)[_SPLIT:]), strict=True):
            part.grad = values.clone()
        for twin in twins:
            twin.step()
    with torch.no_grad():
        joined = torch.cat([parts[0], parts[1]]).view(_SHAPE)
        moved = (whole - start).abs().max().clamp_min(1e-12)
        return float((joined - whole).abs().max() / moved)


def _seed_state(optimizer: Optimizer, group: int, twin: Optimizer, param: Parameter) -> None:
    """Give a trial parameter state like that of a real one, for classes that create state in their constructor."""
    for real in optimizer.param_groups[group]["params"]:
        state = optimizer.state.get(real) if real.numel() else None
        if state:
            twin.state[param] = {
                key: _like(value, real, param) if key != "step" else _copy(value) for key, value in state.items()
            }
            return


def _like(value: Any, real: Tensor, param: Parameter) -> Any:
    if not isinstance(value, Tensor) or value.numel() != real.numel():
        return _copy(value)
    return torch.full_like(param, float(value.reshape(-1)[0]))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(str(left[key]) == str(right[key]) for key in left)


def _refusal(kind: type[Optimizer], reason: str) -> str:
    return explain(
        f"optimizer {kind.__name__} cannot work on sharded parameters: {reason}",
        expected="an optimizer that updates every element from its own gradient and state alone",
        do="use Adam, AdamW, SGD, Adagrad, Lion, Lamb or another elementwise class",
    )
