"""Checkpoints written for torch.distributed.checkpoint, which loads them."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.contents import Facts, Key, Part, Spec, real_dtype
from shardwise.checkpoint.foreign import DcpSource
from shardwise.checkpoint.foreign.dcp_write import write_dcp
from shardwise.errors import CheckpointError
from tests.unit.foreign_support import Model, same, state_of, trained, whole


class Memory:
    """A source in memory that notes how much of what it handed out is alive."""

    def __init__(self, tensors: dict[Key, Tensor], facts: Facts) -> None:
        self.tensors = tensors
        self.facts = facts
        self.where = "memory"
        self.specs = {key: Spec(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        self.alive = self.most = 0

    def read(self, parts: list[Part]) -> None:
        for part in parts:
            flat = self.tensors[part.key].detach().reshape(-1).view(real_dtype(part.spec.dtype))
            part.values.copy_(flat[part.start : part.stop])
            size = part.values.nbytes
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(part.values.untyped_storage(), self.drop, size)

    def drop(self, size: int) -> None:
        self.alive -= size

    def close(self) -> None:
        pass


def memory_of(model: Model, optimizer: torch.optim.Optimizer) -> Memory:
    names = dict(model.named_parameters())
    tensors = {Key("weight", name): parameter for name, parameter in names.items()}
    tensors |= {Key("buffer", name): buffer for name, buffer in model.named_buffers()}
    for name, parameter in names.items():
        tensors |= {Key("optimizer", name, key): optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
    groups = [
        {
            "options": {"lr": group["lr"], "betas": group["betas"]},
            "parameters": [n for n, p in names.items() if any(p is q for q in group["params"])],
        }
        for group in optimizer.param_groups
    ]
    facts = Facts(steps=dict.fromkeys(names, 3), groups=groups, ties={"head.weight": "model.0.weight"})
    return Memory(tensors, facts)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_torch_loads_what_is_written(tmp_path: Path, flat: bool) -> None:
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    model, optimizer = trained()
    write_dcp(memory_of(model, optimizer), tmp_path / "dcp", flatten_optimizer=flat)
    fresh, other = trained(steps=0)
    state = state_of(fresh, other, flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(fresh, other, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    for name, tensor in model.state_dict().items():
        assert same(fresh.state_dict()[name], tensor)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert all(same(other.state[two][key], optimizer.state[one][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
    assert [group["betas"] for group in other.param_groups] == [(0.9, 0.999), (0.5, 0.6)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    memory = memory_of(model, optimizer)
    write_dcp(memory, tmp_path / "dcp")
    source = DcpSource(tmp_path / "dcp")
    assert set(memory.specs) < set(source.specs)
    for key, tensor in memory.tensors.items():
        assert same(whole(source, key), tensor)
    assert same(whole(source, Key("weight", "head.weight")), model.head.weight)  # the format has ties twice
    assert source.facts.steps == memory.facts.steps
    assert [group["parameters"] for group in source.facts.groups] == [group["parameters"] for group in memory.facts.groups]


def test_little_is_in_memory_at_a_time(tmp_path: Path) -> None:
    tensors = {Key("weight", f"w{number}"): torch.randn(300) for number in range(40)}
    tensors[Key("weight", "big")] = torch.randn(1000)
    memory = Memory(tensors, Facts())
    write_dcp(memory, tmp_path / "dcp")
    assert memory.alive == 0
    assert memory.most <= 2 * 4000
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) <= 16
    source = DcpSource(tmp_path / "dcp")
    assert all(same(whole(source, key), tensor) for key, tensor in tensors.items())


def test_what_cannot_be_written_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory({Key("weight", "a"): torch.zeros(2)}, Facts())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for taken in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(CheckpointError, match="cannot be written: expected a new or empty directory"):
            write_dcp(memory, taken)
    with pytest.raises(CheckpointError, match="dcp cannot be written: found Not a directory"):
        write_dcp(memory, tmp_path / "full" / "file" / "dcp")

    def fail(parts: list[Part]) -> None:
        raise CheckpointError("the source is damaged")

    monkeypatch.setattr(memory, "read", fail)
    with pytest.raises(CheckpointError, match=r"^the source is damaged$"):
        write_dcp(memory, tmp_path / "dcp")
    assert not (tmp_path / "dcp" / ".metadata").exists()
