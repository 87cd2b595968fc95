"""Small models, each with one peculiarity that has broken a sharding system somewhere.

Owns the models, their data and their loss. A batch is a dict whose tensors have the sample dimension first; the loss is a mean
over samples, so the mean of the losses of equal parts of a batch is the loss of the batch. Refuses to know ranks and engines.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Batch", "Case", "case"]

Batch = dict[str, Any]
VOCABULARY = 13
CONTEXT = 6


@dataclass(frozen=True)
class Case:
    """One peculiar model.

    Args:
        name: what the tests call it.
        build: makes it; the same weights for the same state of torch's global generator.
        batch: `(samples, generator, step)` to a batch of float32 and integer tensors; other values are passed on as they are.
        loss: the mean loss of a batch; calls the model it is given, which may be wrapped.
        precisions: what it can be trained in.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator, int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")


CASES: dict[str, Case] = {}


def case(name: str) -> Case:
    """The case of that name."""
    return CASES[name]


def _vectors(inputs: int, outputs: int) -> Callable[[int, torch.Generator, int], Batch]:
    def batch(samples: int, generator: torch.Generator, step: int) -> Batch:
        return {
            "x": torch.randn(samples, inputs, generator=generator),
            "y": torch.randn(samples, outputs, generator=generator),
            "step": step,
        }

    return batch


def _tokens(samples: int, generator: torch.Generator, step: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


def _squares(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"].float())


def _next_token(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["next"].flatten())


def _add(build: Callable[[], nn.Module], inputs: int = 0, outputs: int = 0, **changes: Any) -> None:
    """Register a case named after its builder: on vectors if it has inputs, else on tokens."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", build.__name__).lower()
    common = {"batch": _vectors(inputs, outputs), "loss": _squares} if inputs else {"batch": _tokens, "loss": _next_token}
    CASES[name] = Case(**{"name": name, "build": build, **common, **changes})


# ---- plain ones


class MLP(nn.Module):
    """Odd sizes; bare layers, no repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


_add(MLP, 7, 3)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)


class Block(nn.Module):
    """A transformer block; a dictionary in its call, as users write them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Blocks in a ModuleList between an embedding and a head; optionally with activation checkpointing."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.position = Parameter(0.1 * torch.randn(CONTEXT, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


_add(Transformer)


def checkpointed() -> nn.Module:
    return Transformer(reentrant=False)


def checkpointed_reentrant() -> nn.Module:
    return Transformer(reentrant=True)


_add(checkpointed)
_add(checkpointed_reentrant)


class Nested(nn.Module):
    """Blocks in lists in lists, and a Sequential of Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)) for _ in range(2)
        )
        self.tail = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 3), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:
                x = x + block(x)
        return self.tail(x)


_add(Nested, 5, 3)


class Convolution(nn.Module):
    """Parameters of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 5, 3, padding=1)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.convolution(x.view(-1, 3, 4))).mean(-1))


_add(Convolution, 12, 2)


def encoder_layers() -> nn.Module:
    """torch's own attention reads the weights of a child without calling it."""
    layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in layers.parameters():  # the layers start as copies of each other
        nn.init.normal_(parameter, std=0.3)
    return nn.Sequential(nn.Unflatten(-1, (2, 6)), layers, nn.Flatten(), nn.Linear(12, 3))


_add(encoder_layers, 12, 3)


# ---- shared parameters


class TiedInside(nn.Module):
    """Two layers of one block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(2))
        self.head = nn.Linear(5, 3)

    @staticmethod
    def _block() -> nn.Module:
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


_add(TiedInside, 5, 3)


class TiedAcross(TiedInside):
    """Layers of different blocks, and one of the root, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        for block in self.blocks:
            block[0].weight = self.entry.weight

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entry(x))


_add(TiedAcross, 5, 3)


class TiedEmbedding(nn.Module):
    """Embedding 5x4 tied to the output layer: not divisible by two or three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens % 5)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _next_of_five(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["next"].flatten() % 5)


_add(TiedEmbedding, loss=_next_of_five)


class SharedModule(nn.Module):
    """One module under two names, called through both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


_add(SharedModule, 5, 3)


class Siamese(nn.Module):
    """The same blocks on two inputs in one forward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.reentrant = reentrant

    def _arm(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                # The reentrant kind cuts the graph at inputs that want no gradient.
                x = checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.clone().chunk(2, dim=-1)
        return self.head(self._arm(left.detach()) - self._arm(right.detach()))


def siamese_checkpointed() -> nn.Module:
    return Siamese(reentrant=False)


def siamese_reentrant() -> nn.Module:
    return Siamese(reentrant=True)


_add(Siamese, 10, 3)
_add(siamese_checkpointed, 10, 3)
_add(siamese_reentrant, 10, 3)


# ---- shapes, strides, dtypes


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Scalars(nn.Module):
    """0-d parameters, in the root and in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = Parameter(torch.tensor(1.0))
        self.inner = Temperature()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x)) / self.temperature


_add(Scalars, 4, 3)


class Empty(nn.Module):
    """A parameter without elements, at the end of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self.nothing = nn.Linear(4, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0 * self.nothing(x).sum()


_add(Empty, 4, 4)


class Tiny(nn.Module):
    """Every parameter is smaller than the number of ranks, and so is everything together in the inner blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.scale = Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x


_add(Tiny, 1, 1)


class NonContiguous(nn.Module):
    """A transposed weight, and one that is a slice with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = Parameter(torch.randn(5, 3).t())
        self.strided = Parameter(torch.randn(5, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.transposed) @ self.strided


_add(NonContiguous, 3, 4)


class FrozenIntegers(nn.Module):
    """A codebook in uint8 and a table in int64, read in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Parameter(torch.randint(256, (5, 3), dtype=torch.uint8), requires_grad=False)
        self.table = Parameter(torch.randperm(7), requires_grad=False)
        self.layer = nn.Linear(5, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight * (self.codes.t().to(x.dtype) / 128 - 1)
        return self.head(torch.tanh(F.linear(x[:, self.table[:5]], weight, self.layer.bias)))


_add(FrozenIntegers, 7, 3)


class Complex(nn.Module):
    """A complex weight, which no 16-bit training casts."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.frozen = Parameter(torch.randn(2, dtype=torch.complex64), requires_grad=False)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).to(torch.complex64) @ self.spectrum * self.frozen).abs()


_add(Complex, 4, 2)


class MixedDtypes(nn.Module):
    """Blocks with float32, bfloat16 and float64 parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.third = Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            y = self.second(x.to(self.second.weight.dtype))
            return (y * self.third).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_add(MixedDtypes, 4, 4)


# ---- frozen, unused, used elsewhere


class Adapted(nn.Module):
    """Frozen blocks with trainable adapters, as LoRA has them; optionally checkpointed."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.base = nn.Linear(6, 6)
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self.down = nn.Linear(6, 2, bias=False)
            self.up = nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return x + torch.tanh(self.base(normed) + self.up(self.down(normed)))

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.head.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def adapted_checkpointed() -> nn.Module:
    return Adapted(reentrant=False)


_add(Adapted, 6, 2)
_add(adapted_checkpointed, 6, 2)


class FrozenUnits(nn.Module):
    """Frozen blocks before, between and after trainable ones; the last frozen one must pass gradients through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(5))
        for index in (0, 2, 4):
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_add(FrozenUnits, 5, 5)


class Unused(nn.Module):
    """A layer of the root and a whole block that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.idle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


_add(Unused, 5, 3)


class Sometimes(nn.Module):
    """One of two experts, depending on the step; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.biases = nn.ParameterList(torch.zeros(3) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.head(self.experts[step % 2](x)) + self.biases[step % 2]


def _squares_of_step(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["step"]).float(), batch["y"].float())


_add(Sometimes, 5, 3, loss=_squares_of_step)


class PartlyReached(nn.Module):
    """A block computes something that the loss ignores."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Linear(5, 5)
            self.side = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.main(x)), self.side(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


_add(PartlyReached, 5, 5)


class OutsideOwner(nn.Module):
    """The root reads weights of a block, of a child it does not call, and of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.store = nn.Linear(4, 3)
        self.gains = nn.ParameterList([torch.ones(4), torch.randn(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.blocks[1][0].weight
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = block(x) * gain
        return F.linear(x, self.store.weight, self.store.bias)


_add(OutsideOwner, 4, 3)


def parametrized() -> nn.Module:
    """Weights that are computed from parameters on every access."""
    blocks = [nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(4, 3))


_add(parametrized, 4, 3)


# ---- inputs and outputs


@dataclass
class Features:
    """A dataclass that travels between modules."""

    values: Tensor
    mask: Tensor | None = None


class Pair(NamedTuple):
    """A named tuple that travels between modules."""

    main: Features
    extra: dict[str, list[Tensor]]


class Structured(nn.Module):
    """Blocks that take and give dataclasses, dicts, named tuples, None and plain numbers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, pair: Pair, *, scale: float, nothing: None = None) -> Pair:
            values = torch.tanh(self.layer(pair.main.values)) * scale
            if pair.main.mask is not None:
                values = values * pair.main.mask
            return Pair(Features(values), {"seen": [*pair.extra["seen"], values]})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, features: Features, options: dict[str, Any]) -> dict[str, Any]:
        pair = Pair(features, {"seen": []})
        for block in self.blocks:
            pair = block(pair, scale=options["scale"], nothing=None)
        return {"output": Features(self.head(pair.main.values + pair.extra["seen"][0])), "nothing": None, "n": (1, "two")}


def _structured_loss(model: Any, batch: Batch) -> Tensor:
    output = model(Features(batch["x"], (batch["x"] > 0).to(batch["x"].dtype)), options={"scale": 0.5})
    assert output["nothing"] is None
    assert output["n"] == (1, "two")
    return F.mse_loss(output["output"].values.float(), batch["y"].float())


_add(Structured, 5, 3, loss=_structured_loss)


class ReturnsLoss(nn.Module):
    """The model computes its own loss and returns it with the prediction detached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        prediction = self.head(x)
        return F.mse_loss(prediction.float(), y.float()), prediction.detach()


_add(ReturnsLoss, 5, 3, loss=lambda model, batch: model(batch["x"], batch["y"])[0])


class Buffers(nn.Module):
    """Buffers of several dtypes, persistent and not, one of them written by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, 5))
        self.register_buffer("mask", torch.tensor([True, True, False, True, True]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer((x * self.frequencies).to(x.dtype).masked_fill(~self.mask, 0.0))


_add(Buffers, 5, 3)


class InPlace(nn.Module):
    """Blocks that write into what they get, and hand out views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5).tanh_()
            x = x.view(-1, 5)
        return x


_add(InPlace, 5, 5)


class Recurrent(nn.Module):
    """torch's LSTM keeps its own list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 3, 3))[0][:, -1])


_add(Recurrent, 9, 2, precisions=("fp32",))
