"""The guard against ranks that ask for different collectives.

Owns the agreement on what comes next, the watch over what does not finish, and the errors that say which rank did what.
Refuses to know tensors and process groups: it sees events and flights.

How it works. Every rank keeps the history of events of each lane (the ranks of one axis) and guesses the next one from it
(`Follower`). A rank whose next event is the guessed one goes on at once, without any message. A rank whose event is another
one asks: it says what it wants, counts itself in at that number of the lane, and waits for all ranks of the lane. If all of
them want the same, the event enters the history and everyone goes on. As ranks of equal history guess alike, at most one event
can pass unasked, so a rank that deviates always knows it, and asks before it starts anything. The ranks that did not deviate
have gone on and now wait inside that collective; they look up once a second, find somebody asking about a number that they
passed with another event, and answer. Then every rank raises, with what each of them asked for.

Where the link itself compares (`Link.checks`), there is nothing to guess and to ask: every operation carries a digest of the
whole history, and a rank that finds another digest raises the alarm. Such a history may hold events that need no message.

Several engines may use one process group, each with its own guard and channel. They look at each other's channels (`Crowd`).
Where what they send shares one order, their guards also share one history (`Stream`): ranks that use two engines in different
orders find each other as ranks do that use two modules in different orders. Where each has a link of its own, two ranks may
wait for each other, each in another engine; that is found by what they wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from shardwise.comm.channel import Ballot, Channel, ChannelGone
from shardwise.comm.events import Event
from shardwise.comm.lanes import Crowd, Lane, Stream
from shardwise.comm.reports import Report, first_difference, tell_apart
from shardwise.comm.transport import Flight, Mismatch
from shardwise.errors import DivergenceError, PeerLostError, ShardwiseError, StallError, UsageError, explain
from shardwise.mesh import Axis

__all__ = ["Guard"]

_ERRORS: dict[str, type[ShardwiseError]] = {"diverged": DivergenceError, "stalled": StallError, "lost": PeerLostError}
_GRACE_S = 3.0  # to hear the other ranks out before an error is raised, and to let them hear this one
_DEATH_S = 1.0  # between the end of a process's connections and the end of the process
_LOOK_S = 2.0  # between looks at the other ranks while this one is not waiting
_COUNT = 1 << 48  # a counter holds the number of ranks above this bit and the sum of their digests below: 32767 ranks
_SAME_ORDER = (
    "run the same number of steps, and the same modules in the same order, on every rank, "
    "or declare those that may differ as leaf modules"
)
_SAME_ENGINES = "call the engines, their losses' backward and their steps in the same order on every rank"
_SAME_STEPS = "run the same number of steps on every rank: a rank with fewer batches must not leave the loop earlier"
_SEE_OUTPUT = "look at the output of that rank for the reason"
_SEE_END = f"{_SEE_OUTPUT}; if it ended in good order, give every rank the same number of steps"


class Guard:
    """Watches the collectives of one `Comm`.

    Args:
        axis: the ranks it may meet.
        channel: how to talk to them.
        watchdog_s: seconds after which a collective that does not finish is an error.
        tick_s: seconds between looks at the other ranks while waiting.
        on_failure: called once, before the first error is raised.
        stream: what the ranks of `axis` ask for; one of its own by default.
        crowd: the guards that may use the same ranks.
    """

    def __init__(
        self,
        axis: Axis,
        channel: Channel,
        watchdog_s: float,
        *,
        tick_s: float = 1.0,
        on_failure: Callable[[], None] = lambda: None,
        stream: Stream | None = None,
        crowd: Crowd | None = None,
    ) -> None:
        self.failure = ""
        self._stream = stream or Stream()
        self._crowd = crowd or Crowd()
        self._crowd.guards.add(self)
        self._axis = axis
        self._rank = axis.rank
        self._channel = channel
        self._watchdog_s = watchdog_s
        self._tick_s = tick_s + axis.size / 128  # the reports of n ranks are read by n ranks
        self._on_failure = on_failure
        self._lanes: dict[tuple[int, ...], Lane] = {}
        self._by_key: dict[str, Lane] = {}
        self._looked = time.monotonic()
        self._reach(lambda: self._tell(Report(self._rank, "runs")))

    def lane(self, axis: Axis) -> Lane:
        """The lane of an axis; axes of the same ranks share one."""
        if axis.ranks not in self._lanes:
            if not set(axis.ranks) <= set(self._axis.ranks):
                raise UsageError(
                    explain(
                        f"axis {axis.name!r} has ranks outside axis {self._axis.name!r}",
                        expected=f"some of {self._axis.ranks}",
                        found=f"{axis.ranks}",
                    )
                )
            made = Lane(axis, self._stream if axis.ranks == self._axis.ranks else Stream())
            self._lanes[axis.ranks] = self._by_key[made.key] = made
        return self._lanes[axis.ranks]

    def mark(self) -> None:
        """Say where this rank is, if saying costs little."""
        if self._channel.host < 0 and not self.failure:
            for lane in self._by_key.values():
                self._say(lane, lane.follower.count - 1, "runs")

    @property
    def can_agree(self) -> bool:
        """Whether ranks can agree before they start anything; without it, all links must check by themselves."""
        return self._channel.ballot is not None

    def before(self, lane: Lane, event: Event, *, agree: bool = False) -> int:
        """Return once this rank may start `event`; the result is the event's number on the lane.

        Args:
            lane: the ranks that take part.
            event: what this rank asks for.
            agree: wait for the other ranks even if the event is the expected one, unless the link checks by itself. For
                whatever can finish on one rank before the others have come.

        Raises:
            DivergenceError: the ranks ask for different events.
            StallError: another rank did not come in time.
            PeerLostError: another rank is gone.
            UsageError: this guard has raised before, or is closed.
        """
        if self.failure:
            self._refuse()
        sequence = lane.follower.count
        if lane.checked:
            lane.record(event)
        elif agree or not lane.follower.follow(event):
            self._reach(lambda: self._agree(lane, event))
            self._reach(lambda: self._say(lane, sequence, "runs"))
            return sequence
        if time.monotonic() - self._looked > _LOOK_S:
            self._reach(lambda: self._look(lane, sequence, "runs"))
        return sequence

    def note(self, lane: Lane, event: Event) -> None:
        """Something all ranks do alike that needs no message: the next operation finds out whether they did.

        Raises:
            UsageError: this guard has raised before, or is closed.
        """
        if self.failure:
            self._refuse()
        if lane.checked:
            lane.record(event)

    def watch(self, flight: Flight, lane: Lane, sequence: int) -> None:
        """Return once a flight has landed; errors as for `before`."""
        if self.failure:
            self._refuse()
        started = time.monotonic()
        patience = self._watchdog_s
        try:
            while not flight.poll(min(self._tick_s, patience)):
                self._reach(lambda: self._look(lane, sequence, "waits"))
                patience = started + self._watchdog_s - time.monotonic()
                if patience <= 0:
                    self._stalled(lane, sequence, f"{self._watchdog_s:g} s")
        except ConnectionError as error:
            self.lost(lane, sequence, error)
        except TimeoutError:
            self._stalled(lane, sequence, "the time limit of the process group")
        except Mismatch as mismatch:
            self.diverged(lane, mismatch.sequence)
        lane.verified = max(lane.verified, sequence)

    def exchange(self, lane: Lane, event: Event, payload: bytes) -> list[bytes]:
        """Every rank's payload, in axis order; errors as for `before`."""
        if self.failure:
            self._refuse()
        keys = [f"object/{lane.key}/{lane.follower.count}/{index}" for index in range(lane.axis.size)]
        mine = keys[lane.axis.index]
        payloads: list[bytes] = []

        def meet() -> None:
            self._ballot.put(mine, payload)
            self._agree(lane, event)
            payloads.extend(self._ballot.fetch(key) for key in keys)
            self._say(lane, lane.agreed, "runs")

        self._reach(meet)
        lane.litter.append(mine)
        return payloads

    def lost(self, lane: Lane, sequence: int, error: Exception) -> NoReturn:
        """A collective broke. Raises PeerLostError, or what the peer said before it went."""
        limit = time.monotonic() + _DEATH_S
        while time.monotonic() < limit:
            self._reach(lambda: self._look(lane, sequence, "waits"))
            time.sleep(0.05)
        problem = f"the connection to another rank broke during {lane.label_at(sequence)}"
        self._fail("lost", problem, found=str(error), do=_SEE_OUTPUT)

    def close(self, note: str = "") -> None:
        """Tell the others that this rank is done, and leave the channel. Never raises, and never waits long.

        Args:
            note: when it was done ("after 12 steps"), for the errors of ranks that are not.
        """
        if not self.failure:
            try:
                self._tell(Report(self._rank, "closed", text=note))
                self._linger(lambda report: report.state in ("failed", "closed"))
            except ChannelGone:
                pass  # the others are done as well, or dead; neither matters to one who leaves
        self.failure = self.failure or "it was closed"
        self._crowd.guards.discard(self)
        self._channel.close()

    def leave(self) -> None:
        """Leave the channel without a word, as soon as no rank is still reading what was agreed on. Never raises."""
        self._crowd.guards.discard(self)
        try:
            if not self.failure:
                self.mark()
                self._linger(lambda report: report.state != "silent" and self._is_through(report))
        except ChannelGone:
            pass
        self._channel.close()

    @property
    def _ballot(self) -> Ballot:
        ballot = self._channel.ballot
        assert ballot is not None, "every lane is checked by its link"
        return ballot

    # What follows runs only when there is something to ask, to wait for, or to complain about.

    def ended(self) -> list[int]:
        """Other ranks whose process is known to have ended. May be asked from any thread."""
        return self._channel.gone(self._axis.ranks)

    @contextmanager
    def patient(self, seconds: float) -> Generator[None]:
        """Allow so many seconds more, where ranks are known to have long work between collectives."""
        self._watchdog_s += seconds
        try:
            yield
        finally:
            self._watchdog_s -= seconds

    def _agree(self, lane: Lane, event: Event) -> None:
        """Ask the ranks of the lane; return when all ask for the same."""
        sequence, size = lane.follower.count, lane.axis.size
        key, amount = f"count/{lane.key}/{sequence}", _COUNT | event.digest
        lane.stream.asking = event
        self._say(lane, sequence, "asks")
        started = looked = time.monotonic()
        pause = 0.0
        total = self._ballot.add(key, amount)
        while total // _COUNT < size:
            time.sleep(pause)
            pause = min(2 * pause + 0.0001, 0.01)
            now = time.monotonic()
            if now - looked > self._tick_s:
                self._look(lane, sequence, "asks")
                looked = now
            if now - started > self._watchdog_s:
                self._stalled(lane, sequence, f"{self._watchdog_s:g} s")
            total = self._ballot.add(key, 0)
        if total != size * amount:
            self.diverged(lane, sequence)
        lane.stream.asking = None
        lane.agreed = sequence
        lane.follower.append(event)
        # All ranks have come this far, so none will look again at what an earlier agreement left.
        for old in lane.litter:
            self._ballot.forget(old)
        lane.litter = [key] if lane.axis.index == 0 else []

    def _look(self, lane: Lane, sequence: int, state: str) -> None:
        """Say what this rank is doing, and raise if what the others say means that it cannot go on."""
        # Neighbours first: what is said there of the past is then never older than what is said here of the present.
        for other in self._neighbours():
            with suppress(ChannelGone):  # the engine it belongs to is closed elsewhere, and is next to be closed here
                other._glance(sequence if other._shares(lane) else None)
        self._say(lane, sequence, state)
        self._looked = time.monotonic()
        crossed = self._find_crossed() if state != "runs" else {}
        reports = self._hear(lane.axis)
        self._compare(reports)
        gone = self._channel.gone(report.rank for report in reports)
        doing = f"rank {self._rank} {'was last in' if state == 'runs' else 'waits for'} {lane.label_at(sequence)}"
        for report in reports:
            if report.rank in gone and report.state != "closed":
                found = f"{doing}; rank {report.rank} {report.last_seen(time.time())}"
                self._fail("lost", f"the process of rank {report.rank} has ended", found=found, do=_SEE_END)
            if state == "runs" or report.passed(lane.key, sequence):
                continue
            if report.state == "closed":
                problem = " ".join(
                    filter(None, [f"rank {report.rank} has closed its engine", report.text, "while others go on"])
                )
                self._fail("diverged", problem, found=doing, do=_SAME_STEPS)
            if report.rank in crossed:
                found = f"{doing}; rank {report.rank} waits for {crossed[report.rank]}, of another engine"
                self._fail("diverged", "ranks use two engines in different orders", found=found, do=_SAME_ENGINES)
            if self._is_crossed(lane, report):
                found = f"{doing}; rank {report.rank} waits for {report.label}"
                self._fail("diverged", "ranks started collectives on two axes in different orders", found=found)

    def _compare(self, reports: list[Report]) -> None:
        """Raise if a rank has failed, or says that it asked for something else than this one did."""
        for report in reports:
            mine = self._by_key.get(report.lane)
            label = mine.label_at(report.sequence) if mine else ""
            if mine and label and report.label and label != report.label:
                self.diverged(mine, report.sequence)
        for report in reports:
            if report.state == "failed":
                self._fail(report.failure, f"rank {report.rank} has stopped", found=report.text)

    def _neighbours(self) -> list[Guard]:
        """The other guards of the crowd that still watch."""
        return [guard for guard in list(self._crowd.guards) if guard is not self and not guard.failure]

    def _companions(self) -> list[Guard]:
        """Those of them that watch the same stream: what ends it for one ends it for all."""
        return [guard for guard in self._neighbours() if guard._shares(self.lane(self._axis))]

    def _shares(self, lane: Lane) -> bool:
        """Whether what goes along that lane shares its order with what is watched here."""
        return lane.stream is self._stream

    def _glance(self, sequence: int | None) -> None:
        """Look for a neighbour: say what came through it at that number, or last, and hear whether ranks here disagree."""
        lane = self.lane(self._axis)
        self._say(lane, lane.follower.count - 1 if sequence is None else sequence, "runs")
        self._compare(self._hear(self._axis))

    def _find_crossed(self) -> dict[int, str]:
        """What other ranks wait for in other engines and this one has not come to: they cannot come here before it has."""
        found: dict[int, str] = {}
        for other in self._neighbours():
            with suppress(ChannelGone):
                for report in other._hear(other._axis):
                    theirs = other._by_key.get(report.lane)
                    reached = theirs.follower.count if theirs else 0
                    mine = str(self._rank) in report.lane.split("-")
                    if report.state in ("waits", "asks") and mine and reached <= report.sequence:
                        found[report.rank] = report.label
        return found

    def _is_crossed(self, lane: Lane, report: Report) -> bool:
        """Whether that rank waits for this one on another lane, where this one has not come so far: neither could go on."""
        if report.state not in ("waits", "asks") or report.lane == lane.key:
            return False
        other = self._by_key.get(report.lane)
        reached = other.follower.count if other else 0
        return str(self._rank) in report.lane.split("-") and reached <= report.sequence

    def diverged(self, lane: Lane, sequence: int) -> NoReturn:
        """Raise DivergenceError, with what every rank of the lane asked for."""
        answer = self._answer(lane, sequence)
        self._tell_all(answer, self._companions())
        limit = time.monotonic() + _GRACE_S
        while True:
            others = self._hear(lane.axis)
            if all(each.answers(lane.key, sequence) or each.state == "closed" for each in others) or time.monotonic() > limit:
                break
            time.sleep(0.01)
        reports = sorted([answer, *others], key=lambda each: each.rank)
        if lane.checked:
            sequence, reports = first_difference(reports, sequence)
        reports = [each.asking(lane.key, sequence) for each in reports]
        self._fail(
            "diverged",
            f"the ranks of axis {lane.axis.name!r} ask for different collectives (number {sequence} on this axis)",
            expected="the same one on every rank",
            found=tell_apart(reports, time.time()),
            do=_SAME_ORDER,
            about=answer,
        )

    def _answer(self, lane: Lane, sequence: int) -> Report:
        trail = lane.trail() if lane.checked else []
        begins = lane.follower.count - len(trail)
        return Report(self._rank, "answers", 0.0, lane.key, sequence, lane.label_at(sequence), trail=trail, begins=begins)

    def _stalled(self, lane: Lane, sequence: int, limit: str) -> NoReturn:
        others: list[Report] = []
        self._reach(lambda: others.extend(self._hear(lane.axis)))
        own = Report(self._rank, "waits", label=lane.label_at(sequence))
        missing = [str(each.rank) for each in others if not each.passed(lane.key, sequence)]
        self._fail(
            "stalled",
            f"{own.label} on axis {lane.axis.name!r} did not finish within {limit}",
            expected=f"rank {', '.join(missing)} to take part" if missing else "",
            found=tell_apart([own, *others], time.time()),
            do="see what the rank that is missing was doing (did it leave the training loop early?), or allow more time",
        )

    def _fail(
        self,
        kind: str,
        problem: str,
        *,
        expected: str = "",
        found: str = "",
        do: str = "",
        about: Report | None = None,
    ) -> NoReturn:
        """Remember, tell the others, raise."""
        failure = explain(problem, expected=expected, found=found.rstrip("."), do=do)
        report = replace(about or Report(self._rank), state="failed", failure=kind, text=failure)
        companions = self._companions()
        for guard in (self, *companions):  # what is in flight in the process group ends it for all that use it
            guard.failure = failure
            guard._on_failure()
        try:
            self._tell_all(report, companions)
            self._linger(lambda report: report.state in ("failed", "closed"))
        except ChannelGone:
            pass  # nobody is left to be told
        raise _ERRORS[kind](self.failure) from None  # a backend's own error and stack say nothing that is not said here

    def _refuse(self) -> NoReturn:
        raise UsageError(
            explain(
                "communication has ended and cannot be used again",
                found=f"the reason: {self.failure.rstrip('.')}",
                do="end the job, or destroy the engine and the process group on every rank and start anew",
            )
        )

    def _reach(self, action: Callable[[], None]) -> None:
        """Do something that needs the side channel; without it this rank is as good as alone."""
        try:
            action()
        except ChannelGone as gone:
            host = self._channel.host
            limit = time.monotonic() + _DEATH_S
            while not (ended := bool(self._channel.gone([host]))) and time.monotonic() < limit:
                time.sleep(0.01)
            problem = f"the process of rank {host} has ended" if ended else f"rank {host} has left, or cannot be reached"
            self._fail("lost", problem, found=f"its side channel is closed ({gone})", do=_SEE_END)

    def _say(self, lane: Lane, sequence: int, state: str) -> None:
        self._tell(Report(self._rank, state, lane=lane.key, sequence=sequence, label=lane.label_at(sequence)))

    def _tell(self, report: Report) -> None:
        report.moment = time.time()
        report.reached = {lane.key: lane.follower.count for lane in self._by_key.values()}
        self._channel.tell(self._rank, report.message())

    def _tell_all(self, report: Report, companions: list[Guard]) -> None:
        """Tell the ranks through the companions' channels too, as they may be listening there."""
        for guard in companions:
            with suppress(ChannelGone):
                guard._tell(replace(report))
        self._tell(report)

    def _hear(self, axis: Axis) -> list[Report]:
        """The reports of the other ranks of an axis."""
        others = [rank for rank in axis.ranks if rank != self._rank]
        return [Report.parse(rank, text) for rank, text in zip(others, self._channel.hear(others), strict=True)]

    def _is_through(self, report: Report) -> bool:
        lanes = [lane for lane in self._by_key.values() if report.rank in lane.axis.ranks]
        return report.state in ("failed", "closed") or all(report.passed(lane.key, lane.agreed) for lane in lanes)

    def _linger(self, is_done: Callable[[Report], bool]) -> None:
        """The channel lives in one rank's process: that rank waits, within limits, until the others are done with it."""
        limit = time.monotonic() + _GRACE_S
        while self._rank == self._channel.host and time.monotonic() < limit:
            waiting = [report.rank for report in self._hear(self._axis) if not is_done(report)]
            if not set(waiting) - set(self._channel.gone(waiting)):
                break
            time.sleep(0.005)
