"""`Engine`: the object users hold.

Owns what they call things, and that everything else they ask for is the model's. So every name on it hides one of the model's,
and what only this package asks is on the `Trainer` behind it. Refuses to know how anything is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.device import available_bytes
from shardwise.errors import UsageError, explain
from shardwise.persistence import Keeper, Request, Wishes, consolidate, save_consolidated
from shardwise.trainer import Parts, Trainer
from shardwise.zero import find_tensors, map_tensors

__all__ = ["Engine", "trainer_of"]


class Counter:
    """A number that the trainer counts, under the same name on the engine."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Engine | None, owner: type | None = None) -> int:
        if engine is None:
            raise AttributeError(f"{self._name} is of an engine, not of the class")
        return getattr(trainer_of(engine), self._name)

    def __set__(self, engine: Engine, value: int) -> None:
        setattr(trainer_of(engine), self._name, value)


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

    global_steps = Counter()
    global_samples = Counter()
    micro_steps = Counter()
    skipped_steps = Counter()

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        parts = trainer.parts
        self.module = parts.model
        self.device = parts.device
        self.training_dataloader = parts.data_loader
        self.optimizer = parts.optimizer
        self.lr_scheduler: Any = None
        self._trainer = trainer
        self._keeper = Keeper(trainer)
        self._compiled: list[nn.Module] = []

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch; returns what the model returns."""
        self._trainer.check_open()
        parts = self._trainer.parts
        precision = parts.policy.precision
        if precision.cast_inputs and precision.compute is not None:
            args, kwargs = _cast((args, kwargs), precision.compute)
        context = torch.autocast(self.device.type, precision.autocast) if precision.autocast is not None else nullcontext()
        try:
            with context:
                return self.module(*args, **kwargs)
        except RuntimeError as error:
            if precision.compute is not None and "dtype" in str(error):
                _explain_dtypes(error, (args, kwargs), precision.compute)
            raise
        finally:
            parts.runtime.forward.settle()

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
        self._trainer.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a plain `engine.scale(loss).backward()`. Needed in fp16 only."""
        return self._trainer.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary of the accumulation window, update the weights and advance the schedule.

        Args:
            lr_kwargs: arguments for `lr_scheduler.step`.
        """
        if self._trainer.step() and self._trainer.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the accumulation window.

        Right after a `step()` that did not end the window, where a plain loop calls it, it does nothing.
        """
        self._trainer.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Collect gradients without communication; they are reduced in the next backward outside, or in the step.

        At stages 2 and 3 this keeps full gradients until then.
        """
        return self._trainer.no_sync()

    @contextmanager
    def inference(self) -> Generator[nn.Module]:
        """Gather every unit once, in eval mode and without gradients, for evaluation or generation on the plain model.

        No communication happens inside, so ranks may run different numbers of forwards. Collective to enter and leave.

        Raises:
            UsageError: the whole model does not fit into the memory that is free on some rank.
        """
        self._trainer.check_open()
        self._trainer.parts.runtime.backward.finish()
        _check_room(self._trainer.parts)
        training = self.module.training
        with self._trainer.serving(), torch.no_grad():
            self.module.eval()
            try:
                yield self.module
            finally:
                self.module.train(training)

    # -- accumulation ------------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._trainer.window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step()` updates the weights. Once called, this decides; micro-batches are no longer counted."""
        self._trainer.window.forced = bool(is_boundary)

    def train_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks and micro-batches."""
        return self._trainer.parts.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._trainer.parts.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._trainer.window.length

    # -- what happened -----------------------------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: it was a boundary, and gradients were finite."""
        return self._trainer.applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of all gradients in the last boundary's step, before clipping; None before the first."""
        return self._trainer.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return self._trainer.learning_rates()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward; 1.0 except in fp16."""
        return self._trainer.parts.scaler.scale

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._trainer.parts.policy.stage.number

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as it was passed in."""
        return self._trainer.parts.config.raw

    def counters(self) -> dict[str, Any]:
        """Exact counts since the engine was made: collectives and bytes by kind, resident bytes by category."""
        return dict(self._trainer.parts.comm.ledger.snapshot())

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds for the model's state, and what it would hold unsharded.

        Keys: parameters_resting, parameters_live_peak, gradients, gradients_in_flight, optimizer, optimizer_offloaded,
        padding, unsharded_parameters, unsharded_gradients, unsharded_optimizer. "optimizer" includes master weights that
        are separate from the parameters; what is offloaded is not in memory of the device.
        """
        parts = self._trainer.parts
        report = parts.runtime.memory()
        masters, unsharded_masters = report.pop("masters"), report.pop("unsharded_masters")
        moments = parts.step_path.driver.state_bytes() if parts.step_path is not None else 0
        elements = sum(len(shard.master) for shard in parts.shards)
        whole = sum(item.buffer.layout.total for item in parts.runtime.reducer.gradients)
        driver = None if parts.step_path is None else parts.step_path.driver
        report["optimizer"] = masters + (driver.resident_bytes() if driver else 0)
        report["optimizer_offloaded"] = driver.offloaded_bytes() if driver else 0
        report["unsharded_optimizer"] = unsharded_masters + (round(moments * whole / elements) if elements else 0)
        return report

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that is needed to go on exactly: on as many ranks as there are now, or on others, at any stage.

        Collective: every rank calls it. Nothing under `save_dir/tag` is ever half-written, and what was saved before stays
        valid whatever happens. With `"checkpoint": {"async": true}` it returns when the state is copied to host memory; see
        `wait_for_checkpoint`.

        Args:
            save_dir: the run's directory, which all ranks see; made if it is not there.
            tag: name of the checkpoint; `global_step<N>` if None.
            client_state: what `load_checkpoint` shall return; the first rank's counts. Plain values and tensors load anywhere.
            save_latest: make it the one that is loaded if no tag is given.
            exclude_frozen_parameters: leave out weights that do not require gradients.

        Returns:
            True.

        Raises:
            CheckpointError: it could not be saved, or an earlier save in the background was not; on every rank.
        """
        self._keeper.save(
            _directory(save_dir),
            tag,
            client_state,
            self.lr_scheduler,
            latest=save_latest,
            without_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
        *,
        fallback: bool = False,
        trust_client_state: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, whatever number of ranks, stage and precision it was saved with. Collective.

        Args:
            load_dir: the directory it was saved to.
            tag: which one; None for the latest.
            load_module_strict: every weight and buffer must be on both sides. False loads what fits, and says in the log what
                did not; a weight of another shape is an error in any case.
            load_optimizer_states: also the optimizer's state, the options of its groups, the loss scale and, on as many ranks
                as saved it, random generators.
            load_lr_scheduler_states: also how far the schedule is.
            load_module_only: weights and buffers, nothing else.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` to put weights into the gathered model; ours
                are not loaded then. Optimizer state is, for parameters that both have under one name and in one shape.
            fallback: where the checkpoint is damaged, take the newest one that is not.
            trust_client_state: unpickle objects of any class in the client_state, which can run any code.

        Returns:
            its path and the `client_state`; `(None, {})` if there is none yet.

        Raises:
            CheckpointError: it does not fit, or is not there; on every rank.
            CheckpointDamagedError: a file is not as it was written. The engine cannot be used until another one is loaded.
        """
        wishes = Wishes(optimizer=load_optimizer_states, schedule=load_lr_scheduler_states, only_weights=load_module_only)
        directory = _directory(load_dir)
        request = Request(directory, tag, load_module_strict, wishes, custom_load_fn, fallback, trust_client_state)
        path, client_state, _ = self._keeper.load(request, self.lr_scheduler)
        return path, client_state

    def wait_for_checkpoint(self) -> None:
        """Return when a save in the background is complete on all ranks. Collective.

        Raises:
            CheckpointError: it failed.
        """
        self._keeper.wait()

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write all weights, in the dtype the model computes in, as one file for torch.load (or safetensors). Collective."""
        self._trainer.check_usable()
        save_consolidated(self._trainer.parts, _directory(save_dir) / save_filename, without_frozen=exclude_frozen_parameters)
        return True

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The model's state dict with whole weights, in host memory, on the first rank; None on the others. Collective."""
        self._trainer.check_usable()
        return consolidate(self._trainer.parts, without_frozen=exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """`module_state_dict`, under the name that Transformers and Accelerate call."""
        return self.module_state_dict(exclude_frozen_parameters)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the configuration asks for whole weights when a model is saved."""
        return self._trainer.parts.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    # -- life --------------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the forward of each unit with `torch.compile`; gathering stays outside of the compiled code."""
        self._trainer.check_open()
        for module in self._trainer.parts.runtime.unit_modules:
            if module not in self._compiled:
                module.forward = torch.compile(module.forward, backend=backend, **(compile_kwargs or {}))
                self._compiled.append(module)

    def destroy(self, restore: bool = True) -> None:
        """Remove all hooks and free all state. Calling it twice is harmless.

        Args:
            restore: give the plain module its full weights back (at stage 3 collective, and the model must fit). False leaves
                released parameters empty.
        """
        for module in self._compiled:
            module.__dict__.pop("forward", None)
        self._compiled.clear()
        try:
            self._keeper.close()  # first: it asks whether the other ranks are still there
        finally:
            self._trainer.close(restore=restore)

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


def _directory(path: Any) -> Path:
    """A user's directory, that stays the same one wherever the program goes."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(explain("this is no directory", expected="a path as text or pathlib.Path", found=repr(path)))
    return Path(path).expanduser().absolute()


def trainer_of(engine: Engine) -> Trainer:
    """What works inside an engine, for the rest of this package. A function, as a method would hide one of the model's."""
    return engine._trainer


def _check_room(parts: Parts) -> None:
    needed, free = parts.runtime.missing_bytes, available_bytes(parts.device)
    short = torch.tensor([float(free is not None and needed > free)], dtype=torch.float64, device=parts.device)
    parts.comm.all_reduce(short, parts.mesh.data, "is there room for all weights").wait()
    if short.item():
        raise UsageError(
            explain(
                "the whole model does not fit into memory on every rank",
                expected=f"{needed / 2**20:.0f} MiB free",
                found=f"{(free or 0) / 2**20:.0f} MiB on this rank",
                do="evaluate with engine.eval() and engine(batch), which gathers one unit at a time",
            )
        )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _explain_dtypes(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Say so if torch complains of mixed dtypes because the model was cast and its inputs were not."""
    others = {tensor.dtype for tensor in find_tensors(inputs) if tensor.is_floating_point() and tensor.dtype != dtype}
    if others:
        raise UsageError(
            explain(
                f"the forward failed, as the weights are {dtype} and inputs are not",
                expected=f"floating-point inputs of {dtype}",
                found=f"{', '.join(sorted(map(str, others)))} ({str(error).splitlines()[0]})",
                do='cast the inputs (`x.to(dtype)`), or use "torch_autocast": {"enabled": true}, which casts where it has to; '
                'in fp16, "auto_cast": true in its section casts all inputs',
            )
        ) from error
