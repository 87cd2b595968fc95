"""`Keeper`: saves an engine and loads it, all ranks together.

Owns when the ranks meet, and that what goes wrong on one of them is an error on all. Refuses to know what is saved and how
files look.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import (
    Background,
    ByCollective,
    ByFiles,
    Contents,
    Destination,
    Folder,
    Key,
    NativeSource,
    Snapshot,
    Source,
    check_tag,
    first_line,
    holds_one,
    open_checkpoint,
    write_checkpoint,
)
from shardwise.errors import CheckpointDamagedError, CheckpointError, ShardwiseError, explain
from shardwise.persistence.collect import buffer_digests, collect, without_equal_buffers
from shardwise.persistence.match import Report, match
from shardwise.persistence.restore import Wishes, load_by_user, restore
from shardwise.trainer import Trainer

__all__ = ["Keeper", "Request"]

log = logging.getLogger("shardwise")

_SHOWN = 4  # ranks whose problems are told
_SLOWEST = 10e6  # bytes per second that a disk moves at least; ranks wait so long for one another


@dataclass(frozen=True)
class Request:
    """What to load, and what to take of it; see `Engine.load_checkpoint`.

    Args:
        directory, tag: where; None for the latest.
        strict: the checkpoint and the model must have the same weights and buffers.
        wishes: what to take besides these.
        custom: puts the weights into the model by itself.
        fallback: where a checkpoint is damaged, take the newest one that is not.
        trusted: unpickle whatever is in the client_state.
    """

    directory: Path
    tag: str | None = None
    strict: bool = True
    wishes: Wishes = field(default_factory=Wishes)
    custom: Callable[..., object] | None = None
    fallback: bool = False
    trusted: bool = False


class Keeper:
    """Saves and loads one engine.

    Args:
        trainer: of the engine.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._options = trainer.parts.config.checkpoint
        self._data = trainer.parts.mesh.data
        self._snapshot = Snapshot()
        self._background: Background | None = None
        self._earlier = ""  # what went wrong in a save that nobody has been told of
        self._allowance = 0.0  # seconds that the slowest disk may take for what is being saved

    def _gather(self, text: Any, name: str) -> list[Any]:
        return self._trainer.parts.comm.all_gather_object(text, self._data, name)

    def _ended(self) -> list[int]:
        """Ranks whose process is no more, by their place among the data ranks."""
        return [self._data.ranks.index(rank) for rank in self._trainer.parts.comm.ended()]

    @property
    def busy(self) -> bool:
        """Whether a save goes on in the background here."""
        return self._background is not None and self._background.busy

    # -- saving ------------------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        tag: object,
        client_state: Mapping[str, Any],
        schedule: Any,
        *,
        latest: bool,
        without_frozen: bool,
    ) -> None:
        """Save; see `Engine.save_checkpoint`. Collective."""
        started = time.monotonic()
        trainer = self._trainer
        trainer.check_usable()
        trainer.parts.comm.set_phase("checkpoint")
        trainer.parts.runtime.settle_writes()
        if trainer.window.backwards and self._data.index == 0:
            log.warning("gradients of an accumulation window that is not complete are not part of a checkpoint")
        folder = Folder(directory)
        name = self._agree(f"global_step{trainer.global_steps}" if tag is None else tag)
        contents, written = self._prepare(folder, name, client_state, schedule, without_frozen)
        to = Destination(folder, name, written, self._data.index, self._data.size, latest=latest, keep=self._options.keep_last)
        if self._options.asynchronous:
            patience = trainer.parts.config.watchdog_s + self._allowance
            self._background = Background(
                lambda: write_checkpoint(contents, to, ByFiles(to, patience, self._ended)), f"shardwise-checkpoint-{name}"
            )
        else:
            with trainer.parts.comm.patient(self._allowance):
                write_checkpoint(contents, to, ByCollective(self._gather))
        trainer.parts.comm.ledger.count("checkpoint write", "disk", contents.nbytes)
        if self._data.index == 0:
            what = "copied, being written" if self._options.asynchronous else "saved"
            log.info(
                "checkpoint %s: %d bytes of this rank %s in %.2f s", name, contents.nbytes, what, time.monotonic() - started
            )

    def _agree(self, tag: object) -> str:
        """The tag that all use. The ranks also find out here whether one is still busy, or has failed before."""
        waits = self._options.on_busy == "wait"
        if waits:
            self._finish()
        with self._trainer.parts.comm.patient(self._allowance if waits else 0.0):
            notes = self._gather((_tag_text(tag), self.busy, self._take_earlier()), "save a checkpoint")
        self._raise_all([earlier for _, _, earlier in notes], "")
        if any(busy for _, busy, _ in notes):
            raise CheckpointError(
                explain(
                    "the checkpoint before this one is still being written",
                    found='"checkpoint": {"on_busy": "refuse"}',
                    do="save less often, or let a save wait",
                )
            )
        self._finish()
        tags = [each for each, _, _ in notes]
        if len(set(tags)) > 1 and self._options.tag_validation != "IGNORE":
            text = explain(
                "the ranks gave different tags", expected=f"{tags[0]!r} on all", found=", ".join(map(repr, dict.fromkeys(tags)))
            )
            if self._options.tag_validation == "FAIL":
                raise CheckpointError(text)
            log.warning("%s Taking %r.", text, tags[0])
        return check_tag(tags[0])

    def _prepare(
        self, folder: Folder, tag: str, client_state: Mapping[str, Any], schedule: Any, without_frozen: bool
    ) -> tuple[Contents, Path]:
        """What to save, and the directory to write it in: everything that can fail before the first byte is written."""
        contents, written, problem = Contents([]), "", ""
        digests: dict[str, int] = {}
        try:
            contents = collect(self._trainer, schedule, without_frozen=without_frozen)
            digests = buffer_digests(contents)
            if self._data.index == 0:
                contents = replace(contents, client_state=_pack(client_state))
                written = str(folder.begin(tag))
            if self._options.asynchronous:
                before = self._snapshot.nbytes
                contents = self._snapshot.take(contents)
                self._trainer.parts.comm.ledger.hold("checkpoint copy", self._snapshot.nbytes - before)
        except Exception as error:  # noqa: BLE001 - whatever users' objects raise; the other ranks would wait
            problem = _text(error)
        notes = self._gather((written, problem, digests, contents.nbytes), "begin to write the checkpoint")
        try:
            self._raise_all([problem for _, problem, _, _ in notes], f"checkpoint {tag!r} was not saved")
        except CheckpointError:
            if written:
                Path(written).rmdir()
            raise
        self._allowance = max(nbytes for _, _, _, nbytes in notes) / _SLOWEST
        return without_equal_buffers(contents, digests, notes[0][2]), Path(notes[0][0])

    def _raise_all(self, problems: list[str], context: str, kind: type[CheckpointError] = CheckpointError) -> None:
        """The same error on every rank, if there is a problem on any."""
        found: dict[str, int] = {}
        for rank, problem in zip(self._data.ranks, problems, strict=True):
            if problem:
                found.setdefault(problem.rstrip("."), rank)
        if not found:
            return
        everywhere = len(found) == 1 and all(problems)
        text = "; ".join(problem if everywhere else f"rank {rank}: {problem}" for problem, rank in list(found.items())[:_SHOWN])
        raise kind(explain(context, found=text) if context else f"{text}.")

    def _finish(self) -> None:
        """Wait for the save in the background, and keep in mind how it went."""
        if self._background is not None:
            self._earlier = self._background.wait()
            self._background = None

    def _take_earlier(self) -> str:
        earlier, self._earlier = self._earlier, ""
        return earlier

    def wait(self) -> None:
        """Return when the save in the background is complete on all ranks. Collective.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        self._finish()
        with self._trainer.parts.comm.patient(self._allowance):
            self._raise_all(self._gather(self._take_earlier(), "is the checkpoint complete"), "")

    def close(self) -> None:
        """Wait for the save in the background on this rank, and give the memory back.

        Raises:
            CheckpointError: it failed here, and nobody was told yet.
        """
        self._finish()
        snapshot, self._snapshot = self._snapshot, Snapshot()
        self._trainer.parts.comm.ledger.drop("checkpoint copy", snapshot.nbytes)
        earlier = self._take_earlier()
        if earlier:
            raise CheckpointError(earlier)

    # -- loading -----------------------------------------------------------------------------------------------------------

    def load(self, request: Request, schedule: Any) -> tuple[str | None, dict[str, Any], Report]:
        """Load; see `Engine.load_checkpoint`. Collective.

        Returns:
            where it was, the user's own state, and how the checkpoint fitted. None for the first where there is none yet.
        """
        self._trainer.check_open()
        self._trainer.parts.comm.set_phase("checkpoint")
        self._trainer.parts.runtime.backward.finish()
        self.wait()
        candidates = self._candidates(request)
        if not candidates:
            if self._data.index == 0:
                log.warning("there is no checkpoint in %s yet: nothing is loaded", request.directory)
            return None, {}, Report()
        for number, tag in enumerate(candidates):
            try:
                return self._load(request, tag, schedule)
            except CheckpointDamagedError as error:
                if not request.fallback or number + 1 == len(candidates):
                    raise
                if self._data.index == 0:
                    log.warning("%s; falling back to %r", str(error).rstrip("."), candidates[number + 1])
        raise AssertionError("the last candidate returns or raises")

    def _candidates(self, request: Request) -> list[str]:
        """Tags to try, in order; the first rank looks."""
        found: tuple[list[str], str] = ([], "")
        if self._data.index == 0:
            folder = Folder(request.directory)
            try:
                folder.recover()
                first = self._first(folder, request)
                others = [tag for tag in folder.tags() if tag != first] if request.fallback else []
                if first is None and not others and holds_one(request.directory):
                    first = ""  # the directory itself, of another program
                found = ([first, *others] if first is not None else others), ""
            except (ShardwiseError, OSError) as error:
                found = [], _text(error)
        tags, problem = self._gather(found, "which checkpoint to load")[0]
        if problem:
            raise CheckpointError(problem)
        return tags

    def _first(self, folder: Folder, request: Request) -> str | None:
        """The tag to begin with."""
        if request.tag is not None:
            return check_tag(request.tag)
        try:
            return folder.newest()
        except CheckpointError as error:
            if not request.fallback:
                raise
            log.warning("%s", error)
            return None

    def _load(self, request: Request, tag: str, schedule: Any) -> tuple[str, dict[str, Any], Report]:
        trainer, source = self._trainer, None
        try:
            source, client_state, names, report = self._together(lambda: self._open(request, tag))
            wishes = replace(request.wishes, weights=request.custom is None)
            trainer.unusable = f"loading {source.where} did not end well, so that its weights are partly those of before"
            notes = self._together(lambda: restore(trainer, schedule, source, names, wishes))
            trainer.parts.runtime.weights_changed(trainer.parts.runtime.units)
            if request.custom is not None:
                load_by_user(trainer.parts, source, request.custom, self._together)
            trainer.unusable = ""
            report.notes += notes
            if report.text and self._data.index == 0:
                log.warning("loaded %s: %s", source.where, report.text)
            return source.where, client_state, report
        finally:
            if source is not None:
                source.close()
            if isinstance(source, NativeSource):
                trainer.parts.comm.ledger.count("checkpoint read", "disk", source.stats.bytes_read)

    def _open(self, request: Request, tag: str) -> tuple[Source, dict[str, Any], dict[str, Key], Report]:
        model = self._trainer.parts.model
        source, client_state = open_checkpoint(request.directory, tag, trusted=request.trusted)
        try:
            if request.custom is not None:  # only what the optimizer's state belongs to
                return source, client_state, match(model, source, strict=False, shapes=False)[0], Report()
            return source, client_state, *match(model, source, strict=request.strict, switch="load_module_strict")
        except BaseException:
            source.close()
            raise

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do something on every rank; where it fails on one, raise the same on all."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of any, or they would wait
            failure = error
        note = ("", False) if failure is None else (_text(failure), isinstance(failure, CheckpointDamagedError | OSError))
        notes = self._gather(note, "is the checkpoint read")
        kind = CheckpointDamagedError if any(damaged for _, damaged in notes) else CheckpointError
        try:
            self._raise_all([problem for problem, _ in notes], "", kind)
        except CheckpointError as error:
            raise error from (None if isinstance(failure, ShardwiseError) else failure)
        return result


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"


def _tag_text(tag: object) -> str:
    """A tag as text; what is none stays recognisable, for `check_tag` to refuse on every rank."""
    return str(tag) if isinstance(tag, str | int) else repr(tag) + "/"


def _pack(client_state: Mapping[str, Any]) -> bytes | None:
    """The user's own state as a file. What torch will not load without being told that it is safe is warned of now."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(explain("client_state cannot be saved", expected="a dict", found=type(client_state).__name__))
    if not client_state:
        return None
    file = io.BytesIO()
    torch.save(_without_numpy(dict(client_state)), file)
    data = file.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever an unpickler may come across
        log.warning("client_state will load only with trust_client_state=True: %s", first_line(error))
    return data


def _without_numpy(value: Any) -> Any:
    """Numbers of numpy as Python's own, in lists, tuples and dicts: torch does not load them without being told."""
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_numpy(item) for item in value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value
