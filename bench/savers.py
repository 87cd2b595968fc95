"""The ways to save and load that `bench.checkpoint` sets side by side, each used as its own documentation shows.

Owns how each saves the same model with its Adam state. Refuses to know clocks and processes. Torch and the systems are imported
only in the processes that save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from bench.cases import LEARNING_RATE, Task
from bench.memory import own_peak, reset_own_peak
from bench.systems import SYSTEMS, System
from bench.worker import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["WAYS", "Measured", "Saver", "SavingRank", "Way", "named"]


class Saver(Protocol):
    """A model with its optimizer, ready to be saved."""

    def save(self, path: Path) -> Callable[[], object] | None:
        """Save into a directory. Where that goes on in the background: what waits for its end."""
        ...

    def load(self, path: Path) -> None:
        """Load what was saved there."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """What this rank holds of weights and optimizer state, at its place."""
        ...


@dataclass(frozen=True)
class Way:
    """One way to save.

    Args:
        system: its name and title, and how a `Saver` is set up.
        background: whether `save` returns before all is written.
    """

    system: System
    background: bool = False


@dataclass(frozen=True)
class Measured:
    """One save or load on one rank: seconds of a clock that all processes of the machine share, and bytes of memory."""

    started: float
    ended: float
    peak: int | None


class SavingRank(Rank):
    """What a rank can be asked to do here."""

    _waits: Callable[[], object] | None = None

    @property
    def _saver(self) -> Saver:
        return cast("Saver", self._built())

    def train(self) -> None:
        """One step, as optimizers make their state in the first."""
        if hasattr(self._built(), "compute"):
            self.run(0, 1)

    def save(self, path: Path) -> Measured:
        """Save; returns when the call does."""
        return self._measure(lambda: self._save(path))

    def wait(self) -> float:
        """Return when the save is complete here: when that was."""
        if self._waits is not None:
            self._waits()
            self._waits = None
        return self._now()

    def load(self, path: Path) -> Measured:
        """Overwrite the state with zeros, and load it."""
        import torch.distributed as dist

        for tensor in self._saver.tensors():
            tensor.zero_()
        dist.barrier()
        return self._measure(lambda: self._saver.load(path))

    def fingerprint(self) -> list[float]:
        """Sums over all of the state, and over parts of it, so that a change of order shows as well."""
        tensors = [tensor.reshape(-1) for tensor in self._saver.tensors()]
        return [sum(tensor[::stride].abs().sum().item() for tensor in tensors) for stride in (1, 3, 7)]

    def _save(self, path: Path) -> None:
        self._waits = self._saver.save(path)

    def _measure(self, work: Callable[[], object]) -> Measured:
        import torch.distributed as dist

        dist.barrier()
        before = reset_own_peak()
        started = self._now()
        work()
        ended = self._now()
        peak = own_peak()
        return Measured(started, ended, None if peak is None or before is None else peak - before)

    @staticmethod
    def _now() -> float:
        import time

        return time.perf_counter()


class _Torch:
    """`torch.save` of one dict per rank, with the rank's part of every weight and moment: the same bytes, and no more."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        import torch
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        self._rank = rank
        self._state: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            weight = parameter.detach().reshape(-1).chunk(world)
            for kind in ("weight", "exp_avg", "exp_avg_sq") if rank < len(weight) else ():
                self._state[f"{kind} {name}"] = weight[rank].clone() if kind == "weight" else torch.rand(weight[rank].shape)

    def save(self, path: Path) -> None:
        import torch

        torch.save(self._state, path / f"rank{self._rank}.pt")

    def load(self, path: Path) -> None:
        import torch

        for name, value in torch.load(path / f"rank{self._rank}.pt", weights_only=True).items():
            self._state[name].copy_(value)

    def tensors(self) -> list[Tensor]:
        return list(self._state.values())


class _Dcp:
    """`torch.distributed.checkpoint` of an FSDP2 model."""

    def __init__(self, background: bool, task: Task, model: nn.Module) -> None:
        trainer: Any = _setup_of("fsdp2")(task, model)
        self._background = background
        self._model, self._optimizer = trainer._model, trainer._optimizer
        self.compute, self.update = trainer.compute, trainer.update

    def save(self, path: Path) -> Callable[[], object] | None:
        if self._background:
            return _dcp().async_save(self._state(), checkpoint_id=path).result
        _dcp().save(self._state(), checkpoint_id=path)
        return None

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        _dcp().load(state, checkpoint_id=path)
        set_state_dict(self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def tensors(self) -> list[Tensor]:
        weights = [parameter.detach().to_local() for parameter in self._model.parameters()]
        moments = [s[key].to_local() for s in self._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return weights + moments

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class _DeepSpeed:
    """DeepSpeed's engine."""

    def __init__(self, stage: int, task: Task, model: nn.Module) -> None:
        trainer: Any = _setup_of(f"deepspeed-{stage}")(task, model)
        self._engine = trainer.engine
        self.compute, self.update = trainer.compute, trainer.update

    def save(self, path: Path) -> None:
        self._engine.save_checkpoint(path)

    def load(self, path: Path) -> None:
        assert self._engine.load_checkpoint(path)[0] is not None

    def tensors(self) -> list[Tensor]:
        optimizer = self._engine.optimizer
        if self._engine.zero_optimization_stage() == 3:
            groups = list(optimizer.fp32_partitioned_groups_flat)
        else:
            groups = list(optimizer.single_partition_of_fp32_groups)
        states = [optimizer.optimizer.state[group] for group in groups]
        return [group.data for group in groups] + [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


class _Shardwise:
    """This package's engine."""

    def __init__(self, stage: int, background: bool, task: Task, model: nn.Module) -> None:
        import shardwise

        self._background = background
        config = {
            "train_micro_batch_size_per_gpu": task.case.batch,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "checkpoint": {"async": background},
        }
        self._engine = shardwise.initialize(model=model, config=config)[0]

    def compute(self, pairs: Any) -> Tensor:
        [(text, targets)] = pairs
        loss = self._engine(text, targets)
        self._engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self._engine.step()

    def save(self, path: Path) -> Callable[[], object] | None:
        self._engine.save_checkpoint(path)
        return self._engine.wait_for_checkpoint if self._background else None

    def load(self, path: Path) -> None:
        assert self._engine.load_checkpoint(path)[0] is not None

    def tensors(self) -> list[Tensor]:
        from shardwise.engine import trainer_of

        found: list[Tensor] = []
        parts = trainer_of(self._engine).parts
        assert parts.step_path is not None
        for number, shard in enumerate(parts.shards):
            found.append(shard.master)
            for position in range(len(shard.pieces)):
                state = parts.step_path.driver.piece_state(number, position)
                found += [state["exp_avg"], state["exp_avg_sq"]]
        return found


def _dcp() -> Any:
    from torch.distributed import checkpoint

    return checkpoint


def _setup_of(name: str) -> Callable[[Task, Any], Any]:
    return next(system.setup for system in SYSTEMS if system.name == name)


def _like(name: str, new: str, title: str, setup: Callable[..., Any]) -> System:
    """A system of `bench.systems` (what it needs and imports), set up as a saver."""
    system = next(system for system in SYSTEMS if system.name == name)
    return replace(system, name=new, title=title, setup=setup, alone=False)


WAYS = (
    Way(_like("single", "torch", "torch.save, a file per rank", _Torch)),
    Way(_like("fsdp2", "dcp", "FSDP2, DCP save", partial(_Dcp, False))),
    Way(_like("fsdp2", "dcp-async", "FSDP2, DCP async_save", partial(_Dcp, True)), background=True),
    *(Way(_like(f"deepspeed-{n}", f"deepspeed-{n}", f"DeepSpeed stage {n}", partial(_DeepSpeed, n))) for n in (2, 3)),
    Way(_like("shardwise-3", "shardwise-3", "Shardwise stage 3", partial(_Shardwise, 3, False))),
    Way(_like("shardwise-3", "shardwise-3-async", "Shardwise stage 3, async", partial(_Shardwise, 3, True)), background=True),
)


def named(names: Sequence[str]) -> list[Way]:
    """The ways with these names, in the order of `WAYS`; what is nobody's name means all whose name begins so."""
    known = {way.system.name for way in WAYS}
    whole, parts = set(names) & known, tuple(f"{name}-" for name in set(names) - known)
    return [way for way in WAYS if way.system.name in whole or way.system.name.startswith(parts)]
