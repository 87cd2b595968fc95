"""How a checkpoint fits a model.

Owns which tensor of the one is which of the other, and what is an error. Refuses to know how anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from shardwise.checkpoint import Key, Source
from shardwise.errors import CheckpointError, explain
from shardwise.persistence.state import members_of
from shardwise.trainer import Parts

__all__ = ["Report", "match", "match_module"]


@dataclass
class Report:
    """How a checkpoint fits a model.

    Args:
        missing: names that the model has and the checkpoint does not.
        unexpected: the reverse.
        notes: what was left as it is, for other reasons.
    """

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """For people; empty if everything fits."""
        lines = [f"not in the checkpoint, left as it is: {', '.join(self.missing)}"] if self.missing else []
        lines += [f"not in the model, not loaded: {', '.join(self.unexpected)}"] if self.unexpected else []
        return "; ".join([*lines, *self.notes])


def match(parts: Parts, source: Source, *, strict: bool) -> tuple[dict[str, str], Report]:
    """Find each parameter of the model in a checkpoint.

    Returns:
        the name in the checkpoint of each parameter that is there, and how the two fit.

    Raises:
        CheckpointError: a parameter has another shape; or, if strict, one side has more than the other.
    """
    report = Report()
    theirs = {key.name: spec for key, spec in source.specs.items() if key.kind == "weight"}
    aliases: dict[int, list[str]] = {}
    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names: dict[str, str] = {}
    for _, member in members_of(parts):
        called = [source.facts.ties.get(name, name) for name in aliases.get(id(member.parameter), [member.name])]
        found = next((name for name in called if name in theirs), None)
        if found is None:
            report.missing.append(member.name)
            continue
        if theirs[found].shape != member.slot.shape:
            raise _wrong_shape(source, member.name, member.slot.shape, theirs[found].shape)
        names[member.name] = found
    used = set(names.values())
    report.unexpected += [name for name in theirs if name not in used]
    _match_buffers(parts, source, report)
    _leave_out(source, report)
    if strict and (report.missing or report.unexpected):
        raise _does_not_fit(source, report)
    return names, report


def _match_buffers(parts: Parts, source: Source, report: Report) -> None:
    state = parts.runtime.other_state()
    theirs = {key.name: spec for key, spec in source.specs.items() if key.kind == "buffer"}
    for name, value in state.items():
        if isinstance(value, Tensor) and name in theirs and theirs[name].shape != tuple(value.shape):
            raise _wrong_shape(source, name, tuple(value.shape), theirs[name].shape)
    known = {*theirs, *source.facts.extra}
    report.missing += [name for name in state if name not in known]
    report.unexpected += [name for name in known if name not in state]


def match_module(model: nn.Module, source: Source, *, strict: bool) -> tuple[dict[str, Key], Report]:
    """Find each parameter and persistent buffer of any module in a checkpoint, whichever of the two it is there.

    Returns:
        where the values of each are, by its first name in the module, and how the two fit.

    Raises:
        CheckpointError: one has another shape; or, if strict, one side has more than the other.
    """
    report = Report()
    theirs = {key.name: key for kind in ("buffer", "weight") for key in source.specs if key.kind == kind}
    first: dict[int, str] = {}
    ours: dict[str, list[str]] = {}
    values: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            values.setdefault(first.setdefault(id(value), name), value)
            ours.setdefault(first[id(value)], []).append(name)
        elif name not in source.facts.extra:
            report.missing.append(name)
    found: dict[str, Key] = {}
    for name, aliases in ours.items():
        called = next((each for alias in aliases for each in (alias, source.facts.ties.get(alias)) if each in theirs), None)
        if called is None:
            report.missing.append(name)
        elif source.specs[theirs[called]].shape != tuple(values[name].shape):
            raise _wrong_shape(source, name, tuple(values[name].shape), source.specs[theirs[called]].shape)
        else:
            found[name] = theirs[called]
    known = {alias for aliases in ours.values() for alias in aliases} | {key.name for key in found.values()}
    report.unexpected += [name for name in theirs if name not in known]
    _leave_out(source, report)
    if strict and (report.missing or report.unexpected):
        raise _does_not_fit(source, report, "strict")
    return found, report


def _leave_out(source: Source, report: Report) -> None:
    """What was left out on purpose is not missing."""
    left_out = [name for name in report.missing if name in source.facts.excluded]
    if left_out:
        report.missing = [name for name in report.missing if name not in left_out]
        report.notes.append(f"frozen and left out when it was saved, left as they are: {', '.join(left_out)}")


def _wrong_shape(source: Source, name: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        explain(
            f"{name!r} has another shape in the model than in {source.where}",
            expected=f"{ours}, as in the model",
            found=f"{theirs}",
            do="build the model with the sizes it was saved with (vocabulary, width), and change them after loading",
        )
    )


def _does_not_fit(source: Source, report: Report, strict: str = "load_module_strict") -> CheckpointError:
    renamed = (
        f" ({len(report.missing)} and {len(report.unexpected)}: were they renamed?)"
        if report.missing and report.unexpected
        else ""
    )
    return CheckpointError(
        explain(
            f"{source.where} is not of this model{renamed}",
            found="; ".join(
                text
                for text, names in (
                    (f"missing in the checkpoint: {', '.join(report.missing[:8])}", report.missing),
                    (f"not in the model: {', '.join(report.unexpected[:8])}", report.unexpected),
                )
                if names
            ),
            do=f"pass {strict}=False to load what fits",
        )
    )
