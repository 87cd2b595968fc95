"""Update rules: what one step does to a stretch of elements.

Owns the arithmetic of Adam, AdamW, SGD, Adagrad and Lion on 1-D tensors of one dtype. Refuses to know shards, dtypes at rest,
gradient norms and which parameter an element belongs to.

A rule must give each element the same bits wherever it stands, so that all ways to cut a model agree bit for bit. Torch's fused
CPU kernels round differently in their vector loop and in the scalar loop for what is left over, so they are only called with
lengths that are multiples of `UNIT`. Plain tensor expressions here use only operations that IEEE 754 rounds exactly (no
`alpha=`, no `lerp`, no `addcmul`: those may fuse).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardwise.errors import OptimizerError, explain

__all__ = ["UNIT", "AdagradRule", "AdamRule", "LionRule", "Options", "Rule", "SgdRule", "adam_moments", "check_options"]

Options = Mapping[str, Any]
"""The options of one parameter group."""

UNIT = 64
"""Elements in the widest group that a vector loop handles at once, over all dtypes and instruction sets."""

# Adam's bias corrections are 1 - beta**step; at this step they are 1, which is how a kernel is told to leave them out.
_FOREVER = 1e30

_log = logging.getLogger(__name__)


class Rule(ABC):
    """One update rule."""

    name: str
    scales_gradient = False
    """Whether `update` itself can multiply the gradient by a scale (in one pass with the rest), overwriting it."""

    @abstractmethod
    def state_names(self, options: Options) -> tuple[str, ...]:
        """Names of the state tensors that `update` takes, in order."""

    def initial(self, name: str, options: Options) -> float:
        """What a state tensor is filled with before the first update."""
        return 0.0

    def fused(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a fused kernel does the update here."""
        return False

    @abstractmethod
    def update(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, scale: float = 1.0) -> None:
        """One step, in place.

        Args:
            p: values, 1-D.
            g: gradients, same length and dtype. Unchanged, unless `scale` is not 1.
            state: tensors named by `state_names`, same length and dtype.
            step: updates that these elements have had before.
            options: the parameter group's.
            scale: multiply the gradients by this first; only where `scales_gradient` and `fused` say so.
        """


class _FusedRule(Rule):
    """A rule for which torch has a fused kernel, on some devices."""

    scales_gradient = True

    def fused(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether torch has a kernel for this device and dtype."""
        return _has_kernel(type(self), device.type, dtype)

    def update(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, scale: float = 1.0) -> None:
        """See `Rule`."""
        if self.fused(p.device, p.dtype):
            # The kernels divide by `grad_scale`.
            divisor = None if scale == 1.0 else torch.full((), 1.0 / scale, dtype=torch.float32, device=p.device)
            self.kernel(p, g, state, step, options, divisor)
        else:
            self.plain(p, g, state, step, options)

    @abstractmethod
    def kernel(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, divisor: Tensor | None) -> None:
        """The update by torch's fused kernel."""

    @abstractmethod
    def plain(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options) -> None:
        """The update by tensor expressions."""


class AdamRule(_FusedRule):
    """Adam and AdamW (arXiv 1412.6980, 1711.05101), as `torch.optim.Adam` and `AdamW`.

    Args:
        decoupled: whether weight decay acts on the weights (AdamW), for groups without "decoupled_weight_decay".
    """

    def __init__(self, decoupled: bool) -> None:
        self.name = "AdamW" if decoupled else "Adam"
        self._decoupled = decoupled

    def state_names(self, options: Options) -> tuple[str, ...]:
        """See `Rule`."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options.get("amsgrad") else ("exp_avg", "exp_avg_sq")

    def kernel(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, divisor: Tensor | None) -> None:
        """See `_FusedRule`."""
        function = adamw if options.get("decoupled_weight_decay", self._decoupled) else adam
        beta1, beta2 = options["betas"]
        function(
            [p],
            [g],
            [state[0]],
            [state[1]],
            state[2:],
            [_counter(step if options.get("bias_correction", True) else _FOREVER, p)],
            foreach=False,
            fused=True,
            grad_scale=divisor,
            amsgrad=bool(options.get("amsgrad")),
            beta1=float(beta1),
            beta2=float(beta2),
            lr=float(options["lr"]),
            weight_decay=float(options["weight_decay"]),
            eps=float(options["eps"]),
            maximize=bool(options.get("maximize")),
        )

    def plain(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options) -> None:
        """See `_FusedRule`."""
        lr, decay = float(options["lr"]), float(options["weight_decay"])
        g = -g if options.get("maximize") else g
        if decay and options.get("decoupled_weight_decay", self._decoupled):
            p.mul_(1.0 - lr * decay)
        elif decay:
            g = g + p * decay
        mean, square, correction1, correction2 = adam_moments(g, state, step, options)
        if options.get("amsgrad"):
            square = torch.maximum(state[2], square, out=state[2])
        p.sub_(mean / (square.sqrt().div_(correction2**0.5).add_(float(options["eps"]))) * (lr / correction1))


def adam_moments(g: Tensor, state: list[Tensor], step: int, options: Options) -> tuple[Tensor, Tensor, float, float]:
    """Advance Adam's moments in place; also gives what each is to be divided by for having started at zero."""
    beta1, beta2 = (float(beta) for beta in options["betas"])
    mean, square = state[0], state[1]
    mean.mul_(beta1).add_(g * (1.0 - beta1))
    square.mul_(beta2).add_((g * g).mul_(1.0 - beta2))
    if not options.get("bias_correction", True):
        return mean, square, 1.0, 1.0
    return mean, square, 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)


class SgdRule(_FusedRule):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    name = "SGD"

    def state_names(self, options: Options) -> tuple[str, ...]:
        """See `Rule`."""
        return ("momentum_buffer",) if options["momentum"] else ()

    def kernel(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, divisor: Tensor | None) -> None:
        """See `_FusedRule`."""
        buffers: list[Tensor | None] = [state[0] if state else None]
        sgd(
            [p],
            [g],
            buffers,
            foreach=False,
            fused=True,
            grad_scale=divisor,
            weight_decay=float(options["weight_decay"]),
            momentum=float(options["momentum"]),
            lr=float(options["lr"]),
            dampening=self._dampening(step, options),
            nesterov=bool(options["nesterov"]),
            maximize=bool(options.get("maximize")),
        )

    def plain(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options) -> None:
        """See `_FusedRule`."""
        momentum, decay = float(options["momentum"]), float(options["weight_decay"])
        g = -g if options.get("maximize") else g
        if decay:
            g = g + p * decay
        if momentum:
            buffer = state[0].mul_(momentum).add_(g * (1.0 - self._dampening(step, options)))
            g = g + buffer * momentum if options["nesterov"] else buffer
        p.sub_(g * float(options["lr"]))

    @staticmethod
    def _dampening(step: int, options: Options) -> float:
        # Torch starts the buffer with the whole first gradient; from a buffer of zeros that is a step without dampening.
        return float(options["dampening"]) if step else 0.0


class AdagradRule(_FusedRule):
    """Adagrad (Duchi et al., 2011), as `torch.optim.Adagrad`."""

    name = "Adagrad"

    def state_names(self, options: Options) -> tuple[str, ...]:
        """See `Rule`."""
        return ("sum",)

    def initial(self, name: str, options: Options) -> float:
        """The configured start of the sum."""
        return float(options.get("initial_accumulator_value", 0.0))

    def kernel(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, divisor: Tensor | None) -> None:
        """See `_FusedRule`."""
        adagrad(
            [p],
            [g],
            [state[0]],
            [_counter(step, p)],
            fused=True,
            grad_scale=divisor,
            foreach=False,
            lr=float(options["lr"]),
            weight_decay=float(options["weight_decay"]),
            lr_decay=float(options["lr_decay"]),
            eps=float(options["eps"]),
            maximize=bool(options.get("maximize")),
        )

    def plain(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options) -> None:
        """See `_FusedRule`."""
        decay = float(options["weight_decay"])
        g = -g if options.get("maximize") else g
        if decay:
            g = g + p * decay
        state[0].add_(g * g)
        lr = float(options["lr"]) / (1.0 + step * float(options["lr_decay"]))
        p.sub_(g / state[0].sqrt().add_(float(options["eps"])) * lr)


class LionRule(Rule):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, with decoupled weight decay."""

    name = "Lion"

    def state_names(self, options: Options) -> tuple[str, ...]:
        """See `Rule`."""
        return ("exp_avg",)

    def update(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, scale: float = 1.0) -> None:
        """See `Rule`."""
        beta1, beta2 = (float(beta) for beta in options["betas"])
        lr, momentum = float(options["lr"]), state[0]
        g = -g if options.get("maximize") else g
        direction = (momentum * beta1).add_(g * (1.0 - beta1)).sign_()
        if options["weight_decay"]:
            p.mul_(1.0 - lr * float(options["weight_decay"]))
        p.sub_(direction.mul_(lr))
        momentum.mul_(beta2).add_(g * (1.0 - beta2))


def check_options(rule: str, options: Options) -> None:
    """Refuse options that no rule can mean.

    Raises:
        OptimizerError: negative or non-finite numbers, or betas outside [0, 1).
    """
    for key in ("lr", "weight_decay", "eps", "momentum", "lr_decay", "initial_accumulator_value", "min_coeff", "max_coeff"):
        if key in options and not 0.0 <= float(options[key]) < float("inf"):
            raise OptimizerError(explain(f"{rule}: bad {key!r}", expected="a number of at least 0", found=str(options[key])))
    betas = options.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise OptimizerError(explain(f"{rule}: bad 'betas'", expected="two numbers in [0, 1)", found=str(betas)))
    if options.get("nesterov") and (not options["momentum"] or options["dampening"]):
        raise OptimizerError(explain(f"{rule}: 'nesterov' needs momentum above 0 and no dampening"))


def _counter(step: float, like: Tensor) -> Tensor:
    return torch.full((), float(step), dtype=torch.float32, device=like.device)


@lru_cache(maxsize=64)
def _has_kernel(rule: type[_FusedRule], device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has the rule's fused kernel for a device; asked by running it once on a few elements."""
    options = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}
    options |= {"nesterov": False, "lr_decay": 0.0, "decoupled_weight_decay": False}
    p, g, a, b = (torch.ones(UNIT, dtype=dtype, device=device) for _ in range(4))
    instance = AdamRule(decoupled=False) if rule is AdamRule else rule()
    try:
        instance.kernel(p, g, [a, b][: len(instance.state_names(options))], 1, options, torch.ones((), device=device))
    except (RuntimeError, TypeError, AssertionError) as error:
        _log.info("no fused %s for %s on %s (%s); using tensor expressions", instance.name, dtype, device, error)
        return False
    return True
