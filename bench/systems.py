"""The ways to train that `bench.compare` sets side by side, each set up as its own documentation shows.

Owns how each is set up around the same model and optimizer. Refuses to know clocks and processes. Torch and the systems are
imported only in the processes that train.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bench.cases import CLIP, LEARNING_RATE, WEIGHT_DECAY, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    Pairs = Sequence[tuple[Tensor, Tensor]]
    """The micro-batches of one rank in one step: texts and targets, `(B, T)` each."""

__all__ = ["COMMON_IMPORTS", "REFERENCE", "SYSTEMS", "System", "Trainer", "named"]

COMMON_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # every optimizer imports it when it is made
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.profiler",
)
"""What every process imports before its memory is counted, so that no system pays for what another would import as well."""


class Trainer(Protocol):
    """A model ready to train."""

    def compute(self, pairs: Pairs) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss of this rank, 0-d."""
        ...

    def update(self) -> None:
        """Clip the gradients and update the weights."""
        ...

    def traffic(self) -> dict[str, tuple[int, int]] | None:
        """Calls and payload bytes so far by kind of collective, where the system itself counts them."""
        ...


@dataclass(frozen=True)
class System:
    """One way to train.

    Args:
        name: on the command line.
        title: in tables.
        setup: makes a model trainable; runs on every rank, after the process group was started.
        needs: the module it needs besides torch, and how to get it.
        alone: a single process, which takes the micro-batches of rank 0 only.
        imports: modules that the setup would import, beyond those of all.
    """

    name: str
    title: str
    setup: Callable[[Task, nn.Module], Trainer]
    needs: tuple[str, str] | None = None
    alone: bool = False
    imports: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, in one line; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs[0]) is not None:
            return None
        return f"{self.needs[0]} is not installed: {self.needs[1]}"


class _Plain:
    """The loop of plain PyTorch, with what wraps the model passed in."""

    def __init__(self, task: Task, model: nn.Module, make_optimizer: Callable[..., Any]) -> None:
        import torch

        self._model = model
        self._torch = torch
        self._optimizer = make_optimizer(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self._autocast = task.precision == "bf16"

    def compute(self, pairs: Pairs) -> Tensor:
        total = self._torch.zeros(())
        for number, (text, targets) in enumerate(pairs):
            with self._around(last=number == len(pairs) - 1), self._casting():
                loss = self._model(text, targets)
            with self._around(last=number == len(pairs) - 1):
                (loss / len(pairs)).backward()
            total += loss.detach()
        return total / len(pairs)

    def update(self) -> None:
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def traffic(self) -> None:
        return None

    def _around(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def _casting(self) -> AbstractContextManager[Any]:
        return self._torch.autocast("cpu", self._torch.bfloat16) if self._autocast else nullcontext()


class _DataParallel(_Plain):
    """DDP sums gradients in the last backward of a step only."""

    def __init__(self, task: Task, model: nn.Module, make_optimizer: Callable[..., Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._parallel = DistributedDataParallel(model)
        super().__init__(task, self._parallel, make_optimizer)

    def _around(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._parallel.no_sync()


class _FullySharded(_Plain):
    """FSDP2, one group of parameters per block and one for the rest; reduces gradients in every backward, as stage 3 does."""

    def _casting(self) -> AbstractContextManager[Any]:
        return nullcontext()  # it casts by its own policy


class _DeepSpeedLike:
    """An engine with DeepSpeed's interface."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def compute(self, pairs: Pairs) -> Tensor:
        losses: list[Tensor] = []
        for number, (text, targets) in enumerate(pairs):
            if number:
                self.engine.step()
            loss = self.engine(text, targets)
            self.engine.backward(loss)
            losses.append(loss.detach())
        return sum(losses[1:], start=losses[0]) / len(losses)

    def update(self) -> None:
        self.engine.step()

    def traffic(self) -> dict[str, tuple[int, int]] | None:
        return None


class _Shardwise(_DeepSpeedLike):
    """Counts its own traffic."""

    def traffic(self) -> dict[str, tuple[int, int]]:
        counters = self.engine.counters()
        return {kind: (calls, counters["bytes"][kind]) for kind, calls in counters["calls"].items()}


def _adamw() -> Any:
    from torch.optim import AdamW

    return AdamW


def _single(task: Task, model: nn.Module) -> Trainer:
    return _Plain(task, model, _adamw())


def _ddp(task: Task, model: nn.Module) -> Trainer:
    return _DataParallel(task, model, _adamw())


def _zero_redundancy(task: Task, model: nn.Module) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return _DataParallel(task, model, partial(ZeroRedundancyOptimizer, optimizer_class=_adamw()))


def _fsdp2(task: Task, model: nn.Module) -> Trainer:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (task.world,))}
    if task.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _FullySharded(task, model, _adamw())


def _configuration(task: Task, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": task.case.batch,
        "gradient_accumulation_steps": task.case.accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": task.precision == "bf16"},
        "zero_optimization": {"stage": stage},
    }


def _deepspeed(stage: int, task: Task, model: nn.Module) -> Trainer:
    import logging

    import deepspeed  # pyright: ignore[reportMissingImports]
    import deepspeed.ops  # pyright: ignore[reportMissingImports]

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It would be compiled at the start, for a minute; only tensor-parallel inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    optimizer = _adamw()(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_configuration(task, stage))
    return _DeepSpeedLike(engine)


def _shardwise(stage: int, transport: str | None, task: Task, model: nn.Module) -> Trainer:
    import shardwise

    options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    config = {**_configuration(task, stage), "optimizer": {"type": "AdamW", "params": options}}
    if transport is not None:
        config["transport"] = transport
    engine, *_ = shardwise.initialize(model=model, config=config)
    return _Shardwise(engine)


_HOW = "`make peers` installs it (the bench extra; it needs setuptools and DS_BUILD_OPS=0, see the Makefile)"
_SHARDWISE = ("shardwise", "shardwise.entry")
# The last two are imported when an engine is made, and bring in the whole of torch's compiler.
_DEEPSPEED = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
)

REFERENCE = System("reference", "reference", _single, alone=True)
"""Plain PyTorch in one process over the micro-batches of all ranks: what the losses are compared with."""

SYSTEMS = (
    System("single", "PyTorch, one process", _single, alone=True),
    System("ddp", "PyTorch DDP", _ddp),
    System("zero-redundancy", "DDP + ZeroRedundancyOptimizer", _zero_redundancy),
    System("fsdp2", "PyTorch FSDP2", _fsdp2),
    *(
        System(f"deepspeed-{n}", f"DeepSpeed stage {n}", partial(_deepspeed, n), ("deepspeed", _HOW), imports=_DEEPSPEED)
        for n in range(4)
    ),
    *(System(f"shardwise-{n}", f"Shardwise stage {n}", partial(_shardwise, n, None), imports=_SHARDWISE) for n in range(4)),
    System("shardwise-3-gloo", "Shardwise stage 3 over gloo", partial(_shardwise, 3, "gloo"), imports=_SHARDWISE),
)


def named(names: Sequence[str]) -> list[System]:
    """The systems with these names, in the order of `SYSTEMS`; what is nobody's name means all whose name begins so."""
    known = {system.name for system in SYSTEMS}
    whole, parts = set(names) & known, tuple(f"{name}-" for name in set(names) - known)
    return [system for system in SYSTEMS if system.name in whole or system.name.startswith(parts)]
