"""Several engines in one process, the end of an engine, serving its weights, and compiled units."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardwise
from shardwise import Engine, utils, zero
from shardwise.errors import UsageError
from tests.distributed.scenario_support import (
    STAGES,
    Net,
    adamw,
    assert_close,
    assert_equal,
    build,
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

# ---- several engines


def small() -> nn.Module:
    return Net(3)


def actor_loss(actor: Any, critic: Any, frozen: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """An actor-critic step in small: the actor is judged by the critic and held near the frozen model."""
    x, _ = batch
    action = actor(x)
    with torch.no_grad():
        anchor = frozen(x)
    value = critic(action.detach())
    advantage = critic(action).mean()
    return (action - anchor).square().mean() - advantage, value.square().mean()


@ranks(2)
def test_three_engines_interleaved() -> None:
    """Stage-3 actor, stage-2 critic and a frozen stage-3 model, each as in plain PyTorch."""
    models = (build(), build(small), build())
    updates = (adamw(models[0].parameters()), sgd(models[1].parameters()))
    for step in range(3):
        loss, critic_loss = actor_loss(*models, samples(4, step))
        updates[0].zero_grad()
        loss.backward()
        updates[1].zero_grad()
        updates[0].step()
        critic_loss.backward()
        updates[1].step()
    for stages in ((3, 2), (2, 3), (0, 1)):
        frozen_model = build().requires_grad_(False)
        actor, critic = start(build(), stages[0], adamw), start(build(small), stages[1])
        frozen = shardwise.initialize(model=frozen_model, config=settings(3))[0]
        with actor, critic, frozen:
            assert frozen.optimizer is None
            for step in range(3):
                loss, critic_loss = actor_loss(actor, critic, frozen, part(samples(4, step), 2))
                actor.backward(loss)
                critic.zero_grad()
                actor.step()
                critic.backward(critic_loss)
                critic.step()
            assert_close(full(actor), full(models[0]), f"actor {stages}")
            assert_close(full(critic), full(models[1]), f"critic {stages}")
            assert_equal(full(frozen), full(models[2]))


@ranks(2)
def test_engines_in_one_backward() -> None:
    """One loss through two models, announced to one engine only: the other takes it as a plain backward."""
    plain = (build(), build(small))
    updates = [sgd(model.parameters()) for model in plain]
    for step in range(3):
        for each in updates:
            each.zero_grad()
        plain[1](plain[0](samples(4, step)[0])).square().mean().backward()
        for each in updates:
            each.step()
    for stages in ((3, 3), (3, 1), (0, 2)):
        with start(build(), stages[0]) as first, start(build(small), stages[1]) as second:
            for step in range(3):
                first.backward(second(first(part(samples(4, step), 2)[0])).square().mean())
                second.step()
                first.step()
            assert_close(full(first), full(plain[0]), f"{stages}")
            assert_close(full(second), full(plain[1]), f"{stages}")


@ranks(2)
def test_engines_of_different_precision_and_stage_do_not_disturb_each_other() -> None:
    alone = {}
    kinds = [(3, "fp32"), (1, "bf16"), (3, "fp16"), (0, "bf16")]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    def run(engine: Engine, precision: str, step: int) -> None:
        x, y = part(samples(4, step), 2)
        engine.backward(squares(engine, (x.to(dtypes[precision]), y)))
        engine.step()

    for stage, precision in kinds:
        with start(build(), stage, adamw, precision=precision) as engine:
            for step in range(3):
                run(engine, precision, step)
            alone[stage, precision] = full(engine)
    engines = {kind: start(build(), kind[0], adamw, precision=kind[1]) for kind in kinds}
    for step in range(3):
        for (_, precision), engine in engines.items():
            run(engine, precision, step)
    for kind, engine in engines.items():
        assert_equal(full(engine), alone[kind], kind)
    for number, engine in enumerate(engines.values()):  # the order of leaving is free
        engine.destroy(restore=number % 2 == 0)


# ---- the end of an engine


def hooks_on(model: nn.Module) -> list[str]:
    """Where hooks of any kind are left."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key, value in vars(module).items() if key.endswith("hooks") and value]
        found += [f"{name}.forward" for _ in [0] if "forward" in vars(module)]
    for name, parameter in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, key, None):
                found.append(f"{name}{key}")
    return found


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_destroyed_engine_leaves_a_plain_module_with_the_trained_weights(precision: str, tmp_path: Path) -> None:
    """It trains on by itself, can be copied, pickled and saved, and can be given to another engine at another stage."""
    right = reference(build(), 3, adamw)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for stage in STAGES:
        model = build()
        identities = [id(parameter) for parameter in model.parameters()]
        engine = start(model, stage, adamw, precision=precision)
        for step in range(3):
            x, y = part(samples(4, step), 2)
            engine.backward(squares(engine, (x.to(dtype), y)))
            engine.step()
        trained = full(engine)
        engine.destroy()
        engine.destroy()
        assert hooks_on(model) == []
        assert [id(parameter) for parameter in model.parameters()] == identities
        for name, parameter in model.named_parameters():
            assert type(parameter) is Parameter
            assert parameter.dtype == dtype
            assert parameter.is_leaf
            assert parameter.requires_grad
            assert_equal(parameter.detach(), trained[name], f"stage {stage}")
        if precision == "fp32":
            assert_close(trained, right, f"stage {stage}")
        twin = copy.deepcopy(model)
        assert_equal(full(pickle.loads(pickle.dumps(model))), trained)
        path = tmp_path / f"{stage}-{dist.get_rank()}.pt"
        torch.save(model.state_dict(), path)
        assert_equal(torch.load(path), dict(model.state_dict()))
        if precision == "fp32":
            further = reference(model, 1)
            assert model.gain.grad is not None
            assert_equal(reference(twin, 1), further)
            model.zero_grad()
            with start(model, 3 - stage, sgd) as other:
                assert_equal(full(other), further)
                train(other, 2)
            assert_close(full(model), reference(twin, 2), f"stage {stage} and then {3 - stage}")


@ranks(2)
def test_everything_but_destroy_is_refused_after_destroy() -> None:
    for stage in (0, 3):
        engine = start(build(), stage)
        train(engine, 1)
        engine.destroy()
        loss = squares(engine.module, samples(2))
        for call, *args in ((engine, samples(2)[0]), (engine.backward, loss), (engine.scale, loss), (engine.step,)):
            with pytest.raises(UsageError, match="this engine was destroyed"):
                call(*args)
        with pytest.raises(UsageError, match="this engine was destroyed"), engine.inference():
            pass
        assert engine.optimizer is not None
        with pytest.raises(UsageError, match="this engine was destroyed"):
            engine.optimizer.step()
        assert utils.safe_get_full_fp32_param(engine.module.gain) is None
        loss.backward()
        assert engine.module.gain.grad is not None


@ranks(2)
def test_an_error_inside_the_block_of_an_engine_comes_out_of_it() -> None:
    for stage in STAGES:
        model = build()
        with pytest.raises(ZeroDivisionError), start(model, stage) as engine:
            train(engine, 1)
            squares(engine, part(samples(4), 2))
            raise ZeroDivisionError
        assert hooks_on(model) == []


class Wide(nn.Module):
    """A quarter of a million parameters, so that what stays behind is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


LIVES = [
    (3, "new"),
    (0, "same"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, "same"), (0, "new"), (2, "new"))),
]


@ranks(2, timeout=120.0)
@pytest.mark.parametrize(("stage", "kind"), LIVES)
def test_twenty_lives_keep_memory_flat_and_leave_no_hooks(stage: int, kind: str) -> None:
    """initialize, train, destroy; with a new model each time, or with one that stays."""
    model = build(Wide)
    memory, tensors, engines, threads = [], [], weakref.WeakSet[Any](), threading.active_count()
    for _ in range(20):
        mine = model if kind == "same" else build(Wide)
        engine = start(mine, stage, adamw, precision="bf16")
        engines.add(engine)
        x, y = part(samples(4, 0, width=256), 2)
        engine.backward(squares(engine, (x.bfloat16(), y)))
        engine.step()
        engine.destroy()
        assert hooks_on(mine) == []
        assert engine.counters()["resident_total"] == 0, engine.counters()["resident"]
        del engine, mine
        gc.collect()
        memory.append(resident_bytes())
        tensors.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
        assert len(engines) == 0, "nothing keeps an engine alive"
    assert tensors[-1] == tensors[4]
    assert threading.active_count() == threads
    # 16 bytes per parameter, a quarter of a million parameters: 4 MB would be lost per life.
    assert memory[-1] - memory[4] < 8e6, [round(each / 1e6) for each in memory]


# ---- serving


class Chatty(Net):
    def generate(self, x: Tensor, tokens: int) -> Tensor:
        """Feeds its output back, as text generation does; on the plain module."""
        for _ in range(tokens):
            x = x + nn.functional.pad(self(x), (0, 2))
        return x


@ranks(2)
def test_ranks_serve_different_numbers_of_calls() -> None:
    """All weights are gathered once on entry; inside nothing is communicated."""
    plain = reference(build(Chatty), 2)
    for stage in STAGES:
        model = build(Chatty)
        expected = build(Chatty)
        expected.load_state_dict(plain)
        with start(model, stage) as engine:
            train(engine, 2)
            with engine.inference() as served:
                assert served is model
                assert not model.training
                assert not torch.is_grad_enabled()
                before = engine.counters()["calls"]
                for _ in range(1 + 3 * dist.get_rank()):
                    mine = samples(2, dist.get_rank())[0]
                    output = served.generate(mine, 2 + dist.get_rank())
                    assert_close(output, expected.generate(mine, 2 + dist.get_rank()).detach(), f"stage {stage}")
                    assert_close(engine(mine), expected(mine).detach())
                    assert_close(engine.generate(mine, 1), expected.generate(mine, 1).detach())
                assert engine.counters()["calls"] == before
                state = model.state_dict()
                assert_close(dict(state), dict(expected.state_dict()))
            assert model.training
            assert torch.is_grad_enabled()
            assert engine.counters()["resident"].get("gathered", 0) == 0
            train(engine, 1, first=2)
            assert_close(full(engine), reference(build(Chatty), 3), f"stage {stage}")


@ranks(2)
def test_training_inside_inference_is_refused() -> None:
    """Weights must not change while they are served; afterwards training goes on."""
    for stage in STAGES:
        with start(build(), stage) as engine:
            train(engine, 1)
            with engine.inference():
                assert engine.optimizer is not None
                for step in (engine.step, engine.optimizer.step):
                    with pytest.raises(UsageError, match=r"inside .*inference"):
                        step()
                with torch.enable_grad():
                    loss = squares(engine, part(samples(4, 1), 2))
                    for backward in (loss.backward, lambda loss=loss: engine.backward(loss)):
                        with pytest.raises(UsageError, match=r"inside .*inference"):
                            backward()
            train(engine, 2, first=1)
            assert_close(full(engine), reference(build(), 3), f"stage {stage}")


@ranks(2)
def test_inference_nests_and_keeps_the_mode() -> None:
    for stage in (1, 3):
        with start(build(), stage) as engine:
            engine.eval()
            with engine.inference() as outer, engine.inference() as inner:
                assert outer is inner
                first = inner(samples(2)[0])
            assert not engine.module.training
            with torch.no_grad():
                assert_equal(engine(samples(2)[0]), first)
            engine.train()
            with pytest.raises(ZeroDivisionError), engine.inference():
                raise ZeroDivisionError
            assert engine.module.training
            train(engine, 1)
            assert_close(full(engine), reference(build(), 1))


@ranks(2)
def test_inference_says_when_the_model_does_not_fit() -> None:
    """On one rank is enough, and all ranks are told; training goes on."""
    from shardwise import engine as engine_module

    with start(build(), 3) as engine:
        original = engine_module.available_bytes
        engine_module.available_bytes = lambda device: 100 if dist.get_rank() else None
        try:
            with pytest.raises(UsageError, match="does not fit into memory"), engine.inference():
                pass
        finally:
            engine_module.available_bytes = original
        train(engine, 1)
        assert_close(full(engine), reference(build(), 1))


@ranks(2)
def test_weights_can_be_read_while_they_are_served() -> None:
    with start(build(), 3) as engine:
        train(engine, 1)
        with engine.inference() as model:
            served = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            with zero.GatheredParameters(list(model.parameters())):
                assert_equal(dict(model.named_parameters()), served)  # pyright: ignore
            assert_equal(model.gain.detach(), served["gain"])
        assert_equal(full(engine), served)


# ---- compilation


class CountingBackend:
    """Runs what was traced, and counts how often something was."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_compiled_units_compute_the_same_and_are_compiled_once(precision: str) -> None:
    """Two steps and an evaluation warm up; nothing is traced again later. `destroy` gives the plain forward back."""
    right = reference(build(), 6, adamw) if precision == "fp32" else None
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for stage in STAGES:
        model = build()
        backend = CountingBackend()
        with start(model, stage, adamw, precision=precision) as engine:
            engine.compile(backend=backend)
            engine.compile(backend=backend)
            assert all("forward" in vars(block) for block in model.blocks)
            with warnings.catch_warnings():  # torch looks at .grad of whatever goes into compiled code, and warns itself of it
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
                warm = 0
                for first in (0, 2, 4):
                    for step in (first, first + 1):
                        x, y = part(samples(4, step), 2)
                        engine.backward((engine(x.to(dtype)).float() - y).square().mean())
                        engine.step()
                    with torch.no_grad():
                        engine.eval()(samples(2)[0].to(dtype))
                    engine.train()
                    warm = warm or backend.graphs
            assert warm >= len(model.blocks), "nothing was compiled"
            assert backend.graphs == warm, f"stage {stage}: {backend.graphs - warm} compiled again after the warm-up"
            if right is not None:
                assert_close(full(engine), right, f"stage {stage}")
        assert hooks_on(model) == []
        torch.compiler.reset()
