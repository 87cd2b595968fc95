"""How checkpoints are shown as text.

Owns wording and tables. Refuses to know how anything is found out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint import NativeSource, Source
from shardwise.checkpoint.compare import Difference
from shardwise.checkpoint.contents import Spec
from shardwise.checkpoint.export import ExportPlan
from shardwise.checkpoint.inspect import Branch, Finding, Leaf, Listed, tree_of
from shardwise.errors import CheckpointError
from shardwise.observe.memory import format_bytes

__all__ = ["difference", "exported", "finding", "listing", "names", "plan", "summary", "tree"]

_SHOWN = 8  # names in one line
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def names(found: Sequence[str], most: int = _SHOWN) -> str:
    """Names in one line, the first few of them."""
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _dtype(spec: Spec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _shape(spec: Spec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- inspect -------------------------------------------------------------------------------------------------------------------


def summary(source: Source) -> str:
    """All that is no tensor, a line for each."""
    facts = source.facts
    rows = [
        ("checkpoint", source.where),
        ("written by", _pairs(facts.origin, ("shardwise", "torch"), leave={"stage", "ranks", "optimizer"})),
        ("size", _sizes(source)),
        ("layout", _pairs(facts.origin, ("ranks", "stage"), only=True)),
        ("progress", ", ".join(f"{name} {value:,}" for name, value in facts.counters.items())),
        ("optimizer", str(facts.origin.get("optimizer", ""))),
        *((f"  group {number}", _group(group)) for number, group in enumerate(facts.groups)),
        ("schedule", _pairs(facts.schedule)),
        ("loss scale", _pairs(facts.loss_scale, ("scale", "dynamic", "clean"), only=True)),
        ("data loader", _pairs(facts.loader)),
        ("extra state", names(list(facts.extra))),
        ("left out", names(facts.excluded)),
        ("client state", _client_state(source)),
    ]
    width = max(len(name) for name, value in rows if value)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows if value)


def _sizes(source: Source) -> str:
    by_kind: dict[str, int] = {}
    for key, spec in source.specs.items():
        by_kind[key.kind] = by_kind.get(key.kind, 0) + spec.nbytes
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in by_kind.items())
    files = f" in {_count(len(source.index.files), 'file')}" if isinstance(source, NativeSource) else ""
    return f"{format_bytes(sum(by_kind.values()))}{files}: {parts}"


def _pairs(found: Mapping[str, Any], first: Sequence[str] = (), *, only: bool = False, leave: Iterable[str] = ()) -> str:
    chosen = {name: found[name] for name in first if name in found}
    if not only:
        chosen.update({name: value for name, value in found.items() if name not in set(leave)})
    return ", ".join(f"{name} {_short(value)}" for name, value in chosen.items())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _group(group: Mapping[str, Any]) -> str:
    options = {name: value for name, value in group.get("options", {}).items() if value is not None}
    return f"{_count(len(group.get('parameters', ())), 'parameter')}: {_pairs(options)}"


def _client_state(source: Source) -> str:
    read = getattr(source, "client_state", None)
    if read is None:
        return ""
    try:
        return names([str(key) for key in read()])
    except CheckpointError as error:
        return str(error)


def tree(source: Source, depth: int | None = None) -> str:
    """Modules and tensors as an indented table; the last columns are bytes of weights and buffers, and of optimizer state.

    Args:
        source: the checkpoint.
        depth: show modules down to this level, and no tensors.
    """
    root = tree_of(source)
    rows = [["", "", "elements", "bytes", "optimizer"], _total("all", root, 0), *_rows(root, 0, depth)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines: list[str] = []
    for name, about, *numbers in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", f"{about:<{widths[1]}}", *cells]))
    return "\n" + "\n".join(line.rstrip() for line in lines)


def _rows(branch: Branch, level: int, depth: int | None) -> Iterator[list[str]]:
    if depth is None:
        for name, leaf in branch.leaves.items():
            yield _leaf(name, leaf, level)
    elif level >= depth:
        return
    for name, module in branch.modules.items():
        while len(module.modules) == 1 and not module.leaves and depth is None:  # a module that only holds another
            inner, module = next(iter(module.modules.items()))
            name = f"{name}.{inner}"
        yield _total(name, module, level + 1)
        yield from _rows(module, level + 1, depth)


def _total(name: str, branch: Branch, level: int) -> list[str]:
    state = format_bytes(branch.state) if branch.state else ""
    return ["  " * max(level - 1, 0) + name, "", f"{branch.elements:,}", format_bytes(branch.nbytes), state]


def _leaf(name: str, leaf: Leaf, level: int) -> list[str]:
    words = f"{_dtype(leaf.spec)} {_shape(leaf.spec)}"
    notes = [f"{leaf.computed} in the model"] if leaf.computed else []
    notes += ["buffer"] if leaf.key.kind == "buffer" else []
    notes += [f"also {names(leaf.tied)}"] if leaf.tied else []
    state = format_bytes(leaf.state) if leaf.state else ""
    about = words + (f" ({'; '.join(notes)})" if notes else "")
    return ["  " * level + name, about, f"{leaf.spec.length:,}", format_bytes(leaf.spec.nbytes), state]


# -- list, verify --------------------------------------------------------------------------------------------------------------


def listing(path: Path, found: Sequence[Listed]) -> str:
    """A run's checkpoints as a table."""
    if not found:
        return f"there are no checkpoints in {path}"
    rows = [["checkpoint", "step", "size", "saved", ""]]
    for each in found:
        note = "  ".join(filter(None, ("latest" if each.latest else "", each.problem)))
        step = "?" if each.step is None else f"{each.step:,}"
        rows.append([each.tag, step, format_bytes(each.nbytes), f"{_age(each.saved_at)} ago", note])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e}" for a, b, c, d, e in rows]
    return "\n".join(line.rstrip() for line in lines)


def _age(saved_at: float) -> str:
    seconds = max(0, int(time.time() - saved_at))
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= size), (1, "second"))
    return _count(seconds // size, unit)


def finding(found: Finding) -> str:
    """A line about a file that was checked."""
    if found.problem:
        return f"DAMAGED  {found.problem}"
    return f"ok       {found.name}" + (f"  {format_bytes(found.nbytes)}" if found.nbytes else "")


# -- diff ----------------------------------------------------------------------------------------------------------------------


def difference(found: Difference, one: str, other: str, limit: int) -> str:
    """All that differs between two checkpoints; `limit` lines of each part, 0 for all."""
    lines = [f"A  {one}", f"B  {other}"]
    for title, keys in (("only in A", found.only_one), ("only in B", found.only_other)):
        lines += _part(title, [_named(key) for key in keys], limit)
    shapes = [f"{_named(key)}: {_dtype(a)} {_shape(a)}, {_dtype(b)} {_shape(b)}" for key, a, b in found.shapes]
    lines += _part("of another shape", shapes, limit)
    lines += _part("of another value", _values(found), limit)
    facts = [f"{fact.name}: {_short(fact.one)}, {_short(fact.other)}" for fact in found.facts]
    lines += _part("other facts", facts, limit)
    equal = found.compared - sum(1 for each in found.values if each.differing)
    lines.append(f"\n{_count(equal, 'tensor')} of {found.compared:,} that both have are equal" if found.compared else "")
    lines.append("nothing differs" if found.same else "they differ")
    return "\n".join(lines)


def _named(key: Any) -> str:
    return (
        f"{key} (buffer)" if key.kind == "buffer" else f"random state of rank {key.name}" if key.kind == "random" else str(key)
    )


def _values(found: Difference) -> list[str]:
    rows: list[str] = []
    for each in found.values:
        dtypes = "" if each.one.dtype == each.other.dtype else f"  {_dtype(each.one)}, {_dtype(each.other)}"
        if each.differing:
            share = (
                f"{each.differing:,} of {each.one.length:,} differ, by up to {each.largest:.3g} ({each.relative:.2g} relative)"
            )
            rows.append(f"{_named(each.key)}: {share}{dtypes}")
        else:
            rows.append(f"{_named(each.key)}: equal values{dtypes}")
    return rows


def _part(title: str, rows: Sequence[str], limit: int) -> list[str]:
    if not rows:
        return []
    shown = rows[:limit] if limit else rows
    more = [f"  ... and {len(rows) - len(shown):,} more (--limit 0 shows all)"] if len(shown) < len(rows) else []
    return [f"\n{title} ({len(rows):,}):", *(f"  {row}" for row in shown), *more]


# -- export --------------------------------------------------------------------------------------------------------------------


def plan(planned: ExportPlan, where: str, out: str, *, dry: bool) -> str:
    """What will be written."""
    dtypes: dict[str, int] = {}
    for spec in planned.specs.values():
        dtypes[_dtype(spec)] = dtypes.get(_dtype(spec), 0) + spec.nbytes
    made = ", ".join(f"{name} {format_bytes(size)}" for name, size in dtypes.items())
    lines = [f"{where} -> {out}: {_count(len(planned.specs), 'tensor')}, {made}"]
    lines += [f"  {file.name}  {format_bytes(file.nbytes)}" for file in planned.files]
    lines += [f"  {planned.index}"] if planned.index else []
    lines += [f"note: {note}" for note in planned.notes]
    return "\n".join([*lines, "nothing was written (--dry-run)"] if dry else lines)


def exported(planned: ExportPlan, out: Path) -> str:
    """What was written, and what is still to be done."""
    text = f"wrote {format_bytes(planned.nbytes)} to {out}"
    if planned.format != "dcp" and not (out / "config.json").exists():
        text += f"\nfrom_pretrained also needs config.json there: model.config.save_pretrained({str(out)!r}), or copy it"
    return text
