"""The swap file: file systems that lack things, transfers that are cut short, full disks, and files left behind."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from shardwise.tiers import StorageError
from shardwise.tiers.files import SwapFile, System
from shardwise.tiers.leftovers import Owner, leftovers_in, new_name, this_process
from shardwise.tiers.memory import Bytes, aligned_bytes, bytes_of, round_up
from tests.unit.tiers_support import Failing, Halting, Strict, Without, random_bytes, refuse


def aligned(nbytes: int, seed: int = 1) -> Bytes:
    return bytes_of(aligned_bytes(nbytes).copy_(random_bytes(nbytes, seed)), nbytes)


def round_trip(file: SwapFile, nbytes: int = 40_960) -> None:
    start = file.grow(nbytes)
    data, found = aligned(nbytes), aligned(nbytes, 2)
    file.write_from(data, start)
    file.read_into(found, start)
    assert (data == found).all()


@pytest.mark.parametrize(
    "pattern",
    [[4096], [1000, 5000], [4096 + 512], [0, None, 8192], [None, 0, 0, 12_289]],
    ids=["a block at a time", "less than a block, too", "blocks and a bit", "nothing and interruptions", "all of it"],
)
def test_transfers_that_are_cut_short_go_on(tmp_path: Path, pattern: list[int | None]) -> None:
    system = Halting(pattern)
    file = SwapFile(tmp_path, system=system)
    round_trip(file)
    file.close()
    assert file.direct
    assert len(system.moved) > 20


def test_short_transfers_through_the_cache_go_on_where_they_stopped(tmp_path: Path) -> None:
    system = Halting([1, 7, 5000, None])
    system.direct, system.alignment = 0, 1
    file = SwapFile(tmp_path, system=system)
    round_trip(file, 9999)
    file.close()
    assert not file.direct
    assert {offset for _, offset, _ in system.moved} >= {0, 1, 8, 5008}


def test_a_disk_that_moves_nothing_is_an_error_and_no_hang(tmp_path: Path) -> None:
    system = Halting([1 << 20])
    file = SwapFile(tmp_path, "parameters", system=system)
    start = file.grow(8192)
    system.pattern = [4096, *[0] * 16]
    system.calls = 0
    with pytest.raises(
        StorageError, match=rf"cannot write 8,192 bytes at 0 of the parameters in {tmp_path}: found .*nothing moves"
    ):
        file.write_from(aligned(8192), start)
    file.close()


def test_a_read_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    file.grow(4096)
    with pytest.raises(StorageError, match=r"cannot read 8,192 bytes at 0 .*after 4,096 bytes"):
        file.read_into(aligned(8192), 0)
    file.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_names_the_folder_and_the_bytes(tmp_path: Path, code: int) -> None:
    system = Failing(lambda kind, offset: offset == 8192, code)
    file = SwapFile(tmp_path, system=system)
    file.grow(16384)
    with pytest.raises(StorageError) as caught:
        file.write_from(aligned(4096), 8192)
    file.close()
    assert caught.value.errno == code
    text = str(caught.value)
    assert text.startswith(f"cannot write 4,096 bytes at 8,192 of the swap file in {tmp_path}: found ")
    assert os.strerror(code) in text
    assert ("bytes free" in text) == (code != errno.EIO)


class FullDisk(System):
    """Has room for 64 KiB, and takes what there is before it says so, as a real one does."""

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        super().allocate(descriptor, offset, min(nbytes, 65536 - offset))
        if offset + nbytes > 65536:
            raise refuse(errno.ENOSPC)


def test_a_full_disk_shows_when_room_is_reserved(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, system=FullDisk())
    file.grow(8192)
    with pytest.raises(StorageError, match=rf"cannot reserve 102,400 bytes for .* in {tmp_path}: found 'No space.*bytes free"):
        file.grow(100_003)
    assert os.fstat(file._descriptor).st_size == file.nbytes == 8192
    round_trip(file)
    file.close()


def test_without_allocation_the_free_space_is_looked_at(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, system=Without(allocate=False))
    round_trip(file)
    before = file.nbytes
    with pytest.raises(StorageError, match="cannot reserve 4,611,686,018,427,387,904 bytes"):
        file.grow(1 << 62)
    assert file.nbytes == before
    file.close()


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=rf"cannot make the swap file in {tmp_path / below}: found .*\. name a folder"):
        SwapFile(tmp_path / below)


class ReadOnly(System):
    """A disk that is mounted to be read only."""

    def open(self, path: Path, flags: int) -> int:
        raise refuse(errno.EROFS)


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"cannot make the swap file in {tmp_path}: found Read-only file system"):
        SwapFile(tmp_path, system=ReadOnly())


# Direct transfers.


class Picky(Strict):
    """Opens files for direct transfers, and then takes none, unless they lie on `alignment`."""

    def write(self, descriptor: int, memory: Bytes, offset: int) -> int:
        if self.is_direct(descriptor):
            self.check("write", memory, offset)
        return os.pwritev(descriptor, [memory.data], offset)

    def read(self, descriptor: int, memory: Bytes, offset: int) -> int:
        if self.is_direct(descriptor):
            self.check("read", memory, offset)
        return os.preadv(descriptor, [memory.data], offset)

    def is_direct(self, descriptor: int) -> bool:
        return not os.get_blocking(descriptor)


@pytest.mark.parametrize(("wants", "gets"), [(512, 4096), (4096, 4096), (16384, 16384), (65536, 65536)])
def test_the_alignment_is_what_the_disk_takes(tmp_path: Path, wants: int, gets: int) -> None:
    file = SwapFile(tmp_path, system=Picky(wants))
    assert (file.direct, file.alignment, file.nbytes) == (True, gets, 0)
    assert os.fstat(file._descriptor).st_size == 0, "nothing is left of what was tried"
    assert file.grow(1) == 0
    assert file.grow(1) == gets
    file.close()


def test_one_line_is_logged_where_direct_transfers_are_refused_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardwise.tiers")
    file = SwapFile(tmp_path, "parameters", system=Picky(1 << 20))
    assert (file.direct, file.alignment) == (False, 4096)
    round_trip(file)
    file.close()
    assert caplog.messages == [f"no direct transfers in {tmp_path}: the bytes of the parameters go through the system's cache"]


@pytest.mark.parametrize("nameless", [True, False])
def test_one_line_is_logged_where_direct_transfers_are_refused_early(
    tmp_path: Path, nameless: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardwise.tiers")
    file = SwapFile(tmp_path, system=Without(direct=False, nameless=nameless))
    assert not file.direct
    assert not list(tmp_path.iterdir())
    round_trip(file)
    file.close()
    assert [message for message in caplog.messages if "no direct transfers" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_failing_disk_is_not_taken_for_one_without_direct_transfers(tmp_path: Path) -> None:
    system = Failing(lambda kind, offset: True)
    system.direct = os.O_NONBLOCK
    with pytest.raises(StorageError, match="Input/output error"):
        SwapFile(tmp_path, system=system)


# What is left behind.


@pytest.mark.parametrize("nameless", [True, False])
def test_an_open_file_has_no_name(tmp_path: Path, nameless: bool) -> None:
    file = SwapFile(tmp_path / "made" / "here", system=Without(nameless=nameless))
    assert list((tmp_path / "made" / "here").iterdir()) == []
    assert os.fstat(file._descriptor).st_nlink == 0
    round_trip(file)
    file.close()
    file.close()


def test_a_file_that_must_keep_its_name_loses_it_at_the_end(tmp_path: Path) -> None:
    system = Without(nameless=False, unlink=False)
    file = SwapFile(tmp_path, system=system)
    (path,) = tmp_path.iterdir()
    other = SwapFile(tmp_path, system=system)
    assert path.exists(), "this process lives"
    round_trip(file)
    system.takes_unlink = True
    file.close()
    assert not path.exists()
    other.close()
    assert not list(tmp_path.iterdir())


def test_only_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    here = this_process()
    assert here.pid == os.getpid()
    assert here.started > 0, "the system says when a process started"
    gone = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(gone, 0)
    lives = os.getppid()
    stale = {
        new_name(Owner(here.machine, gone, 5)): "no such process",
        new_name(Owner(here.machine, here.pid, here.started - 1)): "another process had this pid",
        new_name(Owner(here.machine, gone, 0)): "no such process, start unknown",
    }
    kept = {
        new_name(here): "this process",
        new_name(Owner(here.machine, here.pid, 0)): "this process, start unknown",
        new_name(Owner("0123456789ab", gone, 5)): "another machine",
        new_name(Owner(here.machine, lives, 0)): "another process",
        new_name(Owner(here.machine, 0, 5)): "no process at all",
        "shardwise-swap.short": "not a name of ours",
        f"shardwise-swap.{here.machine}.pid.5.1": "not a number",
        "data.bin": "a user's file",
    }
    for name in (*stale, *kept):
        (tmp_path / name).write_text(name)
    assert {path.name for path in leftovers_in(tmp_path)} == set(stale)
    file = SwapFile(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    file.close()
    assert leftovers_in(tmp_path / "missing") == []


def flags_of(memory: torch.Tensor) -> set[str]:
    """What the system notes about the mapping that a tensor lies in; see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, _, stop = line.split()[0].partition("-")
            inside = int(start, 16) <= memory.data_ptr() < int(stop, 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def test_aligned_memory() -> None:
    for nbytes, alignment in ((1, 4096), (5000, 65536), (3 << 20, 4096), (1 << 21, 1 << 22)):
        memory = aligned_bytes(nbytes, alignment)
        assert (memory.data_ptr() % alignment, memory.shape, memory.any().item()) == (0, (nbytes,), False)
        assert nbytes < 1 << 21 or memory.data_ptr() % (1 << 21) == 0
    if sys.platform == "linux":
        assert "dc" in flags_of(aligned_bytes(5000)), "not copied to a forked child"
        assert {"dc", "hg"} <= flags_of(aligned_bytes(3 << 20)), "on huge pages where there are any"
    assert [round_up(nbytes, 4096) for nbytes in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
