"""A port for the ranks to meet on, held by the launcher so that no other program gets it.

Owns the choice and the holding. The socket is bound and never listens: with SO_REUSEADDR on both sides the store of rank 0
can listen on the port nevertheless, while the kernel hands it to nobody who asks for a free one. That closes the gap
between "found a free port" and "rank 0 uses it" in which two jobs that start together would collide. Refuses to know the job.
"""

from __future__ import annotations

import errno
import socket
import sys
from types import TracebackType

from shardwise.errors import LaunchError, explain

__all__ = ["HeldPort"]

_TRIES = 64


class HeldPort:
    """A TCP port of this machine, held until `close()`.

    Args:
        port: the port wanted, or None for any free one.

    Raises:
        LaunchError: the port wanted is in use, or may not be used.
    """

    def __init__(self, port: int | None = None) -> None:
        self._sockets: tuple[socket.socket, ...] = _bind(port) if port is not None else _bind_any()
        self.port: int = self._sockets[0].getsockname()[1]

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the port; more than once does no harm."""
        for held in self._sockets:
            held.close()


def _bind_any() -> tuple[socket.socket, ...]:
    for _ in range(_TRIES):
        try:
            return _bind(0)
        except LaunchError:  # the number was free, but another launcher holds its claim for an explicit --master-port
            continue
    raise LaunchError(explain("no free port was found", do="close programs that hold ports, or name one with --master-port"))


def _bind(port: int) -> tuple[socket.socket, ...]:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
        return (held, *_claim(held.getsockname()[1]))
    except OSError as error:
        held.close()
        raise LaunchError(_refusal(port, error)) from None


def _claim(port: int) -> tuple[socket.socket, ...]:
    """A second lock between launchers: two sockets that do not listen may share a port, so binding alone cannot tell."""
    if sys.platform != "linux":
        return ()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0shardwise-port-{port}")  # abstract: no file, gone with the process, one name space per network
    except OSError:
        claim.close()
        raise
    return (claim,)


def _refusal(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return explain(
            f"port {port} is in use on this machine",
            do="leave --master-port out to get a free one, or name another",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return explain(f"port {port} needs more rights than this user has", do="use a port from 1024 to 65535")
    return explain(f"port {port} cannot be used", found=str(error))
