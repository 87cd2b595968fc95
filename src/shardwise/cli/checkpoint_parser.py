"""What can be typed after `shardwise checkpoint`.

Owns flags, help texts and their examples. Refuses to know what the commands do; imports nothing heavy.
"""

from __future__ import annotations

from shardwise.cli.parser import Parser

__all__ = ["ACTIONS", "checkpoint_parser"]

ACTIONS = {
    "inspect": "print what is in a checkpoint: tensors by module, progress, optimizer, layout",
    "verify": "read every byte and compare it with its checksum",
    "diff": "compare two checkpoints, of whatever formats",
    "export": "write whole weights that from_pretrained, torch.load or torch's DCP can load",
    "list": "list the checkpoints of a run",
    "clean": "remove what processes that were killed left unfinished",
}

_EPILOG = """\
PATH is a run's directory (what was passed to save_checkpoint), of which the latest checkpoint or --tag is taken; or one
checkpoint. Checkpoints of DeepSpeed, of torch's DCP and of Hugging Face (save_pretrained) can be read as well.

examples:
  shardwise checkpoint list runs/mine
  shardwise checkpoint inspect runs/mine
  shardwise checkpoint verify runs/mine --tag global_step2000
  shardwise checkpoint diff runs/mine/global_step1000 runs/mine/global_step2000
  shardwise checkpoint export runs/mine exported --dtype bf16

`shardwise checkpoint COMMAND --help` explains a command. Exit codes: 0 all is well, 1 damaged (verify) or different (diff),
2 the command could not be carried out.
"""

_EXAMPLES = {
    "inspect": """\
examples:
  shardwise checkpoint inspect runs/mine                       the latest
  shardwise checkpoint inspect runs/mine --tag global_step500
  shardwise checkpoint inspect runs/mine --depth 2             modules of two levels instead of every tensor
""",
    "verify": """\
Goes on after a damaged file and names each; exit code 1 if there is any. Checkpoints of other programs have no checksums:
there it is tried whether everything can be read.

examples:
  shardwise checkpoint verify runs/mine
  shardwise checkpoint verify runs/mine/global_step500
""",
    "diff": """\
Prints tensors that only one has, other shapes and dtypes, and where values differ: how many, the largest absolute and the
largest relative difference. Exit code 1 if anything differs. Takes a few megabytes of memory, whatever the size.

examples:
  shardwise checkpoint diff runs/a runs/b                      the latest of two runs
  shardwise checkpoint diff runs/a runs/b --tag global_step10  the same step of two runs
  shardwise checkpoint diff runs/a exported --only weight      is the export what was trained?
""",
    "export": """\
The directory appears when everything is in it, or not at all. At no time is more than a few megabytes in memory.

formats:
  safetensors   model.safetensors, or shards and their index: what from_pretrained loads
  torch         pytorch_model.bin likewise, for torch.load
  dcp           torch.distributed.checkpoint, with master weights and the optimizer's state

from_pretrained also needs the model's config.json: run model.config.save_pretrained(OUT), or copy it into OUT.

examples:
  shardwise checkpoint export runs/mine exported
  shardwise checkpoint export runs/mine exported --dtype bf16 --max-shard-size 2GB
  shardwise checkpoint export runs/mine exported --format torch --dtype fp32
  shardwise checkpoint export runs/mine exported --dry-run     print files and sizes, write nothing
""",
    "list": "examples:\n  shardwise checkpoint list runs/mine\n",
    "clean": """\
Checkpoints that are complete stay, unless --keep says how many shall. What a living process is writing stays in any case.

examples:
  shardwise checkpoint clean runs/mine
  shardwise checkpoint clean runs/mine --keep 3    also delete all but the 3 newest checkpoints (and the latest)
""",
}


def checkpoint_parser() -> Parser:
    """The parser of `shardwise checkpoint` and its commands; `action` is None if none was named."""
    parser = Parser(prog="shardwise checkpoint", description="Look at checkpoints and convert them.", epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", parser_class=Parser)
    for name, summary in ACTIONS.items():
        sub = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EXAMPLES[name])
        _arguments(name, sub)
        parser.flags.update(sub.flags)
    return parser


def _arguments(name: str, sub: Parser) -> None:
    if name == "diff":
        sub.add_argument("path", metavar="A", help="the first: a run's directory or one checkpoint")
        sub.add_argument("other", metavar="B", help="the second")
    elif name in ("list", "clean"):
        sub.add_argument("path", metavar="DIR", help="a run's directory")
    else:
        sub.add_argument("path", metavar="PATH", help="a run's directory or one checkpoint")
    if name not in ("list", "clean"):
        sub.flag("--tag", metavar="TAG", help="which checkpoint of the run (default: the latest)")
    if name == "inspect":
        sub.flag("--depth", metavar="N", help="show modules down to N levels, and no tensors")
    elif name == "diff":
        kinds = ("weight", "buffer", "optimizer", "random")
        sub.flag("--only", action="append", choices=kinds, metavar="KIND", help=f"one of {', '.join(kinds)}; may be repeated")
        sub.flag("--limit", metavar="N", default="50", help="lines of each part of the answer (default 50; 0 for all)")
    elif name == "export":
        sub.add_argument("out", metavar="OUT", help="the directory to write")
        sub.flag("--format", metavar="F", default="safetensors", help="safetensors (the default), torch or dcp")
        sub.flag("--dtype", metavar="T", help="fp32, bf16 or fp16 (default: the one the model computed in)")
        sub.flag("--max-shard-size", metavar="S", default="5GB", help="a file's size before another is begun (default 5GB)")
        sub.flag("--dry-run", action="store_true", help="print files and sizes, write nothing")
        sub.flag("--overwrite", action="store_true", help="replace weights that are in OUT; its other files stay")
    elif name == "clean":
        sub.flag("--keep", metavar="N", help="keep the N newest checkpoints and the latest, delete others")
