"""Forward calls that are not the ordinary one: evaluation, no gradients, errors, recomputation, hooks of the user."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardwise import Engine
from shardwise.engine import trainer_of
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
    sgd,
    squares,
    start,
    train,
)
from tests.harness import ranks

# ---- evaluation


@ranks(2)
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "with gradients"])
def test_evaluation_between_steps(gradients: bool) -> None:
    """Also between the forward and the backward, between micro-batches, and with gradients that nobody asks for."""
    model = build()
    updates = adamw(model.parameters())
    outputs = []
    for step in range(3):
        updates.zero_grad()
        outputs.append(model(samples(2, 50 + step)[0]).detach())
        squares(model, samples(8, step)).backward()
        updates.step()
    for stage in STAGES:
        with start(build(), stage, adamw, accumulation=2) as engine:

            def evaluate(step: int, engine: Engine = engine) -> Tensor:
                engine.eval()
                assert not engine.module.training
                with torch.set_grad_enabled(gradients):
                    output = engine(samples(2, 50 + step)[0])
                engine.train()
                assert engine.module.blocks[0].training
                return output.detach()

            for step in range(3):
                assert_close(evaluate(step), outputs[step])
                for number in range(2):
                    loss = squares(engine, part(samples(8, step), 2, number))
                    assert_close(evaluate(step), outputs[step])
                    engine.backward(loss)
                    assert_close(evaluate(step), outputs[step])
                    engine.step()
            assert_close(full(engine), full(model), f"stage {stage}")


@ranks(2)
def test_nothing_grows_over_many_evaluations() -> None:
    """Fifty evaluations leave no object behind, and the same collectives are issued in each."""
    for stage in STAGES:
        with start(build(), stage) as engine:
            train(engine, 2)
            evaluate = torch.no_grad()(lambda engine=engine: engine(samples(2)[0]))
            traffic, alive, booked = [], [], []
            for _ in range(50):
                before = engine.counters()
                evaluate()
                after = engine.counters()
                assert after["resident"] == before["resident"]
                traffic.append([minus(after[key], before[key]) for key in ("calls", "bytes")])
                booked.append(sizes(trainer_of(engine).parts.runtime))
                if len(booked) in (10, 50):
                    gc.collect()
                    alive.append(len(gc.get_objects()))
            assert traffic[1:] == traffic[1:2] * 49
            assert booked[1:] == booked[1:2] * 49
            assert alive[1] - alive[0] < 40, "not even one object per evaluation"
            train(engine, 1, first=2)
            assert_close(full(engine), reference(build(), 3), f"stage {stage}")


def minus(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in after.items()}


def sizes(runtime: Any) -> dict[str, int]:
    """Lengths of all containers of the object that follows the order of modules, and of its parts."""
    parts = {type(runtime).__name__: runtime}
    parts |= {name: value for name, value in vars(runtime).items() if type(value).__module__.startswith("shardwise.zero")}
    found = {f"{part}.{name}": value for part, owner in parts.items() for name, value in vars(owner).items()}
    return {name: len(value) for name, value in found.items() if hasattr(value, "__len__")}


@ranks(2)
def test_no_grad_in_train_mode() -> None:
    """As for a warm-up of running statistics, or a metric; and `torch.inference_mode`."""
    for stage in STAGES:
        for mode in (torch.no_grad, torch.inference_mode):
            with start(build(), stage) as engine:
                for step in range(3):
                    with mode():
                        output = engine(part(samples(4, step), 2)[0])
                    assert not output.requires_grad
                    train(engine, 1, first=step)
                assert_close(full(engine), reference(build(), 3), f"stage {stage}")


class Sensor(nn.Module):
    """A frozen-by-context first part, as models with a fixed feature extractor have it."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for eye in self.eyes:
                x = eye(x)
            guess = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + guess)


@ranks(2)
def test_no_grad_inside_the_forward() -> None:
    """A unit that runs without gradients, and another that runs both ways in one forward."""
    right = reference(build(Sensor), 3, adamw)
    for stage in STAGES:
        with start(build(Sensor), stage, adamw) as engine:
            train(engine, 3)
            assert_close(full(engine), right, f"stage {stage}")


# ---- errors of the user


class Fragile(Net):
    """Raises where it is told to, once."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for number, block in enumerate(self.blocks):
            self.fail(f"before {number}")
            x = block(x)
        self.fail("end")
        return self.head(x)

    def fail(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise ArithmeticError(where)


@ranks(2)
def test_a_forward_that_raises_and_is_tried_again() -> None:
    """Anywhere, in a training step or an evaluation, also inside of a block; the weights are released as ever."""
    right = reference(build(Fragile), 6)
    for stage in STAGES:
        model = build(Fragile)
        with start(model, stage) as engine:
            for step, where in enumerate(("", "before 0", "before 1", "end", "inside", "evaluation")):
                model.where = where
                if where == "inside":
                    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                        engine.module.blocks[1](torch.zeros(2, 9))
                elif where == "evaluation":
                    model.where = "before 1"
                    with torch.no_grad(), pytest.raises(ArithmeticError):
                        engine(samples(2)[0])
                elif where:
                    with pytest.raises(ArithmeticError, match=where):
                        engine(samples(2)[0])
                train(engine, 1, first=step)
                assert engine.counters()["resident"].get("gathered", 0) == 0
            assert_close(full(engine), right, f"stage {stage}")


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, fuse: list[bool]) -> Tensor:
        context.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        if context.fuse and context.fuse.pop():
            raise ArithmeticError("in backward")
        return gradient, None


class Explosive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fuse: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = Explode.apply(self.blocks[0](x * self.gain), self.fuse)
        return self.head(self.blocks[1](x))


@ranks(2)
@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
def test_a_backward_that_raises_and_is_tried_again(plain: bool) -> None:
    """After a plain one the half-done gradients are dropped with zero_grad, as in plain PyTorch."""
    right = reference(build(Explosive), 3, adamw)
    for stage in STAGES:
        model = build(Explosive)
        with start(model, stage, adamw) as engine:
            for step in range(3):
                model.fuse.append(True)
                loss = squares(engine, part(samples(4, step), 2))
                with pytest.raises(ArithmeticError, match="in backward"):
                    if plain:
                        loss.backward()
                    else:
                        engine.backward(loss)
                if plain:
                    engine.zero_grad()
                train(engine, 1, first=step)
            assert_close(full(engine), right, f"stage {stage}")


@ranks(2)
def test_a_failed_backward_restarts_its_window() -> None:
    """The micro-batches before it in the window have to be run again as well."""
    right = reference(build(Explosive), 1, batch=8)
    for stage in STAGES:
        model = build(Explosive)
        with start(model, stage, accumulation=2) as engine:
            engine.backward(squares(engine, part(samples(8), 2, 0)))
            engine.step()
            model.fuse.append(True)
            with pytest.raises(ArithmeticError):
                engine.backward(squares(engine, part(samples(8), 2, 1)))
            for number in range(2):
                assert engine.is_gradient_accumulation_boundary() == (number == 1)
                engine.backward(squares(engine, part(samples(8), 2, number)))
                engine.step()
            assert engine.was_step_applied()
            assert_close(full(engine), right, f"stage {stage}")


# ---- hooks of the user


class Watch:
    """Counts the calls of hooks on some modules, and notes what they could not see."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.blind: list[str] = []
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.sums: dict[str, float] = {}

    def hook(self, model: nn.Module, when: str) -> None:
        for name in ("", "blocks.0", "blocks.0.0", "blocks.1", "head"):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name, module=module: self.see(f"{when} pre", name, module))
            module.register_forward_hook(lambda *_, name=name, module=module: self.see(f"{when} post", name, module))

    def see(self, kind: str, prefix: str, module: nn.Module) -> None:
        self.calls[kind, prefix] += 1
        direct = dict(module.named_parameters(recurse=prefix.startswith("blocks")))
        for name, parameter in direct.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if parameter.shape != self.shapes[full_name] or bool(parameter.isnan().any()) or not parameter.is_contiguous():
                self.blind.append(f"{kind} hook on {prefix or 'root'}: {name}")


@ranks(2)
def test_forward_hooks_fire_once_and_see_full_weights() -> None:
    """Registered before and after initialize, on the root, units and layers inside; with and without gradients."""
    for stage in STAGES:
        model = build()
        watch = Watch(model)
        watch.hook(model, "early")
        with start(model, stage) as engine:
            watch.hook(model, "late")
            places = ("", "blocks.0", "blocks.0.0", "blocks.1", "head")
            kinds = ("early pre", "early post", "late pre", "late post")
            once = {(kind, place): 1 for kind in kinds for place in places}
            for step in range(2):
                watch.calls.clear()
                loss = squares(engine, part(samples(4, step), 2))
                assert dict(watch.calls) == once
                engine.backward(loss)
                engine.step()
                assert dict(watch.calls) == once
            watch.calls.clear()
            with torch.no_grad():
                engine.eval()(samples(2)[0])
            assert dict(watch.calls) == once
            assert watch.blind == [], f"stage {stage}"
            assert_close(full(engine), reference(build(), 2), f"stage {stage}")


@ranks(2)
def test_hooks_that_change_inputs_and_outputs_are_obeyed() -> None:
    def hooked(model: nn.Module, order: str) -> None:
        model.blocks[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2,), prepend=order == "first")
        model.blocks[1].register_forward_hook(lambda _m, _a, out: out + 1, prepend=order == "first")
        model.head.register_forward_hook(lambda _m, _a, out: out * 0.5)

    plain = build()
    hooked(plain, "")
    right = reference(plain, 3)
    for stage in STAGES:
        for order in ("before", "after", "first"):
            model = build()
            if order == "before":
                hooked(model, order)
            with start(model, stage) as engine:
                if order != "before":
                    hooked(model, order)
                train(engine, 3)
                assert_close(full(engine), right, f"stage {stage} {order}")


@ranks(2)
def test_backward_hooks_see_gradients() -> None:
    """Of modules and of parameters, registered before and after; those of parameters can change what arrives."""

    def hooked(model: nn.Module, seen: list[Tensor]) -> None:
        for module in (model.blocks[0], model.blocks[1][0], model.head):
            module.register_full_backward_hook(lambda _m, _gi, go: seen.append(go[0].detach().clone()))
        model.head.weight.register_hook(lambda gradient: gradient * 2)
        model.blocks[0][0].bias.register_hook(lambda gradient: gradient * 0)

    plain, expected = build(), []
    hooked(plain, expected)
    right = reference(plain, 2)
    for stage in STAGES:
        for early in (True, False):
            model = build()
            seen: list[Tensor] = []
            if early:
                hooked(model, seen)
            with start(model, stage) as engine:
                if not early:
                    hooked(model, seen)
                train(engine, 2)
                assert len(seen) == len(expected)
                rank = dist.get_rank()
                for mine, whole in zip(seen, expected, strict=True):
                    assert_close(mine / 2, whole[2 * rank : 2 * rank + 2])
                assert_close(full(engine), right, f"stage {stage}")


# ---- recomputation


class Inner(nn.Module):
    """A block that recomputes its inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.layer = nn.Linear(5, 5)
        self.reentrant = reentrant

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=self.reentrant)  # pyright: ignore


class Deep(nn.Module):
    """Checkpoints inside the blocks, around each, or around pairs of them; or one inside the other."""

    def __init__(self, style: str, reentrant: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        inner = style in ("inside", "nested")
        self.blocks = nn.ModuleList(Inner(reentrant) if inner else Plain() for _ in range(4))
        self.head = nn.Linear(5, 3)
        self.style, self.reentrant = style, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.style == "inside":
            for block in self.blocks:
                x = block(x)
        elif self.style in ("around", "nested"):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)  # pyright: ignore
        elif self.style == "pairs":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)
        else:
            x = checkpoint(self.every, x, use_reentrant=self.reentrant)  # pyright: ignore
        return self.head(x)

    def every(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(Inner):
    def __init__(self) -> None:
        super().__init__(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


STYLES = ("inside", "around", "nested", "pairs", "all")


def freeze_norms(model: nn.Module) -> nn.Module:
    """As for adapters: what is not frozen is trained behind what is."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and name != "blocks.3.layer.weight")
    return model


@ranks(2)
@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputation_inside_and_around_units(reentrant: bool, stages: tuple[int, ...]) -> None:
    """With all weights trained, and with frozen ones."""
    for style in STYLES:
        for frozen in (False, True) if style in ("inside", "around") else (True,):
            prepare: Callable[[nn.Module], nn.Module] = freeze_norms if frozen else lambda model: model
            right = reference(prepare(build(lambda style=style: Deep(style, reentrant))), 3, adamw)
            for stage in stages:
                model = prepare(build(lambda style=style: Deep(style, reentrant)))
                with start(model, stage, adamw) as engine:
                    train(engine, 3)
                    assert_close(full(engine), right, f"stage {stage} {style} frozen {frozen}")


@ranks(2)
def test_recomputation_in_bf16_changes_no_bit() -> None:
    """Of what the same model gives without recomputation."""
    found = []
    for make in (lambda: Deep("every", False), *(lambda s=s, r=r: Deep(s, r) for s in STYLES for r in (False, True))):
        with start(build(make), 3, adamw, precision="bf16") as engine:
            for step in range(2):
                x, y = part(samples(4, step), 2)
                engine.backward(F.mse_loss(engine(x.bfloat16()).float(), y))
                engine.step()
            found.append(full(engine))
    for other in found[1:]:
        assert_equal(other, found[0])


class Noisy(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)  # pyright: ignore
        return self.head(x)


@ranks(2)
def test_recomputation_draws_the_same_dropout() -> None:
    for stage in STAGES:
        found = []
        for reentrant in (None, False, True):
            with start(build(lambda reentrant=reentrant: Noisy(reentrant)), stage) as engine:
                torch.manual_seed(dist.get_rank())
                train(engine, 3)
                found.append(full(engine))
        assert_equal(found[1], found[0], f"stage {stage}, non-reentrant")
        assert_equal(found[2], found[0], f"stage {stage}, reentrant")


@ranks(2)
def test_recomputation_with_several_backwards_and_accumulation() -> None:
    """Reentrant checkpoints run a backward inside the backward; windows, `no_sync` and retained graphs go on working."""
    for reentrant in (False, True):
        right = build(lambda reentrant=reentrant: Deep("around", reentrant))
        updates = sgd(right.parameters())
        for step in range(2):
            updates.zero_grad()
            (2 * squares(right, samples(8, step))).backward()
            updates.step()
        for stage in STAGES:
            with start(build(lambda reentrant=reentrant: Deep("around", reentrant)), stage, accumulation=2) as engine:
                for step in range(2):
                    with engine.no_sync():
                        engine.backward(2 * squares(engine, part(samples(8, step), 2, 0)))
                    engine.step()
                    # A reentrant checkpoint cannot be run backward twice; two forwards can.
                    for _ in range(2):
                        engine.backward(squares(engine, part(samples(8, step), 2, 1)))
                    engine.step()
                assert_close(full(engine), full(right), f"stage {stage}")


# ---- memory of graphs


class Token:
    """Something that a graph holds on to."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, tokens: Any) -> Tensor:
        context.token = Token()
        tokens.add(context.token)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient, None


class Marking(nn.Module):
    """Leaves a token in the graph of each block."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Mark()) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)  # pyright: ignore
        return self.head(x)


class Mark(nn.Module):
    tokens: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return Marked.apply(x, Mark.tokens)


@ranks(1, 2)
def test_graphs_die_with_their_last_reference() -> None:
    """Run backward or not, no garbage collection is needed to have the memory of activations back."""
    gc.collect()
    gc.disable()
    try:
        for stage in STAGES:
            for reentrant in (None, False, True):
                Mark.tokens = weakref.WeakSet()
                with start(build(lambda reentrant=reentrant: Marking(reentrant)), stage) as engine:
                    for backward in (True, False, True):
                        loss = squares(engine, part(samples(4), 2))
                        assert len(Mark.tokens) == (0 if reentrant else 3)
                        if backward:
                            engine.backward(loss)
                            engine.step()
                        del loss
                        # gloo's thread keeps what was current when a collective began until it has put that aside.
                        limit = time.monotonic() + 5.0
                        while len(Mark.tokens) and time.monotonic() < limit:
                            time.sleep(0.001)
                        assert len(Mark.tokens) == 0, f"stage {stage}, reentrant {reentrant}, backward {backward}"
    finally:
        gc.enable()


class Given(nn.Module):
    """Blocks that get a tensor in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(5, 3)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor, extra: dict[str, Tensor], unused: Tensor) -> Tensor:
            return torch.tanh(self.layer(x) + extra["shift"])

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, {"shift": shift}, x * shift)
        return self.head(x)


@ranks(2)
def test_leaf_tensors_in_containers_collect_no_hooks() -> None:
    """And an input that the block ignores does not disturb the others."""
    plain = build(Given)
    shift = torch.ones(5, requires_grad=True)
    updates = sgd(plain.parameters())
    for step in range(3):
        updates.zero_grad()
        x, y = samples(4, step)
        F.mse_loss(plain(x, shift), y).backward()
        updates.step()
    for stage in STAGES:
        for leaf in (True, False):
            mine = torch.ones(5, requires_grad=True)
            with start(build(Given), stage) as engine:
                for step in range(3):
                    x, y = part(samples(4, step), 2)
                    engine.backward(F.mse_loss(engine(x, mine if leaf else mine * 1), y))
                    engine.step()
                    assert not mine._backward_hooks
                assert_close(full(engine), full(plain), f"stage {stage}")
                total = mine.grad
                assert total is not None
                dist.all_reduce(total)
                assert_close(total / 2, shift.grad)


# ---- kin: other ways into the model


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](x * self.gain)


@ranks(2)
def test_parts_of_the_model_called_on_their_own() -> None:
    """A block, or a method of the model, called in training between ordinary steps; its gradients count."""
    right = build(Encoder)
    updates = sgd(right.parameters())
    for step in range(3):
        updates.zero_grad()
        x, y = samples(4, step)
        (F.mse_loss(right(x), y) + right.blocks[1](x).square().mean()).backward()
        updates.step()
    for stage in STAGES:
        with start(build(Encoder), stage) as engine:
            for step in range(3):
                x, y = part(samples(4, step), 2)
                engine.backward(F.mse_loss(engine(x), y))
                engine.backward(engine.module.blocks[1](x).square().mean())
                engine.step()
            assert_close(full(engine), full(right), f"stage {stage}")


@ranks(2)
def test_gradients_reach_the_inputs() -> None:
    """Adversarial training wants them."""
    plain = build()
    x, y = samples(4)
    x.requires_grad_()
    squares(plain, (x, y)).backward()
    assert x.grad is not None
    for stage in STAGES:
        with start(build(), stage) as engine:
            mine = samples(4)[0][2 * dist.get_rank() : 2 * dist.get_rank() + 2].clone().requires_grad_()
            engine.backward(squares(engine, (mine, part(samples(4), 2)[1])))
            assert mine.grad is not None
            assert_close(mine.grad / 2, x.grad[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
