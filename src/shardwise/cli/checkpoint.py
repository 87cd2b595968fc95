"""`shardwise checkpoint`: looks at checkpoints and converts them.

Owns the commands' course and exit codes. Refuses to know formats (`shardwise.checkpoint`) and wording (`checkpoint_text`).
What is heavy is imported when a command runs.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwise.cli.checkpoint_parser import checkpoint_parser
from shardwise.cli.parser import whole
from shardwise.errors import CheckpointError, ShardwiseError, explain

if TYPE_CHECKING:
    from shardwise.checkpoint import Source

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run what was typed after `shardwise checkpoint`; returns the exit code."""
    parser = checkpoint_parser()
    options = parser.parse_args(words)
    if options.action is None:
        print(parser.format_help().rstrip("\n"))
        return 2
    try:
        return _ACTIONS[options.action](options)
    except ShardwiseError as error:
        print(f"shardwise checkpoint {options.action}: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        about = str(error.filename or options.path)
        print(f"shardwise checkpoint {options.action}: {explain(about, found=error.strerror or str(error))}", file=sys.stderr)
    return 2


def _inspect(options: Namespace) -> int:
    from shardwise.checkpoint.inspect import list_checkpoints
    from shardwise.cli import checkpoint_text as text

    depth = None if options.depth is None else whole("--depth", options.depth)
    with closing(_open(options.path, options.tag)) as source:
        print(text.summary(source))
        print(text.tree(source, depth))
    others = [listed.tag for listed in list_checkpoints(options.path) if Path(source.where).name != listed.tag]
    if others:
        print(f"\nother checkpoints in {options.path}: {text.names(others)}")
    return 0


def _verify(options: Namespace) -> int:
    from shardwise.checkpoint.inspect import verify
    from shardwise.cli import checkpoint_text as text
    from shardwise.observe import WorkProgress

    with WorkProgress("verifying") as progress:
        findings = list(verify(options.path, options.tag, progress, progress.begin))
    damaged = sum(bool(finding.problem) for finding in findings)
    print("\n".join(map(text.finding, findings)))
    print(f"{damaged} damaged" if damaged else "everything is as it was written")
    return 1 if damaged else 0


def _diff(options: Namespace) -> int:
    from shardwise.checkpoint.compare import KINDS, bytes_to_compare, diff
    from shardwise.cli import checkpoint_text as text
    from shardwise.observe import WorkProgress

    kinds = cast("Any", options.only or KINDS)
    limit = 0 if options.limit == "0" else whole("--limit", options.limit, "a whole number, 0 for all")
    with ExitStack() as stack:
        one, other = (stack.enter_context(closing(_open(path, options.tag))) for path in (options.path, options.other))
        with WorkProgress("comparing", bytes_to_compare(one, other, kinds=kinds)) as progress:
            found = diff(one, other, kinds=kinds, progress=progress)
        print(text.difference(found, one.where, other.where, limit))
    return 0 if found.same else 1


def _export(options: Namespace) -> int:
    from shardwise.checkpoint.export import export, plan_export
    from shardwise.cli import checkpoint_text as text
    from shardwise.observe import WorkProgress

    wishes: dict[str, Any] = {"format": options.format, "dtype": options.dtype, "max_shard_size": options.max_shard_size}
    with closing(_open(options.path, options.tag)) as source:
        plan = plan_export(source, **wishes)
        print(text.plan(plan, source.where, options.out, dry=options.dry_run))
        if options.dry_run:
            return 0
        with WorkProgress("exporting", plan.nbytes) as progress:
            export(source, options.out, **wishes, overwrite=options.overwrite, progress=progress)
    print(text.exported(plan, Path(options.out)))
    return 0


def _list(options: Namespace) -> int:
    from shardwise.checkpoint.inspect import list_checkpoints
    from shardwise.cli import checkpoint_text as text

    print(text.listing(_run(options.path), list_checkpoints(options.path)))
    return 0


def _clean(options: Namespace) -> int:
    from shardwise.checkpoint import Folder

    path = _run(options.path)
    folder = Folder(path)
    keep = None if options.keep is None else whole("--keep", options.keep)
    before = {entry.name for entry in path.iterdir()}
    folder.clean()
    after = {entry.name for entry in path.iterdir()}
    gone, back = sorted(before - after), sorted(after - before)
    tags = folder.tags()
    if keep is not None and tags:
        gone += folder.prune(keep, tags[0])
    for name in back:
        print(f"restored {name}, whose replacement was never finished")
    for name in gone:
        print(f"removed {name}")
    print(f"left in {path}: {', '.join(folder.tags()) or 'no checkpoint'}" if gone or back else f"nothing to remove in {path}")
    return 0


def _open(path: str, tag: str | None) -> Source:
    from shardwise.checkpoint.opening import open_path

    return open_path(path, tag)


def _run(path: str) -> Path:
    """A run's directory, which must exist."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(explain(f"there is no directory {path}", expected="what was passed to save_checkpoint"))
    return directory


_ACTIONS = {"inspect": _inspect, "verify": _verify, "diff": _diff, "export": _export, "list": _list, "clean": _clean}
