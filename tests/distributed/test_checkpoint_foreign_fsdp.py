"""Checkpoints that FSDP2 and tensor parallel models write with torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.contents import Key
from shardwise.checkpoint.foreign import DcpSource
from tests.harness import ranks
from tests.unit.foreign_support import interval, same, save_dcp, whole


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))


def shared_folder() -> Path:
    """One directory for all ranks."""
    held: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return Path(held[0])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same on all ranks, and on one."""
    model(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2, 3)
def test_a_sharded_model_and_its_optimizer() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, plain = build(), build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        step(model, optimizers[0])
        step(plain, optimizers[1])
    state = get_state_dict(model, optimizers[0])
    folder = shared_folder()
    try:
        save_dcp({"model": state[0], "optim": state[1]}, folder)
        source = DcpSource(folder)
        for name, parameter in plain.named_parameters():
            key = Key("weight", name)
            full = model.get_parameter(name).full_tensor().detach()
            assert torch.allclose(full, parameter, atol=1e-6)
            assert same(whole(source, key), full)
            assert torch.equal(interval(source, key, full.numel() // 3, full.numel()), full.view(-1)[full.numel() // 3 :])
            for which in ("exp_avg", "exp_avg_sq"):
                moment = optimizers[0].state[model.get_parameter(name)][which].full_tensor()
                assert same(whole(source, Key("optimizer", name, which)), moment)
        names = [name for name, _ in plain.named_parameters()]
        assert source.facts.steps == dict.fromkeys(names, 2)
        assert [group["parameters"] for group in source.facts.groups] == [names]
        assert source.facts.groups[0]["options"]["lr"] == 0.1
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


@ranks(2, 3)
def test_blocks_of_columns() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(4)
    tensors = {"columns": torch.randn(4, 7), "deep": torch.randn(2, 3, 5), "copies": torch.randn(3, 2)}
    places = {"columns": Shard(1), "deep": Shard(2), "copies": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [places[name]]) for name, tensor in tensors.items()}
    folder = shared_folder()
    try:
        save_dcp({"model": state}, folder)
        source = DcpSource(folder)
        for name, tensor in tensors.items():
            assert same(whole(source, Key("weight", name)), tensor)
            for start in range(0, tensor.numel(), 3):
                stop = min(tensor.numel(), start + 8)
                assert torch.equal(interval(source, Key("weight", name), start, stop), tensor.view(-1)[start:stop])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
