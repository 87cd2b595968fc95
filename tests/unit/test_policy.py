"""The table of stages, the dtypes a precision means, and how patterns name modules."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from shardwise.policy import STAGES, Policy, Precision, Reduce, Release, matches_module


def test_the_table_of_stages() -> None:
    """Rajbhandari et al. 2020: each stage keeps one more kind of state in shards than the one before."""
    assert [stage.number for stage in STAGES] == [0, 1, 2, 3]
    assert [stage.sharded for stage in STAGES] == [False, True, True, True]
    assert [stage.reduce for stage in STAGES] == [Reduce.LAST, Reduce.LAST, Reduce.EVERY, Reduce.EVERY]
    assert [stage.release for stage in STAGES] == [Release.NEVER, Release.STEP, Release.STEP, Release.USE]


def test_policies_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Policy(STAGES[3]).persist_below = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrozenInstanceError):
        Precision().compute = torch.bfloat16  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_sixteen_bit_storage(compute: torch.dtype) -> None:
    precision = Precision(compute=compute)
    assert precision.storage_dtype(torch.float32, False) == compute
    assert precision.storage_dtype(torch.float16, False) == compute
    assert precision.storage_dtype(torch.bfloat16, False) == compute
    for kept in (torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool):
        assert precision.storage_dtype(kept, False) == kept
        assert precision.storage_dtype(kept, True) == kept


def test_pinned_parameters_are_float32() -> None:
    precision = Precision(compute=torch.bfloat16)
    assert precision.storage_dtype(torch.float32, True) == torch.float32
    assert precision.storage_dtype(torch.bfloat16, True) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.complex64])
def test_without_a_compute_dtype_parameters_keep_their_own(dtype: torch.dtype) -> None:
    assert Precision().storage_dtype(dtype, False) == dtype


def test_masters() -> None:
    for sixteen in (torch.float16, torch.bfloat16):
        assert Precision().master_dtype(sixteen) == torch.float32
        assert Precision(low_precision_master=True).master_dtype(sixteen) == sixteen
    for own in (torch.float32, torch.float64):
        assert Precision().master_dtype(own) == own


def test_gradients_are_accumulated_in_float32_unless_asked() -> None:
    assert Precision().gradient_dtype(torch.bfloat16) == torch.float32
    assert Precision(accumulate=torch.bfloat16).gradient_dtype(torch.bfloat16) == torch.bfloat16
    assert Precision(accumulate=torch.bfloat16).gradient_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize(
    ("pattern", "name", "classes", "meant"),
    [
        ("Block", "layers.0", ("Block", "pkg.Block"), True),
        ("pkg.Block", "layers.0", ("Block", "pkg.Block"), True),
        ("Bloc", "layers.0", ("Block", "pkg.Block"), False),
        ("Bloc*", "layers.0", ("Block", "pkg.Block"), False),  # patterns are of module names
        ("layers.*", "layers.0", ("Block",), True),
        ("layers.[01]", "layers.1", ("Block",), True),
        ("layers.[01]", "layers.2", ("Block",), False),
        ("Layers.*", "layers.0", ("Block",), False),
        ("layers.0", "layers.0", (), True),
        ("0", "layers.0", ("Block",), False),
    ],
)
def test_what_a_pattern_means(pattern: str, name: str, classes: tuple[str, ...], meant: bool) -> None:
    assert matches_module((pattern,), name, classes) is meant
    assert matches_module(("other", pattern), name, classes) is meant


def test_no_pattern_means_nothing() -> None:
    assert not matches_module((), "layers.0", ("Block",))
