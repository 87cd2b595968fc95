"""The processes of one system: started together, asked together, ended together.

Refuses to know what is measured. Nothing here waits for ever: a rank that dies or does not answer ends its crew with a reason.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from bench.cases import Task
from bench.systems import REFERENCE, System
from bench.worker import Rank, Stay, live

__all__ = ["Crew", "CrewError"]

ANSWER_WITHIN_S = 300.0


class CrewError(Exception):
    """A crew could not go on.

    Args:
        reason: one line.
        refused: whether the system itself said no, as opposed to something that broke.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True)
class _Member:
    process: Any
    line: Connection
    log: Path


class Crew:
    """The ranks of one system, alive until `close`.

    Args:
        system: what they train with.
        task: what they train.
        folder: an empty one, for the store and the logs.
        kind: what answers in each rank.
    """

    def __init__(self, system: System, task: Task, folder: Path, kind: type[Rank] = Rank) -> None:
        self.system = system
        self.step = 0  # how many steps they have trained
        self._members: list[_Member] = []
        context = multiprocessing.get_context("spawn")
        world = 1 if system.alone else task.world
        for rank in range(world):
            shares = tuple(range(task.world)) if system.name == REFERENCE.name else (rank,)
            log = folder / f"rank{rank}.log"
            ours, theirs = context.Pipe()
            process = context.Process(
                target=live, args=(kind, system, task, Stay(rank, world, shares, folder / "store", log), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append(_Member(process, ours, log))

    @property
    def pids(self) -> list[int]:
        """The ranks' process numbers."""
        return [member.process.pid for member in self._members]

    def ask(self, request: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something; what each returned, in rank order.

        Raises:
            CrewError: some rank failed; the crew is closed.
        """
        for member in self._members:
            with contextlib.suppress(OSError):  # it is dead; the answers will tell
                member.line.send((request, *arguments))
        waiting = {member.line: number for number, member in enumerate(self._members)}
        answers: list[Any] = [None] * len(self._members)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fall(f"rank {min(waiting.values())} did not answer {request!r} within {ANSWER_WITHIN_S:.0f} s")
            for line in ready:
                assert isinstance(line, Connection)
                number = waiting.pop(line)
                answers[number] = self._receive(line, number, request)
        return answers

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.line.close()
        for kind in ("terminate", "kill"):
            for member in self._members:
                getattr(member.process, kind)()
            for member in self._members:
                member.process.join(timeout=5)
            if not any(member.process.is_alive() for member in self._members):
                break

    def _receive(self, line: Connection, number: int, request: str) -> Any:
        try:
            kind, *content = line.recv()
        except (EOFError, OSError):
            self._members[number].process.join(timeout=5)
            code = self._members[number].process.exitcode
            self._fall(f"rank {number} died during {request!r} (exit code {code}): {self._last_words(number)}")
        if kind == "error":
            name, text = content
            self._fall(f"{name}: {' '.join(text.split())}", refused=name == "ConfigError")
        return content[0]

    def _fall(self, reason: str, *, refused: bool = False) -> NoReturn:
        self.close()
        raise CrewError(reason if len(reason) < 300 else f"{reason[:300]}...", refused=refused)

    def _last_words(self, number: int) -> str:
        with contextlib.suppress(OSError):
            lines = self._members[number].log.read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()
        return "it said nothing"
