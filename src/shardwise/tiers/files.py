"""One file on a disk that serves as memory.

Owns opening it so that nothing of it outlives the process, direct transfers where the file system has them, transfers that the
system cuts short, and a disk that is full. Refuses to know threads, ranges in flight, and what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.tiers.failures import StorageError, free_bytes, storage_error
from shardwise.tiers.leftovers import leftovers_in, new_name, this_process
from shardwise.tiers.memory import Bytes, aligned_bytes, bytes_of, round_up

__all__ = ["SwapFile", "System"]

_log = logging.getLogger(__name__)

_ALIGNMENTS = (4096, 16384, 65536)
"""Tried in turn. Disks with blocks of 512 bytes take 4096 as well, and it is the page of most systems."""
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.ENOSYS)
"""What file systems and older kernels answer to a flag or call they do not have."""
_TRIES = 16
"""Transfers in a row that may move nothing before that is an error."""


class System:
    """The calls of the operating system that a swap file makes; a place to put one that fails, in tests.

    Attributes:
        direct: the flag that opens a file without cache; 0 where there is none.
        nameless: the flag that makes a file without a name; 0 where there is none.
    """

    direct: int = getattr(os, "O_DIRECT", 0)
    nameless: int = getattr(os, "O_TMPFILE", 0)

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; see open(2)."""
        return os.open(path, flags, 0o600)

    def unlink(self, path: Path) -> None:
        """Remove a name; see unlink(2)."""
        path.unlink()

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Give a stretch of a file its room on the disk; see posix_fallocate(3)."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        os.posix_fallocate(descriptor, offset, nbytes)

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        """Bytes moved, perhaps fewer than asked for; see preadv(2)."""
        return os.preadv(descriptor, [memory.data], offset)

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        """Bytes moved, perhaps fewer than asked for; see pwritev(2)."""
        return os.pwritev(descriptor, [memory.data], offset)


class SwapFile:
    """A file without a name, which grows and is gone when it is closed or the process ends, however it ends.

    Where the file system has no nameless files, it is made and unlinked at once; where it refuses even that, the file keeps its
    name, and the next start on this machine removes it if this process was killed.

    Attributes:
        directory: the folder it lies in.
        direct: whether transfers bypass the system's cache. If so, memory, offset and length must be multiples of `alignment`.
        alignment: bytes; also what stretches of the file start on.

    Args:
        directory: made when missing.
        name: what it is called in errors.
        system: the calls to use.

    Raises:
        StorageError: no file can be made there.
    """

    def __init__(self, directory: str | Path, name: str = "swap file", *, system: System | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.direct = False
        self.alignment = _ALIGNMENTS[0]
        self._name = name
        self._system = system or System()
        self._path: Path | None = None
        self._size = 0
        self._descriptor = -1
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._open()
        except OSError as error:
            raise self._cannot("make", error, do="name a folder on a local disk that this user may write to") from None
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._size

    def grow(self, nbytes: int) -> int:
        """Make it longer, with the room taken on the disk now, so that a full disk shows here and not in a later write.

        Args:
            nbytes: rounded up to the alignment.

        Returns:
            Where the new stretch starts. It reads as zeros until it is written.

        Raises:
            StorageError: there is no room.
        """
        start, room = self._size, round_up(nbytes, self.alignment)
        if not room:
            return start
        try:
            try:
                self._system.allocate(self._descriptor, start, room)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                self._extend(start, room)
        except OSError as error:
            with suppress(OSError):  # what was allocated before the disk was full
                os.ftruncate(self._descriptor, start)
            raise self._cannot(
                f"reserve {room:,} bytes for", error, do="free space there, or name a folder on another disk"
            ) from None
        self._size = start + room
        return start

    def read_into(self, memory: Bytes, offset: int) -> None:
        """Fill `memory` from the file.

        Raises:
            StorageError: the system reports an error, or the file ends early.
        """
        self._transfer(self._system.read, "read", memory, offset)

    def write_from(self, memory: Bytes, offset: int) -> None:
        """Write all of `memory` to the file.

        Raises:
            StorageError: the system reports an error.
        """
        self._transfer(self._system.write, "write", memory, offset)

    def close(self) -> None:
        """Give the room back. Nobody may be reading or writing. Closing again does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                self._system.unlink(path)

    def _transfer(self, call: Callable[[int, Bytes, int], int], verb: str, memory: Bytes, offset: int) -> None:
        done = idle = 0
        while done < len(memory):
            try:
                moved = call(self._descriptor, memory[done:], offset + done)
            except InterruptedError:
                moved = 0
            except OSError as error:
                raise self._cannot(f"{verb} {len(memory):,} bytes at {offset:,} of", error) from None
            if self.direct and done + moved < len(memory):
                moved -= moved % self.alignment  # go on from where a direct transfer may start; what lies between moves twice
            done += moved
            idle = 0 if moved else idle + 1
            if idle == _TRIES:
                found = f"that nothing moves after {done:,} bytes"
                raise self._cannot(f"{verb} {len(memory):,} bytes at {offset:,} of", found)

    def _open(self) -> None:
        """Direct and nameless if both can be had, else what can."""
        system = self._system
        for direct in dict.fromkeys((system.direct, 0)):
            flags = os.O_RDWR | os.O_CLOEXEC | direct
            try:
                self._descriptor = self._open_nameless(flags)
            except OSError as error:
                if not direct or error.errno not in _NOT_HERE:
                    raise
                continue
            self.direct = bool(direct)
            return

    def _open_nameless(self, flags: int) -> int:
        system = self._system
        if system.nameless:
            try:
                return system.open(self.directory, flags | system.nameless)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
        path = self.directory / new_name(this_process())
        try:
            descriptor = system.open(path, flags | os.O_CREAT | os.O_EXCL)
        except OSError:
            with suppress(OSError):  # some kernels make the file before they refuse the flag
                system.unlink(path)
            raise
        try:
            system.unlink(path)
        except OSError:
            self._path = path
        return descriptor

    def _remove_leftovers(self) -> None:
        for path in leftovers_in(self.directory):
            with suppress(OSError):
                self._system.unlink(path)
                _log.info("removed %s, left behind by a process that was killed", path)

    def _probe(self) -> None:
        """Find the alignment that direct transfers take. Some file systems open a file for them and refuse them later."""
        if self.direct and not any(self._takes(alignment) for alignment in _ALIGNMENTS):
            self.direct = False
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~self._system.direct)
        if not self.direct:
            self.alignment = _ALIGNMENTS[0]
            _log.info(
                "no direct transfers in %s: the bytes of the %s go through the system's cache", self.directory, self._name
            )

    def _takes(self, alignment: int) -> bool:
        self.alignment = alignment
        block = bytes_of(aligned_bytes(alignment, alignment), alignment)
        try:
            self.write_from(block, 0)
            self.read_into(block, 0)
        except StorageError as error:
            if error.errno not in _NOT_HERE:
                raise
            return False
        finally:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        return True

    def _extend(self, start: int, room: int) -> None:
        """For file systems that cannot allocate ahead: look at the space that is free now, which others may take later."""
        free = free_bytes(self.directory)
        if free is not None and free < room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, start + room)

    def _cannot(self, problem: str, cause: OSError | str, *, do: str = "check the disk and its mount") -> StorageError:
        return storage_error(f"cannot {problem} the {self._name} in {self.directory}", self.directory, cause, do=do)
