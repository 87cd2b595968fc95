"""The GPT that all systems train, and its data.

A plain model of linear layers, so that what differs between systems is how they shard it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import POOL, Case, Shape

__all__ = ["GPT", "Block", "batches"]


class Block(nn.Module):
    """Causal self-attention, then two linear layers with a GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, width)` to the same."""
        B, T, W = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, W)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """`(B, T)` token numbers and targets in, the mean cross-entropy out (nats)."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        """The loss as a 0-d float32 tensor."""
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batches(case: Case, world: int) -> Tensor:
    """All data of a run, the same in every process: `(POOL, accumulation, world, batch, tokens + 1)` token numbers."""
    generator = torch.Generator().manual_seed(1)
    size = (POOL, case.accumulation, world, case.batch, case.tokens + 1)
    return torch.randint(case.shape.vocabulary, size, generator=generator)
