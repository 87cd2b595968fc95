"""What the one step path needs of a thing that updates shards.

Owns the contract and what every driver shares: the settings, and state that was carried over from elsewhere. Refuses to know
update rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError, explain
from shardwise.optim.shards import Piece, Shard

__all__ = ["Driver", "Groups", "PieceState", "StepSettings", "Sum", "Sums"]

Groups = Sequence[dict[str, Any]]
"""The optimizer's `param_groups`."""

PieceState = Mapping[str, Any]
"""State of one piece by torch's names: 1-D tensors of the piece's length, and numbers."""

Sum = Callable[[Tensor, str], Tensor]
"""Sum a small tensor over ranks, in place; the text names the collective. Every rank calls it in the same order."""


class Sums(NamedTuple):
    """Sums over all data ranks, and over the ranks that hold one copy of the parameters between them."""

    ranks: Sum
    shards: Sum


@dataclass(frozen=True)
class StepSettings:
    """How to step.

    Args:
        clip: largest gradient norm; 0 for no clipping.
        check_overflow: skip a step whose gradients are not all finite.
        state_dtype: dtype of built-in rules' state; None for the master's.
        keep_grad: leave the gradients of an applied step as they are, at some cost in speed.
        rank, world: this rank's number and their count among the data ranks, to tell who saw a bad gradient.
        names: parameter names by index, for messages; where absent, the names of this rank's pieces.
        device: where small tensors are summed; None for the shards' device.
    """

    clip: float = 0.0
    check_overflow: bool = True
    state_dtype: torch.dtype | None = None
    keep_grad: bool = False
    rank: int = 0
    world: int = 1
    names: Sequence[str] = ()
    device: torch.device | None = None


class Driver(ABC):
    """Updates shards by one optimizer's rule. `shards` is fixed for life; what the shards' fields point at is not.

    Attributes:
        in_memory: whether `piece_state` gives the state itself, so that writing to it is setting it.
    """

    in_memory = True

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self.settings = StepSettings()
        self._carried: Mapping[str, PieceState] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the rule: state of one driver means something to another of the same name."""

    def state_names(self) -> set[str] | None:
        """Names of the state tensors that the rule keeps; None if that is not known."""
        return None

    @property
    def inner(self) -> Optimizer | None:
        """The torch optimizer that does the work, where there is one."""
        return None

    def carry_over(self, states: Mapping[str, PieceState]) -> None:
        """Start from existing state: full-size tensors (any shape) and numbers, by parameter name."""
        self._carried = states

    def configure(self, settings: StepSettings) -> None:
        """Take settings, before the first update; carried-over state is cut to this rank's pieces now."""
        self.settings = settings
        carried, self._carried = self._carried, {}
        for number, shard in enumerate(self.shards):
            for position, piece in enumerate(shard.pieces):
                if state := carried.get(piece.name):
                    self.load_piece_state(number, position, {key: cut(key, value, piece) for key, value in state.items()})

    @abstractmethod
    def update(self, groups: Groups, scale: float, used: Sequence[bool], sums: Sums) -> None:
        """Apply gradients times `scale` to the parameters in use; the others and their state stay bit for bit.

        Args:
            groups: live options, by `Shard.group`.
            scale: clip x unscale x 1 / denominator.
            used: by parameter index.
            sums: for rules that need whole-tensor norms.
        """

    @abstractmethod
    def piece_state(self, shard: int, piece: int) -> dict[str, Any]:
        """State of one piece, to read: 1-D tensors, and numbers such as "step". Empty before its first update."""

    @abstractmethod
    def load_piece_state(self, shard: int, piece: int, state: PieceState) -> None:
        """Overwrite the state of one piece; tensors are cast to the dtype that the rule keeps."""

    def set_piece_state(self, shard: int, piece: int, name: str, values: Tensor) -> None:
        """Replace one tensor of the state of one piece, which has it."""
        self.piece_state(shard, piece)[name].copy_(values)

    def resident_bytes(self) -> int:
        """Bytes of state in this device's memory."""
        return self.state_bytes()

    def offloaded_bytes(self) -> int:
        """Bytes of state, master weights included, that rest elsewhere than in this device's memory."""
        return 0

    def close(self) -> None:  # noqa: B027 - most drivers hold nothing but memory
        """Give back what is not memory."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of this rank's state tensors, wherever they rest."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Copies of the state of every piece, by shard, with what tells one layout from another."""
        return [
            {"pieces": _extent(shard), "steps": list(shard.steps), "state": self._state_of(number)}
            for number, shard in enumerate(self.shards)
        ]

    def _state_of(self, number: int) -> list[dict[str, Any]]:
        states = (self.piece_state(number, position) for position in range(len(self.shards[number].pieces)))
        return [{key: _copy(value) for key, value in state.items()} for state in states]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `state_dict` gave for the same shards.

        Raises:
            UsageError: the state is of other parameters, or of other parts of them.
        """
        ours = [_extent(shard) for shard in self.shards]
        theirs = [saved["pieces"] for saved in state]
        if ours != theirs:
            raise UsageError(
                explain(
                    "optimizer state does not fit this rank's shards",
                    expected=_summary(ours),
                    found=_summary(theirs),
                    do="load it on the same rank of the same number of ranks, or use the engine's checkpoints",
                )
            )
        for number, (shard, saved) in enumerate(zip(self.shards, state, strict=True)):
            for position, values in enumerate(saved["state"]):
                self.load_piece_state(number, position, values)
            shard.steps = list(saved["steps"])


def _extent(shard: Shard) -> list[list[Any]]:
    return [[piece.name, piece.offset, piece.stop - piece.start] for piece in shard.pieces]


def _summary(extents: Sequence[Sequence[Sequence[Any]]]) -> str:
    pieces = [piece for shard in extents for piece in shard]
    return f"{len(pieces)} pieces with {sum(length for _, _, length in pieces)} elements, the first {pieces[:1]}"


def cut(key: str, value: Any, piece: Piece) -> Any:
    """The part of a full-size state tensor that belongs to `piece`; anything else, such as a step count, as it is."""
    if not isinstance(value, Tensor) or key == "step":
        return value
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    return flat[piece.offset : piece.offset + piece.stop - piece.start] if flat.numel() == piece.numel else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
