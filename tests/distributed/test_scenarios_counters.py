"""Exact counts: bytes moved, collectives issued and bytes held per rank equal the formulas of ZeRO, derived here by hand.

The derivation knows shapes, the number of ranks and the rule of the layout (slots and chunks begin at multiples of 128 bytes),
and no code of Shardwise. In the formulas below `n` is the number of elements of all buffers, padding included, `w` the bytes
of a weight (2 or 4), and 4 the bytes of a gradient:

    stage   reduced per step        gathered per step                          weights   gradients   optimizer
    0       4n (all-reduce)         0                                          wn        4n          8n + masters
    1       4n                      wn (after the step)                        wn        4n, 4n/N    (8n + masters)/N
    2       4n per micro-batch      wn (after the step)                        wn        4n/N        (8n + masters)/N
    3       4n per micro-batch      2wn per micro-batch, less what stays       wn/N      4n/N        (8n + masters)/N

(arXiv 1910.02054, section 7: communication volume 2, 2, 2 and 3 times the model. What stays gathered between the forward and
the backward is the root and the last block.)

Every number also stands in `counters.txt`, next to this file, for the eye and as a gate: a change that makes a step send, hold
or allocate more has to change that table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shardwise import Engine
from tests.distributed.scenario_support import STAGES, adamw, build, start
from tests.harness import ranks, run_on_ranks
from tests.models import Block

WIDTH, LAYERS, VOCABULARY, CONTEXT = 96, 6, 128, 16


class Language(nn.Module):
    """About 400 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def padded(sizes: list[int], itemsize: int, parts: int) -> int:
    """Elements of a buffer that holds parameters of these sizes and is cut into equal parts."""
    step = 128 // itemsize
    end = 0
    for size in sizes:
        end = -(-end // step) * step + size
    chunk = -(-end // parts)
    return parts * (-(-chunk // step) * step)


@dataclass(frozen=True)
class Shape:
    """Elements of the root's buffer and of one block's, padded and bare."""

    root: int
    block: int
    bare: int
    parameters: int

    @classmethod
    def of(cls, itemsize: int, parts: int) -> Shape:
        """Counted on a plain model."""
        model = build(Language)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        root = [size for name, size in sizes.items() if not name.startswith("blocks.")]
        block = [size for name, size in sizes.items() if name.startswith("blocks.0.")]
        assert len(sizes) == len(root) + LAYERS * len(block)
        return cls(padded(root, itemsize, parts), padded(block, itemsize, parts), sum(sizes.values()), len(sizes))

    @property
    def total(self) -> int:
        return self.root + LAYERS * self.block


def one_step(engine: Engine, step: int) -> None:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    for _ in range(engine.gradient_accumulation_steps()):
        tokens = torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=source)
        engine.backward(F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()


def expected_traffic(stage: int, shape: Shape, weight: int, accumulation: int, shared: bool) -> dict[str, tuple[int, int]]:
    """Calls and bytes of one step by kind of collective; bytes count the same where memory is shared and nothing moves."""
    units = LAYERS + 1
    # Which parameters have a gradient and which buffers are still to be reduced (int32), and the norm (float64).
    agreements = (2, 4 * (shape.parameters + units) + 8)
    gradients = 4 * shape.total
    refresh = (units, weight * shape.total)
    if stage == 0:
        return {"all_reduce": (units + agreements[0], gradients + agreements[1])}
    reduced = accumulation if stage >= 2 else 1
    traffic = {"all_reduce": agreements, "reduce_scatter": (reduced * units, reduced * gradients), "all_gather": refresh}
    if stage == 3:
        if shared:
            traffic["fence"] = (1, 0)
        again = LAYERS - 1  # blocks whose weights went away between their forward and their backward
        traffic["all_gather"] = (accumulation * (units + again), accumulation * weight * (shape.total + again * shape.block))
    return traffic


def expected_residency(stage: int, shape: Shape, weight: int, ranks: int) -> dict[str, int]:
    """Bytes that rest on a rank between steps, by category; the pool of full-length gradients apart."""
    parts = ranks if stage else 1
    held = {"parameters": weight * shape.total // (ranks if stage == 3 else 1)}
    if weight == 2:
        held["master weights"] = 4 * shape.total // parts
    if stage:
        held["gradients"] = 4 * shape.total // ranks
    return held


def expected_full_gradients(stage: int, shape: Shape, accumulation: int) -> int:
    """Most bytes of full-length gradients at one time.

    Where they are reduced in every backward: the root's, which is filled from the first to the last moment of a backward, the
    block's that is being filled, and two that are on their way. Otherwise all of them.
    """
    every = stage >= 2 or (stage == 1 and accumulation == 1)
    return 4 * (shape.root + 3 * shape.block if every else shape.total)


def test_counters_equal_the_formulas_of_zero() -> None:
    """Over sockets and through shared memory; the latter takes no memory for gathered weights, and one fence per step."""
    table = [HEAD]
    for transport in ("gloo", "shm"):
        rows, others = run_on_ranks(2, check_all, transport, timeout=120.0)
        assert rows == others
        table += rows
    found = "\n".join(table) + "\n"
    assert found == TABLE.read_text(), f"if the change is meant, {TABLE} becomes:\n{found}"


def check_all(transport: str) -> list[str]:
    """On every rank."""
    rows = []
    shared = transport == "shm"
    for precision, weight, accumulation in (("fp32", 4, 1), ("fp32", 4, 3), ("bf16", 2, 1)):
        shape = Shape.of(weight, 2)
        assert 300_000 < shape.bare < 600_000
        assert shape.total - shape.bare < 0.01 * shape.bare, "padding below 1 %"
        own = accumulation * large_allocations(plain_step(precision))
        for stage in STAGES:
            what = f"{precision} stage {stage} accumulation {accumulation}"
            extra = {"micro": 1, "accumulation": accumulation, "precision": precision, "transport": transport}
            with start(build(Language), stage, adamw, **extra) as engine:
                snapshots = []
                for step in range(3):
                    one_step(engine, step)
                    snapshots.append(engine.counters())
                found = [traffic_between(*pair) for pair in pairwise(snapshots)]
                assert found == [expected_traffic(stage, shape, weight, accumulation, shared)] * 2, what
                held = {kind: count for kind, count in snapshots[-1]["resident"].items() if count and kind != "full gradients"}
                assert held == expected_residency(stage, shape, weight, 2), what
                assert snapshots[-1]["peak"]["full gradients"] == expected_full_gradients(stage, shape, accumulation), what
                if stage == 3:
                    # The root, the block in use, and the next one on its way.
                    live = 0 if shared else weight * (shape.root + 2 * shape.block)
                    assert snapshots[-1]["peak"].get("gathered", 0) == live, what
                report = engine.memory_report()
                check_report(report, stage, shape, weight, snapshots[-1], shared)
                allocations = large_allocations(lambda engine=engine: one_step(engine, 3)) - own
                rows.append(row(f"{transport:6}{what}", found[0], report, snapshots[-1]["peak"], allocations))
    return rows


def traffic_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Calls and bytes by kind, of kinds that occurred."""
    return {
        kind: (calls - before["calls"].get(kind, 0), after["bytes"][kind] - before["bytes"].get(kind, 0))
        for kind, calls in after["calls"].items()
        if calls != before["calls"].get(kind, 0)
    }


def check_report(report: dict[str, int], stage: int, shape: Shape, weight: int, counters: dict[str, Any], shared: bool) -> None:
    masters = 4 if weight == 2 else 0
    parts = 2 if stage else 1
    padding = shape.total - shape.bare
    # Where gradients are reduced in every backward, full-length buffers only carry them.
    full = counters["resident"]["full gradients"]
    kept, carried = (0, full) if stage >= 2 else (full, 0)
    assert report == {
        "parameters_resting": weight * shape.total // (2 if stage == 3 else 1),
        "parameters_live_peak": weight * (shape.root + 2 * shape.block) if stage == 3 and not shared else 0,
        "gradients": (4 * shape.total // 2 if stage else 0) + kept,
        "gradients_in_flight": carried,
        "optimizer": (8 + masters) * shape.total // parts,
        "optimizer_offloaded": 0,
        "padding": weight * padding,
        "unsharded_parameters": weight * shape.bare,
        "unsharded_gradients": 4 * shape.bare,
        "unsharded_optimizer": masters * shape.bare + 8 * shape.total,
    }


TABLE = Path(__file__).with_name("counters.txt")
HEAD = (
    "One step of a model of 400 thousand parameters on one of 2 ranks: thousands of bytes sent (each collective as its full\n"
    "tensor), calls, thousands of bytes held at rest, gathered weights and carried gradients at most, and allocations of\n"
    "32 KiB or more beyond those of the model itself. Over sockets, stage 3 takes memory for each gather and gives it back.\n\n"
    f"{'':38}{'reduced':>8}{'gathered':>9}{'calls':>6}{'weights':>8}{'gradients':>10}{'optimizer':>10}"
    f"{'gathered':>9}{'carried':>8}{'padding':>8}{'allocated':>10}"
)


def row(what: str, traffic: dict[str, tuple[int, int]], report: dict[str, int], peak: dict[str, int], allocations: int) -> str:
    """One line of the table."""
    moved = [traffic.get("reduce_scatter", (0, 0))[1] or traffic["all_reduce"][1], traffic.get("all_gather", (0, 0))[1]]
    calls = sum(count for count, _ in traffic.values())
    kept = [report["parameters_resting"], report["gradients"], report["optimizer"]]
    most = [peak.get("gathered", 0), peak["full gradients"]]
    padding = report["padding"] / report["unsharded_parameters"]
    numbers = [f"{number / 1e3:.0f}" for number in (*moved, *kept, *most)]
    cells = [*numbers[:2], str(calls), *numbers[2:], f"{padding:.2%}", str(allocations)]
    widths = (8, 9, 6, 8, 10, 10, 9, 8, 8, 10)
    return f"{what:38}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def plain_step(precision: str) -> Callable[[], None]:
    """Forward and backward of the model alone."""
    model = build(Language).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def step() -> None:
        model.zero_grad()
        tokens = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
        F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()).backward()

    step()
    return step


def large_allocations(action: Callable[[], None]) -> int:
    """How often torch allocates 32 KiB or more: weights and their gradients have that size, activations do not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    kineto: Any = profiled.profiler
    return sum(event.name() == "[memory]" and event.nbytes() >= 32768 for event in kineto.kineto_results.events())


@ranks(2)
def test_small_parameters_stay_and_are_refreshed_after_the_step() -> None:
    """Up to the threshold, biases and norms at stage 3 are gathered once per step instead of twice per micro-batch."""
    limit = 3 * WIDTH
    model = build(Language)
    sizes = [(name, parameter.numel()) for name, parameter in model.named_parameters()]

    def elements(prefix: str, small: bool) -> int:
        inside = [size for name, size in sizes if name.startswith(prefix) == bool(prefix) and (size <= limit) == small]
        if not prefix:
            inside = [size for name, size in sizes if not name.startswith("blocks.") and (size <= limit) == small]
        return padded(inside, 4, 2)

    large, small = ([elements("", is_small), elements("blocks.0.", is_small)] for is_small in (False, True))
    with start(model, 3, adamw, micro=1, zero={"stage3_param_persistence_threshold": limit}) as engine:
        one_step(engine, 0)
        one_step(engine, 1)
        before = engine.counters()
        one_step(engine, 2)
        after = engine.counters()
        gathered = after["bytes"]["all_gather"] - before["bytes"]["all_gather"]
        assert gathered == 4 * (large[0] + (2 * LAYERS - 1) * large[1] + small[0] + LAYERS * small[1])
        assert after["resident"]["parameters"] == 4 * ((large[0] + LAYERS * large[1]) // 2 + small[0] + LAYERS * small[1])


@ranks(2)
def test_an_optimizer_without_state_holds_none() -> None:
    for stage in STAGES:
        with start(build(Language), stage, lambda parameters: torch.optim.SGD(parameters, lr=0.1), micro=1) as engine:
            one_step(engine, 0)
            assert engine.memory_report()["optimizer"] == 0


@ranks(2)
def test_evaluation_gathers_each_unit_once() -> None:
    shape = Shape.of(4, 2)
    for stage in STAGES:
        with start(build(Language), stage, adamw, micro=1) as engine, torch.no_grad():
            engine.eval()
            tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
            before = engine.counters()["bytes"]
            engine(tokens)
            after = engine.counters()["bytes"]
            moved = {kind: count - before.get(kind, 0) for kind, count in after.items() if count != before.get(kind, 0)}
            assert moved == ({"all_gather": 4 * shape.total} if stage == 3 else {})


@ranks(1)
def test_one_rank_moves_nothing_and_pads_the_same_way() -> None:
    shape = Shape.of(4, 1)
    for stage in STAGES:
        with start(build(Language), stage, adamw, micro=1) as engine:
            one_step(engine, 0)
            counters = engine.counters()
            assert counters["calls"] == {}
            assert counters["resident"]["parameters"] == 4 * shape.total
            assert engine.memory_report()["optimizer"] == 8 * shape.total
