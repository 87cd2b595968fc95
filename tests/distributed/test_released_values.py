"""What travels between units: containers that a unit writes into, values nobody can look into, losses kept on the side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.zero_support import check, own
from tests.harness import ranks
from tests.models import Batch


class Appending(nn.Module):
    """Blocks that collect their side outputs in a list of the caller's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:
            collected.append(self.side(x))
            return torch.tanh(self.main(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        for block in self.blocks:
            x = block(x, collected)
        assert len(collected) == 3, "a list that a block was given is the caller's list"
        return torch.cat([x, *collected], dim=-1)


class Writing(nn.Module):
    """Blocks that put what they know into a dictionary, and replace what is there."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, state: dict[str, Any], number: int) -> None:
            state["x"] = torch.tanh(self.layer(state["x"]))
            state[f"layer {number}"] = state["x"]
            state["history"].append(state["x"])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "history": []}
        for number, block in enumerate(self.blocks):
            block(state, number)
        assert len(state["history"]) == 3
        return state["x"] + state["layer 0"] + state["history"][1]


@dataclass
class Cache:
    """As key-value caches are written."""

    keys: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None
    calls: int = field(default=0, init=False)


class Caching(nn.Module):
    """Blocks that update a dataclass they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, *, cache: Cache) -> Tensor:
            cache.keys.append(self.key(x))
            cache.calls += 1
            cache.last = torch.tanh(self.value(x)) * torch.stack(cache.keys).mean(0)
            return cache.last

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        assert cache.calls == len(cache.keys) == 3
        assert cache.last is not None
        return x + cache.last + cache.keys[0]


class Node:
    """A tree whose children know their parents."""

    def __init__(self, value: Tensor, parent: Node | None = None) -> None:
        self.value, self.parent, self.children = value, parent, []
        if parent is not None:
            parent.children.append(self)


class Knotted(nn.Module):
    """Blocks that take and return values which contain themselves."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, node: Node, state: dict[str, Any]) -> Node:
            assert state["self"] is state
            state["x"] = torch.tanh(self.layer(node.value))
            return Node(state["x"], node)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x}
        state["self"] = state
        node = Node(x)
        for block in self.blocks:
            node = block(node, state)
        assert node.parent is not None
        return node.value + node.parent.value


class Closed:
    """A value that keeps its tensor where nobody finds it."""

    __slots__ = ("read",)

    def __init__(self, tensor: Tensor) -> None:
        self.read = lambda: tensor


class Sealed(nn.Module):
    """Blocks whose inputs and outputs nobody can look into."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, closed: Closed) -> Closed:
            return Closed(closed.read() + self.out(torch.tanh(self.layer(closed.read()))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Closed:
        closed = Closed(x)
        for block in self.blocks:
            closed = block(closed)
        return Closed(self.head(closed.read()))


class Auxiliary(nn.Module):
    """Blocks that keep a loss of their own as an attribute, which the caller adds."""

    class Block(nn.Module):
        aux: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.router, self.layer = nn.Linear(4, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x).softmax(-1)
            self.aux = (scores @ scores.t()).diagonal().mean()
            return x + torch.tanh(self.layer(x)) * scores[:, :1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OnlyAuxiliary(Auxiliary):
    """The output of the last block reaches the loss through an attribute only."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        self.blocks[2](x)
        return self.head(x)


class Square(torch.autograd.Function):
    """Saves its input and a weight, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 2

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = 2 * (x @ weight) * outputs[0]
        return inner @ weight.t(), x.t() @ inner


class Hoarding(torch.autograd.Function):
    """Keeps its weight as an attribute of the context, past the saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[0] @ ctx.weight.t(), ctx.x.t() @ outputs[0]


class Functions(nn.Module):
    """Blocks that compute through custom autograd functions."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(4, 4) / 2)
            self.two = nn.Parameter(torch.randn(4, 4) / 2)
            self.frozen = nn.Parameter(torch.randn(4, 4) / 2, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(Hoarding.apply(Square.apply(x, self.one), self.two) + Square.apply(x, self.frozen))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _sealed_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).read().float(), batch["y"].float())


def _auxiliary_loss(model: Any, batch: Batch) -> Tensor:
    loss = F.mse_loss(model(batch["x"]).float(), batch["y"].float())
    return loss + 0.1 * sum(block.aux.float() for block in model.blocks)


@ranks(2)
@pytest.mark.parametrize("build", [Appending, Writing, Caching, Knotted])
def test_containers_that_units_write_into(build: type[nn.Module]) -> None:
    outputs = 10 if build is Appending else 4
    check(own(build, 4, outputs, optimizer="adamw"), stages=(1, 3))


@ranks(2)
def test_values_nobody_can_look_into() -> None:
    check(own(Sealed, 4, 4, loss=_sealed_loss, accumulation=2), own(Functions, 4, 4), stages=(0, 3))


@ranks(2)
def test_losses_kept_as_attributes() -> None:
    check(
        own(Auxiliary, 4, 4, loss=_auxiliary_loss, optimizer="adamw"),
        own(OnlyAuxiliary, 4, 4, loss=_auxiliary_loss),
        own(Auxiliary, 4, 4, loss=_auxiliary_loss, precision="bf16"),
        stages=(1, 3),
    )
