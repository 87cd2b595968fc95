"""Bytes per rank, messages per step and padding for thousands of ranks, on one machine and without their memory.

    python -m bench.scale                              (a GPT of 6.9 billion parameters on 8 to 4096 ranks)
    python -m bench.scale --width 12288 --layers 96 --heads 96 --ranks 64 1024

A GPT of the chosen size is built on the meta device, where tensors have shapes and no memory, and sharded by Shardwise's own
layout, policy and units as one rank of many. Then the collectives of one step are issued in the engine's order over a transport
that sends nothing and counts everything. A test holds these counts against those of real engines, and the growth with the
number of ranks against the formulas of the ZeRO paper (Rajbhandari et al. 2020, arXiv:1910.02054).

What the columns say, for one rank:
  parameters, gradients, optimizer   bytes at rest; the optimizer's are AdamW's two moments and, in bf16, float32 weights
  total, of one                      all of these, and as a part of what a single process holds
  padding                            of these, bytes that belong to no parameter
  messages                           collectives of one step
  sent, volume                       what a rank sends in a step where rings carry the collectives, and the same as elements for
                                     each element of the model: the paper's volume, 2 up to stage 2 and 3 at stage 3
A unit in use is gathered as well: the largest one is told above the tables, and a few may be gathered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.cases import Shape
from bench.gpt import GPT
from bench.tables import grid
from shardwise.comm import Comm, NullTransport
from shardwise.config import Config, load_config
from shardwise.mesh import DataMesh
from shardwise.policy import Policy, Reduce
from shardwise.settings import make_policy
from shardwise.zero import Buffer, Site, Unit, build_units

__all__ = ["Footprint", "describe", "footprint", "main", "replay"]

_META = torch.device("meta")
_MOMENTS = 2
_MOMENT_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """What one rank holds at rest and sends in a step, in bytes.

    Args:
        elements: parameters of the model.
        parameters: resting parameters.
        gradients: where gradients accumulate.
        optimizer: moments, and weights in float32 where the parameters have fewer bits.
        padding: the part of these that belongs to no parameter.
        largest_unit: bytes of the gathered unit that is largest; 0 where nothing is released.
        messages: collectives of one step.
        payload: bytes of them by kind, each counted as its full tensor.
        sent: bytes that this rank sends where rings carry them.
        volume: what is sent in units of a parameter's or gradient's size, for each element of the model.
    """

    elements: int
    parameters: int
    gradients: int
    optimizer: int
    padding: int
    largest_unit: int
    messages: int
    payload: dict[str, int]
    sent: float
    volume: float

    @property
    def total(self) -> int:
        """All bytes at rest."""
        return self.parameters + self.gradients + self.optimizer


def footprint(shape: Shape, context: int, stage: int, ranks: int, precision: str = "bf16") -> Footprint:
    """What the middle one of `ranks` ranks holds and sends when it trains a GPT at a ZeRO stage.

    Args:
        shape: size of the GPT.
        context: tokens of a sequence.
        stage: 0 to 3.
        ranks: data-parallel ranks, 2 or more.
        precision: "fp32" or "bf16".
    """
    config = configuration(stage, ranks, precision)
    policy = make_policy(config, ranks)
    mesh = DataMesh.grid(ranks // 2, ranks, ranks if policy.stage.sharded else 1)
    comm = Comm(mesh.data, transport=NullTransport())
    with _META:
        model = GPT(shape, context)
    groups = dict.fromkeys(model.parameters(), 0)
    units = [unit for unit, _ in build_units(model, Site(comm, mesh, policy, _META, groups))]
    built = comm.ledger.snapshot()
    replay(units, policy, comm, mesh)
    after = comm.ledger.snapshot()
    payload = {kind: total - built["bytes"].get(kind, 0) for kind, total in after["bytes"].items()}
    calls = sum(after["calls"].values()) - sum(built["calls"].values())
    buffers = [buffer for unit in units for buffer in unit.buffers]
    moments = [_MOMENTS * _MOMENT_BYTES * buffer.layout.chunk for buffer in buffers]
    held = {category: built["resident"].get(category, 0) for category in ("parameters", "master weights")}
    elements = sum(parameter.numel() for parameter in model.parameters())
    around = (ranks - 1) / ranks
    ring = {kind: total * around * (2 if kind == "all_reduce" else 1) for kind, total in payload.items()}
    gradient_size, parameter_size = _gradient_dtype(buffers[0], policy).itemsize, buffers[0].key.dtype.itemsize
    sizes = {"all_gather": parameter_size}
    return Footprint(
        elements=elements,
        parameters=held["parameters"],
        gradients=sum(_gradient_bytes(buffer, policy) for buffer in buffers),
        optimizer=held["master weights"] + sum(moments),
        padding=sum(_padding(buffer, policy) for buffer in buffers),
        largest_unit=max(sum(buffer.storage.nbytes_full for buffer in unit.moving) for unit in units),
        messages=calls,
        payload={kind: total for kind, total in payload.items() if total},
        sent=sum(ring.values()),
        volume=sum(total / sizes.get(kind, gradient_size) for kind, total in ring.items()) / elements,
    )


def configuration(stage: int, ranks: int, precision: str) -> Config:
    """The configuration that is looked at: nothing but the stage and the precision."""
    return load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": precision == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
        },
        world_size=ranks,
    )


def replay(units: Sequence[Unit], policy: Policy, comm: Comm, mesh: DataMesh) -> None:
    """Issue the collectives of one training step, in the engine's order.

    Args:
        units: the root first, then in the order of use.
        policy: when to reduce; what is released was decided when the units were built.
        comm: where to issue and count them.
        mesh: the data axes.
    """
    root, *others = units
    for unit in units:  # forward: each comes when it is entered
        _gather(unit)
    for unit in others[:-1]:  # the last one is needed next, and the root throughout
        _release(unit)
    for unit in (*reversed(others), root):  # backward
        _gather(unit)
        for buffer in unit.buffers:
            _reduce(buffer, policy, comm)
        _release(unit)
    parameters = sum(len(buffer.members) for unit in units for buffer in unit.buffers)
    flags = torch.empty(parameters + len(units), dtype=torch.int32, device=_META)
    comm.all_reduce(flags, mesh.data, "agree on gradients").wait()
    comm.all_reduce(torch.empty(1, dtype=torch.float64, device=_META), mesh.data, "gradient norm").wait()
    for unit in units:  # what is never released is refreshed from the updated shards
        for buffer in unit.buffers:
            if buffer.resident:
                buffer.storage.gather(f"refresh {unit.name}").wait()


def _gather(unit: Unit) -> None:
    for buffer in unit.moving:
        if not buffer.storage.is_live:
            buffer.storage.gather(f"gather {unit.name}").wait()


def _release(unit: Unit) -> None:
    for buffer in unit.moving:
        buffer.storage.release()


def _reduce(buffer: Buffer, policy: Policy, comm: Comm) -> None:
    key, layout = buffer.key, buffer.layout
    dtype = key.wire or policy.precision.communicate or _gradient_dtype(buffer, policy)
    full = torch.empty(layout.total, dtype=dtype, device=_META)
    if key.shard.size == 1:
        comm.all_reduce(full, key.replicate, "reduce").wait()
    else:
        comm.reduce_scatter(torch.empty(layout.chunk, dtype=dtype, device=_META), full, key.shard, "reduce").wait()


def _gradient_dtype(buffer: Buffer, policy: Policy) -> torch.dtype:
    return policy.precision.gradient_dtype(buffer.key.dtype)


def _gradient_copies(buffer: Buffer, policy: Policy) -> int:
    """Elements in which gradients accumulate: all where they are reduced once per step, and the shard that gets the sum."""
    whole = buffer.layout.total if policy.stage.reduce is Reduce.LAST else 0
    return whole + (buffer.layout.chunk if buffer.key.shard.size > 1 else 0)


def _gradient_bytes(buffer: Buffer, policy: Policy) -> int:
    return _gradient_copies(buffer, policy) * _gradient_dtype(buffer, policy).itemsize


def _padding(buffer: Buffer, policy: Policy) -> int:
    """Bytes of padding in everything this rank holds for a buffer."""
    layout = buffer.layout
    first, last = layout.interval(buffer.key.shard.index)
    in_shard = layout.chunk - sum(stop - start for _, start, stop in layout.pieces(first, last))
    parameters = layout.padding if buffer.resident else in_shard
    master = buffer.master.dtype.itemsize if buffer.master is not None and buffer.master.separate else 0
    whole = layout.padding if policy.stage.reduce is Reduce.LAST else 0
    gradients = whole + (in_shard if buffer.key.shard.size > 1 else 0)
    size = _gradient_dtype(buffer, policy).itemsize
    return parameters * buffer.key.dtype.itemsize + gradients * size + in_shard * (master + _MOMENTS * _MOMENT_BYTES)


def _table(shape: Shape, context: int, stage: int, ranks: Sequence[int], precision: str) -> str:
    alone = footprint(shape, context, 0, 2, precision).total
    names = ["ranks", "parameters", "gradients", "optimizer", "total", "of one", "padding", "messages", "sent", "volume"]
    rows = [names]
    for count in ranks:
        found = footprint(shape, context, stage, count, precision)
        cells = [_bytes(n) for n in (found.parameters, found.gradients, found.optimizer, found.total)]
        share = [f"{found.total / alone:.2%}", _bytes(found.padding), str(found.messages), _bytes(found.sent)]
        rows.append([str(count), *cells, *share, f"{found.volume:.2f}"])
    return grid(rows)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def describe(words: Sequence[str] | None = None) -> str:
    """A table for each stage, as the command line asks."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024, 4096], metavar="N")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4), metavar="N")
    args = parser.parse_args(words)
    if min(args.ranks) < 2:
        parser.error("--ranks are 2 or more")
    shape = Shape(args.vocabulary, args.width, args.layers, args.heads)
    first = footprint(shape, args.context, 3, 2, args.precision)
    size = f"{first.elements / 1e9:.2f} billion" if first.elements >= 1e8 else f"{first.elements / 1e6:.1f} million"
    head = (
        f"GPT of {size} parameters ({args.layers} blocks of width {args.width}), {args.precision}; "
        f"the largest unit takes {_bytes(first.largest_unit)} when it is gathered"
    )
    tables = [f"stage {stage}\n{_table(shape, args.context, stage, args.ranks, args.precision)}" for stage in args.stages]
    return "\n\n".join([head, *tables])


def main() -> None:
    """Print what the command line asks for."""
    print(describe())


if __name__ == "__main__":
    main()
