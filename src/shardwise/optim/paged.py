"""Optimizer state that rests in a tier: in host memory beside an accelerator, or on a disk.

Owns pages: a page is a stretch of a shard with all its state, one after the other, in one range of the tier. A step brings
pages in one by one, updates them by the very code that updates state in memory, and sends them back, so that reading the next
and writing the one before overlap with it, and memory is a few pages whatever the model's size. Master weights that are not
the weights themselves rest in the pages too. Refuses to know update rules, and what a tier is made of.

Pages begin at multiples of `UNIT` elements, so that an element is updated by the same instructions as in memory, and the
results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import OptimizerError, UsageError, explain
from shardwise.optim.builtin import RuleDriver
from shardwise.optim.driver import Driver, Groups, PieceState, Sums
from shardwise.optim.rules import UNIT, Rule
from shardwise.optim.shards import Piece, Shard, count_steps, find_runs
from shardwise.tiers import Loan, Range, Tier

__all__ = ["PagedDriver", "Paging", "TierMaster", "page_state"]

MASTER = "master weights"
"""Name of the master weights in a page; no rule has state of that name."""

_ALIGN = 64  # bytes at whose multiples the tensors of a page begin


@dataclass(frozen=True)
class Paging:
    """That state is to rest in a tier.

    Args:
        open_tier: makes the tier.
        page_bytes: most bytes of a page.
        ratio: share of each shard's state that goes there; the rest stays in memory, at the shards' ends.
    """

    open_tier: Callable[[], Tier]
    page_bytes: int
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Page:
    """Elements `[start, stop)` of a shard, and where their state rests.

    Args:
        shard: number of the shard.
        start, stop: elements of it.
        held: the range; None where the state stays in memory.
    """

    shard: int
    start: int
    stop: int
    held: Range | None


class Field(NamedTuple):
    """A tensor of each page of a shard."""

    name: str
    dtype: torch.dtype


class _Open:
    """The page whose bytes are here outside of a step."""

    def __init__(self, page: Page, loan: Loan) -> None:
        self.page = page
        self.loan = loan
        self.written = False


class PagedDriver(RuleDriver):
    """A built-in rule whose state rests in a tier.

    Args:
        shards: what to update. Those with separate master weights have theirs moved into the tier: `Shard.master` then is one
            number, expanded, and `TierMaster` reads and writes the values.
        rule: elementwise.
        groups: options, by which a rule has more or less state.
        paging: how.

    Attributes:
        tier: closed with the driver.
    """

    in_memory = False

    def __init__(self, shards: Sequence[Shard], rule: Rule, groups: Groups, paging: Paging) -> None:
        super().__init__(shards, rule, groups)
        self.tier = paging.open_tier()
        self._paging = paging
        self._fields: list[tuple[Field, ...]] = []
        self._pages: list[list[Page]] = []
        self._blank: set[tuple[int, int]] = set()  # pages of which no byte was written yet
        self._resident: dict[tuple[int, int], Tensor] = {}
        self._open: _Open | None = None

    def configure(self, settings: Any) -> None:
        """Take settings, which decide on dtypes: cut the pages, and move master weights into them."""
        self.settings = settings
        for number, shard in enumerate(self.shards):
            own = [Field(MASTER, shard.master.dtype)] if shard.weight is not None else []
            names = self.rule.state_names(self.groups[shard.group])
            self._fields.append((*own, *(Field(name, settings.state_dtype or shard.master.dtype) for name in names)))
            self._pages.append(list(self._cut(number)))
            self._blank.update((number, page.start) for page in self._pages[-1])
        for number, shard in enumerate(self.shards):
            if shard.weight is not None:
                self._move_in(number, shard)
        super().configure(settings)

    def _cut(self, number: int) -> Iterator[Page]:
        """Pages of one shard."""
        length = len(self.shards[number].master)
        width = sum(field.dtype.itemsize for field in self._fields[number])
        room = self._paging.page_bytes - _ALIGN * len(self._fields[number])
        size = room // max(1, width) // UNIT * UNIT
        if size < UNIT:
            raise OptimizerError(
                explain(
                    "the buffers of the offloaded optimizer state are too small",
                    expected=f"at least {UNIT * width + _ALIGN * len(self._fields[number])} bytes",
                    found=str(self._paging.page_bytes),
                    do="raise offload_optimizer.buffer_size",
                )
            )
        moved = round(length * self._paging.ratio)
        for start in range(0, length, size):
            stop = min(start + size, length)
            held = self.tier.reserve(self._bytes_of(number, stop - start)) if start < moved else None
            yield Page(number, start, stop, held)

    def _bytes_of(self, number: int, elements: int) -> int:
        return sum(_padded(elements * field.dtype.itemsize) for field in self._fields[number])

    def _views(self, page: Page, memory: Tensor) -> dict[str, Tensor]:
        """The tensors of a page."""
        views: dict[str, Tensor] = {}
        offset, length = 0, page.stop - page.start
        for field in self._fields[page.shard]:
            nbytes = length * field.dtype.itemsize
            views[field.name] = memory[offset : offset + nbytes].view(field.dtype)
            offset += _padded(nbytes)
        return views

    def _fill_blank(self, page: Page, views: dict[str, Tensor]) -> None:
        """Give state that was never written its first values."""
        if (page.shard, page.start) in self._blank:
            for name, view in views.items():
                if name != MASTER:
                    view.fill_(self.rule.initial(name, self.groups[self.shards[page.shard].group]))

    def _move_in(self, number: int, shard: Shard) -> None:
        """The master weights of a shard go into the tier."""
        for page, views in self._visit(self._pages[number]):
            views[MASTER].copy_(shard.master[page.start : page.stop])
        shard.master = torch.zeros((), dtype=shard.master.dtype, device=shard.master.device).expand(len(shard.master))

    def _visit(self, pages: Sequence[Page]) -> Iterator[tuple[Page, dict[str, Tensor]]]:
        """Bring pages in, one after the other, and take back what became of them."""
        self._shut()
        moved = [page for page in pages if page.held is not None]
        held = [page.held for page in moved if page.held is not None]
        for number, memory in self.tier.stream(held, write_back=True):
            views = self._views(moved[number], memory)
            self._fill_blank(moved[number], views)
            yield moved[number], views
            self._blank.discard((moved[number].shard, moved[number].start))
        for page in pages:
            if page.held is None:
                yield page, self._resident_views(page)

    def _resident_views(self, page: Page) -> dict[str, Tensor]:
        key = page.shard, page.start
        if key not in self._resident:
            device = self.shards[page.shard].master.device
            nbytes = self._bytes_of(page.shard, page.stop - page.start)
            self._resident[key] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        views = self._views(page, self._resident[key])
        self._fill_blank(page, views)
        self._blank.discard(key)
        return views

    # -- steps -------------------------------------------------------------------------------------------------------------

    def update(self, groups: Groups, scale: float, used: Sequence[bool], sums: Sums) -> None:
        """One pass over the pages of which something is in use."""
        self._check_names(groups)
        todo = [
            page
            for number, pages in enumerate(self._pages)
            for page in pages
            if any(used[piece.index] for piece, _ in _within(self.shards[number], page))
        ]
        for page, views in self._visit(todo):
            self._update_page(page, views, groups, scale, used)
        for shard in self.shards:
            count_steps(shard, used)

    def _update_page(self, page: Page, views: dict[str, Tensor], groups: Groups, scale: float, used: Sequence[bool]) -> None:
        """The update of `RuleDriver`, on a shard that is only the page."""
        shard = self.shards[page.shard]
        device = shard.master.device
        here = {name: view.to(device, non_blocking=True) for name, view in views.items()}
        state = {name: view for name, view in here.items() if name != MASTER}
        window = Shard(
            shard.group,
            here.get(MASTER, shard.master[page.start : page.stop]),
            None if shard.weight is None else shard.weight[page.start : page.stop],
            None if shard.grad is None else shard.grad[page.start : page.stop],
            tuple(piece for piece, _ in _within(shard, page)),
            state=state,
            steps=[step for _, step in _within(shard, page)],
        )
        for run in find_runs(window, used):
            self._update_run(window, run, tuple(state), groups[shard.group], scale)
        for name, view in views.items():
            if here[name] is not view:
                view.copy_(here[name])

    def _check_names(self, groups: Groups) -> None:
        for number, shard in enumerate(self.shards):
            names = tuple(field.name for field in self._fields[number] if field.name != MASTER)
            wanted = tuple(self.rule.state_names(groups[shard.group]))
            if names != wanted:
                raise UsageError(
                    explain(
                        "options that change which state an optimizer keeps cannot change while it is offloaded",
                        expected=f"state {', '.join(names) or 'none'}",
                        found=", ".join(wanted) or "none",
                        do="set them before initialize()",
                    )
                )

    # -- pieces, outside of steps ------------------------------------------------------------------------------------------

    def _opened(self, page: Page, *, write: bool) -> dict[str, Tensor]:
        """The tensors of one page, which stays here until another is asked for."""
        if page.held is None:
            return self._resident_views(page)
        if self._open is None or self._open.page is not page:
            self._shut()
            self._open = _Open(page, self.tier.lend(page.held))
        views = self._views(page, self._open.loan.tensor)
        blank = (page.shard, page.start) in self._blank
        self._fill_blank(page, views)
        self._blank.discard((page.shard, page.start))
        self._open.written |= write or blank
        return views

    def _shut(self) -> None:
        """Send the open page back."""
        if self._open is not None:
            opened, self._open = self._open, None
            try:
                if opened.written and opened.page.held is not None:
                    self.tier.start_write(opened.page.held, opened.loan.tensor).wait()
            finally:
                opened.loan.give()

    def read(self, number: int, name: str, first: int, last: int) -> Tensor:
        """A copy of elements of one state of a shard, 1-D."""
        parts = [
            self._opened(page, write=False)[name][
                max(first, page.start) - page.start : min(last, page.stop) - page.start
            ].clone()
            for page in self._pages[number]
            if page.start < last and first < page.stop
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, number: int, name: str, first: int, values: Tensor) -> None:
        """Replace elements `[first, first + len(values))` of one state of a shard."""
        last = first + len(values)
        for page in self._pages[number]:
            if page.start < last and first < page.stop:
                low, high = max(first, page.start), min(last, page.stop)
                self._opened(page, write=True)[name][low - page.start : high - page.start].copy_(
                    values[low - first : high - first]
                )

    def piece_state(self, shard: int, piece: int) -> dict[str, Any]:
        """Copies of the piece's state; empty before its first update. `set_piece_state` writes."""
        home, part = self.shards[shard], self.shards[shard].pieces[piece]
        if not home.steps[piece]:
            return {}
        found = {
            field.name: self.read(shard, field.name, part.start, part.stop)
            for field in self._fields[shard]
            if field.name != MASTER
        }
        return {"step": home.steps[piece], **found}

    def set_piece_state(self, shard: int, piece: int, name: str, values: Tensor) -> None:
        """See `Driver.set_piece_state`."""
        self.write(shard, name, self.shards[shard].pieces[piece].start, values.reshape(-1))

    def load_piece_state(self, shard: int, piece: int, state: PieceState) -> None:
        """See `RuleDriver.load_piece_state`; a state that the rule does not have is left out."""
        home, part = self.shards[shard], self.shards[shard].pieces[piece]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
        home.steps[piece] = int(state.get("step", 1 if tensors else 0))
        for field in self._fields[shard]:
            if field.name == MASTER:
                continue
            value = tensors.get(field.name)
            if value is None:
                initial = self.rule.initial(field.name, self.groups[home.group])
                value = torch.full((), initial, dtype=field.dtype).expand(part.stop - part.start)
            self.write(shard, field.name, part.start, value.reshape(-1))

    def state_bytes(self) -> int:
        """Bytes of state tensors, wherever they rest."""
        return sum(
            len(shard.master) * field.dtype.itemsize
            for shard, fields in zip(self.shards, self._fields, strict=True)
            for field in fields
            if field.name != MASTER
        )

    def resident_bytes(self) -> int:
        """Bytes in memory: what the ratio left there, master weights included."""
        return sum(memory.nbytes for memory in self._resident.values())

    def offloaded_bytes(self) -> int:
        """See `Driver.offloaded_bytes`."""
        return sum(page.held.nbytes for pages in self._pages for page in pages if page.held is not None)

    def close(self) -> None:
        """Give the tier back."""
        with suppress(UsageError):
            if self._open is not None:
                self._open.loan.give()
        self._open = None
        self._resident.clear()
        self.tier.close()


def page_state(driver: Driver, paging: Paging) -> PagedDriver:
    """The same rule over the same shards, with its state in a tier; `driver` has not been configured yet.

    Raises:
        OptimizerError: the driver is no built-in elementwise rule.
    """
    if type(driver) is not RuleDriver:
        raise OptimizerError(
            explain(
                f"the state of {driver.name} cannot be offloaded",
                expected="Adam, AdamW, SGD, Adagrad or Lion, by name or as torch.optim's class",
                found=driver.name,
                do="use one of these, or leave zero_optimization.offload_optimizer out",
            )
        )
    return PagedDriver(driver.shards, driver.rule, driver.groups, paging)


class TierMaster:
    """Master weights of one shard, in the pages of its driver.

    Args:
        driver: of the shard.
        number: its number.
    """

    separate = True
    tensor = None
    nbytes = 0

    def __init__(self, driver: PagedDriver, number: int) -> None:
        self._driver = driver
        self._number = number
        self.dtype = driver.shards[number].master.dtype

    def read(self, first: int, last: int) -> Tensor:
        """A copy of some elements."""
        return self._driver.read(self._number, MASTER, first, last)

    def write(self, first: int, values: Tensor) -> None:
        """Replace some elements."""
        self._driver.write(self._number, MASTER, first, values)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _within(shard: Shard, page: Page) -> Iterator[tuple[Piece, int]]:
    """The pieces of a shard in a page, counted from its start, each with the updates it has had."""
    for piece, step in zip(shard.pieces, shard.steps, strict=True):
        start, stop = max(piece.start, page.start), min(piece.stop, page.stop)
        if start < stop:
            cut = replace(piece, start=start - page.start, stop=stop - page.start, offset=piece.offset + start - piece.start)
            yield cut, step
