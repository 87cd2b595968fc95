"""Ranks simulated by threads of one process: parameters cut at random places, sums that really wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.optim import LossScale, OptimizerPlan, Piece, Shard, StepPath, StepReport, StepSettings, plan_groups

SHAPES = ((5, 7), (3,), (), (0, 4), (13,), (2, 3, 4), (1,), (130, 9))


class Reducer:
    """Sums tensors over `world` threads, in rank order."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=30)
        self._inputs: list[Tensor | None] = [None] * world
        self.calls: list[list[str]] = [[] for _ in range(world)]

    def of(self, rank: int) -> Callable[[Tensor, str], Tensor]:
        def total(tensor: Tensor, name: str) -> Tensor:
            self.calls[rank].append(name)
            self._inputs[rank] = tensor.clone()
            self._barrier.wait()
            values = [value for value in self._inputs if value is not None]
            tensor.copy_(sum(values[1:], values[0].clone()))
            self._barrier.wait()
            return tensor

        return total


@dataclass
class Setup:
    """How parameters are cut and what dtypes they have."""

    world: int = 2
    seed: int = 0
    align: int = 1
    replicas: int = 1
    settings: StepSettings = field(default_factory=StepSettings)
    master: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    weight: torch.dtype | None = None
    scaler: Callable[[], LossScale] = LossScale.constant


class Job:
    """All ranks of a job, and the unsharded parameters beside them."""

    def __init__(
        self, make: Callable[[list[Parameter]], tuple[Any, Any, Any]], setup: Setup, shapes: Sequence[tuple[int, ...]] = SHAPES
    ) -> None:
        source = torch.Generator().manual_seed(setup.seed)
        self.setup = setup
        self.params = [Parameter(torch.randn(shape, generator=source).to(setup.master)) for shape in shapes]
        self.names = [f"p{number}" for number in range(len(shapes))]
        self.plans: list[OptimizerPlan] = []
        self.paths: list[StepPath] = []
        self.reducer = Reducer(setup.world)
        for rank in range(setup.world):
            # Every rank has its own copy of the user's objects, as in its own process.
            params = [Parameter(param.detach().clone()) for param in self.params]
            optimizer, model_parameters, section = make(params)
            plan = plan_groups(optimizer, model_parameters, zip(self.names, params, strict=True), section)
            assert plan is not None
            self.plans.append(plan)
            shards = self._shards(plan, params, rank)
            settings = StepSettings(**{**vars(setup.settings), "rank": rank, "world": setup.world, "names": self.names})
            total = self.reducer.of(rank)
            path = StepPath(shards, plan.driver(shards), settings, total, total, setup.scaler())
            plan.optimizer.bind(path, dict(zip(self.names, params, strict=True)), lambda: None, lambda _: None)
            self.paths.append(path)

    def _layout(self, plan: OptimizerPlan, params: list[Parameter], group: int) -> tuple[list[tuple[int, int, int]], int]:
        """(parameter number, start, stop) in the group's flat buffer, and the buffer's length: a multiple of the world."""
        source = torch.Generator().manual_seed(self.setup.seed + group)
        slots, position = [], 0
        for number, param in enumerate(params):
            if plan.group_of(param) == group:
                gap = int(torch.randint(0, 4, (), generator=source)) if self.setup.align == 1 else -position % self.setup.align
                position += gap
                slots.append((number, position, position + param.numel()))
                position += param.numel()
        return slots, -(-position // self.setup.world) * self.setup.world

    def _shards(self, plan: OptimizerPlan, params: list[Parameter], rank: int) -> list[Shard]:
        shards = []
        parts = self.setup.world // self.setup.replicas
        for group in range(len(plan.param_groups)):
            slots, length = self._layout(plan, params, group)
            if not slots:
                continue
            chunk = length // parts
            low = rank % parts * chunk
            flat = torch.zeros(length, dtype=self.setup.master)
            for number, start, stop in slots:
                flat[start:stop] = params[number].detach().view(-1)
            pieces = tuple(
                Piece(
                    self.names[number],
                    number,
                    max(start, low) - low,
                    min(stop, low + chunk) - low,
                    stop - start,
                    max(low - start, 0),
                )
                for number, start, stop in slots
                if max(start, low) < min(stop, low + chunk)
            )
            master = flat[low : low + chunk].clone()
            weight = None if self.setup.weight is None else master.to(self.setup.weight)
            share = chunk // self.setup.replicas
            index = rank // parts
            counted = slice(index * share, chunk if index == self.setup.replicas - 1 else (index + 1) * share)
            shards.append(Shard(group, master, weight, pieces=pieces, counted=counted))
        return shards

    def step(
        self, grads: Sequence[Tensor | None], denominator: float = 1.0, bad: dict[int, tuple[int, float]] | None = None
    ) -> list[StepReport]:
        """One step everywhere. `grads`: full gradients, already summed; `bad`: rank -> (element of its first shard, value)."""
        used = [grad is not None for grad in grads]
        reports: list[Any] = [None] * self.setup.world

        def work(rank: int) -> None:
            path, plan = self.paths[rank], self.plans[rank]
            try:
                self._fill(path, grads)
                if bad and rank in bad:
                    position, value = bad[rank]
                    path.shards[0].grad[path.shards[0].pieces[0].start + position] = value
                reports[rank] = path.run(plan.param_groups, denominator, used)
            except Exception as error:  # noqa: BLE001 - handed to the test
                reports[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.setup.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for report in reports:
            if isinstance(report, Exception):
                raise report
        assert all(report is not None for report in reports)
        return reports

    def _fill(self, path: StepPath, grads: Sequence[Tensor | None]) -> None:
        for shard in path.shards:
            grad = torch.zeros(len(shard.master), dtype=self.setup.grad)
            for piece in shard.pieces:
                full = grads[piece.index]
                if full is not None:
                    grad[piece.start : piece.stop] = full.reshape(-1)[piece.offset : piece.offset + piece.stop - piece.start]
            shard.grad = grad

    def gather(self, kind: str = "master") -> list[Tensor]:
        """Full parameters (or weights), put together from the first copy of every part."""
        parts = self.setup.world // self.setup.replicas
        dtype = self.setup.weight if kind == "weight" else self.setup.master
        full = [torch.zeros(param.numel(), dtype=dtype) for param in self.params]
        for path in self.paths[:parts]:
            for shard in path.shards:
                flat = shard.weight if kind == "weight" else shard.master
                for piece in shard.pieces:
                    full[piece.index][piece.offset : piece.offset + piece.stop - piece.start] = flat[piece.start : piece.stop]
        return [flat.view(param.shape) for flat, param in zip(full, self.params, strict=True)]

    def gather_state(self, key: str) -> dict[int, Tensor]:
        """Full state tensors of the parameters that have any."""
        found: dict[int, Tensor] = {}
        for path in self.paths[: self.setup.world // self.setup.replicas]:
            for number, shard in enumerate(path.shards):
                for position, piece in enumerate(shard.pieces):
                    state = path.driver.piece_state(number, position)
                    if key in state:
                        flat = found.setdefault(piece.index, torch.full((piece.numel,), float("nan")))
                        flat[piece.offset : piece.offset + piece.stop - piece.start] = state[key].reshape(-1).float()
        return found


class Reference:
    """The same steps by plain PyTorch on whole parameters."""

    def __init__(self, job: Job, make: Callable[[list[Parameter]], torch.optim.Optimizer]) -> None:
        self.params = [Parameter(param.detach().clone()) for param in job.params]
        self.optimizer = make(self.params)

    def step(self, grads: Sequence[Tensor | None], clip: float = 0.0) -> Tensor:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype).clone()
        norm = torch.nn.utils.clip_grad_norm_(self.params, clip or float("inf"))
        self.optimizer.step()
        return norm


def make_grads(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, unused: Sequence[int] = ()) -> list[Tensor | None]:
    source = torch.Generator().manual_seed(1000 + seed)
    return [None if number in unused else torch.randn(shape, generator=source) for number, shape in enumerate(shapes)]


def close(actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        message = f"parameter {number}: {{}}".format
        torch.testing.assert_close(left, right.detach(), rtol=rtol, atol=atol, msg=message)
