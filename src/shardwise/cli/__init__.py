"""The `shardwise` command.

Owns the choice of the command and how its errors end: exit code 2 with a remedy for wrong input, never a traceback for a
user's mistake. Each command is imported when it is called, so that `shardwise --help` and `shardwise run` load no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from shardwise.errors import LaunchError, explain

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's own arguments) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except LaunchError as error:
        print(f"shardwise{' run' if words[:1] == ['run'] else ''}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _dispatch(words: list[str]) -> int:
    from shardwise.cli.parser import COMMANDS, command_parser

    if words[:1] == ["run"]:
        from shardwise.cli.run import main as run

        return run(words[1:])
    if words[:1] == ["checkpoint"]:
        from shardwise.cli.checkpoint import main as checkpoint

        return checkpoint(words[1:])
    if words and not words[0].startswith("-") and words[0] not in COMMANDS | {"report": ""}:
        near = get_close_matches(words[0], COMMANDS, n=1)
        do = f"did you mean {near[0]}? " if near else ""
        raise LaunchError(explain(f"there is no command {words[0]}", do=f"{do}Commands: {', '.join(COMMANDS)}"))
    parser = command_parser()
    options = parser.parse_args(["env", *words[1:]] if words[:1] == ["report"] else words)
    if options.version:
        return _print(f"shardwise {_version()}")
    if options.command is None:
        return _print(parser.format_help().rstrip("\n")) or 2
    if options.command == "doctor":
        return _doctor(options.config, options.world_size)
    if options.command == "schema":
        return _schema()
    if options.command == "bench":
        return _bench(options.what, options.directory, options.size)
    if options.command == "env":
        from shardwise.cli.environment import describe

        return _print(describe())
    from shardwise.cli.selftest import main as selftest

    return selftest()


def _print(text: str) -> int:
    print(text, flush=True)
    return 0


def _version() -> str:
    from importlib.metadata import version

    return version("shardwise")


def _doctor(config: str, world_size: str) -> int:
    from shardwise.cli.parser import whole
    from shardwise.config.report import diagnose

    diagnosis = diagnose(config, whole("--world-size", world_size))
    print(diagnosis.text.rstrip("\n"), flush=True)
    return 0 if diagnosis.healthy else 1


def _bench(what: str, directory: str, size: str) -> int:
    from shardwise.errors import ConfigError
    from shardwise.tiers import StorageError
    from shardwise.tiers.report import main as measure

    if what != "io":
        raise LaunchError(explain(f"there is no measurement {what!r}", do="type: shardwise bench io DIR"))
    try:
        return _print(measure(directory, size, lambda done, total, text: print(f"[{done}/{total}] {text}", file=sys.stderr)))
    except (StorageError, ConfigError) as error:
        raise LaunchError(str(error)) from None


def _schema() -> int:
    import json

    from shardwise.config import json_schema

    return _print(json.dumps(json_schema(), indent=2))
