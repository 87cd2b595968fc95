"""Train a small GPT, byte by byte, on the source code of the Python standard library that is running it.

An ordinary PyTorch script: model, data, loop, evaluation. The five lines marked `# Shardwise` are what sharded training adds.
Any of these runs it, and the losses of all ZeRO stages agree:

    shardwise run --nproc 2 examples/train_gpt.py --config examples/zero3.json
    torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/zero3.json --stage 2
    python examples/train_gpt.py --steps 20

With `--save DIR` it saves checkpoints there, and goes on from the last one if it is started again, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwise  # Shardwise
from shardwise.data import RepeatingLoader
from shardwise.device import read_memory
from shardwise.observe import TrainingProgress, memory_table

# ---------------------------------------------------------------------------------------------------------------- the model
#
# Shapes: B sequences in a batch, T bytes in a sequence, W width, H heads.


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021, arXiv:2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)  # a block begins as the identity
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, W))

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention, then two linear layers with a squared ReLU between them (So et al. 2021, arXiv:2109.08668)."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, context)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class ByteEmbedding(nn.Module):
    """A vector per byte plus one per pair of neighbours: a lookup costs little, and two minutes of training learn more."""

    def __init__(self, width: int, pair_width: int = 32) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.pair = nn.Embedding(256 * 256, pair_width)
        self.widen = nn.Linear(pair_width, width, bias=False)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.pair.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        before = F.pad(text, (1, 0))[:, :-1]
        return self.byte(text) + self.widen(self.pair(256 * before + text))


class GPT(nn.Module):
    """A language model over bytes: `(B, T)` integers in; `(B, T, 256)` scores out, or the loss if there are targets."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = ByteEmbedding(width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return scores if targets is None else F.cross_entropy(scores.flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------------------------------- the text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into windows of `context` bytes, each with the same window one byte later as its target."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def read_standard_library(limit: int = 16_000_000) -> tuple[bytes, bytes]:
    """Training and held-out text: the `.py` files of this Python's standard library, every twentieth of them held out.

    Files come in sorted order, so every rank reads the same text. Tests and tables of data are left out, and the first `limit`
    bytes are enough.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = sorted(set(inside) - skipped)
        files += (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    texts: tuple[list[bytes], list[bytes]] = [], []
    for number, path in enumerate(files):
        text = path.read_bytes()
        limit -= len(text)
        if limit < 0:
            break
        texts[number % 20 == 10].append(text)
    training, held_out = (b"".join(part) for part in texts)
    if min(len(training), len(held_out)) < 50_000:
        raise SystemExit(
            f"found too little Python source under {root} to learn from ({len(training)} bytes). This Python keeps its "
            "standard library elsewhere, perhaps in a zip file; run the example with one that has it as files."
        )
    return training, held_out


# --------------------------------------------------------------------------------------------------- evaluation and sampling


@torch.no_grad()
def mean_loss(model: nn.Module, windows: Windows, count: int = 192, batch: int = 16) -> float:
    """Mean loss (nats per byte) over `count` windows spread evenly over the text. Every rank computes the same."""
    chosen = [windows[i * len(windows) // count] for i in range(count)]
    batches = [chosen[start : start + batch] for start in range(0, count, batch)]
    device = next(model.parameters()).device
    losses = [model(*(torch.stack(part).to(device) for part in zip(*batch, strict=True))) for batch in batches]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def write(model: nn.Module, context: int, prompt: str, length: int, seed: int) -> str:
    """Continue the prompt, one byte after the other, to `length` bytes."""
    device = next(model.parameters()).device
    chance = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt.encode())], device=device)
    while text.shape[1] < length:
        scores = model(text[:, -context:])[:, -1] / 0.7  # below 1: likely bytes become likelier
        text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1, generator=chance)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


# -------------------------------------------------------------------------------------------------------------- the training


def main() -> None:
    args = parse_arguments()
    training, held_out = (Windows(text, args.context) for text in read_standard_library())
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine, _, loader, _ = shardwise.initialize(model=model, training_data=training, config=configuration(args))  # Shardwise
    rank = dist.get_rank()
    if args.save:
        engine.load_checkpoint(args.save, fallback=True)  # where there is none yet, nothing happens

    if rank == 0:
        if engine.global_steps:
            print(f"going on after step {engine.global_steps}")
        print(f"{size / 1e6:.1f} M parameters, ZeRO stage {engine.zero_optimization_stage()}, on {engine.device.type}")
        print(f"{len(training.text) / 1e6:.1f} MB of Python to learn from, {len(held_out.text) / 1e6:.1f} MB held out")
    engine.eval()
    before = mean_loss(engine, held_out)
    engine.train()
    batches = iter(RepeatingLoader(loader))
    loss = torch.tensor(math.nan)
    shown = rank == 0 and not args.no_progress
    left = max(0, args.steps - engine.global_steps)
    with TrainingProgress(left, enabled=shown, memory=lambda: read_memory(engine.device).current) as progress:
        while engine.global_steps < args.steps:
            for _ in range(engine.gradient_accumulation_steps()):
                text, targets = (part.to(engine.device) for part in next(batches))
                loss = engine(text, targets)
                engine.backward(loss)  # Shardwise
                engine.step()  # Shardwise
            progress.advance(
                loss=loss.detach(),
                tokens=engine.train_batch_size() * args.context,
                learning_rate=engine.get_lr()[0],
                gradient_norm=engine.get_global_grad_norm(),
            )
            if args.save and (engine.global_steps % args.save_every == 0 or engine.global_steps == args.steps):
                engine.save_checkpoint(args.save)
    memory = {**engine.memory_report(), "process": read_memory(engine.device).peak}
    reports = on_every_rank(memory, engine.device)

    with engine.inference() as model:  # Shardwise
        after = mean_loss(model, held_out)
        sample = write(model, args.context, "def ", length=300, seed=args.seed) if rank == 0 else ""
    if rank == 0:
        print(f"\nheld-out loss {before:.4f} before, {after:.4f} after {args.steps} steps (nats per byte)")
        print(f"\n300 bytes written by the trained model:\n\n{indented(sample)}\n")
        print(memory_table(reports, measured=[report["process"] for report in reports]))
    engine.destroy(restore=False)
    dist.destroy_process_group()


def on_every_rank(numbers: dict[str, int], device: torch.device) -> list[dict[str, int]]:
    """The numbers of all ranks, in rank order."""
    mine = torch.tensor(list(numbers.values()), device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [dict(zip(numbers, theirs.tolist(), strict=True)) for theirs in everyone]


def indented(text: str) -> str:
    """For printing: the bytes of a young model may be anything, also what moves a terminal's cursor."""
    safe = "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "\n".join(f"    {line}" for line in safe.split("\n"))


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration file, with what the command line says put over it."""
    config = json.loads(args.config.read_text())
    if args.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = args.stage
    if args.precision is not None:
        config["bf16"] = {"enabled": args.precision == "bf16"}
        # The first gradients are large; a loss scale that begins at the usual 2^16 would skip the first ten steps.
        config["fp16"] = {"enabled": args.precision == "fp16", "initial_scale_power": 8}
    if args.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    if args.accumulation is not None:
        config["gradient_accumulation_steps"] = args.accumulation
    if args.lr is not None:
        config["optimizer"]["params"]["lr"] = args.lr
    if "scheduler" in config:
        config["scheduler"]["params"]["total_num_steps"] = args.steps
        config["scheduler"]["params"]["warmup_num_steps"] = max(2, args.steps // 20)
    return config


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python standard library, sharded by Shardwise.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("zero3.json"), help="Shardwise configuration")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage, over the configuration's")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="over the configuration's")
    parser.add_argument("--steps", type=int, default=480, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, help="sequences per rank and forward, over the configuration's")
    parser.add_argument("--accumulation", type=int, help="forwards per step, over the configuration's")
    parser.add_argument("--lr", type=float, help="peak learning rate, over the configuration's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR", help="save checkpoints there, and go on from the last one")
    parser.add_argument("--save-every", type=int, default=100, metavar="N", help="optimizer steps between two checkpoints")
    parser.add_argument("--no-progress", action="store_true", help="print only the results")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # some launchers pass it
    return parser.parse_args()


if __name__ == "__main__":
    main()
