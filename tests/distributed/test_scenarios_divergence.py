"""Parameters that some ranks, or all, do not use; and ranks that do not do the same, which must be told instead of hanging."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import utils
from shardwise.errors import DivergenceError, PeerLostError
from tests.distributed.scenario_support import (
    STAGES,
    Net,
    adamw,
    assert_close,
    assert_equal,
    build,
    end_process,
    everywhere,
    full,
    part,
    reference,
    samples,
    settings,
    sgd,
    squares,
    start,
    train,
)
from tests.harness import ranks

LIMIT_S = 10.0


@contextmanager
def soon(match: str) -> Iterator[None]:
    """A named error with that text, within the promised time."""
    began = time.monotonic()
    with pytest.raises(DivergenceError, match=match):
        yield
    assert time.monotonic() - began < LIMIT_S


# ---- unused everywhere


class Spare(Net):
    """A block, a layer and a bare parameter that no forward reads; the last one sits between used ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(5, 5), nn.Tanh()))
        self.idle = nn.Linear(5, 5)
        self.between = Parameter(torch.randn(3, 3))
        self.tail = Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x) * self.tail


IDLE = ("blocks.2.0.weight", "blocks.2.0.bias", "idle.weight", "idle.bias", "between")


@ranks(2)
def test_what_no_rank_uses_stays_as_it_is_and_has_no_state() -> None:
    """AdamW with weight decay leaves a parameter without gradient alone, as plain PyTorch does."""
    for precision in ("fp32", "bf16"):
        for stage in STAGES:
            model = build(Spare)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            with start(model, stage, adamw, precision=precision) as engine:
                for step in range(3):
                    x, y = part(samples(4, step), 2)
                    loss = squares(engine, (x.bfloat16() if precision == "bf16" else x, y))
                    engine.backward(loss)
                    for name in IDLE:
                        assert utils.safe_get_full_grad(model.get_parameter(name)) is None, name
                    engine.step()
                state = {id(parameter): each for parameter, each in engine.optimizer.state.items()}  # pyright: ignore
                for name, parameter in model.named_parameters():
                    master = utils.safe_get_full_fp32_param(parameter)
                    moment = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
                    if name in IDLE:
                        assert_equal(master, before[name], f"{name} at stage {stage}")
                        assert moment is None
                        assert id(parameter) not in state
                    else:
                        assert not torch.equal(master, before[name]), name  # pyright: ignore
                        assert moment is not None
                        assert moment.shape == parameter.shape
                if precision == "fp32":
                    assert_close(full(engine), reference(build(Spare), 3, adamw), f"stage {stage}")


# ---- used on one rank only


class Experts(nn.Module):
    """Two experts; which one is used, and how often the gate, is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.gate = nn.Linear(5, 5)

    def forward(self, x: Tensor, expert: int, calls: int) -> Tensor:
        for _ in range(calls):
            x = torch.tanh(self.gate(x))
        return self.experts[expert](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, expert: int, calls: int) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x, expert, calls)
        for _ in range(calls):
            x = x + torch.tanh(F.linear(self.head(x), self.head.weight.t()))
        return self.head(x)


def mixture_loss(model: Any, batch: Any, rank: int) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x, rank, 1 + 2 * rank), y)


def declare_nothing(model: nn.Module) -> dict[str, Any]:
    return {}


def declare_by_class(model: nn.Module) -> dict[str, Any]:
    assert len(utils.set_z3_leaf_modules(model, [Experts])) == 2
    return {}


def declare_by_config(model: nn.Module) -> dict[str, Any]:
    return {"leaf_module": {"classes": ["Experts"]}}


def declare_by_name(model: nn.Module) -> dict[str, Any]:
    return {"leaf_module": {"names": ["layers.0", "layers.1"]}}


def declare_by_suffix(model: nn.Module) -> dict[str, Any]:
    return {"leaf_module": {"name_suffixes": ["experts"]}}


def mixture_reference(optimizer: Callable[[Any], torch.optim.Optimizer], steps: int, accumulation: int) -> dict[str, Tensor]:
    """The mean of both ranks' losses: what one of them did not use gets zeros from it."""
    model = build(Mixture)
    updates = optimizer(model.parameters())
    for step in range(steps):
        updates.zero_grad()
        for number in range(accumulation):
            for rank in range(2):
                batch = part(samples(4 * accumulation, step), 2, number, rank)
                (mixture_loss(model, batch, rank) / (2 * accumulation)).backward()
        updates.step()
    return full(model)


@ranks(2)
def test_what_one_rank_uses_counts_as_zero_on_the_other() -> None:
    """Stages 0 to 2 need no declaration; at stage 3 the module that differs is declared, in any of the ways."""
    ways = [(0, declare_nothing), (1, declare_nothing), (2, declare_nothing)]
    ways += [(3, way) for way in (declare_by_class, declare_by_config, declare_by_name, declare_by_suffix)]
    for optimizer, accumulation in ((adamw, 1), (sgd, 3)):
        right = mixture_reference(optimizer, 3, accumulation)
        for stage, declare in ways:
            model = build(Mixture)
            with start(model, stage, optimizer, accumulation=accumulation, zero=declare(model)) as engine:
                for step in range(3):
                    for number in range(accumulation):
                        batch = part(samples(4 * accumulation, step), 2, number)
                        engine.backward(mixture_loss(engine, batch, dist.get_rank()))
                        engine.step()
                assert_close(full(engine), right, f"stage {stage}, {declare.__name__}, accumulation {accumulation}")


class Early(Net):
    """Also hands out what the first block made."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        early = self.blocks[0](x * self.gain)
        return self.head(self.blocks[1](early)), early


@ranks(2)
def test_one_rank_reaches_only_a_part_of_the_model() -> None:
    """Its loss does not depend on the later blocks; the other rank's does. (At stage 3 they would gather differently.)"""
    for stage in STAGES[:3]:
        model = build(Early)
        updates = adamw(model.parameters())
        for step in range(3):
            updates.zero_grad()
            for rank in range(2):
                x, y = part(samples(4, step), 2, rank=rank)
                output, early = model(x)
                ((F.mse_loss(output, y) if rank == 0 else early.square().mean()) / 2).backward()
            updates.step()
        with start(build(Early), stage, adamw) as engine:
            for step in range(3):
                x, y = part(samples(4, step), 2)
                output, early = engine(x)
                engine.backward(F.mse_loss(output, y) if dist.get_rank() == 0 else early.square().mean())
                engine.step()
            assert_close(full(engine), full(model), f"stage {stage}")


@ranks(2)
def test_one_rank_does_not_train_a_window() -> None:
    """Rank 1 has no batch left and only steps: at stages that need no gather its gradient counts as zero."""
    model = build()
    updates = sgd(model.parameters())
    for step in range(2):
        updates.zero_grad()
        (squares(model, part(samples(4, step), 2, rank=0)) / 2).backward()
        updates.step()
    for stage in (0, 1):
        with start(build(), stage) as engine:
            for step in range(2):
                if dist.get_rank() == 0:
                    with engine.no_sync():
                        engine.backward(squares(engine, part(samples(4, step), 2)))
                engine.step()
            assert_close(full(engine), full(model), f"stage {stage}")


# ---- differences that nobody declared


class Forked(Net):
    """Each rank can be sent its own way, after some ordinary steps. Far enough apart that guessed gathers do not cover it."""

    way = "same"

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        blocks = list(self.blocks)
        if self.way == "one":
            blocks = blocks[:1]
        elif self.way == "other":
            blocks = blocks[-1:]
        elif self.way == "swapped":
            blocks = blocks[::-1]
        for block in blocks:
            x = block(x)
        return self.head(x)


DIFFERENT_WAYS = [(("one", "other"), 3), (("same", "swapped"), 0), pytest.param(("one", "same"), 3, marks=pytest.mark.slow)]


@ranks(2, dies=(0, 1))
@pytest.mark.parametrize(
    ("ways", "warm"), DIFFERENT_WAYS, ids=lambda value: " vs ".join(value) if isinstance(value, tuple) else ""
)
def test_different_units_at_stage_3_are_a_named_error_on_both_ranks(ways: tuple[str, str], warm: int) -> None:
    """Also when it comes out of the engine's own `with` block, which must not hide it."""
    # Weights may be gathered by a wrong guess, so it is not always the first module that tells the ranks apart.
    named = r"(?s)rank 0: asks for '(gather|reduce) [\w.<>]+'.*rank 1: asks for '(gather|reduce) [\w.<>]+'"
    model = build(Forked)
    with soon(f"{named}.*declare those that may differ as leaf modules"), start(model, 3) as engine:
        train(engine, warm)
        model.way = ways[dist.get_rank()]
        train(engine, 1, first=warm)
    end_process()


@ranks(2)
def test_one_rank_evaluates_more_where_weights_stay() -> None:
    for stage in STAGES[:3]:
        with start(build(), stage) as engine:
            train(engine, 2)
            evaluate_on_rank_0(engine)
            train(engine, 1, first=2)
            assert_close(full(engine), reference(build(), 3), f"stage {stage}")


def evaluate_on_rank_0(engine: Any) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            engine(samples(2)[0])


@ranks(2, dies=(0, 1))
def test_one_rank_evaluates_more_where_weights_are_gathered() -> None:
    with soon("gather"), start(build(), 3) as engine:
        train(engine, 2)
        evaluate_on_rank_0(engine)
        train(engine, 1, first=2)
    end_process()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@ranks(2, dies=(0, 1))
def test_one_rank_leaves_out_a_step(stage: int) -> None:
    with soon("agree on gradients|gather|reduce"), start(build(), stage) as engine:
        train(engine, 2)
        for step in (2, 3):
            engine.backward(squares(engine, part(samples(4, step), 2)))
            if dist.get_rank() == 0 or step == 3:
                engine.step()
    end_process()


@ranks(2, dies=(0, 1), timeout=30.0)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_one_rank_ends_training_early(stage: int, tmp_path: Path) -> None:
    """And goes on with other things, so that no connection breaks."""
    engine = start(build(), stage)
    train(engine, 2)
    if dist.get_rank() == 0:
        with soon(
            r"rank 1 has closed its engine after 2 steps while others go on: found rank 0 waits for '[\w<>. ]+' .*, phase "
            r"'(backward|step)'\)\. run the same number of steps on every rank"
        ):
            train(engine, 1)
        (tmp_path / "seen").touch()
    engine.destroy(restore=False)
    limit = time.monotonic() + 2 * LIMIT_S
    while not (tmp_path / "seen").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    end_process()


@ranks(2, dies=(0, 1), timeout=30.0)
def test_one_rank_ends_its_process_early() -> None:
    """In good order, but before the others: they are told where it was last."""
    engine = start(build(), 2)
    train(engine, 2)
    if dist.get_rank() == 1:
        end_process()
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        train(engine, 1, first=2)
    assert time.monotonic() - began < LIMIT_S
    told = str(caught.value)
    assert "the process of rank 1 has ended: found rank 0 waits for '" in told
    assert "; rank 1 was last seen after '" in told
    assert told.endswith("if it ended in good order, give every rank the same number of steps.")
    end_process()


# ---- started differently


def models_that_differ(rank: int, what: str) -> nn.Module:
    model = build()
    if rank == 0:
        return model
    if what == "shape":
        model.head = nn.Linear(5, 4)
    elif what == "extra":
        model.extra = Parameter(torch.zeros(2))
    elif what == "name":
        model.top = model.head
        del model.head
    elif what == "dtype":
        model.head.bias.data = model.head.bias.data.double()
    elif what == "frozen":
        model.blocks[1].requires_grad_(False)
    elif what == "buffer":
        model.register_buffer("table", torch.zeros(3))
    return model


@ranks(2)
def test_different_models_are_a_named_error_on_every_rank() -> None:
    """The first difference is named; nothing is in flight then, so the process group can be used again."""
    cases = {
        "shape": r"on rank 1: parameter head\.weight: \(3, 5\) .*found parameter head\.weight: \(4, 5\)",
        "extra": r"found parameter extra: \(2,\)",
        "name": r"on rank 1: parameter head\.weight.*found parameter top\.weight",
        "dtype": r"parameter head\.bias: .*torch\.float32.*torch\.float64",
        "frozen": r"parameter blocks\.1\.0\.weight: .*trainable=True.*trainable=False",
        "buffer": r"found buffer table: \(3,\) torch\.float32",
    }
    for what, message in cases.items():
        with soon(f"(?s)rank 0 and rank 1 were started with different.*{message}.*on every rank"):
            shardwise.initialize(model=models_that_differ(dist.get_rank(), what), optimizer=sgd, config=settings(3))
    with start(build(), 3) as engine:
        train(engine, 1)


@ranks(2)
def test_different_configurations_are_a_named_error_on_every_rank() -> None:
    cases: dict[str, dict[str, Any]] = {
        "gradient_clipping": {"gradient_clipping": 0.5},
        "bf16": {"bf16": {"enabled": True}},
        "zero_optimization": {"zero_optimization": {"stage": 1}},
        "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
        "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
    }
    for key, change in cases.items():
        config = {**settings(3), **(change if dist.get_rank() else {})}
        with soon(f"(?s)rank 0 and rank 1 were started with different.*configuration {key}"):
            shardwise.initialize(model=build(), optimizer=sgd, config=config)


@ranks(2)
def test_different_optimizer_groups_are_a_named_error_on_every_rank() -> None:
    """Shards are laid out by group, so ranks that group differently would exchange the wrong bytes."""
    for stage in (0, 1, 3):
        for what in ("groups", "members", "lr"):
            model = build()
            parameters = list(model.parameters())
            halves = [{"params": parameters[:2]}, {"params": parameters[2:]}]
            groups = {
                "groups": [{"params": parameters}],
                "members": [{"params": parameters[:3]}, {"params": parameters[3:]}],
                "lr": [{"params": parameters[:2], "lr": 0.3}, {"params": parameters[2:]}],
            }
            optimizer = sgd(groups[what] if dist.get_rank() else halves)
            with soon("(?s)rank 0 and rank 1 were started with different.*group"):
                shardwise.initialize(model=model, optimizer=optimizer, config=settings(stage))


@ranks(2)
def test_ranks_with_different_weights_and_buffers_begin_with_those_of_rank_0() -> None:
    for stage in STAGES:
        torch.manual_seed(dist.get_rank())
        model = Net()
        model.register_buffer("table", torch.randn(3))
        own = {name: value.clone() for name, value in model.state_dict().items()}
        first = everywhere(own)[0]
        with start(model, stage) as engine:
            assert_equal(full(engine), {name: first[name] for name, _ in model.named_parameters()}, f"stage {stage}")
            assert_equal(model.table, first["table"])
