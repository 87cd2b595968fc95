"""How a checkpoint fits a model.

Owns which tensor of the one is which of the other, and what is an error. Refuses to know how anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint import Key, Source
from shardwise.errors import CheckpointError, explain

__all__ = ["Report", "match", "state_of"]


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


def match(
    model: nn.Module, source: Source, *, strict: bool, shapes: bool = True, switch: str = "strict"
) -> tuple[dict[str, Key], Report]:
    """Find each parameter and persistent buffer of a model in a checkpoint, whichever of the two it is there.

    Args:
        model: plain or sharded.
        source: the checkpoint.
        strict: whether both must have the same.
        shapes: whether another shape is an error; otherwise it counts as missing.
        switch: what users call `strict`.

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
    for name, value in state_of(model).items():
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
            if not shapes:
                report.missing.append(name)
                continue
            raise _wrong_shape(source, name, tuple(values[name].shape), source.specs[theirs[called]].shape)
        else:
            found[name] = theirs[called]
    for name, key in found.items():
        ignored = [alias for alias in ours[name] if alias in theirs and theirs[alias] != key]
        if ignored:
            report.notes.append(f"tied to {key.name} in the model, their own values not loaded: {', '.join(ignored)}")
    known = {alias for aliases in ours.values() for alias in aliases} | {key.name for key in found.values()}
    report.unexpected += [name for name in theirs if name not in known]
    _leave_out(source, report)
    if strict and (report.missing or report.unexpected):
        raise _does_not_fit(source, report, switch)
    return found, report


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a model has by name: its state dict, and parameters that a module leaves out of it: whatever trains is saved."""
    return {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}


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


def _does_not_fit(source: Source, report: Report, switch: str) -> CheckpointError:
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
            do=f"pass {switch}=False to load what fits",
        )
    )
