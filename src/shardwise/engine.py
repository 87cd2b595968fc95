"""`Engine`: the object users hold, and the only one that knows all parts: model, optimizer, schedule, loss scale, accumulation.

Owns the order in which the parts act. Refuses to know how any of them does its work.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accumulation import Window
from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.device import available_bytes
from shardwise.errors import UsageError, explain
from shardwise.mesh import DataMesh
from shardwise.optim import BadGradient, LossScale, Shard, ShardedOptimizer, StepPath
from shardwise.policy import Policy, Release
from shardwise.zero import Gradients, Runtime, Unit, map_tensors

__all__ = ["Engine", "Parts"]

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
    scaler: LossScale
    data_loader: Any


class Engine(nn.Module):
    """A model that trains under one configuration. Made by `shardwise.initialize`.

    Calling it runs the model; `backward`, `step` and the rest are described at each method. Attributes that it does not have
    are those of the model. As a context manager it destroys itself at the end.

    Attributes:
        module: the user's model, the same object.
        optimizer: the `torch.optim.Optimizer` that `initialize` returned; None if there is none.
        lr_scheduler: stepped after each applied `step()`; may be set to None to step it elsewhere.
        training_dataloader: the loader made from `training_data`, or None.
        device: where the model's parameters are.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step()` so far.
        skipped_steps: steps left out because gradients were not finite.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.model
        self.device = parts.device
        self.training_dataloader = parts.data_loader
        self.optimizer: ShardedOptimizer | None = None
        self.lr_scheduler: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._parts = parts
        self._runtime = parts.runtime
        self._window = Window(parts.config.gradient_accumulation_steps, parts.config.managed_gradient_accumulation)
        self._prescaled = False  # whether the plain backward that begins is of a scaled loss
        self._applied = False
        self._grad_norm: float | None = None
        self._compiled: list[nn.Module] = []
        self._serving = 0  # depth of inference()
        self._closed = False

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch; returns what the model returns."""
        self._check_open()
        precision = self._parts.policy.precision
        if precision.cast_inputs and precision.compute is not None:
            args, kwargs = self._cast((args, kwargs), precision.compute)
        context = torch.autocast(self.device.type, precision.autocast) if precision.autocast is not None else nullcontext()
        try:
            with context:
                return self.module(*args, **kwargs)
        finally:
            self._runtime.forward.settle()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of a loss and add them to the accumulation window.

        Args:
            loss: 0-d tensor, the mean over this rank's micro-batch. It is not changed.
            retain_graph: keep the graph, for another backward through it.
            scale_wrt_gas: divide by `gradient_accumulation_steps`; False if the loss was divided already.

        Returns:
            the loss.

        If the backward itself raises, the gradients of the whole accumulation window are dropped, as some are incomplete, and
        a new window begins.

        Raises:
            UsageError: there is no optimizer, or the loss is not a 0-d tensor that depends on parameters.
        """
        self._check_training()
        self._check_loss(loss)
        self._runtime.backward.finish()
        reduce = self._window.last_backward
        weight = self._window.add_backward(divide=scale_wrt_gas) * self._parts.scaler.scale
        # float(): a loss scale can be more than float16 holds
        weighted = loss if weight == 1.0 else loss.float() * weight
        try:
            with self._runtime.backward.announced(reduce=reduce):
                weighted.backward(retain_graph=retain_graph)
        except BaseException:
            if self._window.backwards > 1:
                log.warning("backward failed: the gradients of %d earlier ones were dropped too", self._window.backwards - 1)
            self._window.restart()
            raise
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a plain `engine.scale(loss).backward()`. Needed in fp16 only."""
        self._check_open()
        if self._parts.scaler.scale == 1.0:
            return loss
        scaled = loss.float() * self._parts.scaler.scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_scaled)
        return scaled

    def _note_scaled(self, gradient: Tensor) -> None:
        """The backward of a scaled loss begins: what reaches the model next is scaled."""
        self._prescaled = True

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary of the accumulation window, update the weights and advance the schedule.

        Args:
            lr_kwargs: arguments for `lr_scheduler.step`.
        """
        if self._step() and self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients. Does nothing between the micro-batches of a window, where a plain loop calls it after `step()`."""
        self._runtime.backward.finish()
        if self._window.since_step or not self._window.steps:
            self._runtime.reducer.clear()
            steps = self._window.steps
            self._window.restart()
            self._window.steps = steps

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Collect gradients without communication; they are reduced in the next backward outside, or in the step.

        At stages 2 and 3 this keeps full gradients until then.
        """
        self._runtime.backward.finish()
        before, self._runtime.backward.synchronize = self._runtime.backward.synchronize, False
        try:
            yield
        finally:
            self._runtime.backward.finish()
            self._runtime.backward.synchronize = before

    @contextmanager
    def inference(self) -> Generator[nn.Module]:
        """Gather every unit once, in eval mode and without gradients, for evaluation or generation on the plain model.

        No communication happens inside, so ranks may run different numbers of forwards. Collective to enter and leave.

        Raises:
            UsageError: the whole model does not fit into the memory that is free on some rank.
        """
        self._check_open()
        self._runtime.backward.finish()
        self._check_room()
        training = self.module.training
        self._parts.comm.set_phase("inference")
        with self._runtime.pinned(), torch.no_grad():
            self.module.eval()
            self._serving += 1
            try:
                yield self.module
            finally:
                self._serving -= 1
                self.module.train(training)

    # -- accumulation ------------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step()` updates the weights. Once called, this decides; micro-batches are no longer counted."""
        self._window.forced = bool(is_boundary)

    def train_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks and micro-batches."""
        return self._parts.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._parts.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._window.length

    # -- what happened -----------------------------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: it was a boundary, and gradients were finite."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of all gradients in the last boundary's step, before clipping; None before the first."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1.0 except in fp16."""
        return self._parts.scaler.scale

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._parts.policy.stage.number

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as it was passed in."""
        return self._parts.config.raw

    def counters(self) -> dict[str, Any]:
        """Exact counts since the engine was made: collectives and bytes by kind, resident bytes by category."""
        return dict(self._parts.comm.ledger.snapshot())

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds for the model's state, and what it would hold unsharded.

        Keys: parameters_resting, parameters_live_peak, gradients, gradients_in_flight, optimizer, padding,
        unsharded_parameters, unsharded_gradients, unsharded_optimizer. "optimizer" includes master weights that
        are separate from the parameters.
        """
        report = self._runtime.memory()
        masters, unsharded_masters = report.pop("masters"), report.pop("unsharded_masters")
        path = self._parts.step_path
        moments = path.driver.state_bytes() if path is not None else 0
        elements = sum(len(shard.master) for shard in self._parts.shards)
        whole = sum(item.buffer.layout.total for item in self._runtime.reducer.gradients)
        report["optimizer"] = masters + moments
        report["unsharded_optimizer"] = unsharded_masters + (round(moments * whole / elements) if elements else 0)
        return report

    # -- life --------------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the forward of each unit with `torch.compile`; gathering stays outside of the compiled code."""
        self._check_open()
        for module in self._runtime.unit_modules:
            if module not in self._compiled:
                module.forward = torch.compile(module.forward, backend=backend, **(compile_kwargs or {}))
                self._compiled.append(module)

    def destroy(self, restore: bool = True) -> None:
        """Remove all hooks and free all state. Calling it twice is harmless.

        Args:
            restore: give the plain module its full weights back (at stage 3 collective, and the model must fit). False leaves
                released parameters empty.
        """
        if self._closed:
            return
        self._closed = True
        for module in self._compiled:
            module.__dict__.pop("forward", None)
        self._compiled.clear()
        self._runtime.close(restore=restore)
        for shard in self._parts.shards:
            shard.grad = shard.weight = None
            shard.master = shard.master.new_empty(0)
            shard.state.clear()
        self._parts.comm.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.destroy(restore=kind is None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(f"neither Engine nor {type(self.module).__name__} has an attribute {name!r}") from None

    # -- inside ------------------------------------------------------------------------------------------------------------

    def unannounced_backward(self) -> bool:
        """A plain `loss.backward()` has begun; whether it is known to be the last of the window.

        Raises:
            UsageError: the loss was not scaled, and in fp16 its gradients would be taken for scaled ones.
        """
        self._check_training()
        if self._parts.scaler.scale != 1.0 and not self._prescaled:
            raise UsageError(
                explain(
                    f"loss.backward() with a loss scale of {self._parts.scaler.scale:g}",
                    do="call engine.backward(loss), or engine.scale(loss).backward()",
                )
            )
        self._prescaled = False
        last = self._window.last_backward
        self._window.add_plain_backward()
        return last

    def plain_step(self) -> None:
        """`optimizer.step()`: as `step`, but the learning-rate schedule is left to the caller."""
        self._step()

    def module_units(self) -> list[str]:
        """Names of the modules that are gathered as one, the model itself first."""
        return [unit.name for unit in self._runtime.units]

    # What `access` asks, to show and set single parameters' gradients and states.

    @property
    def gradient_divisor(self) -> float:
        """What the summed gradients of this window will be divided by, loss scale included."""
        return self._denominator() * self._parts.scaler.scale

    @property
    def gradient_predivide(self) -> float:
        """What gradients are divided by before they are summed."""
        return self._parts.policy.precision.predivide

    def gradient_buffers(self) -> list[Gradients]:
        """Gradients of all trainable buffers, complete but for what the step reduces."""
        self._runtime.backward.finish()
        return self._runtime.reducer.gradients

    def has_gradient(self, parameter: int) -> bool:
        """Whether this rank delivered a gradient for a parameter in this window."""
        return bool(self._runtime.reducer.delivered[parameter])

    def mark_gradient(self, parameter: int) -> None:
        """Count a gradient that was set by hand as delivered."""
        self._runtime.reducer.delivered[parameter] = 1

    def piece_state(self, parameter: int) -> dict[str, Any]:
        """Optimizer state of this rank's piece of a parameter, as views and numbers; empty if there is none."""
        path = self._parts.step_path
        for number, shard in enumerate(self._parts.shards):
            for position, piece in enumerate(shard.pieces):
                if piece.index == parameter and path is not None:
                    return path.driver.piece_state(number, position)
        return {}

    def weights_edited(self, unit: Unit) -> None:
        """The shards of a unit's weights were set from outside a step."""
        self._runtime.weights_changed([unit])

    def _step(self) -> bool:
        """Returns whether it was a boundary."""
        self._check_training()
        path, optimizer = self._parts.step_path, self.optimizer
        if path is None or optimizer is None:
            raise UsageError(explain("step() without an optimizer", do="pass optimizer= or an optimizer section to initialize"))
        self._runtime.backward.finish()
        self.micro_steps += 1
        self._applied = False
        idle = not self._window.backwards
        if not self._window.add_step():
            return False
        if idle:
            log.warning("step() without a backward since the last one: nothing is updated")
        used = self._runtime.finish_window()
        for shard, gradients in zip(self._parts.shards, self._runtime.reducer.gradients, strict=True):
            shard.grad = gradients.shard
        report = path.run(optimizer.param_groups, self._denominator(), used, describe=self._name_culprit)
        self._grad_norm = report.grad_norm
        self._applied = report.applied
        optimizer.announce_step()
        if report.applied:
            self._runtime.weights_changed()
        elif self._parts.mesh.data.index == 0:
            scale = f"; loss scale {report.loss_scale:g} -> {self._parts.scaler.scale:g}" if self._parts.scaler.dynamic else ""
            log.warning("step %d skipped on all ranks: %s%s", self.global_steps + 1, report.culprit, scale)
        self._restart()
        return True

    def _restart(self) -> None:
        """Count the step, and begin a new accumulation window."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.skipped_steps += not self._applied
        for shard in self._parts.shards:
            shard.grad = None
        self._runtime.reducer.clear()
        self._window.restart()
        every = self._parts.config.steps_per_print
        if every and self.global_steps % every == 0 and self._parts.mesh.data.index == 0:
            skipped, norm = self.skipped_steps, self._grad_norm
            log.info("step %d, lr %s, gradient norm %.4g, skipped %d", self.global_steps, self.get_lr(), norm, skipped)

    def _name_culprit(self, bad: BadGradient) -> str:
        """Which parameter, and whose micro-batch: the step path knows only who holds the sum."""
        ranks = self._runtime.reducer.contributors(bad.index)
        kind = "NaN" if bad.nan else "Inf"
        moves = bad.nan and self._parts.policy.stage.release is Release.USE
        hint = " (released weights read as NaN: was one read outside of the model's forward?)" if moves else ""
        return f"{kind} in the gradient of {bad.name!r} from rank {', '.join(map(str, ranks)) or 'unknown'}{hint}"

    def _denominator(self) -> float:
        """What the summed gradients are divided by, besides the loss scale."""
        config = self._parts.config
        ranks = self._parts.mesh.data.size if config.gradient_allreduce_op == "mean" else 1
        return ranks * self._window.divisor / self._parts.policy.precision.predivide

    def _check_loss(self, loss: Tensor) -> None:
        if self._parts.step_path is None:
            raise UsageError(
                explain("backward() without an optimizer", do="pass optimizer= or an optimizer section to initialize")
            )
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
            found = (
                f"shape {tuple(loss.shape)}, requires_grad {loss.requires_grad}"
                if isinstance(loss, Tensor)
                else repr(type(loss))
            )
            raise UsageError(
                explain(
                    "this loss cannot be differentiated",
                    expected="a 0-d tensor computed from the model with gradients on",
                    found=found,
                    do="take its mean() if it has elements, and run forward outside of no_grad",
                )
            )

    def _check_training(self) -> None:
        self._check_open()
        if self._serving:
            raise UsageError(
                explain(
                    "training inside `with engine.inference()`",
                    do="leave the block first: it holds weights that must not change",
                )
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(explain("this engine was destroyed", do="make a new one with shardwise.initialize"))

    def _check_room(self) -> None:
        needed, free = self._runtime.missing_bytes, available_bytes(self.device)
        short = torch.tensor([float(free is not None and needed > free)], dtype=torch.float64, device=self.device)
        self._parts.comm.all_reduce(short, self._parts.mesh.data, "is there room for all weights").wait()
        if short.item():
            raise UsageError(
                explain(
                    "the whole model does not fit into memory on every rank",
                    expected=f"{needed / 2**20:.0f} MiB free",
                    found=f"{(free or 0) / 2**20:.0f} MiB on this rank",
                    do="evaluate with engine.eval() and engine(batch), which gathers one unit at a time",
                )
            )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
