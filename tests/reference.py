"""The one numerical reference, and the same training through Shardwise.

Owns one recipe (which model, optimizer, precision, how the global batch is split), trained two ways into the same record:

- float32: plain PyTorch in one process over the whole global batch, as a user without Shardwise writes it.
- 16 bit: the same arithmetic spelled out in plain PyTorch: float32 master weights, a 16-bit copy of them for forward and
  backward of each rank's micro-batches, gradients widened to float32 and summed, one division, clipping and update on the
  masters.

Two float32 sums in different order differ in their last bits, and a master that lies next to a rounding boundary then gives
another 16-bit weight: a difference of 2^-9 from one of 2^-24. So the reference can be told which weights to compute with
(`replay`): the recorded 16-bit weights of the other run, which are themselves checked to be the rounded masters bit for bit.
All other comparisons then keep the tolerance of float32, at every precision and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from tests.models import Batch, Case, case

__all__ = [
    "OPTIMIZERS",
    "Recipe",
    "Record",
    "Way",
    "compare_all",
    "compare_bits",
    "config_for",
    "global_batch",
    "part_of",
    "train_reference",
    "train_sharded",
]

RELATIVE, ABSOLUTE = 1e-5, 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
LOSS_SCALE_POWER = 8

Named = Sequence[tuple[str, Parameter]]
Weights = dict[str, Tensor]


def _groups(named: Named) -> list[dict[str, Any]]:
    """Two groups, as training scripts have them: matrices decay, the rest does not."""
    matrices = [parameter for _, parameter in named if parameter.dim() >= 2]
    others = [parameter for _, parameter in named if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(named), lr=0.05, momentum=0.9)


def _adamw(named: Named) -> torch.optim.Optimizer:
    # The update is lr x m / (sqrt(v) + eps). Where terms of size 0.1 cancel to a gradient near zero, its error of 1e-8 is
    # divided by eps; 1e-3 keeps that below the absolute tolerance, where 1e-8 would have rounding noise compared.
    return torch.optim.AdamW(_groups(named), lr=1e-2, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {"sgd": _sgd, "adamw": _adamw}


@dataclass(frozen=True)
class Recipe:
    """One training run, without the stage.

    Args:
        case: name of the model, see `tests.models`.
        world: data ranks.
        accumulation: micro-batches per step and rank.
        precision: "fp32", "bf16" or "fp16".
        optimizer: name in `OPTIMIZERS`.
        clip: largest gradient norm; 0 for none.
        steps: optimizer steps.
        micro_batch: samples per micro-batch.
    """

    case: str
    world: int
    accumulation: int = 1
    precision: str = "fp32"
    optimizer: str = "sgd"
    clip: float = 0.0
    steps: int = 3
    micro_batch: int = 2

    @property
    def model(self) -> Case:
        """What is trained."""
        return case(self.case)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by for backward."""
        return 2.0**LOSS_SCALE_POWER if self.precision == "fp16" else 1.0

    def build(self) -> nn.Module:
        """The model with its initial weights, the same on every call."""
        torch.manual_seed(1234)
        return self.model.build()


@dataclass
class Record:
    """What a run did.

    Args:
        losses: mean loss over the global batch, by step.
        norms: gradient norm before clipping, by step.
        weights: the weights that the model computes with, by parameter name: after each step where some have 16 bits, else
            after the last.
        masters: the weights that the optimizer updates, at the end, by parameter name.
        buffers: at the end, by name.
        faces: dtype and shape that the parameters show outside of any use, at the end, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    masters: Weights = field(default_factory=dict)
    buffers: Weights = field(default_factory=dict)
    faces: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)


# ---- data


def global_batch(recipe: Recipe, step: int) -> Batch:
    """All samples of one optimizer step, over ranks and micro-batches."""
    samples = recipe.world * recipe.accumulation * recipe.micro_batch
    return recipe.model.batch(samples, torch.Generator().manual_seed(77 + step), step)


def part_of(batch: Batch, recipe: Recipe, rank: int, micro_step: int) -> Batch:
    """One rank's micro-batch, with float inputs in the compute dtype."""
    start = (micro_step * recipe.world + rank) * recipe.micro_batch
    dtype = DTYPES[recipe.precision]
    return {
        key: _cast(value[start : start + recipe.micro_batch], dtype) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# ---- the reference


def train_reference(recipe: Recipe, replay: Sequence[Weights] = ()) -> Record:
    """Train in this process alone.

    Args:
        recipe: what to train.
        replay: weights to compute with after each step, in place of the rounded masters; only where some have 16 bits.
    """
    model = recipe.build()
    originals = {name: _widen(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(_storage_dtype(parameter, recipe))
    if any(parameter.dtype in SIXTEEN_BIT for parameter in model.parameters()):
        return _Widened(recipe, model, originals).train(replay)
    return _train_plainly(recipe, model)


def _storage_dtype(parameter: Tensor, recipe: Recipe) -> torch.dtype:
    """16-bit training casts floating-point parameters, except float64."""
    keeps = recipe.precision == "fp32" or not parameter.is_floating_point() or parameter.dtype == torch.float64
    return parameter.dtype if keeps else DTYPES[recipe.precision]


def _trainable(model: nn.Module) -> list[tuple[str, Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _train_plainly(recipe: Recipe, model: nn.Module) -> Record:
    optimizer = OPTIMIZERS[recipe.optimizer](_trainable(model))
    record = Record()
    for step in range(recipe.steps):
        loss = recipe.model.loss(model, global_batch(recipe, step))
        loss.backward()
        record.losses.append(loss.item())
        record.norms.append(_clip(model.parameters(), recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
    record.masters = _copies(model.named_parameters())
    record.weights = [record.masters]
    record.buffers = _copies(model.named_buffers())
    return record


class _Widened:
    """Training with float32 masters of 16-bit weights. Masters begin with all digits that the model was built with."""

    def __init__(self, recipe: Recipe, model: nn.Module, originals: Weights) -> None:
        self.recipe, self.model = recipe, model
        self.parameters = _trainable(model)
        self.masters = [(name, Parameter(originals[name])) for name, _ in self.parameters]
        self.optimizer = OPTIMIZERS[recipe.optimizer](self.masters)
        for (_, parameter), (_, master) in zip(self.parameters, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(self._adder(master))

    def train(self, replay: Sequence[Weights]) -> Record:
        record = Record()
        for step in range(self.recipe.steps):
            record.losses.append(self._accumulate(step))
            for _, master in self.masters:
                if master.grad is not None:
                    master.grad /= self.recipe.world * self.recipe.accumulation * self.recipe.loss_scale
            record.norms.append(_clip((master for _, master in self.masters), self.recipe.clip))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._round(replay[step] if replay else None)
            record.weights.append(_copies(self.model.named_parameters()))
        record.masters = {**record.weights[-1], **_copies(self.masters)}
        record.buffers = _copies(self.model.named_buffers())
        return record

    def _accumulate(self, step: int) -> float:
        batch = global_batch(self.recipe, step)
        losses = []
        for micro_step in range(self.recipe.accumulation):
            for rank in range(self.recipe.world):
                loss = self.recipe.model.loss(self.model, part_of(batch, self.recipe, rank, micro_step))
                loss.backward(gradient=torch.full_like(loss, self.recipe.loss_scale))
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def _round(self, weights: Weights | None) -> None:
        for (name, parameter), (_, master) in zip(self.parameters, self.masters, strict=True):
            parameter.data.copy_(master.data if weights is None else weights[name])

    @staticmethod
    def _adder(master: Parameter) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                wide = _widen(parameter.grad)
                master.grad = wide.clone() if master.grad is None else master.grad + wide
                parameter.grad = None

        return add


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in SIXTEEN_BIT else tensor


def _clip(parameters: Any, clip: float) -> float:
    return torch.nn.utils.clip_grad_norm_(list(parameters), clip or float("inf")).item()


def _copies(named: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in named}


# ---- through Shardwise


def config_for(recipe: Recipe, stage: int, **overrides: Any) -> dict[str, Any]:
    """The configuration of a recipe at one stage. Even the smallest parameter is released, so that this is seen to work."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if recipe.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER}
    elif recipe.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return {**config, **overrides}


@dataclass(frozen=True)
class Way:
    """How a recipe is trained through Shardwise.

    Args:
        stage: ZeRO stage.
        plain_loop: `loss.backward(); optimizer.step(); optimizer.zero_grad()` instead of the engine's methods.
        sharded_init: build the model under `zero.Init`.
        overrides: configuration keys that differ from `config_for`.
    """

    stage: int
    plain_loop: bool = False
    sharded_init: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)


def train_sharded(recipe: Recipe, way: Way) -> Record:
    """Train on the ranks of the current process group. Collective; the record is the same on every rank."""
    import shardwise

    config = config_for(recipe, way.stage, **way.overrides)
    with shardwise.zero.Init(config_dict_or_path=config, enabled=way.sharded_init):
        model = recipe.build()
    optimizer = OPTIMIZERS[recipe.optimizer](_trainable(model))
    engine, optimizer, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config)
    record = Record()
    with engine:
        for step in range(recipe.steps):
            record.losses.append(_step(engine, recipe, step, optimizer if way.plain_loop else None))
            record.norms.append(float(engine.get_global_grad_norm()))
            assert engine.was_step_applied(), f"step {step} was skipped"
            if step == recipe.steps - 1 or any(parameter.dtype in SIXTEEN_BIT for parameter in model.parameters()):
                with shardwise.zero.GatheredParameters(list(model.parameters())):
                    record.weights.append(_copies(model.named_parameters()))
        record.faces = {name: (parameter.dtype, parameter.shape) for name, parameter in model.named_parameters()}
        record.masters = _masters(model, record.weights[-1])
        record.buffers = _copies(model.named_buffers())
    return record


def _step(engine: Any, recipe: Recipe, step: int, optimizer: Any = None) -> float:
    """One optimizer step; through the optimizer if there is one, else through the engine."""
    batch = global_batch(recipe, step)
    total = torch.zeros((), dtype=torch.float64)
    for micro_step in range(recipe.accumulation):
        loss = recipe.model.loss(engine, part_of(batch, recipe, dist.get_rank(), micro_step))
        if optimizer is None:
            engine.backward(loss)
            engine.step()
        else:
            engine.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach().double()
    dist.all_reduce(total)
    return total.item() / (recipe.accumulation * recipe.world)


def _masters(model: nn.Module, weights: Weights) -> Weights:
    """The weights as the optimizer has them; collective."""
    from shardwise import utils

    masters = {
        name: utils.safe_get_full_fp32_param(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and weights[name].dtype in SIXTEEN_BIT
    }
    return {**weights, **_copies(masters.items())}


# ---- comparison


def _compare(actual: Record, recipe: Recipe) -> list[str]:
    """Train the reference and say where a run differs from it; empty if nowhere."""
    sixteen = any(tensor.dtype in SIXTEEN_BIT for tensor in actual.weights[-1].values())
    expected = train_reference(recipe, actual.weights if sixteen else ())
    problems = []
    for step in range(recipe.steps):
        problems += _compare_numbers(f"step {step}: loss", actual.losses[step], expected.losses[step])
        problems += _compare_numbers(f"step {step}: gradient norm", actual.norms[step], expected.norms[step])
    problems += _compare_weights("master", actual.masters, expected.masters)
    for name, weight in actual.weights[-1].items():
        right = expected.weights[-1][name]
        if not torch.equal(weight, actual.masters[name].to(weight.dtype)):
            problems.append(f"weight {name} is not its master rounded")
        if weight.dtype != right.dtype:
            problems.append(f"weight {name} has dtype {weight.dtype}, expected {right.dtype}")
        if actual.faces[name] != (right.dtype, right.shape):
            problems.append(f"weight {name} shows {actual.faces[name]} while it is not in use")
    for name, buffer in actual.buffers.items():
        if buffer.dtype != expected.buffers[name].dtype or buffer.shape != expected.buffers[name].shape:
            problems.append(f"buffer {name} is {buffer.dtype} {tuple(buffer.shape)}")
    return problems


def _compare_numbers(what: str, actual: float, expected: float) -> list[str]:
    if abs(actual - expected) <= ABSOLUTE + RELATIVE * abs(expected):
        return []
    return [f"{what}: {actual!r}, expected {expected!r}"]


def _compare_weights(what: str, actual: Weights, expected: Weights) -> list[str]:
    if actual.keys() != expected.keys():
        return [f"{what}: names {sorted(actual)}, expected {sorted(expected)}"]
    problems = []
    for name, value in expected.items():
        if actual[name].shape != value.shape or actual[name].dtype != value.dtype:
            problems.append(f"{what} {name}: {actual[name].dtype} {tuple(actual[name].shape)}, expected {value.dtype}")
        elif not torch.allclose(actual[name], value, rtol=RELATIVE, atol=ABSOLUTE):
            off = (actual[name] - value).abs().flatten()
            at = int(off.argmax())
            found, right = (tensor.flatten()[at].item() for tensor in (actual[name], value))
            problems.append(f"{what} {name}: off by {off[at].item():.3g} in element {at}: {found!r}, expected {right!r}")
    return problems


def compare_bits(one: Record, other: Record) -> list[str]:
    """Where two runs differ in any bit of their losses, norms and weights."""
    problems = [f"master {name}" for name, master in one.masters.items() if not torch.equal(master, other.masters[name])]
    if one.losses != other.losses:
        problems.append(f"losses {one.losses} != {other.losses}")
    if one.norms != other.norms:
        problems.append(f"norms {one.norms} != {other.norms}")
    return problems


def compare_all(runs: Mapping[str, Record], recipe: Recipe) -> list[str]:
    """Where runs of one recipe differ from the reference, or between ranks. Collective.

    Runs that are the same in every bit are compared once, and each rank compares a share of them: all ranks together tell all.
    """
    mine = {label: _fingerprint(record) for label, record in runs.items()}
    everyone: list[dict[str, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    distinct = {key: label for label, key in everyone[0].items()}
    share = list(distinct.values())[dist.get_rank() :: dist.get_world_size()]
    differ = [label for label in runs if len({keys[label] for keys in everyone}) > 1]
    return [
        *(f"{label}: ranks hold different weights, losses or norms" for label in differ),
        *(f"{label}: {problem}" for label in share for problem in _compare(runs[label], recipe)),
    ]


def _fingerprint(record: Record) -> str:
    """A text that is equal for records with equal bits, but for the values of buffers, which are each rank's own."""
    buffers = [(name, buffer.dtype, buffer.shape) for name, buffer in record.buffers.items()]
    state = hashlib.sha256(repr((record.losses, record.norms, record.faces, buffers)).encode())
    for weights in [record.masters, *record.weights]:
        for name, tensor in weights.items():
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
