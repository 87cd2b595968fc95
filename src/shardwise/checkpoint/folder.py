"""The directory that holds a run's checkpoints: one directory per tag, and the file `latest`.

Owns what makes a checkpoint appear and disappear as a whole. It is written under a name that starts with a dot, and renamed
when every byte is on disk; `latest` is replaced after that. One that goes is renamed before its files are deleted. So whatever
is killed at whatever moment, a directory under a tag is complete. Refuses to know what is in the files.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from shardwise.checkpoint.datafile import refuse
from shardwise.checkpoint.index import Index, is_plain_name
from shardwise.errors import CheckpointDamagedError, CheckpointError, explain

__all__ = ["INDEX", "LATEST", "Folder", "check_tag", "sync_directory"]

INDEX = "index.json"
LATEST = "latest"
_WRITING, _REPLACED, _LEAVING = "writing", "replaced", "leaving"
_FORGOTTEN_S = 24 * 3600.0  # another machine's unfinished checkpoint that nobody has touched for so long is nobody's
_EXCHANGE, _AT_FDCWD = 2, -100  # of renameat2(2)
_OURS = re.compile(r"index\.json|client_state\.pt|rank-\d+\.(safetensors|json|failed)")

log = logging.getLogger("shardwise")


def check_tag(tag: object) -> str:
    """A tag as the name of a directory.

    Raises:
        CheckpointError: it cannot be one.
    """
    text = str(tag)
    printable = text.isprintable() and text == text.strip()
    if not is_plain_name(text) or not printable or text.startswith(".") or text == LATEST or len(text.encode()) > 200:
        expected = "a printable name without slashes that does not begin with a dot, of at most 200 bytes"
        raise CheckpointError(explain("this tag cannot be used", expected=expected, found=repr(tag)))
    return text


class Folder:
    """A run's checkpoints.

    Args:
        path: the directory; need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # -- what is there -----------------------------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """The tags of all complete checkpoints of this package's format, the newest first."""
        found: list[tuple[float, str]] = []
        with suppress(OSError):
            for path in list(self.path.iterdir()):
                written = None if path.name.startswith(".") else Index.when(path / INDEX)
                if written is not None:
                    found.append((written, path.name))
        return [tag for _, tag in sorted(found, reverse=True)]

    def latest(self) -> str | None:
        """What the file `latest` says; None without one.

        Raises:
            CheckpointError: it says nothing that could be a tag.
        """
        try:
            text = (self.path / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointDamagedError(explain(f"{self.path / LATEST} cannot be read", found=str(error))) from None
        return check_tag(text)

    def newest(self) -> str | None:
        """The tag to go on from: that of `latest`, or of the newest complete checkpoint where nothing was written after it."""
        named = self.latest()
        if named is not None:
            return named
        found = self.tags()
        if found:
            log.warning("%s has no file %r: taking the newest checkpoint, %r", self.path, LATEST, found[0])
        return found[0] if found else None

    def read_index(self, tag: str) -> Index:
        """The index of a checkpoint.

        Raises:
            CheckpointError: there is no such checkpoint, or its index is damaged.
        """
        path = self.path / tag / INDEX
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise self._unknown(tag) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointDamagedError(
                explain(f"{path} cannot be read", found=str(error), do="load another checkpoint")
            ) from None
        return Index.loads(text, str(path))

    def _unknown(self, tag: str) -> CheckpointDamagedError:
        if (self.path / tag).is_dir():
            missing = f"{self.path / tag / INDEX} is missing"
            return CheckpointDamagedError(explain(missing, expected="the index of a checkpoint", do="load another checkpoint"))
        there = ", ".join(self.tags()[:8]) or "none"
        problem = f"there is no checkpoint {tag!r} in {self.path}"
        return CheckpointDamagedError(
            explain(problem, expected=f"one of: {there}", do="give a tag that is there, or none for the latest")
        )

    # -- a checkpoint comes ------------------------------------------------------------------------------------------------

    def begin(self, tag: str, *, over_anything: bool = False) -> Path:
        """Make the directory in which a checkpoint is written; leftovers of processes that are no more go.

        Args:
            tag: its name.
            over_anything: whether what has the name already may be something else than a checkpoint of this format.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self.path / f".{tag}.{uuid4().hex[:8]}.{_WRITING}-{_owner()}"
        if not over_anything:
            self._check_replaceable(self.path / tag)
        try:
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            if new:
                sync_directory(self.path.parent)
            self.clean()
            path.mkdir()
        except OSError as error:
            raise refuse(path, error, 0) from error
        return path

    def _check_replaceable(self, target: Path) -> None:
        """What has the name already must be a checkpoint of this format."""
        if not os.path.lexists(target):
            return
        if target.is_symlink() or Index.when(target / INDEX) is None:
            what = "a link" if target.is_symlink() else "something that is no checkpoint of this package"
            raise CheckpointError(
                explain(f"{target} is there already", found=what, do="save under another tag, or move it away")
            )

    def commit(self, written: Path, tag: str, *, latest: bool) -> None:
        """Give a checkpoint that is complete its name, and make it the latest.

        Raises:
            CheckpointError: a file cannot be renamed or written.
        """
        target = self.path / tag
        try:
            if target.exists():
                if Index.when(target / INDEX) is not None:
                    _keep_others(target, written)
                sync_directory(written)
                self._replace(written, target)
            else:
                sync_directory(written)
                self._rename_or_replace(written, target)
                sync_directory(self.path)
        except OSError as error:
            raise refuse(target, error, 0) from error
        if latest:
            try:
                self._point_to(tag)
            except OSError as error:
                problem = f"{target} is complete, but {self.path / LATEST} could not be replaced"
                do = f"load it with tag={tag!r}, and remove what is in the way"
                raise CheckpointError(explain(problem, found=error.strerror or str(error), do=do)) from error

    def _rename_or_replace(self, written: Path, target: Path) -> None:
        try:
            written.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._replace(written, target)  # another save has just taken the name

    def _replace(self, written: Path, target: Path) -> None:
        leaving = self.path / f".{target.name}.{uuid4().hex[:8]}.{_LEAVING}-{_owner()}"
        if _exchange(written, target):
            sync_directory(self.path)
            written.rename(leaving)
        else:  # a kill between these two leaves neither under its name: `recover` puts the old one back
            aside = self.path / f".{target.name}.{_REPLACED}-{_owner()}"
            target.rename(aside)
            written.rename(target)
            aside.rename(leaving)
        sync_directory(self.path)  # the new names first, the deletions after
        shutil.rmtree(leaving, ignore_errors=True)

    def _point_to(self, tag: str) -> None:
        path = self.path / f".{LATEST}.{uuid4().hex[:8]}.{_WRITING}-{_owner()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, tag.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            path.rename(self.path / LATEST)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        sync_directory(self.path)

    # -- and goes ----------------------------------------------------------------------------------------------------------

    def prune(self, keep: int, written: str) -> list[str]:
        """Delete all but the newest checkpoints. What `latest` names and what was just written stay in any case.

        Only checkpoints whose index this version can read go, and nothing goes unless what was just written is there in full.

        Returns:
            the tags that went.
        """
        tags = self.tags()
        kept = {tag for tag in (written, self.latest()) if tag is not None}
        for tag in tags:
            if len(kept) < keep and self._is_whole(tag):
                kept.add(tag)
        if not self._is_whole(written):
            return []
        gone: list[str] = []
        for tag in tags:
            if tag not in kept and self._is_readable(tag):
                leaving = self.path / f".{tag}.{uuid4().hex[:8]}.{_LEAVING}-{_owner()}"
                with suppress(OSError):
                    (self.path / tag).rename(leaving)
                    gone.append(tag)
                    shutil.rmtree(leaving, ignore_errors=True)
        return gone

    def _is_readable(self, tag: str) -> bool:
        try:
            self.read_index(tag)
        except CheckpointError:
            return False
        return not (self.path / tag).is_symlink()

    def _is_whole(self, tag: str) -> bool:
        try:
            index = self.read_index(tag)
            files = [*index.files, *([index.client_state] if index.client_state else [])]
            return all((self.path / tag / name).stat().st_size == sums.size for name, sums in files)
        except (CheckpointError, OSError):
            return False

    def clean(self) -> None:
        """Delete what processes that are no more have left unfinished."""
        self.recover()
        for _, kind, path in self._unfinished():
            if kind != _REPLACED:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                log.info("removed %s, which a process that has ended left unfinished", path)

    def recover(self) -> None:
        """Give checkpoints their names back that were being replaced when the process ended."""
        for tag, kind, path in self._unfinished():
            if kind == _REPLACED:
                if (self.path / tag).exists():
                    shutil.rmtree(path, ignore_errors=True)  # its successor is there
                else:
                    path.rename(self.path / tag)
                    log.warning("%s was being replaced when its process ended: it is back", self.path / tag)

    def _unfinished(self) -> list[tuple[str, str, Path]]:
        """Tag, kind and path of what dead processes have left."""
        if not self.path.is_dir():
            return []
        found = [(*_parse(path.name), path) for path in list(self.path.iterdir())]
        return [(tag, kind, path) for tag, kind, owner, path in found if kind and _is_dead(owner, path)]


def _keep_others(target: Path, written: Path) -> None:
    """What users have put into a checkpoint that is replaced (a tokenizer, a note) is in its successor too."""
    for entry in target.iterdir():
        if _OURS.fullmatch(entry.name) or (written / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, written / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, written / entry.name, follow_symlinks=False)


def sync_directory(path: Path) -> None:
    """Make names in a directory last, where the file system allows to ask for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


def _owner() -> str:
    """This process, for others to find out whether it is alive: machine, process id, and when it began."""
    return f"{_machine()}-{os.getpid()}-{_birth(os.getpid())}"


def _machine() -> str:
    """What processes have in common that know each other by number: containers may share the name of their host."""
    with suppress(OSError):
        return f"{socket.gethostname()}@{Path('/proc/self/ns/pid').stat().st_ino}"
    return socket.gethostname()


def _birth(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if it is no more, "0" where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[19].decode()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "0"
    except OSError:
        return "0"


def _parse(name: str) -> tuple[str, str, str]:
    """Tag, kind and owner of an unfinished thing; empty if it is none."""
    for kind in (_WRITING, _REPLACED, _LEAVING):
        tag, separator, owner = name.removeprefix(".").rpartition(f".{kind}-")
        if name.startswith(".") and separator and owner.count("-") >= 2:
            return tag, kind, owner
    return "", "", ""


def _is_dead(owner: str, path: Path) -> bool:
    host, pid, birth = owner.rsplit("-", 2)
    if host != _machine():
        with suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (path, *(path.iterdir() if path.is_dir() else ())))
            return time.time() - newest > _FORGOTTEN_S
        return False
    return not pid.isdigit() or _birth(int(pid)) != birth
