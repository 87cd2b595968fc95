"""`Trainer`: from a loss to updated weights.

Owns the order in which the parts of an engine act, the accumulation window, the counters, and when training is refused. What
only the package asks an engine is asked here, so that it takes no name on the engine, where it would hide the model's.

Refuses to know how any part does its work, and what users call things.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accumulation import Window
from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.errors import DivergenceError, PeerLostError, StallError, UsageError, explain
from shardwise.mesh import DataMesh
from shardwise.optim import BadGradient, LossScale, Shard, ShardedOptimizer, StepPath, StepReport
from shardwise.policy import Policy, Release
from shardwise.tiers import StorageError
from shardwise.zero import Gradients, Runtime, Unit

__all__ = ["Parts", "Trainer"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Parts:
    """What an engine is made of; `shardwise.initialize` puts it together."""

    model: nn.Module
    config: Config
    policy: Policy
    mesh: DataMesh
    comm: Comm
    device: torch.device
    runtime: Runtime
    shards: tuple[Shard, ...]
    step_path: StepPath | None
    optimizer: ShardedOptimizer | None
    scaler: LossScale
    data_loader: Any


class Trainer:
    """Trains one model.

    Attributes:
        parts: what it works with.
        window: the accumulation window.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step()` so far.
        skipped_steps: steps left out because gradients were not finite.
        applied: whether the last `step()` changed the weights.
        grad_norm: norm of all gradients in the last boundary's step, before clipping; None before the first.
        unusable: why the weights mean nothing at the moment; empty if they do.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.window = Window(parts.config.gradient_accumulation_steps, parts.config.managed_gradient_accumulation)
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.applied = False
        self.grad_norm: float | None = None
        self.unusable = ""
        self._prescaled = False  # whether the plain backward that begins is of a scaled loss
        self._serving = 0  # depth of `serving()`
        self._closed = False

    # -- losses ------------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool, divide: bool) -> None:
        """Compute gradients of a loss and add them to the window; see `Engine.backward`."""
        self.check_training()
        self._check_loss(loss)
        passes = self.parts.runtime.backward
        passes.finish()
        reduce = self.window.last_backward
        weight = self.window.add_backward(divide=divide) * self.parts.scaler.scale
        # float(): a loss scale can be more than float16 holds
        weighted = loss if weight == 1.0 else loss.float() * weight
        try:
            with passes.announced(reduce=reduce):
                weighted.backward(retain_graph=retain_graph)
        except BaseException as error:
            if self.window.backwards > 1 and not isinstance(error, DivergenceError | StallError | PeerLostError):
                log.warning("backward failed: the gradients of %d earlier ones were dropped too", self.window.backwards - 1)
            self.window.restart()
            raise

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, and a note that its backward is allowed."""
        self.check_open()
        if self.parts.scaler.scale == 1.0:
            return loss
        scaled = loss.float() * self.parts.scaler.scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_scaled)
        return scaled

    def _note_scaled(self, gradient: Tensor) -> None:
        """The backward of a scaled loss begins: what reaches the model next is scaled."""
        self._prescaled = True

    def begin_plain_backward(self) -> bool:
        """A plain `loss.backward()` has begun; whether it is known to be the last of the window.

        Raises:
            UsageError: the loss was not scaled, and in fp16 its gradients would be taken for scaled ones.
        """
        self.check_training()
        if self.parts.scaler.scale != 1.0 and not self._prescaled:
            raise UsageError(
                explain(
                    f"loss.backward() with a loss scale of {self.parts.scaler.scale:g}",
                    do="call engine.backward(loss), or engine.scale(loss).backward()",
                )
            )
        self._prescaled = False
        last = self.window.last_backward
        self.window.add_plain_backward()
        return last

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only collect gradients; see `Engine.no_sync`."""
        passes = self.parts.runtime.backward
        passes.finish()
        before, passes.synchronize = passes.synchronize, False
        try:
            yield
        finally:
            passes.finish()
            passes.synchronize = before

    # -- steps -------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """End a micro-batch; at the boundary of the window, update the weights. Returns whether it was the boundary."""
        self.check_training()
        parts = self.parts
        path, optimizer, runtime = parts.step_path, parts.optimizer, parts.runtime
        if path is None or optimizer is None:
            raise UsageError(explain("step() without an optimizer", do="pass optimizer= or an optimizer section to initialize"))
        runtime.backward.finish()
        self.micro_steps += 1
        self.applied = False
        idle = not self.window.backwards
        if not self.window.add_step():
            return False
        if idle:
            log.warning("step() without a backward since the last one: nothing is updated")
        used = runtime.finish_window()
        for shard, gradients in zip(parts.shards, runtime.reducer.gradients, strict=True):
            shard.grad = gradients.shard
        try:
            report = path.run(optimizer.param_groups, self._denominator(), used, describe=self._name_culprit)
        except StorageError as error:
            self.unusable = f"a step was interrupted, so that some weights are updated and others are not: {error}".rstrip(".")
            raise
        self.grad_norm, self.applied = report.grad_norm, report.applied
        optimizer.announce_step()
        if report.applied:
            runtime.weights_changed()
        else:
            self._warn_of_skipping(report)
        self._count_step()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the window, but not right after a `step()` that did not end it."""
        self.parts.runtime.backward.finish()
        if self.window.since_step or not self.window.steps:
            self.parts.runtime.reducer.clear()
            self.window.forget_backwards()

    def learning_rates(self) -> list[float]:
        """Of each parameter group."""
        return [] if self.parts.optimizer is None else [group["lr"] for group in self.parts.optimizer.param_groups]

    def _count_step(self) -> None:
        """Count the step, and begin a new accumulation window."""
        self.global_steps += 1
        self.global_samples += self.parts.config.train_batch_size
        self.skipped_steps += not self.applied
        for shard in self.parts.shards:
            shard.grad = None
        self.parts.runtime.reducer.clear()
        self.window.restart()
        every = self.parts.config.steps_per_print
        if every and self.global_steps % every == 0 and self.parts.mesh.data.index == 0:
            rates, norm, skipped = self.learning_rates(), self.grad_norm, self.skipped_steps
            log.info("step %d, lr %s, gradient norm %.4g, skipped %d", self.global_steps, rates, norm, skipped)

    def _warn_of_skipping(self, report: StepReport) -> None:
        scaler = self.parts.scaler
        if self.parts.mesh.data.index == 0:
            scale = f"; loss scale {report.loss_scale:g} -> {scaler.scale:g}" if scaler.dynamic else ""
            log.warning("step %d skipped on all ranks: %s%s", self.global_steps + 1, report.culprit, scale)

    def _name_culprit(self, bad: BadGradient) -> str:
        """Which parameter, and whose micro-batch: the step path knows only who holds the sum."""
        ranks = self.parts.runtime.reducer.contributors(bad.index)
        kind = "NaN" if bad.nan else "Inf"
        moves = bad.nan and self.parts.policy.stage.release is Release.USE
        hint = " (released weights read as NaN: was one read outside of the model's forward?)" if moves else ""
        return f"{kind} in the gradient of {bad.name!r} from rank {', '.join(map(str, ranks)) or 'unknown'}{hint}"

    def _denominator(self) -> float:
        """What the summed gradients are divided by, besides the loss scale."""
        ranks = self.parts.mesh.data.size if self.parts.config.gradient_allreduce_op == "mean" else 1
        return ranks * self.window.divisor / self.gradient_predivide

    # -- single parameters, for `access` -----------------------------------------------------------------------------------

    @property
    def gradient_divisor(self) -> float:
        """What the summed gradients of this window will be divided by, loss scale included."""
        return self._denominator() * self.parts.scaler.scale

    @property
    def gradient_predivide(self) -> float:
        """What gradients are divided by before they are summed."""
        return self.parts.policy.precision.predivide

    def gradients(self) -> list[Gradients]:
        """Gradients of all trainable buffers, complete but for what the step reduces."""
        self.parts.runtime.backward.finish()
        return self.parts.runtime.reducer.gradients

    def has_gradient(self, parameter: int) -> bool:
        """Whether this rank delivered a gradient for a parameter in this window."""
        return bool(self.parts.runtime.reducer.delivered[parameter])

    def mark_gradient(self, parameter: int) -> None:
        """Count a gradient that was set by hand as delivered."""
        self.parts.runtime.reducer.delivered[parameter] = 1

    def piece_state(self, parameter: int) -> dict[str, Any]:
        """Optimizer state of this rank's piece of a parameter, to read: tensors and numbers; empty if there is none."""
        path = self.parts.step_path
        for number, shard in enumerate(self.parts.shards):
            for position, piece in enumerate(shard.pieces):
                if piece.index == parameter and path is not None:
                    return path.driver.piece_state(number, position)
        return {}

    def set_piece_state(self, parameter: int, name: str, values: Tensor) -> None:
        """Replace one tensor of the optimizer state of this rank's piece of a parameter."""
        path = self.parts.step_path
        for number, shard in enumerate(self.parts.shards):
            for position, piece in enumerate(shard.pieces):
                if piece.index == parameter and path is not None:
                    path.driver.set_piece_state(number, position, name, values)

    def weights_edited(self, unit: Unit) -> None:
        """The shards of a unit's weights were set from outside a step."""
        self.parts.runtime.weights_changed([unit])

    # -- life --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Generator[None]:
        """Gather all weights, and refuse to train until the end of the context."""
        self.parts.comm.set_phase("inference")
        with self.parts.runtime.pinned():
            self._serving += 1
            try:
                yield
            finally:
                self._serving -= 1

    def close(self, *, restore: bool) -> None:
        """Remove all hooks and free all state; see `Engine.destroy`. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.parts.runtime.close(restore=restore)
        for shard in self.parts.shards:
            shard.grad = shard.weight = None
            shard.master = shard.master.new_empty(0)
            shard.state.clear()
        if self.parts.step_path is not None:
            self.parts.step_path.driver.close()
        self.parts.comm.close(f"after {self.global_steps} step{'' if self.global_steps == 1 else 's'}")

    def check_open(self) -> None:
        """Raise if the engine was destroyed."""
        if self._closed:
            raise UsageError(explain("this engine was destroyed", do="make a new one with shardwise.initialize"))

    def check_usable(self) -> None:
        """Raise if the weights mean nothing."""
        self.check_open()
        if self.unusable:
            raise UsageError(
                explain("this engine has no valid weights", found=self.unusable, do="load a checkpoint that is whole")
            )

    def check_training(self) -> None:
        """Raise if nothing may be trained now."""
        self.check_usable()
        if self._serving:
            raise UsageError(
                explain(
                    "training inside `with engine.inference()`",
                    do="leave the block first: it holds weights that must not change",
                )
            )

    def _check_loss(self, loss: Any) -> None:
        if self.parts.step_path is None:
            raise UsageError(
                explain("backward() without an optimizer", do="pass optimizer= or an optimizer section to initialize")
            )
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
            return
        tensor = isinstance(loss, Tensor)
        raise UsageError(
            explain(
                "this loss cannot be differentiated",
                expected="a 0-d tensor computed from the model with gradients on",
                found=f"shape {tuple(loss.shape)}, requires_grad {loss.requires_grad}" if tensor else repr(type(loss)),
                do="take its mean() if it has elements, and run forward outside of no_grad",
            )
        )
