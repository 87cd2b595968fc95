"""The command line: what can be typed, and what is said when something else is.

Owns flags, help texts and their examples. Refuses to know what the commands do; imports nothing heavy.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from shardwise.cli.plan import LAUNCHER_VARIABLES, Program
from shardwise.errors import LaunchError, explain

__all__ = ["COMMANDS", "Parser", "RunRequest", "command_parser", "parse_run", "whole"]

COMMANDS = {
    "run": "start a training script as several ranks on this machine",
    "doctor": "check a config and print how it is understood",
    "schema": "print the JSON Schema of the config",
    "env": "print versions, devices, backend, cores and compiler",
    "selftest": "train a tiny model on two ranks and say PASS or FAIL",
    "checkpoint": "inspect, verify, compare, export, list and tidy up checkpoints",
    "bench": "measure this machine: `shardwise bench io DIR` measures a disk for offload and recommends settings",
}

_RUN_EPILOG = """\
examples:
  shardwise run train.py --epochs 3            one rank per GPU; without GPUs 2 ranks (1 on a single core)
  shardwise run --nproc 4 train.py             4 ranks
  shardwise run -m mypackage.train --lr 1e-3   a module instead of a file
  shardwise run --no-python ./train.sh         any executable
  shardwise run --dry-run train.py             print what would be started, start nothing
  shardwise run --log-dir logs train.py        one log file per rank

Options of the launcher go before the script; everything after it belongs to the script.
The script finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment;
shardwise.initialize() and torch.distributed.init_process_group() both read them.
When a rank fails, all are stopped within 10 s and the exit code is that of the failed rank (128 + n for signal n);
2 means that nothing was started.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest flag and say what to type."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.flags: dict[str, argparse.Action] = {}

    def flag(self, *names: str, **options: Any) -> None:
        """`add_argument` for an option, remembered for messages and for finding where the script begins."""
        action = self.add_argument(*names, **options)
        self.flags.update(dict.fromkeys(action.option_strings, action))

    def error(self, message: str) -> NoReturn:
        """Print and exit with code 2."""
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        text = self.unknown_flag(unknown[1]) if unknown else explain(message, do=f"see {self.prog} --help")
        print(f"{self.prog}: {text}", file=sys.stderr)
        raise SystemExit(2)

    def unknown_flag(self, flag: str) -> str:
        """The message for a flag that does not exist."""
        near = get_close_matches(flag.partition("=")[0], [*self.flags, "--help"], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return explain(f"unknown option {flag}", do=f"{hint}See {self.prog} --help")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """`shardwise run` as typed. `nproc` None means automatic, `master_port` None any free port."""

    program: Program
    nproc: int | None = None
    master_port: int | None = None
    log_dir: Path | None = None
    prefix: bool = False
    dry_run: bool = False
    env: dict[str, str] = field(default_factory=dict)
    omp_threads: int | None = None
    grace: float = 5.0


def parse_run(argv: Sequence[str]) -> RunRequest:
    """The request in `argv` (what follows `shardwise run`).

    Raises:
        LaunchError: a value is wrong, a flag is unknown, or no script was named.
        SystemExit: after `--help` or a message of the argument parser.
    """
    parser = _run_parser()
    options, program = _split(parser, argv)
    values = parser.parse_args(options)
    if values.module and values.no_python:
        raise LaunchError(explain("-m and --no-python exclude each other", do="leave one out"))
    if not program:
        raise LaunchError(explain("no script was named", do="for example: shardwise run --nproc 2 train.py"))
    kind = "module" if values.module else "command" if values.no_python else "script"
    return RunRequest(
        program=Program(kind, program[0], tuple(program[1:])),
        nproc=None if values.nproc == "auto" else whole("--nproc", values.nproc, "a whole number from 1 on, or auto"),
        master_port=None if values.master_port is None else _port(values.master_port),
        log_dir=None if values.log_dir is None else Path(values.log_dir),
        prefix=values.prefix,
        dry_run=values.dry_run,
        env=dict(map(_assignment, values.env)),
        omp_threads=None if values.omp_threads is None else whole("--omp-threads", values.omp_threads),
        grace=_seconds("--grace", values.grace),
    )


def _run_parser() -> Parser:
    parser = Parser(
        prog="shardwise run",
        usage="shardwise run [options] script [arguments of the script]",
        description="Start a training script as several ranks on this machine.",
        epilog=_RUN_EPILOG,
    )
    parser.flag(
        "--nproc",
        "--nproc-per-node",
        "--num-gpus",
        default="auto",
        metavar="N",
        help="ranks to start; auto (the default) is one per GPU, without GPUs 2 (1 on a single core)",
    )
    parser.flag("--master-port", metavar="PORT", help="port on which the ranks meet; by default a free one is found")
    parser.flag("-m", "--module", action="store_true", help="the script is a module, run as `python -m` does")
    parser.flag("--no-python", action="store_true", help="the script is an executable of any kind")
    parser.flag("--env", action="append", default=[], metavar="K=V", help="a variable for all ranks; may be repeated")
    parser.flag(
        "--omp-threads", metavar="N", help="OMP_NUM_THREADS of each rank; by default cores / ranks, or what is set already"
    )
    parser.flag("--log-dir", metavar="DIR", help="write rank N's output to DIR/rankN.log; only rank 0 is shown as well")
    parser.flag(
        "--prefix", action="store_true", help="put the rank in front of each line (a progress bar is then no longer live)"
    )
    parser.flag("--grace", default="5", metavar="S", help="seconds the ranks get to end after Ctrl-C or SIGTERM (default 5)")
    parser.flag("--dry-run", action="store_true", help="print what would be started, and start nothing")
    return parser


def _split(parser: Parser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the launcher, and the script with all that follows. `--master_port` and `--master-port` are the same."""
    position = 0
    options: list[str] = []
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "-":
        word = argv[position]
        position += 1
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in {"-h", "--help"}:
            return ["--help"], []
        action = parser.flags.get(name)
        if action is None:
            raise LaunchError(parser.unknown_flag(word))
        options.append(name + equals + value)
        if action.nargs != 0 and not equals:
            if position == len(argv):
                raise LaunchError(explain(f"{word} needs a value", expected=f"{word} {action.metavar}"))
            options[-1] = f"{name}={argv[position]}"  # one word, so that a value may begin with a dash
            position += 1
    return options, list(argv[position:])


def whole(flag: str, text: str, expected: str = "a whole number from 1 on") -> int:
    """The number in `text`, at least 1.

    Raises:
        LaunchError: it is something else; the message names the flag.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise LaunchError(explain(f"{flag} has a wrong value", expected=expected, found=repr(text)))
    return int(text)


def _port(text: str) -> int:
    expected = "a port from 1 to 65535"
    value = whole("--master-port", text, expected)
    if value > 65535:
        raise LaunchError(explain("--master-port has a wrong value", expected=expected, found=repr(text)))
    return value


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e9:
        raise LaunchError(explain(f"{flag} has a wrong value", expected="seconds, from 0 on", found=repr(text)))
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or "\0" in text:
        raise LaunchError(explain("--env has a wrong value", expected="NAME=VALUE", found=repr(text)))
    if name in LAUNCHER_VARIABLES:
        raise LaunchError(explain(f"--env cannot set {name}", do=f"the launcher sets it; see {_flag_for(name)}"))
    return name, value


def _flag_for(name: str) -> str:
    return {"WORLD_SIZE": "--nproc", "LOCAL_WORLD_SIZE": "--nproc", "MASTER_PORT": "--master-port"}.get(
        name, "shardwise run --help"
    )


def command_parser() -> Parser:
    """The parser of all commands but `run`, whose script may take any words, and `checkpoint`, which has its own."""
    parser = Parser(
        prog="shardwise",
        description="Shardwise trains PyTorch models that do not fit in one device's memory.",
        epilog="examples:\n  shardwise run --nproc 2 train.py\n  shardwise doctor config.json --world-size 8\n"
        "  shardwise checkpoint export runs/mine exported\n"
        "\n`shardwise COMMAND --help` explains a command.",
    )
    parser.flag("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == "doctor":
            sub.add_argument("config", help="a JSON file")
            sub.flag("--world-size", metavar="N", default="1", help="ranks the batch numbers are derived for (default 1)")
        if name == "bench":
            sub.add_argument("what", metavar="io", help="what to measure; there is one thing so far")
            sub.add_argument("directory", metavar="DIR", help="a folder on the disk; what is written there is removed")
            sub.flag("--size", metavar="S", default="1GiB", help="bytes written and read for each number (default 1GiB)")
        parser.flags.update(sub.flags)
    return parser
