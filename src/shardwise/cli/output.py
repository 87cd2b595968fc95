"""Where the output of the ranks goes.

Owns three ways. *Inherit* (the default): every rank writes to the launcher's own stdout and stderr, the launcher touches
nothing, and a live progress bar of rank 0 stays one. *Prefix*: each line gets its rank in front. *Log directory*: one file per
rank; rank 0 is shown as well, through a terminal of its own when the launcher has one, so that its progress bar stays live.
Copying is done by one thread per stream: a reader of our output that stops reading can then never keep the launcher from
ending the job. Refuses to know processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shardwise.errors import LaunchError, explain

__all__ = ["OutputPlan", "RankStreams"]

_CHUNK = 65536
_LONGEST_PARTIAL_LINE = 8192
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")

Sink = Callable[[bytes], object]


@dataclass(slots=True)
class RankStreams:
    """What a rank's process is given; `opened` is the launcher's copy, to be closed once the process has started."""

    stdin: int | None
    stdout: int | None
    stderr: int | None
    opened: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the launcher's copies."""
        for descriptor in self.opened:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.opened.clear()


class OutputPlan:
    """Opens the streams of the ranks and copies what has to be copied.

    Args:
        prefix: put the rank in front of each line.
        log_dir: folder for `rankN.log`, made when missing; files are appended to.
        title: first line of a new section in each log file.

    Raises:
        LaunchError: the folder cannot be made or written.
    """

    def __init__(self, *, prefix: bool = False, log_dir: Path | None = None, title: str = "") -> None:
        self._prefix = prefix
        self._log_dir = log_dir
        self._title = title
        self._copies: list[tuple[int, Sequence[Sink]]] = []
        self._threads: list[threading.Thread] = []
        self._files: list[IO[bytes]] = []
        self._lock = threading.Lock()
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(_cannot_write(log_dir, error)) from None

    @property
    def errors_are_logged(self) -> bool:
        """True where each rank's own stderr is kept, so that a traceback should be written there too."""
        return self._log_dir is not None

    def open(self, rank: int) -> RankStreams:
        """The streams for one rank. stdin goes to rank 0 alone, and only where it is no terminal: the ranks are no longer in
        the terminal's foreground, and reading it would fail or stop them.
        """
        stdin = None if rank == 0 and not _is_terminal(0) else subprocess.DEVNULL
        streams = RankStreams(stdin, None, None)
        if self._log_dir is not None:
            self._open_logged(rank, self._log_dir / f"rank{rank}.log", streams)
        elif self._prefix:
            tag = f"[rank {rank}] ".encode()
            streams.stdout = self._pipe(streams, [_Lines(self._to(1), tag)])
            streams.stderr = self._pipe(streams, [_Lines(self._to(2), tag)])
        return streams

    def _open_logged(self, rank: int, path: Path, streams: RankStreams) -> None:
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise LaunchError(_cannot_write(path, error)) from None
        file.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} {self._title}\n".encode())
        self._files.append(file)
        tag = f"[rank {rank}] ".encode() if self._prefix else b""
        if rank and not self._prefix:
            streams.stdout = streams.stderr = file.fileno()  # no thread between: the file is complete however the launcher ends
            return
        if not self._prefix and _is_terminal(1) and _is_terminal(2):
            streams.stdout = streams.stderr = self._terminal(streams, [self._to(1), _Lines(file.write, plain=True)])
            return
        shown = [_Lines(self._to(number), tag) if tag else self._to(number) for number in (1, 2)]
        streams.stdout = self._pipe(streams, [shown[0], _Lines(file.write, plain=True)])
        streams.stderr = self._pipe(streams, [shown[1], _Lines(file.write, plain=True)])

    def start(self) -> None:
        """Begin to copy. Called when all ranks have been started: a process with threads is a bad one to start others from."""
        for source, sinks in self._copies:
            thread = threading.Thread(target=_copy, args=(source, sinks), daemon=True)
            thread.start()
            self._threads.append(thread)
        self._copies.clear()

    def close(self, patience: float = 1.0) -> None:
        """Wait until what the ranks wrote has been copied, but no longer than `patience` seconds for all of it."""
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for source, _ in self._copies:
            os.close(source)
        self._copies.clear()
        if not any(thread.is_alive() for thread in self._threads):
            for file in self._files:
                file.close()
            self._files.clear()

    def _to(self, descriptor: int) -> Sink:
        def write(data: bytes) -> None:
            with self._lock:
                _write_all(descriptor, data)

        return write

    def _pipe(self, streams: RankStreams, sinks: Sequence[Sink]) -> int:
        source, target = os.pipe()
        streams.opened.append(target)
        self._copies.append((source, sinks))
        return target

    def _terminal(self, streams: RankStreams, sinks: Sequence[Sink]) -> int:
        """A terminal for rank 0, of the size of ours; it passes line ends through, as the real one will turn them."""
        import pty
        import termios

        source, target = pty.openpty()
        settings: list[Any] = termios.tcgetattr(target)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(target, termios.TCSANOW, settings)
        _copy_size(target)
        streams.opened.append(target)
        self._copies.append((source, sinks))
        return target


class _Lines:
    """A sink that passes whole lines on, each with a tag before it.

    Args:
        sink: gets the lines.
        tag: put before each.
        plain: drop control sequences, and keep only the last state of a line that was drawn over and over (a progress bar).
    """

    def __init__(self, sink: Sink, tag: bytes = b"", *, plain: bool = False) -> None:
        self._sink = sink
        self._tag = tag
        self._plain = plain
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        """Take more bytes; none at all means the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_PARTIAL_LINE):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._sink(b"".join(self._dress(line) for line in lines))

    def _dress(self, line: bytes) -> bytes:
        if self._plain:
            line = _CONTROL.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
        return self._tag + line + b"\n"


def _copy(source: int, sinks: Sequence[Sink]) -> None:
    data = b"-"
    while data:
        try:
            data = os.read(source, _CHUNK)
        except OSError:  # how a terminal says that its other side is closed
            data = b""
        for sink in sinks:
            if data or isinstance(sink, _Lines):
                with contextlib.suppress(OSError, ValueError):
                    sink(data)
    os.close(source)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _copy_size(target: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(1, termios.TIOCGWINSZ, b"\0" * 8))


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _cannot_write(path: Path, error: OSError) -> str:
    return explain(f"--log-dir: cannot write {path}", found=error.strerror or str(error), do="name a folder you may write to")
