"""`python -m shardwise` is `shardwise`."""

from __future__ import annotations

from shardwise.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
