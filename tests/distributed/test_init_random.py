"""`zero.Init` against a normal build, over random programs of what constructors do to modules and weights."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import zero
from shardwise.zero import GatheredParameters
from tests.distributed.zero_support import same
from tests.harness import ranks


class Piece(nn.Module):
    """A module with parameters of its own and of children."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(3, 3))
        self.layer = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.small = nn.Parameter(torch.randn(()))


class Program:
    """A constructor that does `length` random things to a growing model; the same ones for the same seed."""

    def __init__(self, seed: int, length: int) -> None:
        self.random = random.Random(seed)
        self.length = length
        self.kept: list[Tensor] = []
        self.trace: list[str] = []

    def run(self) -> nn.Module:
        """Build the model."""
        torch.manual_seed(1)
        self.model = nn.ModuleList([Piece(), Piece()])
        actions = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(self.length):
            action = self.random.choice(actions)
            self.trace.append(action)
            with torch.no_grad():
                getattr(self, action)()
        self.kept.clear()
        return self.model

    def piece(self) -> Any:
        return self.random.choice(list(self.model))

    def matrix(self) -> nn.Parameter:
        piece = self.piece()
        return self.random.choice([piece.own, piece.layer.weight])

    def do_scale(self) -> None:
        self.matrix().mul_(1.5)

    def do_draw(self) -> None:
        nn.init.normal_(self.matrix())

    def do_draw_data(self) -> None:
        self.matrix().data.uniform_(-1, 1)

    def do_copy(self) -> None:
        target, source = self.matrix(), self.matrix()
        target.copy_(source)

    def do_copy_data(self) -> None:
        self.matrix().data.copy_(self.matrix().data)

    def do_mix(self) -> None:
        one, two, three = self.matrix(), self.matrix(), self.matrix()
        one.lerp_(two, 0.25)
        torch.add(two, three, alpha=0.5, out=self.matrix())

    def do_assign(self) -> None:
        self.matrix().data = self.matrix().detach() @ torch.eye(3) + 0.125

    def do_assign_transposed(self) -> None:
        self.matrix().data = self.matrix().detach().clone().t()

    def do_row(self) -> None:
        self.matrix()[self.random.randrange(3)] = self.matrix()[0] + 1

    def do_keep(self) -> None:
        view = self.matrix().data
        self.kept.append(self.random.choice([view, view[1], view.t(), view[:2, 1:]]))

    def do_write_kept(self) -> None:
        if self.kept:
            self.random.choice(self.kept).add_(0.5)

    def do_read_kept(self) -> None:
        if self.kept:
            self.piece().small.copy_(self.random.choice(self.kept).sum())

    def do_drop_kept(self) -> None:
        if self.kept:
            self.kept.pop(self.random.randrange(len(self.kept)))

    def do_extend(self) -> None:
        if len(self.model) < 6:
            self.model.append(Piece())

    def do_copy_module(self) -> None:
        if len(self.model) < 6:
            self.model.append(copy.deepcopy(self.piece()))

    def do_replace(self) -> None:
        self.piece().layer = nn.Linear(3, 3)

    def do_tie(self) -> None:
        self.piece().layer.weight = self.matrix()

    def do_load(self) -> None:
        state = {name: value.clone() for name, value in self.piece().state_dict().items()}
        self.piece().load_state_dict(state)

    def do_apply(self) -> None:
        self.piece().apply(lambda m: nn.init.constant_(m.bias, 0.25) if isinstance(m, nn.Linear) else None)

    def do_reset(self) -> None:
        self.piece().layer.reset_parameters()

    def do_freeze(self) -> None:
        self.piece().norm.requires_grad_(False)

    def do_gather_to_read(self) -> None:
        one, other = self.piece(), self.piece()
        with GatheredParameters([*one.parameters(), other.own]):
            total = sum(float(parameter.double().sum()) for parameter in one.parameters())
        other.small.fill_(total)

    def do_gather_to_edit(self) -> None:
        piece = self.piece()
        with GatheredParameters(piece.parameters(), modifier_rank=0):
            if not dist.is_initialized() or dist.get_rank() == 0 or not isinstance(piece.own, nn.Parameter):
                piece.own.data.add_(piece.layer.weight.data)

    def do_inner_block(self) -> None:
        if len(self.model) < 6:
            with zero.Init(enabled=self.sharded):
                self.model.append(Piece())

    sharded = False


def differences(seed: int, length: int) -> list[str]:
    """Where the sharded outcome of a program differs."""
    plain = Program(seed, length)
    # On the other rank nobody would edit: in a normal build there is nobody to send it.
    plain.do_gather_to_edit = _edit_everywhere.__get__(plain)  # pyright: ignore[reportAttributeAccessIssue]
    expected = plain.run()
    program = Program(seed, length)
    program.sharded = True
    with zero.Init():
        model = program.run()
    problems = []
    left = dict(model.named_parameters(remove_duplicate=False))
    right = dict(expected.named_parameters(remove_duplicate=False))
    if list(left) != list(right):
        return [f"seed {seed}: other parameters"]
    if dist.get_world_size() > 1 and not all(parameter.isnan().all() for parameter in left.values()):
        problems.append(f"seed {seed}: not all is sharded")
    with GatheredParameters(model.parameters()):
        for name, parameter in left.items():
            other = right[name]
            if not same(parameter, other) or parameter.requires_grad != other.requires_grad:
                problems.append(f"seed {seed}: {name} after {program.trace}")
    return problems


def _edit_everywhere(self: Program) -> None:
    piece = self.piece()
    piece.own.data.add_(piece.layer.weight.data)


def _try(seeds: range, length: int) -> None:
    problems = [problem for seed in seeds for problem in differences(seed, length)[:1]]
    assert not problems, "\n".join(problems)


@ranks(2)
def test_random_constructors() -> None:
    _try(range(8), length=25)


@pytest.mark.slow
@ranks(2, 3, timeout=300.0)
def test_many_random_constructors() -> None:
    _try(range(100, 130), length=40)
