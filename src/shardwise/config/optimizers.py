"""Which update rules the format names, and the arguments each takes.

Arguments that are absent from the file are left to the update rule, so the defaults here only document. Refuses to know how a
rule computes.
"""

from __future__ import annotations

from shardwise.config.fields import Number, Pair, Section, inert, key

__all__ = [
    "OPTIMIZER_PARAMS",
    "TORCH_ELEMENTWISE",
    "TORCH_WHOLE_TENSOR",
    "AdagradParams",
    "AdamParams",
    "LambParams",
    "LionParams",
    "OptimizerParams",
    "SgdParams",
]


class OptimizerParams(Section):
    """What every update rule takes."""

    lr: Number = key(1e-3, "Learning rate; a schedule changes it while training.", ge=0, auto_is_error=True)
    weight_decay: Number = key(0.0, "How strongly weights are pulled to zero.", ge=0)
    maximize: bool = key(False, "Go up the gradient instead of down.")
    fused: bool = inert(True, "The update always is one pass over the shard.")
    foreach: bool = inert(True, "The update always is one pass over the shard.")
    capturable: bool = inert(False, "Tuned CUDA graphs.")
    differentiable: bool = inert(False, "The update is never differentiated.")


class AdamParams(OptimizerParams):
    """Adam and AdamW (Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101)."""

    betas: Pair = key((0.9, 0.999), "Decay rates of the running mean of gradients and of their squares.")
    eps: Number = key(1e-8, "Added to the denominator.", ge=0)
    amsgrad: bool = key(False, "Divide by the largest second moment seen so far.")
    adam_w_mode: bool = key(True, "Type Adam only: decay the weights themselves (AdamW), not through the gradient (L2).")
    bias_correction: bool = key(True, "Correct the moments for having started at zero.")
    torch_adam: bool = inert(False, "Chose an implementation; there is one.")
    set_grad_none: bool = inert(True, "Gradients are always released after a step.")


class SgdParams(OptimizerParams):
    """Stochastic gradient descent."""

    momentum: Number = key(0.0, "Decay rate of the running mean of gradients; 0 for none.", ge=0)
    dampening: Number = key(0.0, "How much less than fully a new gradient enters the running mean.")
    nesterov: bool = key(False, "Look ahead along the momentum; needs momentum above 0 and no dampening.")


class AdagradParams(OptimizerParams):
    """Adagrad (Duchi et al., JMLR 2011)."""

    lr: Number = key(1e-2, "Learning rate.", ge=0, auto_is_error=True)
    lr_decay: Number = key(0.0, "Decay of the learning rate per step.", ge=0)
    initial_accumulator_value: Number = key(0.0, "Starting value of the sum of squared gradients.", ge=0)
    eps: Number = key(1e-10, "Added to the denominator.", ge=0)


class LionParams(OptimizerParams):
    """Lion (Chen et al., arXiv:2302.06675)."""

    lr: Number = key(1e-4, "Learning rate; a third to a tenth of what Adam would use.", ge=0, auto_is_error=True)
    betas: Pair = key((0.9, 0.99), "Decay rates of the update direction and of the momentum.")


class LambParams(OptimizerParams):
    """Lamb (You et al., arXiv:1904.00962): Adam with a trust ratio per tensor."""

    betas: Pair = key((0.9, 0.999), "Decay rates of the running mean of gradients and of their squares.")
    eps: Number = key(1e-8, "Added to the denominator.", ge=0)
    eps_inside_sqrt: bool = key(False, "Add eps under the square root instead of after it.")
    bias_correction: bool = key(True, "Correct the moments for having started at zero.")
    max_coeff: Number = key(10.0, "Largest trust ratio.", gt=0)
    min_coeff: Number = key(0.01, "Smallest trust ratio.", ge=0)


OPTIMIZER_PARAMS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
}
"""The types whose arguments are checked here."""

TORCH_ELEMENTWISE = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""The other classes of `torch.optim` that can be named; they check their arguments themselves, in the engine."""

TORCH_WHOLE_TENSOR = ("Adafactor", "LBFGS", "SparseAdam")
"""Names that are spelled right, and that the engine refuses with its reason."""
