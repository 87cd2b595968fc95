"""A released parameter outside of any use: true shape, NaN values, and no way to write it by accident."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import zero
from shardwise.errors import ParameterError
from shardwise.zero import GatheredParameters, ReleasedParameter
from tests.distributed.zero_support import engine_for, same
from tests.harness import ranks
from tests.models import CASES


class Zoo(nn.Module):
    """One parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.vector = nn.Parameter(torch.randn(5))
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(3, 4).t())
        self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.codes = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.child = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x @ self.matrix) * self.scalar


def zoo() -> Zoo:
    torch.manual_seed(3)
    return Zoo()


WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1),
    "add_": lambda p: p.add_(1.0),
    "sub": lambda p: p.__isub__(1.0),
    "mul": lambda p: p.__imul__(2.0),
    "div": lambda p: p.__itruediv__(2.0),
    "copy_": lambda p: p.copy_(torch.ones(())),
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.uniform_(),
    "clamp_": lambda p: p.clamp_(0.0),
    "lerp_": lambda p: p.lerp_(torch.zeros(()), 0.5),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(()), torch.ones(()), value=0.1),
    "masked_fill_": lambda p: p.masked_fill_(torch.tensor(True), 0.0),
    "neg_": lambda p: p.neg_(),
    "set_": lambda p: p.set_(torch.zeros(2)),
    "resize_": lambda p: p.resize_(7),
    "setitem": lambda p: p.__setitem__(..., 0.0),
    "init": lambda p: nn.init.constant_(p, 1.0),
    "init normal": nn.init.normal_,
    "init uniform": nn.init.uniform_,
    "out": lambda p: torch.add(torch.ones(()), 1.0, out=p),
    "out in a tuple": lambda p: torch.max(torch.ones(2, 2), 0, out=(p, torch.empty(2, dtype=torch.int64))),
    "relu inplace": lambda p: F.relu(p, inplace=True),
    "relu_": torch.relu_,
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "data zero_": lambda p: p.data.zero_(),
    "data copy_": lambda p: p.data.copy_(torch.ones(())),
    "data setitem": lambda p: p.data.__setitem__(..., 1.0),
    "data view": lambda p: p.data.reshape(p.shape).fill_(2.0),
    "data mul": lambda p: p.data.__imul__(2.0),
    "detach": lambda p: p.detach().zero_(),
    "detach out": lambda p: torch.neg(torch.ones(()), out=p.detach()),
    "view": lambda p: p.view_as(p).zero_(),
    "part": lambda p: p[..., :1].zero_() if p.dim() else p[None].zero_(),
    "part of part": lambda p: p.data[None][0].unsqueeze(0).fill_(1.0),
    "flattened": lambda p: p.detach().flatten()[0].fill_(1.0),
    "expanded": lambda p: p.detach().expand_as(p).zero_(),
    "unbound": lambda p: [part.zero_() for part in p.data[None].unbind()],
    "split": lambda p: [part.zero_() for part in p.detach()[None].split(1)],
    "iterated": lambda p: [row.fill_(0.0) for row in p.data[None]],
    "foreach data": lambda p: torch._foreach_mul_([torch.ones(()), p.data], 2.0),
}


def raises(action: Callable[[], Any]) -> bool:
    """Whether an action raises the error that says how to gather."""
    try:
        with torch.no_grad():
            action()
    except ParameterError as error:
        return "GatheredParameters" in str(error) and "'" in str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    return False


@ranks(2)
def test_every_kind_of_write_says_how_to_gather() -> None:
    """A placeholder of a single element, for one, could silently be written."""
    model, expected = zoo(), zoo()
    with zero.Init():
        unclaimed = zoo()
    problems = []
    with engine_for(model, 3) as engine:
        for where, which in (("engine", model), ("init", unclaimed)):
            for name in ("matrix", "vector", "one", "scalar", "strided", "frozen", "child.bias"):
                parameter = which.get_parameter(name)
                for kind, write in WRITES.items():
                    try:
                        if not raises(lambda write=write, parameter=parameter: write(parameter)):
                            problems.append(f"{where} {name} {kind}: was let pass")
                    except AssertionError as error:
                        problems.append(f"{where} {name} {kind}: {error}")
        assert not problems, "\n".join(problems)
        assert all(p.isnan().all() for p in model.parameters() if p.is_floating_point()), "no placeholder was written"
        with GatheredParameters(model.parameters()), torch.no_grad():
            assert all(same(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
        assert torch.equal(engine(torch.ones(1, 4)), expected(torch.ones(1, 4)))


@ranks(2)
def test_whoever_writes_into_many_at_once_is_told_too() -> None:
    model = zoo()
    with engine_for(model, 3):
        plain = torch.zeros(4, 3)
        assert raises(lambda: plain.grad is None and model.matrix.copy_(plain))
        assert raises(lambda: nn.utils.vector_to_parameters(torch.zeros(12), [model.matrix]))
        assert raises(lambda: model.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None))
        assert raises(model.half)
        model.matrix.grad = torch.ones(4, 3)
        optimizer = torch.optim.SGD([model.matrix], lr=0.1)
        assert raises(optimizer.step)
        model.matrix.grad = None
        with pytest.raises(RuntimeError, match="GatheredParameters"):  # torch collects the errors of all parameters
            model.load_state_dict(zoo().state_dict())


@ranks(2)
def test_other_tensors_can_be_written_from_it() -> None:
    """Reading gives NaN and is no error, as scripts read shapes and dtypes through ordinary operations."""
    model = zoo()
    with engine_for(model, 3):
        target = torch.zeros(4, 3)
        target.copy_(model.matrix.detach())
        assert target.isnan().all()
        result = model.matrix * 2
        assert type(result.detach()) is Tensor
        result.detach().zero_()
        clone = model.matrix.data.clone()
        clone.fill_(1.0)
        assert clone.sum().item() == 12.0
        torch.add(model.matrix.data, 1.0, out=target)
        taken = model.matrix.detach()
        taken = taken + 1
        taken.zero_()
        made = nn.Parameter(torch.zeros_like(model.matrix))
        made.data.add_(1.0)
        state = model.state_dict()
        assert all(value.isnan().all() for value in state.values() if value.is_floating_point())


@ranks(2)
def test_what_it_tells_is_true() -> None:
    for precision, narrow in (("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model, expected = zoo(), zoo()
        with engine_for(model, 3, precision):
            right = dict(expected.named_parameters())
            for name, parameter in model.named_parameters():
                other = right[name]
                assert isinstance(parameter, nn.Parameter)
                assert isinstance(parameter, ReleasedParameter) is (parameter.numel() > 0)
                assert parameter.shape == other.shape == parameter.size(), name
                assert parameter.numel() == other.numel() == parameter.nelement(), name
                assert parameter.dim() == other.dim() == parameter.ndim, name
                narrowed = narrow is not None and other.dtype == torch.float32
                assert parameter.dtype == (narrow if narrowed else other.dtype), name
                assert parameter.device == other.device, name
                assert parameter.requires_grad is other.requires_grad, name
                assert parameter.is_leaf, name
                assert parameter.grad is None, name
                assert parameter.is_floating_point() is other.is_floating_point(), name
                assert parameter.is_complex() is other.is_complex(), name
                assert parameter.element_size() == parameter.dtype.itemsize, name
                assert parameter.nbytes == parameter.numel() * parameter.dtype.itemsize, name
                assert torch.zeros_like(parameter).shape == other.shape, name
                assert torch.empty_like(parameter).dtype == parameter.dtype, name
                if other.dim():
                    assert len(parameter) == len(other), name
                assert hash(parameter) == id(parameter) or isinstance(hash(parameter), int)
                assert name in str(list(dict(model.named_parameters())))
            assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in expected.parameters())
            assert repr(model) == repr(expected)


@ranks(2)
def test_what_is_read_is_nan() -> None:
    model = zoo()
    with engine_for(model, 3):
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.is_floating_point() or parameter.is_complex():
                    assert parameter.isnan().all(), name
                    assert parameter.data.isnan().all(), name
                    assert parameter.detach().sum().isnan() or not parameter.numel(), name
                    assert parameter.mean(dtype=parameter.dtype).isnan(), name
                else:
                    assert not parameter.to(torch.int64).any(), name
                assert "Parameter" in repr(parameter) or "nan" in repr(parameter), name
                assert isinstance(str(parameter.data), str)
        assert model.scalar.item() != model.scalar.item()
        assert float(model.one.detach()) != float(model.one.detach())
        assert f"{model.scalar.detach()}" == "nan"
        assert model.vector.tolist() != model.vector.tolist()
        assert model.vector.detach().numpy().shape == (5,)
        assert not (model.matrix == model.matrix).any()
        assert torch.isnan(torch.stack([p.detach().norm() for p in (model.matrix, model.vector)]).norm())


@ranks(2)
def test_copies_and_files_are_refused() -> None:
    """A copy would silently be NaN, and so would be a checkpoint written from it."""
    model = zoo()
    with zero.Init():
        unclaimed = zoo()
    with engine_for(model, 3):
        for which in (model, unclaimed):
            attempts: list[Callable[[], Any]] = [
                lambda which=which: copy.deepcopy(which),
                lambda which=which: copy.deepcopy(which.child),
                lambda which=which: copy.deepcopy(which.matrix),
                lambda which=which: copy.copy(which.matrix),
                lambda which=which: copy.deepcopy(dict(which.named_parameters())),
                lambda which=which: pickle.dumps(which.matrix),
                lambda which=which: torch.save(which.matrix, io.BytesIO()),
                lambda which=which: torch.save(which.state_dict(), io.BytesIO()),
                lambda which=which: torch.save({"weight": which.matrix.data}, io.BytesIO()),
                lambda which=which: copy.deepcopy(which.state_dict()),
            ]
            for number, attempt in enumerate(attempts):
                assert raises(attempt), number


@ranks(2)
def test_state_dicts_have_every_key() -> None:
    for name in ("transformer", "tied_embedding", "buffers", "encoder_layers", "parametrized", "empty", "complex"):
        expected = CASES[name].build().state_dict()
        for stage in (0, 3):
            model = CASES[name].build()
            with engine_for(model, stage) as engine:
                for state in (model.state_dict(), engine.module.state_dict(), model.state_dict(keep_vars=True)):
                    assert list(state) == list(expected), name
                    shapes = [(tuple(value.shape), value.dtype) for value in state.values()]
                    assert shapes == [(tuple(value.shape), value.dtype) for value in expected.values()], name
                prefixed = model.state_dict(prefix="module.")
                assert list(prefixed) == [f"module.{key}" for key in expected]


@ranks(2)
def test_gradients_are_never_left_on_parameters() -> None:
    model = zoo()
    with engine_for(model, 3) as engine:
        engine.backward(engine(torch.ones(1, 4)).square().mean())
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.step()
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


@ranks(2)
def test_flags_may_be_changed() -> None:
    """Freezing after `initialize` stops training of the parameter, and is undone as easily."""
    for stage in (1, 3):
        model, expected = zoo(), zoo()
        with engine_for(model, stage) as engine:
            model.matrix.requires_grad_(False)
            model.child.requires_grad_(False)
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 4)).square().mean())
                engine.step()
            with GatheredParameters(model.parameters()):
                assert same(model.matrix, expected.matrix), stage
                assert same(model.child.weight, expected.child.weight), stage
                assert not same(model.scalar, expected.scalar), stage
            model.matrix.requires_grad = True
            engine.backward(engine(torch.ones(1, 4)).square().mean())
            engine.step()
            with GatheredParameters(model.parameters()):
                assert not same(model.matrix, expected.matrix), stage


@ranks(2)
def test_after_the_engine_everything_is_as_before() -> None:
    for restore in (True, False):
        model, expected = zoo(), zoo()
        with engine_for(model, 3) as engine:
            engine.destroy(restore=restore)
        if restore:
            assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
            assert all(same(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
            copied = copy.deepcopy(model)
            nn.init.zeros_(model.matrix)
            assert same(copied.matrix, expected.matrix)
            assert torch.equal(copied(torch.ones(1, 4)), expected(torch.ones(1, 4)))
        else:
            assert raises(lambda model=model: model.matrix.zero_())
            assert tuple(model.matrix.shape) == (4, 3)
