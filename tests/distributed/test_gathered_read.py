"""`GatheredParameters` to read: every form of its argument, every place it may stand, before and after `initialize`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import zero
from shardwise.errors import ParameterError, UsageError
from shardwise.zero import DiscardedEditWarning, GatheredParameters
from tests.distributed.zero_support import engine_for, same
from tests.harness import ranks
from tests.models import CASES


class Model(nn.Module):
    """Two blocks, a tied pair, a scalar, an empty parameter, an integer table, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 4)
        self.tail.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(self.head(x)) * self.scale


def build() -> Any:
    torch.manual_seed(5)
    return Model()


def sharded() -> Any:
    torch.manual_seed(5)
    with zero.Init():
        return Model()


def released(model: nn.Module) -> bool:
    """Whether every floating-point parameter is away, as only NaN can be read."""
    return all(p.isnan().all() for p in model.parameters() if p.is_floating_point())


def whole(model: nn.Module, expected: nn.Module, names: Iterable[str] = ()) -> bool:
    """Whether the named parameters (all, if none is named) are here with the right bits."""
    right = dict(expected.named_parameters())
    mine = dict(model.named_parameters())
    return all(same(mine[name], right[name]) for name in names or mine)


FORMS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "one": (lambda m: m.head.weight, ("head.weight",)),
    "list": (lambda m: [m.head.weight, m.scale], ("head.weight", "scale")),
    "tuple": (lambda m: (m.blocks[0][0].weight,), ("blocks.0.0.weight",)),
    "generator": (lambda m: m.parameters(), ()),
    "comprehension": (lambda m: (p for p in m.blocks[1].parameters()), ("blocks.1.0.weight", "blocks.1.0.bias")),
    "dictionary values": (lambda m: dict(m.named_parameters()).values(), ()),
    "set": (lambda m: set(m.head.parameters()), ("head.weight", "head.bias")),
    "duplicates": (lambda m: [m.head.weight, m.tail.weight, m.head.weight, m.scale], ("head.weight", "scale")),
    "buffers too": (lambda m: m.state_dict(keep_vars=True).values(), ()),
    "plain tensors too": (lambda m: [m.head.weight, torch.ones(2), nn.Parameter(torch.ones(3))], ("head.weight",)),
    "integers": (lambda m: [m.table], ("table",)),
    "empty ones": (lambda m: [m.empty], ("empty",)),
    "scalar": (lambda m: m.scale, ("scale",)),
}


@ranks(2)
def test_every_form_of_the_argument() -> None:
    expected = build()
    untouched = sharded()
    model = build()
    with engine_for(model, 3):
        for which in (untouched, model):
            for form, (choose, names) in FORMS.items():
                assert released(which), form
                with GatheredParameters(choose(which)):
                    assert whole(which, expected, names), form
            assert released(which)
            assert same(which.running, expected.running)


@ranks(2)
def test_nothing_to_gather() -> None:
    plain = build()
    model = sharded()
    expected = build()
    for params in ([], (), iter(()), list(plain.parameters()), plain.running, torch.ones(3), [torch.ones(())]):
        with GatheredParameters(params), GatheredParameters(params, modifier_rank=0):
            assert released(model)
    with GatheredParameters(model.parameters(), enabled=False):
        assert released(model)
    with GatheredParameters(plain.parameters(), modifier_rank=1):
        plain.scale.data.fill_(3.0)
        plain.head.weight.data = torch.ones(5, 5)  # nobody's business
    assert plain.scale.item() == 3.0
    with GatheredParameters(model.parameters(), fwd_module=model):
        assert whole(model, expected)


@ranks(2)
def test_what_is_not_a_tensor_is_refused() -> None:
    model = build()
    for params in (["head.weight"], [model.head], [None], 3, model):
        with pytest.raises(ParameterError, match="takes tensors"):
            GatheredParameters(params)  # pyright: ignore[reportArgumentType]


@ranks(2)
def test_a_modifier_that_is_no_rank_is_refused_and_harms_nothing() -> None:
    model, expected = build(), build()
    with engine_for(model, 3):
        for rank in (2, -1, 7):
            with pytest.raises(UsageError, match="modifier_rank"), GatheredParameters(model.parameters(), modifier_rank=rank):
                raise AssertionError("was entered")
        assert released(model)
        with GatheredParameters(model.parameters()):
            assert whole(model, expected)


@ranks(1, 3)
def test_on_any_number_of_ranks(world_size: int) -> None:
    expected = build()
    for stage in (0, 2, 3):
        model = build()
        with engine_for(model, stage):
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)
            assert released(model) is (stage == 3 and world_size > 1)


@ranks(2)
def test_contexts_inside_contexts() -> None:
    model, expected = build(), build()
    with engine_for(model, 3):
        with GatheredParameters(model.blocks.parameters()):
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)
                with GatheredParameters(model.blocks[0].parameters()):
                    assert whole(model, expected)
                assert whole(model, expected)
            assert whole(model, expected, ("blocks.0.0.weight", "blocks.1.0.weight"))
            assert model.head.weight.isnan().all()
        assert released(model)
        one, other = GatheredParameters(model.parameters()), GatheredParameters(model.head.parameters())
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)  # not the last one entered
        assert whole(model, expected, ("head.weight",))
        other.__exit__(None, None, None)
        assert released(model)


@ranks(2)
def test_one_context_object_again_and_again() -> None:
    model, expected = build(), build()
    context = GatheredParameters(model.parameters())  # made before the engine
    with engine_for(model, 3):
        for _ in range(3):
            with context:
                assert whole(model, expected)
            assert released(model)


@ranks(2)
def test_an_exception_inside_leaves_order() -> None:
    for make in (build, sharded):
        model, expected = make(), build()
        with engine_for(model, 3):
            for modifier in (None, 0):
                with pytest.raises(ZeroDivisionError), GatheredParameters(model.parameters(), modifier_rank=modifier):
                    1 / 0  # noqa: B018
                assert released(model)
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)


@ranks(2)
def test_an_exception_inside_discards_edits() -> None:
    for stage in (1, 3):
        model, expected = build(), build()
        with engine_for(model, stage):
            for modifier in (None, 0):
                with pytest.raises(ZeroDivisionError), GatheredParameters(model.parameters(), modifier_rank=modifier):
                    model.head.weight.data.zero_()
                    model.scale.data = torch.tensor(9.0)
                    1 / 0  # noqa: B018
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)
            x = torch.randn(2, 4)
            assert torch.equal(model(x), expected(x))


@ranks(2)
def test_copies_made_inside_are_ordinary_modules() -> None:
    for stage in (0, 3):
        model, expected = build(), build()
        with engine_for(model, stage):
            with GatheredParameters(model.parameters()):
                whole_copy = copy.deepcopy(model.blocks)
                weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
                one = nn.Parameter(model.head.weight.detach().clone())
            x = torch.randn(2, 4)
            assert torch.equal(whole_copy[0](x), expected.blocks[0](x))
            assert {type(parameter) for parameter in whole_copy.parameters()} == {nn.Parameter}
            assert all(same(weights[name], value) for name, value in expected.state_dict().items())
            assert same(one, expected.head.weight)
            whole_copy[0][0].weight.data.zero_()
            with GatheredParameters(model.parameters()):
                assert whole(model, expected)


@ranks(2)
def test_what_was_read_inside_may_be_kept() -> None:
    """Tensors that share memory with the weights are not pulled away from under their holder."""
    model, expected = build(), build()
    with engine_for(model, 3) as engine:
        with GatheredParameters(model.parameters()):
            kept = {name: value.detach() for name, value in model.named_parameters()}
            row = model.head.weight.data[1]
            cpu = model.scale.data.cpu()
        with engine.inference() as plain:
            state = plain.state_dict()
        for name, value in expected.named_parameters():
            assert same(kept[name], value)
            assert same(state[name], value)
        assert same(row, expected.head.weight[1])
        assert cpu.item() == 0.75
        loss = engine(torch.randn(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        assert same(kept["head.weight"], expected.head.weight), "training goes on in memory of its own"


@ranks(2)
def test_before_the_engine_in_training_and_after_it() -> None:
    torch.manual_seed(0)
    expected, model = build(), sharded()
    with GatheredParameters(model.parameters()):
        assert whole(model, expected)
    with engine_for(model, 3) as engine:
        with GatheredParameters(model.parameters()):
            assert whole(model, expected)
        for _ in range(2):
            loss = engine(torch.ones(2, 4)).square().mean()
            with GatheredParameters(model.parameters()):  # between forward and backward
                assert whole(model, expected)
            engine.backward(loss)
            with GatheredParameters(model.parameters()):  # between backward and step
                assert whole(model, expected)
            engine.step()
            plain = expected(torch.ones(2, 4)).square().mean()
            plain.backward()
            with torch.no_grad():
                for parameter in expected.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            with GatheredParameters(model.parameters()):
                assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
                for mine, right in zip(model.parameters(), expected.parameters(), strict=True):
                    right.data.copy_(mine.data)  # the same bits again
    with GatheredParameters(model.parameters(), modifier_rank=0):
        assert whole(model, expected)


@ranks(2)
def test_around_the_whole_training_step() -> None:
    expected = build()
    for stage in (2, 3):
        model = build()
        with engine_for(model, stage) as engine:
            with GatheredParameters(model.blocks.parameters()):
                loss = engine(torch.ones(2, 4)).square().mean()
                engine.backward(loss)
            engine.step()
            with GatheredParameters(model.parameters()):
                changed = [
                    name for name, value in model.named_parameters() if not same(value, dict(expected.named_parameters())[name])
                ]
            assert set(changed) >= {"blocks.0.0.weight", "head.weight", "scale"}
            outcome = dict(gathered(model))
        if stage == 2:
            first = outcome
    assert all(same(first[name], outcome[name]) for name in first)


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    with GatheredParameters(model.parameters()):
        yield from [(name, value.detach().clone()) for name, value in model.named_parameters()]


@ranks(2)
def test_inside_hooks_of_a_running_forward() -> None:
    """A hook reads the weights of its own module, of another, and of everything; training is not disturbed."""
    results = {}
    for hooked in (False, True):
        model = build()
        seen: list[bool] = []

        def look(module: nn.Module, args: Any, output: Any = None, *, model: Any = model, seen: list[bool] = seen) -> None:
            with GatheredParameters(module.parameters()):
                seen.append(not any(p.isnan().any() for p in module.parameters()))
            with GatheredParameters([model.head.weight, *model.blocks[1].parameters()]):
                seen.append(not model.head.weight.isnan().any() and not model.blocks[1][0].weight.isnan().any())
            with GatheredParameters(model.parameters()):
                seen.append(not any(p.isnan().any() for p in model.parameters() if p.is_floating_point()))
            seen.append(not any(p.isnan().any() for p in module.parameters()))

        if hooked:
            for block in model.blocks:
                block.register_forward_pre_hook(look)
                block.register_forward_hook(look)
        with engine_for(model, 3) as engine:
            if hooked:
                model.head.register_forward_hook(look)
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).square().mean())
                engine.step()
            results[hooked] = dict(gathered(model))
            assert all(seen)
            assert len(seen) == (2 * 5 * 4 if hooked else 0)
            assert released(model)
    assert all(same(results[False][name], results[True][name]) for name in results[False])


@ranks(2)
def test_inside_hooks_of_a_running_backward() -> None:
    model, expected = build(), build()
    seen: list[bool] = []

    def look(gradient: Tensor) -> None:
        with GatheredParameters(model.parameters()):
            seen.append(whole(model, expected))

    with engine_for(model, 3) as engine:
        hidden: list[Tensor] = []
        model.blocks[0].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = engine(torch.ones(2, 4)).square().mean()
        hidden[0].register_hook(look)
        engine.backward(loss)
        engine.step()
        assert seen == [True]
        weights = dict(gathered(model))
    twin = build()
    with engine_for(twin, 2) as engine:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        assert all(same(weights[name], value) for name, value in gathered(twin))


@ranks(2)
def test_reading_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiscardedEditWarning)
        for name in ("scalars", "complex", "mixed_dtypes", "empty", "frozen_integers", "non_contiguous", "tied_across"):
            for stage in (0, 1, 3):
                model = CASES[name].build()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.is_floating_point() and parameter.numel() > 1:
                            parameter[(0,) * parameter.dim()] = float("nan")  # unequal to itself, and yet not edited
                            break
                with engine_for(model, stage), GatheredParameters(model.parameters()):
                    assert all(isinstance(parameter.abs().sum().item(), (int, float)) for parameter in model.parameters())


@ranks(2)
def test_parameters_of_two_engines_at_once() -> None:
    one, other, expected = build(), build(), build()
    with engine_for(one, 3), engine_for(other, 1):
        with GatheredParameters([*one.parameters(), *other.parameters(), *expected.parameters()]):
            assert whole(one, expected)
            assert whole(other, expected)
        assert released(one)
        assert not released(other)
    assert dist.get_world_size() == 2
