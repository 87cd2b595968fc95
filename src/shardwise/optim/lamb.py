"""Lamb: Adam's direction, scaled for each whole tensor by the ratio of the norms of weights and direction (arXiv 1904.00962).

Owns the two passes that this takes and the sums per tensor between them. The second pass computes the direction again from the
moments rather than keep it, which would cost as much memory as the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.optim.builtin import Block, RuleDriver
from shardwise.optim.driver import Groups, Sums
from shardwise.optim.norm import block_sum_of_squares
from shardwise.optim.rules import Options, Rule, adam_moments
from shardwise.optim.shards import Run, Shard, count_steps, find_runs

__all__ = ["LambDriver", "LambRule"]

# Blocks differ from step to step only while it changes which parameters are in use.
_REMEMBERED = 4096
# Pieces from this length on have blocks of their own, in which sums and rates need no regard to segments.
_LONG = 1 << 16


class LambRule(Rule):
    """Lamb's moments and direction; the options are those of DeepSpeed's configuration format.

    With m and v the moments, both corrected for having started at zero if "bias_correction":
    `direction = m / (sqrt(v) + eps) + weight_decay * p`, and per tensor
    `p -= lr * clamp(norm(p) / norm(direction), min_coeff, max_coeff) * direction`, without the ratio where a norm is 0.
    """

    name = "Lamb"

    def state_names(self, options: Options) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, p: Tensor, g: Tensor, state: list[Tensor], step: int, options: Options, scale: float = 1.0) -> None:
        """Advance the moments only."""
        adam_moments(-g if options.get("maximize") else g, state, step, options)

    def direction(self, p: Tensor, state: list[Tensor], step: int, options: Options) -> Tensor:
        """Where the weights go, from the moments after `step + 1` updates."""
        beta1, beta2 = (float(beta) for beta in options["betas"])
        eps, decay = float(options["eps"]), float(options["weight_decay"])
        first, second = 1.0, 1.0
        if options.get("bias_correction", True):
            first, second = 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)
        # The corrections are folded into the denominator: (m / first) / (sqrt(v / second) + eps).
        if options.get("eps_inside_sqrt"):
            root = state[1].mul(first**2 / second).add_(eps * first**2).sqrt_()
        else:
            root = state[1].sqrt().mul_(first / second**0.5).add_(eps * first)
        result = torch.div(state[0], root, out=root)
        return result.add_(p * decay) if decay else result


class LambDriver(RuleDriver):
    """Drives Lamb over shards: moments and norms, one collective, then the weights."""

    def __init__(self, shards: Sequence[Shard], groups: Groups) -> None:
        self._lamb = LambRule()
        super().__init__(shards, self._lamb, groups)
        self._segments: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def update(self, groups: Groups, scale: float, used: Sequence[bool], sums: Sums) -> None:
        """Moments and norms, one collective, then the weights."""
        work = [(shard, run) for shard in self.shards for run in find_runs(shard, used)]
        device = self.settings.device or (self.shards[0].master.device if self.shards else torch.device("cpu"))
        # Squared norms of weights and direction, by parameter; the last column collects padding.
        squares = torch.zeros(2, len(used) + 1, dtype=torch.float64, device=device)
        for shard, run in work:
            self._advance(shard, run, groups[shard.group], scale, squares)
        # Over all ranks and `counted` parts, not over one copy of the parameters: so replicas add the same numbers in the same
        # order as ranks that hold one part each, and every stage gets the same bits.
        sums.ranks(squares, "trust ratio norms")
        norms = squares.sqrt_()
        for shard, run in work:
            self._apply(shard, run, groups[shard.group], norms)
        for shard in self.shards:
            count_steps(shard, used)

    def _advance(self, shard: Shard, run: Run, options: Options, scale: float, squares: Tensor) -> None:
        names = self._allocate(shard, options)
        counted = shard.counted_range()
        for start, stop in self._cut_blocks(shard, run, counted):
            block = Block(shard, start, stop, names, self._scratch)
            self._lamb.update(block.p, block.gradient(scale), block.state, run.step, options)
            if counted[0] <= start < counted[1]:
                direction = self._lamb.direction(block.p, block.state, run.step, options)
                for row, tensor in zip(squares, (block.p, direction), strict=True):
                    self._add_squares(row, tensor[: block.length], self._segments_of(shard, start, stop, squares))
            block.write_back()

    def _apply(self, shard: Shard, run: Run, options: Options, norms: Tensor) -> None:
        low, high, lr = float(options["min_coeff"]), float(options["max_coeff"]), float(options["lr"])
        ratio = torch.where((norms > 0).all(dim=0), (norms[0] / norms[1]).clamp(low, high), 1.0)
        rates = (ratio * lr).to(shard.master.device)
        names = self._lamb.state_names(options)
        for start, stop in self._cut_blocks(shard, run, shard.counted_range()):
            block = Block(shard, start, stop, names, self._scratch)
            direction = self._lamb.direction(block.p, block.state, run.step, options)
            lengths, columns = self._segments_of(shard, start, stop, norms)
            rate = rates[columns.to(rates.device)].to(direction.dtype)
            if len(lengths) > 1:
                rate = torch.repeat_interleave(rate, lengths, output_size=block.length)
            block.p[: block.length].sub_(direction[: block.length].mul_(rate))
            block.write_back()

    @staticmethod
    def _add_squares(row: Tensor, tensor: Tensor, segments: tuple[Tensor, Tensor]) -> None:
        lengths, columns = segments
        if len(lengths) == 1:
            sums = block_sum_of_squares(tensor).view(1)
        else:
            sums = torch.segment_reduce(tensor.double().square_(), "sum", lengths=lengths)
        row.index_add_(0, columns, sums.to(row.device))

    def _cut_blocks(self, shard: Shard, run: Run, counted: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Blocks that lie inside or outside of what is counted, and in one long piece or in any number of short ones."""
        edges = {*counted, *(edge for p in shard.pieces if p.stop - p.start >= _LONG for edge in (p.start, p.stop))}
        for start, stop in pairwise([run.start, *sorted(edge for edge in edges if run.start < edge < run.stop), run.stop]):
            yield from self._blocks(start, stop, shard)

    def _segments_of(self, shard: Shard, start: int, stop: int, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths of the pieces and gaps that make up a block, and the column of `squares` that each belongs to."""
        key = (id(shard), start, stop)
        if key not in self._segments:
            if len(self._segments) >= _REMEMBERED:
                self._segments.clear()
            padding, position = squares.shape[1] - 1, start
            lengths: list[int] = []
            columns: list[int] = []
            for piece in shard.pieces:
                begin, end = max(piece.start, start), min(piece.stop, stop)
                if begin < end:
                    lengths += [begin - position, end - begin] if begin > position else [end - begin]
                    columns += [padding, piece.index] if begin > position else [piece.index]
                    position = end
            if position < stop:
                lengths.append(stop - position)
                columns.append(padding)
            self._segments[key] = (
                torch.tensor(lengths, device=shard.master.device),
                torch.tensor(columns, device=squares.device),
            )
        return self._segments[key]
