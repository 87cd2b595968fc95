"""What the keys of a torch.distributed.checkpoint stand for.

A state dict is nested, its keys in the checkpoint are flat; next to them the planner keeps the path of each. Owns the names
under which people save models and optimizers. Refuses to know tensors and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.checkpoint.foreign.narrow import as_dict, as_list

__all__ = ["Entry", "Names"]

_MODELS = ("model", "module", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optim_state_dict", "optimizer_state_dict")
_KNOWN = (*_MODELS, *_OPTIMIZERS)


@dataclass(frozen=True)
class Entry:
    """What a key stands for.

    Args:
        kind: a tensor of the model, optimizer state of a parameter, or an option of a parameter group.
        name: of the tensor or parameter; empty for options that are not kept by parameter.
        state: name of the state or option; empty for all options of all groups in one.
        group: number of the parameter group, for options that are kept by group.
    """

    kind: Literal["model", "state", "options"]
    name: str
    state: str = ""
    group: int = -1


class Names:
    """Sorts keys.

    Args:
        keys: all of them.
        paths: the path in the state dict for each key, if known.
    """

    def __init__(self, keys: Iterable[str], paths: Mapping[Any, Any]) -> None:
        self.left_out: list[str] = []
        keys = list(keys)
        self._paths: dict[str, list[str]] = {}
        for key in keys:
            path = as_list(paths.get(key))
            known = path and all(isinstance(part, str | int) for part in path)
            self._paths[key] = [str(part) for part in path or ()] if known else [key]
        starts = tuple(f"{name}.{part}." for name in _OPTIMIZERS for part in ("state", "param_groups"))
        # Without paths, "model." may be the name of a module; only an optimizer beside it tells that it is not.
        self._split = all(len(path) == 1 for path in self._paths.values()) and any(key.startswith(starts) for key in keys)

    def entry(self, key: str) -> Entry | None:
        """What a key stands for, or None for something that is neither of the model nor of the optimizer."""
        path = self._paths[key]
        if len(path) == 1 and self._split:
            head, _, rest = key.partition(".")
            path = [head, rest] if head in _KNOWN and rest else path
        while len(path) > 2 and path[0] not in _KNOWN and path[1] in _KNOWN:
            path = path[1:]  # in an object of the application's
        if len(path) == 1:
            return Entry("model", path[0])
        if path[0] in _MODELS:
            return Entry("model", ".".join(path[1:]))
        if path[0] in _OPTIMIZERS:
            return self._optimizer(path[1:])
        self.leave_out(path[0])
        return None

    def _optimizer(self, path: list[str]) -> Entry | None:
        if len(path) == 1 and path[0].startswith(("state.", "param_groups.")):
            kind, _, rest = path[0].partition(".")
            name, _, state = rest.rpartition(".")
            return self._state(name, state) if kind == "state" else Entry("options", name, state)
        if path[0] == "state" and len(path) > 2:
            return self._state(path[1], ".".join(path[2:]))
        if path[0] == "param_groups":
            if len(path) == 1:
                return Entry("options", "")
            return Entry("options", "", ".".join(path[2:]), int(path[1])) if path[1].isdecimal() else None
        self.leave_out(path[0])
        return None

    def _state(self, name: str, state: str) -> Entry | None:
        if name.isdecimal():
            self.leave_out("optimizer state of parameters that have a number and no name")
            return None
        return Entry("state", name, state)

    def leave_out(self, what: str) -> None:
        """Note that something was there and is not used."""
        if what not in self.left_out:
            self.left_out.append(what)

    def groups(self, options: Mapping[Entry, Any]) -> list[dict[str, Any]]:
        """The parameter groups, as `Facts` has them, from the values of all options."""
        numbered: dict[int, dict[str, Any]] = {}
        named: dict[str, dict[str, Any]] = {}
        for entry, value in options.items():
            if entry.name:
                named.setdefault(entry.name, {})[entry.state] = value
            elif entry.group >= 0:
                numbered.setdefault(entry.group, {})[entry.state] = value
            else:
                every = [as_dict(group) for group in as_list(value) or ()]
                numbered |= {number: group for number, group in enumerate(every) if group is not None}
        groups = [_group(numbered[number]) for number in sorted(numbered)]
        for name, held in named.items():
            same = next((group for group in groups if group["options"] == held), None)
            if same is None:
                groups.append(same := {"options": held, "parameters": []})
            same["parameters"].append(name)
        return groups


def _group(options: Mapping[str, Any]) -> dict[str, Any]:
    members: list[Any] = []
    for given in (as_list(options.get("params")), as_list(options.get("param_names"))):
        if not members and given and all(isinstance(name, str) for name in given):
            members = given
    kept = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    return {"options": kept, "parameters": members}
