"""`Buffer`: the parameters of one unit that are treated alike, side by side in one 1-D storage that is cut over the shard axis.

Owns the binding between `nn.Parameter` objects and the storage. Refuses to know when anything is gathered, optimizers and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.errors import ParameterError, explain
from shardwise.layout import Layout, Slot
from shardwise.mesh import Axis
from shardwise.zero.master import Master, SameMaster
from shardwise.zero.released import ReleasedParameter, placeholder, retype

if TYPE_CHECKING:
    from shardwise.comm import Storage

__all__ = ["Buffer", "BufferKey", "Member", "as_storage", "storage_dtype_of"]

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX = {real: pair for pair, real in _REAL.items()}


@dataclass(frozen=True, slots=True)
class BufferKey:
    """Parameters with equal keys share a buffer.

    Args:
        group: index of the optimizer's parameter group; None for parameters that no optimizer updates.
        dtype: dtype of the storage (the real dtype for complex parameters).
        wire: dtype in which gradients travel; None for the one of all others.
        small: whether the parameters are below the persistence threshold.
        shard: axis the buffer is cut over.
        replicate: axis that holds equal copies of each chunk.
    """

    group: int | None
    dtype: torch.dtype
    wire: torch.dtype | None
    small: bool
    shard: Axis
    replicate: Axis


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter and its place.

    Args:
        reference: gives the parameter, the user's object, which is never replaced; None once it is dead. An engine keeps its
            parameters alive, `zero.Init` does not.
        slot: where it lies in the buffer; `slot.name` is its first name in the model.
        index: its number among all parameters of the engine.
        strides: of the tensor that it was, where they matter while it is lent; None for row-major ones.
    """

    reference: Callable[[], nn.Parameter | None]
    slot: Slot
    index: int
    strides: tuple[int, ...] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The user's object."""
        parameter = self.reference()
        assert parameter is not None, f"{self.name} is dead"
        return parameter

    @property
    def name(self) -> str:
        """First name of the parameter in the model."""
        return self.slot.name

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view of its slot in a full-length buffer (complex for complex parameters)."""
        part = flat[self.slot.offset : self.slot.stop]
        if self.slot.request.width == 2:
            return torch.view_as_complex(part.view(*self.slot.shape, 2))
        return part.view(self.slot.shape)


class Buffer:
    """Bytes with a `Layout` on an axis.

    Args:
        key: what the members have in common.
        layout: where they lie.
        members: one per slot, in slot order.
        storage: the bytes, allocated by the transport.
        resident: whether the gathered copy stays for good.
    """

    def __init__(self, key: BufferKey, layout: Layout, members: Sequence[Member], storage: Storage, *, resident: bool) -> None:
        self.key = key
        self.layout = layout
        self.members = tuple(members)
        self.storage = storage
        self.resident = resident
        self.master: Master | None = None  # of this rank's chunk; None where no optimizer updates it
        # Views outlive a release: they share the storage that is emptied and refilled (see "Same storage" in unit.py).
        self._views = [member.view(storage.full) for member in self.members] if storage.is_live else []
        self._placeholders: list[Tensor] = []
        self._gone: set[int] = set()  # members that another buffer holds now

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates these parameters."""
        return self.key.group is not None

    @property
    def precise(self) -> Master:
        """This rank's chunk of the weights with all their digits: the masters, or the weights where there are none."""
        return SameMaster(self.shard) if self.master is None else self.master

    @property
    def interval(self) -> tuple[int, int]:
        """The part of the buffer that rests on this rank, in storage elements."""
        return self.layout.interval(self.key.shard.index)

    @property
    def shard(self) -> Tensor:
        """This rank's chunk of the weights, 1-D, in the storage dtype."""
        return self.storage.shard

    def check_bound(self) -> None:
        """Gathered parameters must still be the views they were made: the step writes into the buffer.

        Raises:
            ParameterError: the data of a parameter was replaced, by a cast of the module for example.
        """
        for number, member, parameter in self.present():
            view = self._views[number]
            if parameter.dtype != view.dtype or (parameter.data_ptr() != view.data_ptr() and view.numel()):
                problem = f"the data of parameter {member.name!r} was replaced after initialize, so that it no longer trains"
                remedy = (
                    "choose the dtype in the configuration instead of casting the module; write values in place, "
                    "or inside shardwise.zero.GatheredParameters(..., modifier_rank=0)"
                )
                raise ParameterError(explain(problem, do=remedy))

    @property
    def address(self) -> int:
        """Where the gathered bytes are, to recognise views of them."""
        return self.storage.full.untyped_storage().data_ptr()

    def present(self) -> Iterator[tuple[int, Member, nn.Parameter]]:
        """Members that are alive and have not been taken over by another buffer, with their numbers."""
        for number, member in enumerate(self.members):
            parameter = None if number in self._gone else member.reference()
            if parameter is not None:
                yield number, member, parameter

    def forget(self, number: int) -> None:
        """Another buffer holds this member from now on."""
        self._gone.add(number)

    def bind(self) -> None:
        """Point every parameter at the gathered bytes."""
        if not self._views:
            with torch.inference_mode(False):  # views made in inference mode could never be trained on
                self._views = [member.view(self.storage.full) for member in self.members]
        for number, _, parameter in self.present():
            retype(parameter, nn.Parameter)
            # `.data`, so that writes through the buffer do not bump the parameter's version counter.
            parameter.data = self._views[number]

    def unbind(self) -> None:
        """Put placeholders where the values were."""
        if not self._placeholders:
            self._placeholders = [placeholder(m.slot.shape, self.dtype_of(m), self.shard.device) for m in self.members]
        for number, _, parameter in self.present():
            retype(parameter, nn.Parameter)  # released by another buffer, it would refuse to be written
            parameter.data = self._placeholders[number]
            retype(parameter, ReleasedParameter)

    def lend(self) -> None:
        """Give every parameter memory of its own, with the gathered values."""
        with torch.inference_mode(False):
            for _, member, parameter in self.present():
                gathered = member.view(self.storage.full)
                own = torch.empty_strided(
                    member.slot.shape,
                    member.strides or gathered.stride(),
                    dtype=gathered.dtype,
                    device=gathered.device,
                )
                own.copy_(gathered)
                retype(parameter, nn.Parameter)
                parameter.data = own

    def dtype_of(self, member: Member) -> torch.dtype:
        """Dtype of a parameter in this buffer."""
        return _COMPLEX[self.key.dtype] if member.slot.request.width == 2 else self.key.dtype

    def own_pieces(self) -> Iterator[tuple[Member, int, int]]:
        """The parts of members in this rank's chunk, as `(member, first, last + 1)` in elements of the chunk."""
        start, stop = self.interval
        for index, first, last in self.layout.pieces(start, stop):
            yield self.members[index], first - start, last - start

    def write(self, full: Tensor) -> None:
        """Replace the weights: `full` has the layout's total length, any floating dtype, equal on all ranks.

        The chunk of a separate master copy is taken from `full` before it is rounded to the storage dtype.
        """
        start, stop = self.interval
        if self.storage.is_live:
            self.storage.full.copy_(full)
        self.shard.copy_(full[start:stop])
        if self.master is not None and self.master.separate:
            self.master.write(0, full[start:stop])


def as_storage(value: Tensor) -> Tensor:
    """The elements of a parameter or gradient as the buffer holds them: 1-D, row-major, complex numbers as pairs of reals."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.reshape(-1)


def storage_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the buffer that holds parameters of `dtype`."""
    return _REAL.get(dtype, dtype)
