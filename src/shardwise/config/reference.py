"""The reference page of the configuration, `docs/configuration.md`, written from the models so that it cannot drift.

Owns the prose around the tables. Refuses to know a single key by heart, except in the examples.

Run `python -m shardwise.config.reference > docs/configuration.md` after a key has changed; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from pydantic.fields import FieldInfo

from shardwise.config.batch import BATCH_KEYS
from shardwise.config.fields import Kind, Section, accepted, allowed, kind_of, section_class
from shardwise.config.model import ConfigView
from shardwise.config.optimizers import OPTIMIZER_PARAMS, TORCH_ELEMENTWISE
from shardwise.config.problems import dotted, show
from shardwise.config.schedulers import SCHEDULER_PARAMS
from shardwise.config.spellings import REFUSED, RENAMED

__all__ = ["render_reference"]

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m shardwise.config.reference`; change the models in `src/shardwise/config`, not this file. -->

Shardwise is told how to train by one JSON file in DeepSpeed's format, so a file you already have works. Pass its path,
its text, or a Python dict to `shardwise.initialize(config=...)`. Every key is optional. A small file for stage 3:

```json
{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 50}},
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3}
}
```

`shardwise doctor FILE` prints what a file means: every value, where each batch number came from, keys without effect,
or, if there are any, all problems and nothing else. `shardwise schema` prints the JSON Schema, which editors use to
complete keys and to show mistakes while you type.

## How a file is read

- **All problems at once.** Each line of the error names the dotted path, the value found, what is allowed, and, for an
  unknown key, the nearest valid one. An unknown key is always an error: a misspelt key that is silently ignored trains
  the wrong thing.
- **`null` is the same as absent.** So is a section that is switched off, whatever it is for.
- **`"auto"`** is a placeholder that libraries such as Transformers fill in. One that is left over means the default,
  except for batch numbers, learning rates and step counts of schedules: there is no good default for those, so it is
  an error.
- **Numbers and booleans are strict.** A whole number may be written `5e8`; `15099494.4` in its place is an error.
  Booleans are `true` and `false`; `"true"` is an error. `steps_per_print` may be infinity in a Python dict
  (`float("inf")`), which means never.
- **Three kinds of key.** Most do what their name says. Some tuned machinery that Shardwise does not have: they are
  accepted *without effect*. Some ask for a capability that does not exist yet: they are accepted while they are off,
  and otherwise an error that says *not available yet*.

## Batch numbers

One optimizer step sees

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks

samples. Give any two and the third follows from the real number of ranks. Give one, and a step is one micro-batch. Give
none, and a micro-batch is one sample. Three that disagree, or two that do not divide evenly, are an error that shows the
arithmetic.
"""

_DIFFERENCES = """\
## Where the meaning differs from DeepSpeed

- `gradient_clipping` is off unless it is set. DeepSpeed 0.19 clips to 1.0 by default, earlier versions did not; the
  engine prints what holds when it starts.
- `AdamW` by name does not decay weights unless `weight_decay` is set, as with DeepSpeed's own; `torch.optim.AdamW` passed as a
  class decays by 0.01, as it does in PyTorch.
- `bf16.check_grad_overflow` is true: a gradient that is Inf or NaN skips the step on every rank.
- An unknown key is an error at every level. DeepSpeed ignores unknown top-level keys.
- `reduce_bucket_size` and `allgather_bucket_size` have no effect, and 0 is an error all the same.
- The stair counts of `OneCycle` do what DeepSpeed documents; versions of it that ignore them train on a straight line instead.
- `OneCycle` leaves the second beta of an optimizer alone, and cycles the momentum of SGD too.
- Every checkpoint loads at any number of ranks, so `checkpoint.load_universal` has nothing to switch.
"""

_OPTIMIZERS = """\
`optimizer.params` depends on `optimizer.type`; upper and lower case do not matter. Besides the types below it may be one of
{others} of `torch.optim`, whose arguments are checked when the optimizer is built. Any other name is an error that says the
nearest; other elementwise optimizers are passed to `initialize()` as a class or an object. Common to all types below:
"""

_SCHEDULES = """\
`scheduler.params` depends on `scheduler.type`. Any other schedule can be passed to `initialize()` as an object or a
callable.
"""


def render_reference() -> str:
    """The whole page as Markdown."""
    parts = [
        _INTRODUCTION,
        _tables(_plain(BATCH_KEYS)),
        "## Training\n",
        _tables(_plain(name for name in ConfigView.model_fields if name not in BATCH_KEYS)),
        *_sections(),
        _params("Optimizers", "optimizer", OPTIMIZER_PARAMS, _OPTIMIZERS.format(others=_named(TORCH_ELEMENTWISE))),
        _params("Schedules", "scheduler", SCHEDULER_PARAMS, _SCHEDULES),
        _removed(),
        _renamed(),
        _DIFFERENCES,
    ]
    return "\n".join(part for part in parts if part)


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(names: Iterable[str]) -> Mapping[str, FieldInfo]:
    fields = ((name, ConfigView.model_fields[name]) for name in names)
    return {name: field for name, field in fields if section_class(field) is None}


def _sections() -> Iterator[str]:
    """One chapter per top-level object; those of capabilities to come go last."""
    models = {name: section_class(field) for name, field in ConfigView.model_fields.items()}
    present = {name: model for name, model in models.items() if model is not None}
    for name, model in sorted(present.items(), key=lambda item: not item[1].available):
        yield from _chapter(name, model)


def _chapter(path: str, model: type[Section]) -> Iterator[str]:
    yield f"{'###' if '.' in path else '##'} `{path}`\n"
    leaves = {name: field for name, field in model.model_fields.items() if section_class(field) is None}
    if model.available:
        yield f"{_summary(model)}\n"
        yield _tables(leaves)
    else:
        yield f"*Not available yet.* {_summary(model)}\n"
        yield _table(("Key", "Default", "Allowed", "What it will do"), map(_full_row, leaves.items()))
    for name, field in model.model_fields.items():
        nested = section_class(field)
        if nested is not None:
            yield from _chapter(dotted(path, name), nested)


def _params(title: str, name: str, table: Mapping[str, type[Section]], introduction: str) -> str:
    common = set[str]()
    parts = [f"## {title}\n", introduction]
    if name == "optimizer":
        base = next(iter(table.values())).__mro__[1]
        shared: dict[str, FieldInfo] = base.model_fields if issubclass(base, Section) else {}
        common = set(shared)
        parts.append(_tables(shared))
    models: dict[type[Section], list[str]] = {}
    for kind, model in table.items():
        models.setdefault(model, []).append(kind)
    for model, kinds in models.items():
        own = {key: field for key, field in model.model_fields.items() if key not in common or _overrides(model, key)}
        parts += [f"### {', '.join(f'`{kind}`' for kind in kinds)}\n", f"{_summary(model)}\n", _tables(own)]
    return "\n".join(part for part in parts if part)


def _overrides(model: type[Section], key: str) -> bool:
    return key in model.__annotations__


def _summary(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split())


def _tables(fields: Mapping[str, FieldInfo]) -> str:
    """Working keys, then those to come, then those without effect."""
    tables: tuple[tuple[Kind, tuple[str, ...], Callable[[tuple[str, FieldInfo]], tuple[str, ...]]], ...] = (
        ("works", ("Key", "Default", "Allowed", "What it does"), _full_row),
        ("later", ("Not available yet", "Accepted now", "What it will do"), _later_row),
        ("inert", ("Accepted without effect", "Why"), _inert_row),
    )
    parts: list[str] = []
    for kind, head, row in tables:
        chosen = [item for item in fields.items() if kind_of(item[1]) == kind]
        if chosen:
            parts.append(_table(head, map(row, chosen)))
    return "\n".join(parts)


def _full_row(item: tuple[str, FieldInfo]) -> tuple[str, ...]:
    name, field = item
    only = ", ".join(f"`{show(value)}`" for value in accepted(field))
    return f"`{name}`", _default(field), f"for now {only}" if only else allowed(field), field.description or ""


def _later_row(item: tuple[str, FieldInfo]) -> tuple[str, ...]:
    name, field = item
    return f"`{name}`", ", ".join(f"`{show(value)}`" for value in accepted(field)), field.description or ""


def _inert_row(item: tuple[str, FieldInfo]) -> tuple[str, ...]:
    name, field = item
    return f"`{name}`", field.description or ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    default: object = field.get_default(call_default_factory=True)
    return "unset" if default is None else f"`{show(default)}`"


def _removed() -> str:
    rows = ((f"`{path}`", f"{instead}.") for path, instead in REFUSED.items())
    head = "## Keys that are refused\n\nThey pass while they are off, with a warning.\n"
    return head + "\n" + _table(("Key", "Instead"), rows)


def _renamed() -> str:
    rows = (
        (f"`{path}`", f"`{dotted(path.rpartition('.')[0], renamed.name)}`" + _as_device(renamed.device))
        for path, renamed in RENAMED.items()
    )
    return "## Older spellings\n\nThey are read as the present name, with a warning.\n\n" + _table(("Old", "Now"), rows)


def _as_device(device: str | None) -> str:
    return f' with `"device": "{device}"`' if device else ""


if __name__ == "__main__":
    sys.stdout.write(render_reference())
