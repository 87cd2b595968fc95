"""Axes and the grid of data ranks, for any rank of any world, without a process group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.mesh import Axis, DataMesh

FEW = settings(max_examples=40, deadline=None)


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int]:
    shard, replicas = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return shard * replicas, shard


@FEW
@given(grids())
def test_shard_lines_and_replica_lines_cross_once(made: tuple[int, int]) -> None:
    world, shard = made
    meshes = [DataMesh.grid(rank, world, shard) for rank in range(world)]
    for rank, mesh in enumerate(meshes):
        assert mesh.data.ranks == tuple(range(world))
        assert (mesh.data.index, mesh.data.size) == (rank, world)
        assert (mesh.shard.size, mesh.replicate.size) == (shard, world // shard)
        assert set(mesh.shard.ranks) & set(mesh.replicate.ranks) == {rank}
        assert mesh.shard.ranks[mesh.shard.index] == mesh.replicate.ranks[mesh.replicate.index] == rank
        assert mesh.shard.index + mesh.replicate.index * shard == rank
        assert (mesh.data.name, mesh.shard.name, mesh.replicate.name) == ("data", "shard", "replicate")


@FEW
@given(grids())
def test_all_ranks_of_a_line_see_the_same_line(made: tuple[int, int]) -> None:
    world, shard = made
    meshes = [DataMesh.grid(rank, world, shard) for rank in range(world)]
    for mesh in meshes:
        assert all(meshes[peer].shard.ranks == mesh.shard.ranks for peer in mesh.shard.ranks)
        assert all(meshes[peer].replicate.ranks == mesh.replicate.ranks for peer in mesh.replicate.ranks)
    for lines in ({mesh.shard.ranks for mesh in meshes}, {mesh.replicate.ranks for mesh in meshes}):
        assert sorted(rank for line in lines for rank in line) == list(range(world))


def test_shard_lines_are_neighbours() -> None:
    mesh = DataMesh.grid(rank=5, world_size=8, shard_size=4)
    assert mesh.shard.ranks == (4, 5, 6, 7)
    assert mesh.replicate.ranks == (1, 5)


@pytest.mark.parametrize("shard", [0, -1, 3, 8, 5])
def test_a_shard_axis_that_does_not_divide_the_world_is_refused(shard: int) -> None:
    with pytest.raises(LayoutError, match="divisor of the world size 4"):
        DataMesh.grid(0, 4, shard)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=str(rank)):
        DataMesh.grid(rank, 4, 2)


def test_an_axis_is_a_line_of_distinct_ranks_through_this_one() -> None:
    axis = Axis("shard", (6, 2, 4), 4)
    assert (axis.size, axis.index) == (3, 2)
    with pytest.raises(LayoutError, match=r"'shard'.*rank 3"):
        Axis("shard", (6, 2, 4), 3)
    with pytest.raises(LayoutError, match="distinct"):
        Axis("shard", (6, 4, 4), 4)


def test_axes_are_values() -> None:
    """They are keys of dictionaries and parts of keys: equal ones must be interchangeable."""
    one, other = DataMesh.grid(1, 4, 2), DataMesh.grid(1, 4, 2)
    assert one == other
    assert len({one.shard, other.shard, one.replicate}) == 2
