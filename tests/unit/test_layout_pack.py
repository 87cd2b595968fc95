"""`layout.pack`, `pieces`, `interval`: properties that hold for any parameters on any number of ranks."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout import DATA_PARALLEL, SLOT_BYTES, Layout, Placement, Request, Role, Slot, pack

FEW = settings(max_examples=40, deadline=None)

ITEMSIZES = (1, 2, 4, 8)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    shapes = draw(st.lists(st.tuples(SHAPES, st.sampled_from((1, 1, 2))), max_size=12))
    return [Request(f"p{number}", shape, width) for number, (shape, width) in enumerate(shapes)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    itemsize = draw(st.sampled_from(ITEMSIZES))
    return pack(draw(requests()), itemsize, draw(st.integers(1, 17))), itemsize


@FEW
@given(requests(), st.sampled_from(ITEMSIZES), st.integers(1, 17))
def test_every_parameter_has_a_slot_of_its_size_in_the_given_order(asked: list[Request], itemsize: int, shards: int) -> None:
    layout = pack(asked, itemsize, shards)
    assert [slot.request for slot in layout.slots] == asked
    assert [slot.length for slot in layout.slots] == [prod(request.shape) * request.width for request in asked]
    assert layout.shards == shards
    assert all((slot.name, slot.shape) == (slot.request.name, slot.request.shape) for slot in layout.slots)


@FEW
@given(layouts())
def test_slots_lie_inside_without_overlap(made: tuple[Layout, int]) -> None:
    layout, _ = made
    owned = [element for slot in layout.slots for element in range(slot.offset, slot.stop)]
    assert len(set(owned)) == len(owned) == layout.used
    assert all(0 <= element < layout.total for element in owned)
    assert layout.used + layout.padding == layout.total


@FEW
@given(layouts())
def test_slots_and_chunks_start_on_whole_lines(made: tuple[Layout, int]) -> None:
    layout, itemsize = made
    assert all(slot.offset * itemsize % SLOT_BYTES == 0 for slot in layout.slots if slot.length)
    assert all(layout.interval(shard)[0] * itemsize % SLOT_BYTES == 0 for shard in range(layout.shards))


@FEW
@given(layouts())
def test_chunks_are_equal_and_follow_each_other(made: tuple[Layout, int]) -> None:
    layout, _ = made
    end = 0
    for shard in range(layout.shards):
        start, stop = layout.interval(shard)
        assert (start, stop - start) == (end, layout.chunk)
        end = stop
    assert end == layout.total == layout.chunk * layout.shards


@FEW
@given(layouts())
def test_pieces_of_all_chunks_are_all_slots_once(made: tuple[Layout, int]) -> None:
    layout, _ = made
    seen: list[tuple[int, int]] = []
    for shard in range(layout.shards):
        start, stop = layout.interval(shard)
        for index, first, last in layout.pieces(start, stop):
            assert start <= first < last <= stop
            seen += [(index, element) for element in range(first, last)]
    expected = [(index, element) for index, slot in enumerate(layout.slots) for element in range(slot.offset, slot.stop)]
    assert sorted(seen) == expected
    assert len(set(seen)) == len(seen)


@FEW
@given(layouts(), st.integers(0, 400), st.integers(0, 400))
def test_pieces_of_any_interval_are_its_slots_elements(made: tuple[Layout, int], start: int, length: int) -> None:
    layout, _ = made
    found = [(index, element) for index, a, b in layout.pieces(start, start + length) for element in range(a, b)]
    wanted = [
        (index, element)
        for index, slot in enumerate(layout.slots)
        for element in range(slot.offset, slot.stop)
        if start <= element < start + length
    ]
    assert found == wanted


@FEW
@given(layouts())
def test_padding_is_bounded_by_lines(made: tuple[Layout, int]) -> None:
    """Less than a line before each slot, and less than a line per chunk and one more at the end."""
    layout, itemsize = made
    line = max(1, SLOT_BYTES // itemsize)
    filled = sum(1 for slot in layout.slots if slot.length)
    assert layout.padding <= max(0, filled - 1) * (line - 1) + layout.shards * line
    if not filled:
        assert layout.total == 0


@FEW
@given(requests(), st.sampled_from(ITEMSIZES), st.integers(1, 17), st.integers(1, 17))
def test_offsets_do_not_depend_on_the_number_of_chunks(asked: list[Request], itemsize: int, one: int, other: int) -> None:
    """So that a buffer can be cut anew for another world without moving anything but its end."""
    slots = pack(asked, itemsize, one).slots
    assert slots == pack(asked, itemsize, other).slots


@FEW
@given(requests(), st.sampled_from(ITEMSIZES), st.integers(1, 9), st.integers(1, 4).map(lambda power: 2**power * 32))
def test_a_granule_starts_whole(asked: list[Request], itemsize: int, shards: int, granule: int) -> None:
    coarse = [Request(request.name, request.shape, request.width, granule) for request in asked]
    layout = pack(coarse, itemsize, shards)
    assert all(slot.offset % granule == 0 for slot in layout.slots if slot.length)


@FEW
@given(st.integers(1, 100), st.integers(1, 4))
def test_a_granule_of_any_size_keeps_slots_on_whole_lines(granule: int, shards: int) -> None:
    layout = pack([Request("a", (5,)), Request("b", (7, 3), granule=granule), Request("c", (2,))], 4, shards)
    assert all(slot.offset * 4 % SLOT_BYTES == 0 for slot in layout.slots)
    assert layout.slots[1].offset % granule == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 512])
@pytest.mark.parametrize(("width", "hidden"), [(768, 3072), (4096, 11008)])
def test_padding_of_a_transformer_block_is_far_below_one_percent(width: int, hidden: int, ranks: int) -> None:
    shapes = [(3 * width, width), (width, width), (hidden, width), (width, hidden), (width,), (width,)]
    layout = pack([Request(str(number), shape) for number, shape in enumerate(shapes)], 2, ranks)
    assert layout.padding < 0.01 * layout.used
    assert layout.padding < 0.0005 * layout.used or ranks > 8


def test_empty_and_scalar_parameters() -> None:
    layout = pack([Request("none", (0, 4)), Request("scalar", ()), Request("last", (4, 0))], 4, 2)
    assert [(slot.offset, slot.length) for slot in layout.slots] == [(0, 0), (0, 1), (1, 0)]
    assert [(index, a, b) for index, a, b in layout.pieces(*layout.interval(0))] == [(1, 0, 1)]
    assert list(layout.pieces(*layout.interval(1))) == []


def test_no_parameters_at_all() -> None:
    layout = pack([], 4, 3)
    assert (layout.total, layout.used, layout.padding, layout.chunk) == (0, 0, 0, 0)
    assert list(layout.pieces(0, 10)) == []


def test_equal_names_are_refused() -> None:
    with pytest.raises(LayoutError, match="'w'"):
        pack([Request("w", (2,)), Request("v", (2,)), Request("w", (3,))], 4, 2)


def test_a_layout_checks_itself() -> None:
    def slot(offset: int, length: int) -> Slot:
        return Slot(Request(f"at{offset}", (length,)), offset, length)

    Layout((slot(0, 4), slot(4, 4)), chunk=4, shards=2)
    with pytest.raises(LayoutError, match=r"'at3'.*\n?.*overlaps|overlaps"):
        Layout((slot(0, 4), slot(3, 4)), chunk=4, shards=2)
    with pytest.raises(LayoutError, match="do not fit"):
        Layout((slot(0, 4), slot(4, 5)), chunk=4, shards=2)
    with pytest.raises(LayoutError, match="do not fit"):
        Layout((slot(0, 4),), chunk=4, shards=0)


def test_no_chunks_at_all_are_refused() -> None:
    with pytest.raises(LayoutError):
        pack([Request("w", (2,))], 4, 0)


def test_placement_names_the_axes_of_a_role() -> None:
    placement = Placement((("tensor", Role.SPLIT), ("shard", Role.PARTIAL), ("replicate", Role.PARTIAL), ("pipe", Role.SAME)))
    assert placement.axes(Role.PARTIAL) == {"shard", "replicate"}
    assert placement.axes(Role.SPLIT) == {"tensor"}
    assert placement.axes(Role.SAME) == {"pipe"}
    assert DATA_PARALLEL.axes(Role.PARTIAL) == {"shard", "replicate"}
    assert not DATA_PARALLEL.axes(Role.SPLIT)
    assert Request("w", (1,)).placement is DATA_PARALLEL
