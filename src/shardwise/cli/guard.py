"""Ends the ranks when the launcher itself was killed and can no longer do it.

The launcher runs this file as a process of its own and keeps the write end of its stdin. Each line is a process group to end;
`done` says that the launcher ended the job in good order. End of file without `done` means that the launcher is gone (SIGKILL,
out of memory). Owns nothing else; imports nothing of Shardwise, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Wait for the end of stdin, then end what is left."""
    groups: list[int] = []
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return 0
        groups.append(int(word))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if groups:
        with contextlib.suppress(OSError):
            sys.stderr.write("shardwise run: the launcher was killed; its ranks were ended with it.\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
