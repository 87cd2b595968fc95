"""What every tier does, whatever it is made of."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.tiers import DiskSettings, DiskTier, HostTier, Range, Tier, aligned_bytes
from tests.unit.tiers_support import Strict, random_bytes

SMALL = DiskSettings(buffer_count=3, buffer_size=1 << 20, threads=2, block_bytes=8192, queue_depth=4)

Maker = Callable[[str], Tier]
MAKERS: dict[str, Maker] = {
    "disk": lambda folder: DiskTier(folder, SMALL),
    "disk, strict": lambda folder: DiskTier(folder, SMALL, system=Strict()),
    "disk, one of each": lambda folder: DiskTier(
        folder,
        DiskSettings(1, 1 << 20, threads=1, block_bytes=1, queue_depth=1, pipeline_read=False, pipeline_write=False),
        system=Strict(),
    ),
    "disk, cached": lambda folder: DiskTier("/dev/shm" if Path("/dev/shm").is_dir() else folder, SMALL),
    "host": lambda folder: HostTier(),
    "host, pinned": lambda folder: HostTier(pinned=True),
}


@pytest.fixture(params=MAKERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    with MAKERS[request.param](str(tmp_path)) as made:
        yield made
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("elements", [0, 1, 511, 513, 4096, 100_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_size_comes_back_as_it_was(tier: Tier, elements: int, dtype: torch.dtype) -> None:
    data = torch.randn(elements).to(dtype)
    before, held, after = tier.reserve(5), tier.reserve(data.nbytes), tier.reserve(7)
    assert all(made.start % tier.alignment == 0 for made in (before, held, after))
    neighbours = [random_bytes(5, 1), random_bytes(7, 2)]
    for place, tensor in zip([before, after, held], [*neighbours, data], strict=True):
        tier.start_write(place, tensor).wait()
    back = torch.full_like(data, 1)
    handle = tier.start_read(held, back)
    handle.wait()
    handle.wait()
    assert torch.equal(back, data)
    for place, tensor in zip([before, after], neighbours, strict=True):
        found = torch.empty_like(tensor)
        tier.start_read(place, found).wait()
        assert torch.equal(found, tensor)
    with tier.lend(held) as lent:
        assert torch.equal(lent.view(dtype), data)


def test_what_was_never_written_is_zero(tier: Tier) -> None:
    held = tier.reserve(10_000)
    found = torch.ones(10_000, dtype=torch.uint8)
    tier.start_read(held, found).wait()
    assert not found.any()


def test_a_tensor_may_have_any_shape_and_alignment_and_need_grad(tier: Tier) -> None:
    whole = torch.randn(3 * 5000 + 1)
    odd = whole[1:].view(3, 5000).requires_grad_()
    held = tier.reserve(odd.nbytes)
    tier.start_write(held, odd).wait()
    back = aligned_bytes(odd.nbytes)
    tier.start_read(held, back).wait()
    assert torch.equal(back.view(torch.float32), whole[1:])


def test_a_read_sees_the_write_before_it_without_a_wait_between(tier: Tier) -> None:
    held = tier.reserve(50_000)
    for seed in range(5):
        data, found = random_bytes(50_000, seed), torch.empty(50_000, dtype=torch.uint8)
        tier.start_write(held, data)
        tier.start_read(held, found).wait()
        assert torch.equal(found, data)


def test_bytes_may_be_copied_on_without_a_wait_between(tier: Tier) -> None:
    first, second = tier.reserve(30_000), tier.reserve(30_000)
    data, passing, found = random_bytes(30_000), torch.empty(30_000, dtype=torch.uint8), torch.empty(30_000, dtype=torch.uint8)
    tier.start_write(first, data)
    tier.start_read(first, passing)
    tier.start_write(second, passing)
    tier.start_read(second, found).wait()
    assert torch.equal(found, data)


def test_parts_of_a_range_are_ranges(tier: Tier) -> None:
    data = random_bytes(20_001)
    held = tier.reserve(20_001)
    parts = held.split(8192)
    assert [(part.start - held.start, part.nbytes) for part in parts] == [(0, 8192), (8192, 8192), (16384, 3617)]
    for part, piece in zip(parts, data.split(8192), strict=True):
        tier.start_write(part, piece)
    found = torch.empty_like(data)
    tier.start_read(held, found).wait()
    assert torch.equal(found, data)
    tail = torch.empty(20_001 - 4096, dtype=torch.uint8)
    tier.start_read(held.part(4096, 20_001), tail).wait()
    assert torch.equal(tail, data[4096:])


@pytest.mark.parametrize(("start", "stop"), [(1, 4096), (0, 4095), (-4096, 0), (4096, 20_002), (8192, 4096)])
def test_a_part_that_is_none_is_refused(tier: Tier, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=r"no part of a range of 20,001 bytes.*multiples of 4,096"):
        tier.reserve(20_001).part(start, stop)


def test_a_stream_shows_every_range_in_order_and_writes_back(tier: Tier) -> None:
    sizes = [1, 511, 4096, 10_000, 0, 70_001, 3]
    data = [random_bytes(size, index) for index, size in enumerate(sizes)]
    ranges = [tier.reserve(size) for size in sizes]
    for held, tensor in zip(ranges, data, strict=True):
        tier.start_write(held, tensor)
    seen = []
    for index, tensor in tier.stream(ranges, write_back=True):
        assert torch.equal(tensor, data[index])
        seen.append(index)
        tensor += 1
    assert seen == list(range(len(sizes)))
    for index, tensor in tier.stream(ranges):
        assert torch.equal(tensor, data[index] + 1)
    assert [index for index, _ in tier.stream([])] == []
    for index, tensor in tier.stream(ranges[::-1], ahead=5):
        assert torch.equal(tensor, data[::-1][index] + 1)


def test_bytes_are_counted_without_padding(tier: Tier) -> None:
    ranges = [tier.reserve(size) for size in (1, 511, 100_003)]
    for held in ranges:
        tier.start_write(held, random_bytes(held.nbytes))
    for _ in tier.stream(ranges, write_back=True):
        pass
    with tier.lend(ranges[0]):
        pass
    tier.flush()
    stats = tier.stats()
    assert (stats.writes, stats.bytes_written) == (6, 2 * 100_515)
    assert (stats.reads, stats.bytes_read) == (4, 100_515 + 1)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3), torch.zeros(2, 4)[:, :2], torch.zeros(4, device="meta"), torch.eye(2).to_sparse()],
    ids=["too short", "with gaps", "not in memory", "not dense"],
)
def test_a_tensor_that_does_not_fit_is_refused(tier: Tier, tensor: torch.Tensor) -> None:
    held = tier.reserve(16)
    for start in (tier.start_read, tier.start_write):
        with pytest.raises(UsageError, match="contiguous tensor of 16 bytes in host memory, found"):
            start(held, tensor)


def test_misuse_is_refused_by_name(tier: Tier) -> None:
    other = HostTier()
    foreign = other.reserve(4)
    for call in (lambda: tier.lend(foreign), lambda: tier.stream([foreign]), lambda: tier.start_read(foreign, torch.zeros(1))):
        with pytest.raises(UsageError, match=r"Range\(start=0, nbytes=4, alignment=4096\) belongs to another tier"):
            call()
    with pytest.raises(UsageError, match="negative"):
        tier.reserve(-1)
    with pytest.raises(UsageError, match="cannot be cut into parts of 4,095 bytes: expected at least 4,096"):
        tier.reserve(9000).split(4095)


def test_a_loan_ends(tier: Tier) -> None:
    loan = tier.lend(tier.reserve(100))
    loan.wait()
    assert loan.tensor.shape == (100,)
    loan.give()
    loan.give()
    with pytest.raises(UsageError, match="given back"):
        _ = loan.tensor


def test_a_closed_tier_says_so(tier: Tier) -> None:
    held, tensor = tier.reserve(8), torch.zeros(8, dtype=torch.uint8)
    stream = tier.stream([held])
    tier.close()
    tier.close()
    calls: list[Callable[[], object]] = [
        lambda: tier.reserve(1),
        lambda: tier.start_read(held, tensor),
        lambda: tier.start_write(held, tensor),
        lambda: tier.lend(held),
        lambda: next(stream),
        tier.flush,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="this tier is closed"):
            call()
    assert tier.stats().reads == 0


# A model in memory: each range is a bytearray, and reads are compared at the end, so that nothing is waited for in between.

actions = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 30_000), st.just(0)),
    st.tuples(st.just("write"), st.integers(0, 7), st.integers(0, 3)),
    st.tuples(st.just("read"), st.integers(0, 7), st.integers(0, 3)),
    st.tuples(st.just("lend"), st.integers(0, 7), st.integers(0, 3)),
    st.tuples(st.just("stream"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("flush"), st.just(0), st.just(0)),
)


class Model:
    """A tier and what should be in it."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.held: list[tuple[Range, bytearray]] = []
        self.pending: list[tuple[torch.Tensor, bytes]] = []
        self.seed = 0

    def do(self, action: str, which: int, how: int) -> None:
        if action == "reserve":
            self.held.append((self.tier.reserve(which), bytearray(which)))
        elif action == "stream":
            self.stream(which, bool(how))
        elif action == "flush":
            self.tier.flush()
        elif self.held:
            held, model = self.held[which % len(self.held)]
            start = min(how * 4096, held.nbytes - held.nbytes % 4096)
            self.move(action, held.part(start, held.nbytes), model, start)

    def move(self, action: str, part: Range, model: bytearray, start: int) -> None:
        self.seed += 1
        if action == "lend":
            with self.tier.lend(part) as lent:
                assert bytes(lent.numpy()) == model[start:]
        elif action == "write":
            data = random_bytes(part.nbytes, self.seed)
            self.tier.start_write(part, data)
            model[start:] = bytes(data.numpy())
        else:
            found = torch.empty(part.nbytes, dtype=torch.uint8)
            self.tier.start_read(part, found)
            self.pending.append((found, bytes(model[start:])))

    def stream(self, ahead: int, write_back: bool) -> None:
        for index, tensor in self.tier.stream([held for held, _ in self.held], ahead=ahead, write_back=write_back):
            model = self.held[index][1]
            assert bytes(tensor.numpy()) == model
            if write_back:
                tensor.fill_(index + ahead)
                model[:] = bytes([index + ahead]) * len(model)

    def check(self) -> None:
        self.tier.flush()
        for found, expected in self.pending:
            assert bytes(found.numpy()) == expected


@pytest.mark.parametrize("kind", ["disk", "disk, strict", "disk, one of each", "host"])
@given(steps=st.lists(actions, max_size=25))
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_calls_gives_what_memory_would(kind: str, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, MAKERS[kind](folder) as tier:
        model = Model(tier)
        for step in steps:
            model.do(*step)
        model.check()
