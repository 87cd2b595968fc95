"""Transfers between memory and a swap file, by threads that share each of them.

Owns the order of transfers, the bound on how many are started, the staging of what is not aligned, and the way an error takes
from a thread to the caller. Refuses to know ranges and buffers.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from shardwise.errors import UsageError, explain
from shardwise.tiers.failures import StorageError, again
from shardwise.tiers.files import SwapFile
from shardwise.tiers.memory import HUGE_PAGE, Bytes, aligned_bytes, bytes_of, round_up
from shardwise.tiers.meter import Meter, TierStats
from shardwise.tiers.transfer import Bond, Transfer

__all__ = ["TransferQueue"]

_log = logging.getLogger(__name__)

_SLOW = 60.0
"""Seconds of waiting after which a line is logged: a disk that has stopped answering cannot be interrupted, only named."""


class TransferQueue:
    """Serves transfers in the order they came, a block at a time; all threads work on the first that has blocks left.

    Args:
        file: where the bytes rest; closed with the queue.
        threads: how many, started with the first transfer.
        block_bytes: what one thread moves at once, rounded up to the file's alignment.
        depth: transfers that may be started and not finished; starting one more waits.
        meter: counts.
    """

    def __init__(self, file: SwapFile, *, threads: int, block_bytes: int, depth: int, meter: Meter | None = None) -> None:
        self._file = file
        self._block = round_up(block_bytes, file.alignment)
        self._depth = depth
        self._meter = meter or Meter()
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._own = threading.local()  # each thread's staging block
        self._staging_bytes = 0
        self._left = 0
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._live: dict[Transfer, None] = {}
        self._ready: deque[Transfer] = deque()
        self._unseen: dict[Transfer, None] = {}  # writes that failed and that nobody has waited for
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def start(self, memory: Bytes, offset: int, nbytes: int, *, write: bool) -> Transfer:
        """Begin a transfer; waits while as many as allowed are in flight.

        Raises:
            StorageError: an earlier write failed and nobody has waited for it.
            UsageError: the queue is closed, or belongs to the parent of this process.
        """
        transfer = Transfer(self, memory, offset, nbytes, write=write)
        self._check_process()
        with self._lock:
            self._sleep_while(lambda: len(self._live) >= self._depth and not self._closed, "a place in the queue")
            self._check_open()
            self._raise_unseen()
            self._start_threads()  # before anything counts on them: the system may refuse
            for earlier in self._live:
                bond = transfer.bond(earlier)
                if bond is not None:
                    transfer.blockers += 1
                    earlier.followers.append((transfer, bond))
            self._live[transfer] = None
            if not transfer.blockers:
                self._make_ready(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """See `Transfer.wait`."""
        if not transfer.done:
            self._check_process()
        with self._lock:
            self._wait_for(transfer)
            self._unseen.pop(transfer, None)
        if transfer.error is not None:
            raise again(transfer.error) if isinstance(transfer.error, StorageError) else UsageError(*transfer.error.args)

    def flush(self) -> None:
        """Wait for all that was started.

        Raises:
            StorageError: a write failed and nobody has waited for it.
            UsageError: as for `start`.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            for transfer in list(self._live):
                self._wait_for(transfer)
            self._raise_unseen()

    def check_open(self) -> None:
        """Raises UsageError if it is closed."""
        with self._lock:
            self._check_open()

    def stats(self, peak_buffers: int) -> TierStats:
        """The counters."""
        with self._lock:
            return self._meter.stats(peak_buffers=peak_buffers, staging_bytes=self._staging_bytes)

    def close(self) -> None:
        """Give up what is in flight, end the threads and close the file. Blocks being moved are finished first."""
        if os.getpid() != self._pid:
            self._file.close()
            return
        with self._lock:
            self._closed = True
        self.abandon()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def abandon(self) -> None:
        """As `close`, but without waiting. Takes no lock: the garbage collector may call it in the middle of anything."""
        atexit.unregister(self.close)
        self._closed = True
        if not self._threads:
            self._file.close()
        for _ in self._threads:
            self._tokens.put(None)

    # What follows up to `_serve` is called with the lock held.

    def _wait_for(self, transfer: Transfer) -> None:
        if not transfer.done:
            began = self._meter.clock()
            self._sleep_while(lambda: not transfer.done, str(transfer))
            self._meter.waited(self._meter.clock() - began, write=transfer.write)

    def _sleep_while(self, condition: Callable[[], bool], what: str) -> None:
        told = False
        while condition():
            if not self._news.wait(_SLOW) and not told:
                told = True
                _log.warning("%s: waiting for %s for %.0f s so far", self._file.directory, what, _SLOW)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                explain(
                    "a disk tier was used in a forked child",
                    expected=f"process {self._pid}, which has its threads",
                    found=f"process {os.getpid()}",
                    do="make the tier in the process that uses it",
                )
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(explain("this tier is closed", do="make another one"))

    def _raise_unseen(self) -> None:
        for transfer in self._unseen:
            del self._unseen[transfer]
            assert isinstance(transfer.error, StorageError)
            raise again(transfer.error)

    def _start_threads(self) -> None:
        while len(self._threads) < self._count:
            # A daemon: the interpreter joins others before it calls what was registered for its exit, which ends these.
            thread = threading.Thread(target=self._run, name=f"shardwise-tier-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _make_ready(self, transfer: Transfer) -> None:
        self._ready.append(transfer)
        for _ in range(min(self._count, -(-transfer.length // self._block))):
            self._tokens.put(None)

    def _take_block(self) -> tuple[Transfer, int, int]:
        transfer = self._ready[0]
        begin = transfer.next
        transfer.next = min(begin + self._block, transfer.length)
        if transfer.next == transfer.length:
            self._ready.popleft()
        if not begin:
            self._meter.begin(write=transfer.write)
        transfer.running += 1
        return transfer, begin, transfer.next

    def _end_block(self, transfer: Transfer, error: StorageError | None) -> None:
        transfer.running -= 1
        if error is not None:
            transfer.error = transfer.error or error
            transfer.next = transfer.length
            if transfer in self._ready:
                self._ready.remove(transfer)
        if transfer.running or transfer.next < transfer.length:
            return
        self._meter.end(write=transfer.write)
        if transfer.error is None:
            self._meter.count(transfer.nbytes, write=transfer.write)
        self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        """It is over; those that waited for it may go, or fail with it."""
        over = [transfer]
        while over:
            ended = over.pop()
            ended.done, ended.memory = True, None
            self._live.pop(ended, None)
            if ended.write and isinstance(ended.error, StorageError):
                self._unseen[ended] = None
            for follower, bond in ended.followers:
                follower.blockers -= 1
                if bond is Bond.DATA:
                    follower.error = follower.error or ended.error
                if not follower.blockers and not follower.done:
                    if follower.error is None:
                        self._make_ready(follower)
                    else:
                        over.append(follower)
            ended.followers.clear()
        self._news.notify_all()

    def _give_up(self) -> None:
        for transfer in list(self._live):
            if transfer in self._live:  # else it failed with one before it
                transfer.error = UsageError(
                    explain("the tier was closed before this transfer was over", do="wait for transfers before close()")
                )
                self._finish(transfer)
        self._ready.clear()
        self._news.notify_all()

    # The threads.

    def _run(self) -> None:
        """Each token says that there may be work, or that the queue is closed. The last thread to leave puts out the light."""
        while not self._closed:
            self._tokens.get()
            while self._serve():
                pass
        with self._lock:
            self._left += 1
            last = self._left == len(self._threads)
            if last:
                self._give_up()
        if last:
            self._file.close()

    def _serve(self) -> bool:
        """Move one block, if there is one. A function, so that an idle thread holds nobody's memory."""
        with self._lock:
            if self._closed or not self._ready:
                return False
            transfer, begin, end = self._take_block()
        error: StorageError | None = None
        try:
            self._move(transfer, begin, end)
        except StorageError as failure:
            error = again(failure)  # without its traceback, which holds the memory that was moved
        except BaseException as failure:  # noqa: BLE001 - a thread that died would leave its caller waiting for ever
            error = StorageError(explain(f"{transfer} failed", found=f"{type(failure).__name__}: {failure}"))
        with self._lock:
            self._end_block(transfer, error)
        return True

    def _move(self, transfer: Transfer, begin: int, end: int) -> None:
        """One block: straight where memory and length are aligned, or need not be; else through a block of the thread's own."""
        assert transfer.memory is not None
        memory, offset, straight = transfer.memory[begin:end], transfer.offset + begin, end - begin
        if self._file.direct:
            alignment = self._file.alignment
            straight = 0 if (transfer.address + begin) % alignment else straight - straight % alignment
        if straight:
            self._between(memory[:straight], offset, write=transfer.write)
        if straight < end - begin:
            self._staged(memory[straight:], offset + straight, write=transfer.write)

    def _between(self, memory: Bytes, offset: int, *, write: bool) -> None:
        if write:
            self._file.write_from(memory, offset)
        else:
            self._file.read_into(memory, offset)

    def _staged(self, memory: Bytes, offset: int, *, write: bool) -> None:
        """By way of aligned memory. numpy copies on the calling thread alone, and without the interpreter's lock.

        A huge page at a time, see the note on them. What pads the last block is arbitrary: nobody reads it.
        """
        staging = self._staging()
        for begin in range(0, len(memory), HUGE_PAGE):
            piece = memory[begin : begin + HUGE_PAGE]
            block = staging[: round_up(len(piece), self._file.alignment)]
            if write:
                block[: len(piece)] = piece
            self._between(block, offset + begin, write=write)
            if not write:
                piece[:] = block[: len(piece)]

    def _staging(self) -> Bytes:
        block: Bytes | None = getattr(self._own, "block", None)
        if block is None:
            block = self._own.block = bytes_of(aligned_bytes(HUGE_PAGE, self._file.alignment), HUGE_PAGE)
            with self._lock:
                self._staging_bytes += HUGE_PAGE
        return block
