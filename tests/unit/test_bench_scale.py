"""`bench.scale` against the formulas of the ZeRO paper (Rajbhandari et al. 2020, arXiv:1910.02054), sections 5 and 7.

With Psi parameters of p bytes, gradients of g bytes and K bytes of optimizer state each, a rank of N holds
    (p + g + K) Psi;   (p + g) Psi + K Psi / N;   p Psi + (g + K) Psi / N;   (p + g + K) Psi / N
at stages 0 to 3, and sends 2 Psi elements in a step, 3 Psi at stage 3. What comes on top here: at stage 1 the shard that gets
the sum, at stage 3 the parameters below the persistence threshold, and padding, which is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from bench import scale
from bench.cases import Shape
from bench.scale import Footprint, footprint

SHAPE = Shape(vocabulary=4096, width=512, layers=8, heads=8)
CONTEXT = 256
RANKS = (8, 64, 512, 4096)
UNITS = SHAPE.layers + 1
LINE = 128  # bytes to which slots and chunks are rounded


@dataclass(frozen=True)
class Bytes:
    """Of one element: p, g and K of the paper. Gradients are kept in float32 in both precisions."""

    parameter: int
    gradient: int
    optimizer: int


SIZES = {"fp32": Bytes(4, 4, 8), "bf16": Bytes(2, 4, 12)}

# Elements by what becomes of them at stage 3: norms (512 each) stay, everything else is above the threshold of 100 000.
SMALL = (2 * SHAPE.layers + 1) * SHAPE.width
BLOCK = 12 * SHAPE.width**2
ROOT = (2 * SHAPE.vocabulary + CONTEXT) * SHAPE.width
PSI = SHAPE.layers * BLOCK + ROOT + SMALL


@cache
def found(stage: int, ranks: int, precision: str) -> Footprint:
    return footprint(SHAPE, CONTEXT, stage, ranks, precision)


def test_the_model_has_the_size_of_the_formula() -> None:
    assert found(0, 8, "fp32").elements == PSI == SHAPE.parameters(CONTEXT)


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", range(4))
def test_bytes_are_those_of_the_paper(stage: int, ranks: int, precision: str) -> None:
    size, here = SIZES[precision], found(stage, ranks, precision)
    share = PSI / ranks
    expected = {
        0: (size.parameter * PSI, size.gradient * PSI, size.optimizer * PSI),
        1: (size.parameter * PSI, size.gradient * (PSI + share), size.optimizer * share),
        2: (size.parameter * PSI, size.gradient * share, size.optimizer * share),
        3: (size.parameter * (share + SMALL * (1 - 1 / ranks)), size.gradient * share, size.optimizer * share),
    }[stage]
    # A buffer is rounded up once for each chunk, by less than a line of its dtype, which is as many elements everywhere.
    waste = 2 * UNITS * (LINE // size.parameter)
    whole = waste * ranks
    for part, held, exact in zip(
        ("parameters", "gradients", "optimizer"), (here.parameters, here.gradients, here.optimizer), expected, strict=True
    ):
        full = stage == 0 or (part == "gradients" and stage == 1) or (part == "parameters" and stage in (1, 2))
        slack = (whole if full else waste) + (whole if part == "parameters" and stage == 3 else 0)
        width = {"parameters": size.parameter, "gradients": 2 * size.gradient, "optimizer": size.optimizer}[part]
        assert exact <= held + 1, part
        assert held <= exact + slack * width, part
    assert here.padding <= here.total - sum(expected) + waste * (size.parameter + 2 * size.gradient + size.optimizer)


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_sent_is_the_papers_volume(ranks: int) -> None:
    around = (ranks - 1) / ranks
    for precision in SIZES:
        slack = 1 + 3 * 2 * UNITS * (LINE // SIZES[precision].parameter) * ranks / PSI
        for stage in (0, 1, 2):
            assert 2 * around <= found(stage, ranks, precision).volume <= 2 * around * slack
        # Not gathered a second time: the root and the last block, which are still there when backward begins. Small
        # parameters are refreshed once.
        volume = (3 * PSI - ROOT - BLOCK - SMALL) / PSI
        assert volume * around <= found(3, ranks, precision).volume <= volume * around * slack


def test_messages_grow_with_units_and_not_with_ranks() -> None:
    per_step = 2  # which gradients there are, and their norm
    buffers = 2 * UNITS  # of large and of small parameters
    for ranks in RANKS:
        assert found(0, ranks, "bf16").messages == buffers + per_step
        for stage in (1, 2):
            assert found(stage, ranks, "bf16").messages == 2 * buffers + per_step
        gathers = UNITS + (UNITS - 2)
        assert found(3, ranks, "bf16").messages == gathers + buffers + UNITS + per_step


@pytest.mark.parametrize("stage", range(4))
def test_memory_falls_with_ranks_as_far_as_the_stage_shards(stage: int) -> None:
    here = [found(stage, ranks, "bf16") for ranks in (8, 64, 512)]
    used = [each.total - each.padding for each in here]
    floor = {0: 18, 1: 6, 2: 2, 3: 0}[stage] * PSI + (2 * SMALL if stage == 3 else 0)
    if stage:
        sharded = [total - floor for total in used]
        assert sharded[0] / sharded[1] == pytest.approx(8, rel=0.05)
        assert sharded[1] / sharded[2] == pytest.approx(8, rel=0.05)
    else:
        assert used == [floor] * 3


def test_it_prints_a_table_for_each_stage() -> None:
    small = ["--width", "64", "--layers", "2", "--heads", "4", "--vocabulary", "256", "--context", "16"]
    lines = scale.describe([*small, "--ranks", "8", "4096"]).splitlines()
    assert lines[0].startswith("GPT of 0.1 million parameters (2 blocks of width 64), bf16")
    assert [line for line in lines if line.startswith("stage")] == [f"stage {n}" for n in range(4)]
    assert sum(line.startswith("4096 ") for line in lines) == 4
