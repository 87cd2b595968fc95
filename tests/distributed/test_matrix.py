"""Every stage, precision, accumulation, world size and peculiar model against the one reference.

float32 cells: relative 1e-5, absolute 1e-6 against plain PyTorch over the whole global batch. 16-bit cells keep the same
tolerance, since `tests.reference` does the same arithmetic with the same 16-bit weights: what is left are float32 sums of the
same terms in another order. On two ranks a sum has one order, so stages are compared bit for bit there: 0 with 1 and 2 with
3 always, and all four where there is one micro-batch (stages 0 and 1 sum micro-batches first, 2 and 3 sum ranks first).

One call on the ranks runs many cells, and tells of all that differ, not only of the first.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.harness import ranks
from tests.models import CASES
from tests.reference import Recipe, Record, Way, compare_all, compare_bits, train_sharded

CLIP = 0.1
"""Below the gradient norm of every model at its first step."""

STAGES = (0, 1, 2, 3)
SOME = ("transformer", "nested", "tied_across", "mixed_dtypes", "scalars", "outside_owner")
OFTEN = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
"""Models of which some are left to the slow tests; those run all of them at every world size and precision."""

RELEASE_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}


def check(recipes: Iterable[Recipe], stages: tuple[int, ...] = STAGES) -> None:
    """Train each recipe at each stage on the ranks of this process group; fail with every difference found."""
    problems = [problem for recipe in recipes for problem in _check_recipe(recipe, stages)]
    assert not problems, f"{len(problems)} differences\n" + "\n".join(problems[:40])


def _check_recipe(recipe: Recipe, stages: tuple[int, ...]) -> list[str]:
    records = {stage: train_sharded(recipe, Way(stage)) for stage in stages}
    problems = compare_all({_label(recipe, stage): record for stage, record in records.items()}, recipe)
    if recipe.world == 2:
        problems += _compare_stages(recipe, records)
    return problems


def _compare_stages(recipe: Recipe, records: dict[int, Record]) -> list[str]:
    pairs = [(0, 1), (2, 3)] if recipe.accumulation > 1 else [(0, 1), (1, 2), (2, 3)]
    return [
        f"{_label(recipe, one)} and stage {other} differ in bits: {problem}"
        for one, other in pairs
        if one in records and other in records
        for problem in compare_bits(records[one], records[other])
    ]


def _label(recipe: Recipe, stage: int) -> str:
    clipped = f" clip {recipe.clip}" if recipe.clip else ""
    kind = f"{recipe.precision} {recipe.optimizer}{clipped}"
    return f"[{recipe.case} stage {stage} {kind} accumulation {recipe.accumulation} world {recipe.world}]"


@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_models_at_every_stage(name: str) -> None:
    check([Recipe(name, 2, optimizer="adamw", clip=CLIP)])


@ranks(1, 3, 4)
@pytest.mark.parametrize("name", ["tied_embedding", "tiny"])
def test_other_world_sizes(name: str, world_size: int) -> None:
    check([Recipe(name, world_size, accumulation=3, clip=CLIP)], stages=(1, 3))


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["adapted", "frozen_integers"])
def test_sixteen_bits(name: str, precision: str) -> None:
    check([Recipe(name, 2, accumulation=3, precision=precision, optimizer="adamw", clip=CLIP)])


def check_equal(recipe: Recipe, base: Way, **others: Way) -> None:
    """Train in several ways; fail with every bit that differs from the first."""
    expected = train_sharded(recipe, base)
    records = {name: train_sharded(recipe, way) for name, way in others.items()}
    problems = [f"{name}: {problem}" for name, record in records.items() for problem in compare_bits(record, expected)]
    assert not problems, "\n".join(problems)


@ranks(2)
@pytest.mark.parametrize("name", OFTEN)
def test_how_it_is_done_changes_no_bit(name: str) -> None:
    """A plain loop, how long weights stay, sharded construction, and what carries the bytes."""
    recipe = Recipe(name, 2, optimizer="adamw", clip=CLIP)
    sockets = {"transport": "gloo"}
    check_equal(
        recipe,
        Way(1),
        plain_loop=Way(1, plain_loop=True),
        sockets=Way(1, overrides=sockets),
    )
    check_equal(
        recipe,
        Way(3),
        plain_loop=Way(3, plain_loop=True),
        everything_resident=Way(3, overrides={"zero_optimization": {"stage": 3}}),
        no_prefetch=Way(3, overrides={"zero_optimization": {**RELEASE_ALL, "stage3_prefetch_bucket_size": 0}}),
        sharded=Way(3, sharded_init=True),
        sockets=Way(3, overrides=sockets),
        sharded_over_sockets=Way(3, sharded_init=True, overrides=sockets),
    )


@pytest.mark.slow
@ranks(1, 2, 3, timeout=300.0)
@pytest.mark.parametrize("name", CASES)
def test_full_matrix(name: str, world_size: int) -> None:
    # Three ranks differ from two in how sums are cut, which accumulation and moments show as well as one step of SGD.
    windows = ((3, "adamw"),) if world_size == 3 else ((1, "sgd"), (3, "adamw"))
    recipes = [
        Recipe(name, world_size, accumulation, precision, optimizer, CLIP)
        for precision in CASES[name].precisions
        for accumulation, optimizer in windows
    ]
    check([*recipes, Recipe(name, world_size, optimizer="adamw")])
