"""Writing a checkpoint, all ranks together.

Owns the order: every rank writes its own file, and when all have, the first rank writes the index and gives the whole its name.
What comes in is parts of tensors and facts; what ranks have to tell each other goes through an `Exchange`. Refuses to know
engines and collectives.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shardwise.checkpoint.contents import Facts, Key, Part, Spec, real_dtype
from shardwise.checkpoint.datafile import Progress, write_file, write_tensors
from shardwise.checkpoint.folder import INDEX, Folder
from shardwise.checkpoint.index import Index, Piece, Share
from shardwise.errors import CheckpointError, ShardwiseError, explain

__all__ = ["ByCollective", "ByFiles", "Contents", "Destination", "Exchange", "Gather", "write_checkpoint"]

log = logging.getLogger("shardwise")

_CLIENT_STATE = "client_state.pt"
_POLL_S = 0.05


@dataclass(frozen=True)
class Contents:
    """What one rank has to save.

    Args:
        parts: of tensors; the parts of all ranks cover each tensor once.
        share: facts of the parameters of which it has a part: `Facts.steps` and `Facts.numbers`.
        specs: of tensors that must be in the checkpoint; on the first rank only.
        facts: everything else; on the first rank only.
        client_state: what is to be in the user's own file; None for no file. On the first rank only.
    """

    parts: list[Part]
    share: Facts = field(default_factory=Facts)
    specs: Mapping[Key, Spec] = field(default_factory=dict[Key, Spec])
    facts: Facts = field(default_factory=Facts)
    client_state: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(part.values.nbytes for part in self.parts)


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint goes.

    Args:
        folder: of the run.
        tag: its name.
        written: the directory in which it is written, which is there already.
        rank, world: of the ranks that save together.
        latest: whether it becomes the latest.
        keep: how many checkpoints stay; 0 for all.
    """

    folder: Folder
    tag: str
    written: Path
    rank: int
    world: int
    latest: bool = True
    keep: int = 0


class Exchange(Protocol):
    """How the ranks of a save tell each other how it went. A problem is a text; empty for none."""

    def collect(self, problem: str) -> list[str]:
        """Say how writing went here; on the first rank, wait for all and return what they said. Elsewhere it may be empty."""
        ...

    def announce(self, problem: str) -> str:
        """The first rank says how it ended; the others may learn it here."""
        ...


class Gather(Protocol):
    """A collective: every rank's text."""

    def __call__(self, text: str, name: str, /) -> list[str]: ...  # noqa: D102


class ByCollective:
    """An exchange in which every rank waits for the others."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def collect(self, problem: str) -> list[str]:
        """See `Exchange.collect`; every rank returns all."""
        return self._gather(problem, "is the checkpoint written")

    def announce(self, problem: str) -> str:
        """See `Exchange.announce`; every rank returns the first one's."""
        return self._gather(problem, "is the checkpoint complete")[0]


class ByFiles:
    """An exchange through the directory itself, for threads that must not take part in collectives while a model trains.

    A rank that is done has its share there under its final name. Only the first rank waits: until all are there, or one has
    said that it failed, or has ended, or nothing in the directory has changed for `patience_s`.

    Args:
        to: where the checkpoint goes.
        patience_s: seconds.
        ended: ranks, by their number in the save, whose process is known to be no more.
    """

    def __init__(self, to: Destination, patience_s: float, ended: Callable[[], Collection[int]] = tuple) -> None:
        self._to = to
        self._patience_s = patience_s
        self._ended = ended

    def collect(self, problem: str) -> list[str]:
        """See `Exchange.collect`."""
        if problem:
            with suppress(OSError):  # a directory that cannot be written to: the first rank finds out by waiting
                os.close(os.open(_failed(self._to.written, self._to.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        return [problem] if self._to.rank else self._wait(problem)

    def _wait(self, problem: str) -> list[str]:
        missing = set(range(1, self._to.world))
        problems = [problem] * (not missing) or [problem]
        changed, before = time.monotonic(), -1
        while missing and not problem:
            lost = missing.intersection(self._ended())  # before looking: what they wrote at the end counts
            for rank in sorted(missing):
                if _share(self._to.written, rank).exists():
                    missing.discard(rank)
                elif _failed(self._to.written, rank).exists():
                    return [*problems, f"rank {rank} could not write its part (its log says why)"]
            if lost & missing:
                return [*problems, f"rank {min(lost & missing)} has ended before its part was written"]
            size = _size(self._to.written)
            if size != before:
                changed, before = time.monotonic(), size
            if missing and time.monotonic() - changed > self._patience_s:
                named = ", ".join(map(str, sorted(missing)[:8]))
                return [*problems, f"rank {named} wrote nothing for {self._patience_s:g} s"]
            if missing:
                time.sleep(_POLL_S)
        return problems

    def announce(self, problem: str) -> str:
        """See `Exchange.announce`; the others learn it when ranks next meet."""
        return problem


def write_checkpoint(contents: Contents, to: Destination, exchange: Exchange, progress: Progress | None = None) -> None:
    """Write this rank's part of a checkpoint; on the first rank, complete it.

    Raises:
        CheckpointError: it could not be written. What was there before is as it was.
    """
    own = _attempt(lambda: _write_share(contents, to, progress))
    problems = exchange.collect(own)
    problem = next(filter(None, problems), "")
    if to.rank == 0:
        problem = problem or _attempt(lambda: _complete(contents, to))
        if problem:
            _remove(to.written)
    # The first rank may have failed after all had written.
    problem = exchange.announce(problem) or problem
    if problem:
        raise CheckpointError(explain(f"saving checkpoint {to.tag!r} failed", found=problem.rstrip(".")))


def _remove(directory: Path) -> None:
    """Remove what was written; again for a while, as other ranks may still be writing into it."""
    limit = time.monotonic() + 10.0
    while directory.exists() and time.monotonic() < limit:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.0 if not directory.exists() else _POLL_S)


def _attempt(work: Callable[[], object]) -> str:
    """Do something; returns what went wrong."""
    try:
        work()
    except ShardwiseError as error:
        return str(error)
    except (OSError, MemoryError, RuntimeError) as error:
        log.exception("saving failed")
        return f"{type(error).__name__}: {error}"
    return ""


def _write_share(contents: Contents, to: Destination, progress: Progress | None) -> None:
    """Write the data file, and beside it the record of what is in it."""
    name = f"rank-{to.rank:05d}.safetensors"
    tensors = {_label(part): _shaped(part) for part in contents.parts}
    metadata = {"format": "pt", "shardwise": "part of a checkpoint; index.json says of which tensors"}
    sums, header = write_tensors(to.written / name, tensors, metadata, progress)
    share = Share(name, sums, steps=contents.share.steps, numbers=contents.share.numbers)
    for part in contents.parts:
        share.specs[part.key] = part.spec
        place = Piece(part.start, part.stop, 0, header.tensors[_label(part)].start)
        share.pieces.setdefault(part.key, []).append(place)
    path = _share(to.written, to.rank)
    beside = path.with_suffix(".tmp")
    write_file(beside, share.dumps().encode())
    beside.rename(path)


def _complete(contents: Contents, to: Destination) -> None:
    """On the first rank, when all have written: the index, and the name."""
    paths = [_share(to.written, rank) for rank in range(to.world)]
    shares: list[Share] = []
    for rank, path in enumerate(paths):
        try:
            shares.append(Share.loads(path.read_text()))
        except FileNotFoundError:
            problem = f"what rank {rank} has written cannot be seen from the first rank"
            do = "save to a directory that all machines share"
            raise CheckpointError(explain(problem, expected=str(path), do=do)) from None
    index = Index.combine(shares, contents.specs, contents.facts)
    if contents.client_state is not None:
        index.client_state = _CLIENT_STATE, write_file(to.written / _CLIENT_STATE, contents.client_state)
    write_file(to.written / INDEX, index.dumps().encode())
    for path in paths:
        path.unlink()
    to.folder.commit(to.written, to.tag, latest=to.latest)
    if to.keep:
        try:
            gone = to.folder.prune(to.keep, to.tag)
        except CheckpointError as error:  # this one is saved; that others cannot be judged is no reason to stop
            log.warning("no checkpoint was deleted: %s", error)
        else:
            log.info("%d checkpoints are kept; deleted: %s", to.keep, ", ".join(gone) or "none")


def _label(part: Part) -> str:
    """The name of a part in its file."""
    kind = f"{part.key.kind}.{part.key.state}" if part.key.state else part.key.kind
    whole = part.start == 0 and part.stop == part.spec.length
    return f"{kind}:{part.key.name}" + ("" if whole else f"[{part.start}:{part.stop}]")


def _shaped(part: Part) -> Tensor:
    """A whole real tensor is stored in its own shape, so that any reader of the format can use it."""
    whole = part.start == 0 and part.stop == part.spec.length and real_dtype(part.spec.dtype) == part.spec.dtype
    return part.values.view(part.spec.shape) if whole else part.values


def _share(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _failed(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.failed"


def _size(directory: Path) -> int:
    """Bytes in a directory, to see whether somebody is at work."""
    total = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            total += entry.stat().st_size + 1
    return total
