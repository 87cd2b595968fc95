"""The guard's decisions, between threads that stand for ranks and with a channel that is a dictionary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from shardwise.comm.channel import ChannelGone
from shardwise.comm.events import Event
from shardwise.comm.guard import Guard
from shardwise.comm.lanes import Lane
from shardwise.comm.reports import Report, tell_apart
from shardwise.comm.transport import FINISHED
from shardwise.errors import DivergenceError, PeerLostError, ShardwiseError, StallError, UsageError
from shardwise.mesh import Axis


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.comm.guard._GRACE_S", 0.5)
    monkeypatch.setattr("shardwise.comm.guard._DEATH_S", 0.2)


A, B, C = (Event("forward", "all_gather", f"layers.{index}", 8) for index in range(3))


class Board:
    """What a store is to the ranks of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.said: dict[int, str] = {}
        self.counters: dict[str, int] = {}
        self.values: dict[str, bytes] = {}
        self.dead: set[int] = set()
        self.messages = 0
        self.open = True


class BoardChannel:
    """One rank's way to the board."""

    host = 0

    def __init__(self, board: Board) -> None:
        self.board = board
        self.closed = False

    def _use(self) -> Board:
        if not self.board.open:
            raise ChannelGone("closed")
        self.board.messages += 1
        return self.board

    def tell(self, rank: int, message: str) -> None:
        self._use().said[rank] = message

    def hear(self, ranks: Iterable[int]) -> list[str]:
        return [self._use().said.get(rank, "") for rank in ranks]

    @property
    def ballot(self) -> BoardChannel:
        return self

    def add(self, key: str, amount: int) -> int:
        board = self._use()
        with board.lock:
            board.counters[key] = board.counters.get(key, 0) + amount
            return board.counters[key]

    def put(self, key: str, value: bytes) -> None:
        self._use().values[key] = value

    def fetch(self, key: str) -> bytes:
        return self._use().values[key]

    def forget(self, key: str) -> None:
        self._use().counters.pop(key, None)
        self.board.values.pop(key, None)

    def gone(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.board.dead]

    def close(self) -> None:
        """Other ranks still use the board."""
        self.closed = True


class Never:
    """A flight that lands only when told to."""

    def __init__(self) -> None:
        self.landed = threading.Event()

    def poll(self, seconds: float) -> bool:
        return self.landed.wait(seconds)


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def poll(self, seconds: float) -> bool:
        raise self.error


class Crowd:
    """Some ranks and their guards."""

    def __init__(self, size: int, watchdog_s: float = 20.0) -> None:
        self.board = Board()
        self.failures: list[int] = []
        self.axes = [Axis("data", tuple(range(size)), rank) for rank in range(size)]
        self.guards = [
            Guard(
                axis,
                BoardChannel(self.board),
                watchdog_s,
                tick_s=0.05,
                on_failure=lambda rank=axis.rank: self.failures.append(rank),
            )
            for axis in self.axes
        ]

    def run(self, *bodies: Callable[[Guard, Lane], object]) -> list[object]:
        """Run one body per rank, side by side; what each returned or raised."""
        results: list[object] = [None] * len(bodies)

        def one(rank: int) -> None:
            guard = self.guards[rank]
            try:
                results[rank] = bodies[rank](guard, guard.lane(self.axes[rank]))
            except ShardwiseError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank hangs"
        return results


def asks(*events: Event) -> Callable[[Guard, Lane], object]:
    """Go through the events, each finishing at once."""

    def body(guard: Guard, lane: Lane) -> list[int]:
        return [guard.before(lane, event) for event in events]

    return body


def asks_and_waits(*events: Event) -> Callable[[Guard, Lane], object]:
    """Go through the events, and wait for the last for ever."""

    def body(guard: Guard, lane: Lane) -> None:
        for event in events:
            sequence = guard.before(lane, event)
        guard.watch(Never(), lane, sequence)

    return body


def test_ranks_that_agree_go_on_and_soon_without_a_message() -> None:
    crowd = Crowd(3)
    assert crowd.run(*[asks(*[A, B, C] * 2)] * 3) == [[0, 1, 2, 3, 4, 5]] * 3
    before = crowd.board.messages
    crowd.run(*[asks(*[A, B, C] * 20)] * 3)
    assert crowd.board.messages == before
    assert len(crowd.board.counters) <= 1  # what was agreed on is not kept


def test_different_first_events_are_an_error_on_every_rank() -> None:
    crowd = Crowd(3)
    found = crowd.run(asks(A), asks(B), asks(A))
    for error in found:
        assert isinstance(error, DivergenceError)
        assert "ranks 0, 2: asks for 'layers.0' (all_gather, phase 'forward'); rank 1: asks for 'layers.1'" in str(error)
        assert "(number 0 on this axis)" in str(error)
        assert "leaf modules" in str(error)
    assert sorted(crowd.failures) == [0, 1, 2]


@pytest.mark.parametrize("phases", [("forward", "backward")])
def test_a_different_phase_is_a_difference(phases: tuple[str, str]) -> None:
    one, other = (A._replace(phase=phase) for phase in phases)
    found = Crowd(2).run(asks(one), asks(other))
    assert all(isinstance(error, DivergenceError) and "phase 'backward'" in str(error) for error in found)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_a_known_path_finds_those_that_stay_on_it(size: int) -> None:
    crowd = Crowd(size)
    loop = [A, B, C]
    crowd.run(*[asks(*loop * 3)] * size)
    found = crowd.run(asks_and_waits(A, B), asks(A, C), *[asks_and_waits(A, B)] * (size - 2))
    for error in found:
        assert isinstance(error, DivergenceError)
        assert "rank 1: asks for 'layers.2'" in str(error)
        assert "'layers.1'" in str(error)
        assert "(number 10 on this axis)" in str(error)


def test_a_rank_that_skips_one_is_found_though_the_next_is_equal() -> None:
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, C) for _ in range(2)])
    found = crowd.run(asks_and_waits(A, B, C), asks_and_waits(A, C))
    assert all(isinstance(error, DivergenceError) for error in found)
    assert "rank 0: asks for 'layers.1'" in str(found[0])


def test_a_rank_one_step_further_waits_for_the_others() -> None:
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, C) for _ in range(2)])

    def late(guard: Guard, lane: Lane) -> object:
        threading.Event().wait(0.3)
        return asks(A, B, A)(guard, lane)

    assert crowd.run(asks(A, B, A), late) == [[3, 4, 5]] * 2


def test_a_rank_that_closed_is_missed_by_name() -> None:
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, A)] * 2)
    crowd.guards[1].close()
    [error] = crowd.run(asks_and_waits(B))
    assert isinstance(error, DivergenceError)
    assert "rank 1 has closed its engine while others go on: found rank 0 waits for 'layers.1'" in str(error)


def test_a_rank_that_closed_may_say_when() -> None:
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, A)] * 2)
    crowd.guards[1].close("after 3 steps")
    [error] = crowd.run(asks_and_waits(B))
    assert isinstance(error, DivergenceError)
    assert "rank 1 has closed its engine after 3 steps while others go on: found rank 0 waits for 'layers.1'" in str(error)
    assert "run the same number of steps on every rank" in str(error)


def test_after_an_error_every_call_says_what_it_was() -> None:
    crowd = Crowd(2)
    crowd.run(asks(A), asks(B))
    lane = crowd.guards[0].lane(crowd.axes[0])
    for call in (
        lambda: crowd.guards[0].before(lane, A),
        lambda: crowd.guards[0].watch(FINISHED, lane, 0),
        lambda: crowd.guards[0].exchange(lane, A, b""),
    ):
        with pytest.raises(UsageError, match="cannot be used again: found the reason: the ranks of axis 'data' ask for"):
            call()
    crowd.guards[0].close()


def test_the_watchdog_says_what_each_rank_was_last_seen_doing() -> None:
    crowd = Crowd(3, watchdog_s=0.5)
    crowd.run(*[asks(A, B, A)] * 3)
    [error] = crowd.run(asks_and_waits(B))
    assert isinstance(error, StallError)
    assert "'layers.1' (all_gather, phase 'forward') on axis 'data' did not finish within 0.5 s" in str(error)
    assert "expected rank 1, 2 to take part" in str(error)
    assert "rank 0: waits for 'layers.1'" in str(error)
    assert "ranks 1, 2: asks for 'layers.1'" not in str(error)


def test_the_watchdog_also_ends_a_question() -> None:
    crowd = Crowd(2, watchdog_s=0.3)
    [error] = crowd.run(asks(A))
    assert isinstance(error, StallError)
    assert "rank 1: has started nothing yet" in str(error)


def test_others_stop_when_one_has_stopped() -> None:
    crowd = Crowd(2, watchdog_s=0.3)
    [first] = crowd.run(asks(A))
    assert isinstance(first, StallError)
    guard = crowd.guards[1]
    with pytest.raises(StallError, match=r"rank 0 has stopped: found 'layers.0'"):
        guard.watch(Never(), guard.lane(crowd.axes[1]), 0)


def test_a_dead_process_is_named() -> None:
    crowd = Crowd(2)
    crowd.board.dead.add(1)
    [error] = crowd.run(asks(A))
    assert isinstance(error, PeerLostError)
    assert "the process of rank 1 has ended: found rank 0 waits for 'layers.0'" in str(error)
    assert "; rank 1 had started nothing yet. look at the output of that rank for the reason; if it ended" in str(error)


def test_a_dead_process_was_last_seen_somewhere() -> None:
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, A)] * 2)
    crowd.board.dead.add(1)
    [error] = crowd.run(asks_and_waits(B))
    assert isinstance(error, PeerLostError)
    assert "; rank 1 was last seen after 'layers." in str(error)


def test_a_broken_connection_names_the_collective() -> None:
    crowd = Crowd(2)
    crowd.run(asks(A), asks(A))
    guard = crowd.guards[0]
    with pytest.raises(PeerLostError, match=r"broke during 'layers.0' \(all_gather.*found Connection closed by peer"):
        guard.watch(Broken(ConnectionError("Connection closed by peer")), guard.lane(crowd.axes[0]), 0)


def test_the_time_limit_of_the_group_is_a_stall() -> None:
    crowd = Crowd(2)
    crowd.run(asks(A), asks(A))
    guard = crowd.guards[0]
    with pytest.raises(StallError, match="did not finish within the time limit of the process group"):
        guard.watch(Broken(TimeoutError()), guard.lane(crowd.axes[0]), 0)


def test_the_host_leaves_when_the_others_have_read_what_they_agreed_on() -> None:
    crowd = Crowd(2)
    crowd.run(asks(A), asks(A))
    report = Report.parse(1, crowd.board.said[1])
    crowd.board.said[1] = Report(1, "asks", lane="0-1", sequence=0, label=A.label).message()
    host = threading.Thread(target=crowd.guards[0].leave)
    host.start()
    host.join(0.2)
    assert host.is_alive()
    crowd.board.said[1] = report.message()
    host.join(5)
    assert not host.is_alive()
    assert crowd.board.said[0] != ""


def test_without_the_channel_a_rank_is_alone() -> None:
    crowd = Crowd(2)
    crowd.board.open = False
    [error] = crowd.run(asks(A))
    assert isinstance(error, PeerLostError)
    assert "rank 0 has left, or cannot be reached" in str(error)


def test_objects_are_exchanged_in_axis_order_and_not_kept() -> None:
    crowd = Crowd(3)

    def body(guard: Guard, lane: Lane) -> object:
        first = guard.exchange(lane, A, b"from %d" % lane.axis.index)
        second = guard.exchange(lane, A, b"")
        return first, second

    assert crowd.run(body, body, body) == [([b"from 0", b"from 1", b"from 2"], [b"", b"", b""])] * 3
    assert all(not value for value in crowd.board.values.values())


def test_agreement_holds_a_rank_back_until_all_have_come() -> None:
    crowd = Crowd(2)
    order: list[str] = []

    def body(name: str, pause: float) -> Callable[[Guard, Lane], object]:
        def run(guard: Guard, lane: Lane) -> None:
            for _ in range(3):
                threading.Event().wait(pause)
                order.append(f"{name} comes")
                guard.before(lane, A, agree=True)
                order.append(f"{name} goes")
                guard.before(lane, B, agree=True)

        return run

    crowd.run(body("slow", 0.1), body("quick", 0.0))
    for start in range(0, 12, 4):
        assert sorted(order[start : start + 2]) == ["quick comes", "slow comes"]


def test_two_axes_in_different_orders_are_found() -> None:
    crowd = Crowd(4)
    rows = [Axis("row", (0, 1), rank) for rank in (0, 1)]

    def body(rank: int, first: Axis, second: Axis) -> Callable[[Guard, Lane], object]:
        def run(guard: Guard, lane: Lane) -> None:
            for axis, event in ((first, A), (second, B)):
                on = guard.lane(axis)
                guard.watch(Never(), on, guard.before(on, event))

        return run

    whole = crowd.axes
    found = crowd.run(body(0, rows[0], whole[0]), body(1, whole[1], rows[1]))
    for error in found:
        assert isinstance(error, DivergenceError)
    assert "collectives on two axes in different orders" in str(found[0])


def test_an_axis_outside_the_data_axis_is_refused() -> None:
    guard = Crowd(2).guards[0]
    with pytest.raises(UsageError, match="axis 'other' has ranks outside axis 'data'"):
        guard.lane(Axis("other", (0, 5), 0))


def test_a_running_rank_looks_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.comm.guard._LOOK_S", 0.0)
    crowd = Crowd(2)
    crowd.run(*[asks(A, B, A, B)] * 2)
    crowd.board.said[1] = Report(1, "failed", failure="lost", text="its reason").message()
    [error] = crowd.run(asks(A))
    assert isinstance(error, PeerLostError)
    assert "rank 1 has stopped: found its reason" in str(error)


def test_reports_travel_and_read_well() -> None:
    report = Report(3, "runs", time.time() - 12.2, "0-3", 5, "'x' (barrier)", {"0-3": 6})
    again = Report.parse(3, report.message())
    assert again == report
    assert again.passed("0-3", 5)
    assert not again.passed("0-3", 6)
    assert not again.passed("other", 0)
    assert again.words(time.time()) == "was last seen after 'x' (barrier), 12 s ago"
    assert again.asking("0-3", 5).words(0.0) == "asks for 'x' (barrier)", "what it asked for at that number, wherever it is now"
    assert again.asking("0-3", 4) == again.asking("other", 5) == again
    assert replace(again, state="closed").asking("0-3", 5).state == "closed"
    many = [Report(rank, "asks", label=f"'{rank}'") for rank in range(12)]
    assert tell_apart(many, 0.0).endswith("rank 7: asks for '7'; and 4 more")
    same = [Report(rank, "closed") for rank in range(20)]
    assert tell_apart(same, 0.0) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: has closed its engine"
    ended = Report(1, "closed", text="after 3 steps")
    assert tell_apart([ended, Report(0, "waits", label="'x'")], 0.0) == (
        "rank 1: has closed its engine after 3 steps; rank 0: waits for 'x'"
    )
