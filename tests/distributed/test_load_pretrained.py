"""`load_pretrained`: sharded models, plain ones and those of engines are filled, each rank with what it holds."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import zero
from shardwise.checkpoint import Facts, Folder, Key, NativeSource
from shardwise.checkpoint.datafile import BLOCK
from shardwise.checkpoint.export import export
from shardwise.engine import trainer_of
from shardwise.errors import CheckpointDamagedError, CheckpointError, ParameterError, UsageError
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.distributed.checkpoint_support import Rich, open_engine, train_on
from tests.harness import ranks
from tests.unit.checkpoint_support import damage, write_run

STAGES = (0, 1, 2, 3)


def trained() -> Rich:
    """The model that was saved."""
    torch.manual_seed(5)
    model = Rich()
    model.seen.fill_(12)
    model.mean.normal_()
    return model


def fresh() -> Rich:
    """One with other values."""
    torch.manual_seed(6)
    return Rich()


def save(directory: Path, dtype: torch.dtype | None = None) -> None:
    """Save the trained model, in the first rank; its floating-point weights as `dtype`."""
    if dist.get_rank() == 0:
        model = trained()
        tensors: dict[Key, Tensor] = {}
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            tensors[Key("weight", name)] = value.to(dtype) if dtype and value.is_floating_point() else value
        tensors.update({Key("buffer", name): value for name, value in model.named_buffers() if name != "scratch"})
        write_run(directory, "saved", tensors, Facts(ties={"head.weight": "embed.weight"}), world=3).close()
    dist.barrier()


def check(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """The model has the trained values, each rounded to `dtype` on its way. Collective."""
    expected = trained()
    with zero.GatheredParameters(list(model.parameters())):
        for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            value = wanted.detach()
            value = value.to(dtype).to(found.dtype) if dtype and value.is_floating_point() else value.to(found.dtype)
            assert torch.equal(found.detach(), value), name
    for name in ("seen", "mean"):
        assert torch.equal(getattr(model, name), getattr(expected, name)), name
    assert model.head.weight is model.embed.weight


def raises(kind: type[Exception], match: str, work: Any) -> None:
    """The same error on every rank."""
    with pytest.raises(kind, match=match):
        work()


# ---- models that are built in shards


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_a_model_under_init_is_filled(dtype: torch.dtype | None, tmp_path: Path) -> None:
    save(tmp_path, dtype)
    with zero.Init():
        model = fresh()
    report = shardwise.load_pretrained(model, tmp_path)
    assert (report.missing, report.unexpected) == ([], [])
    check(model, dtype)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.initialize(model=model, config=config)[0] as engine:  # an engine takes it over as it is
        check(engine.module, dtype)


@ranks(2)
def test_values_that_are_lent_follow_and_keep_what_was_written(tmp_path: Path) -> None:
    """Inside the block, as libraries load; what the checkpoint does not have keeps what the first rank wrote last."""
    if dist.get_rank() == 0:
        write_run(tmp_path, "saved", {Key("weight", "weight"): torch.full((3, 3), 2.0)}, Facts()).close()
    dist.barrier()
    with zero.Init():
        inner = nn.Linear(3, 3)
        model = nn.Sequential(inner)  # now it is sharded, and what is written to it is a lent copy
        nn.init.zeros_(inner.weight)
        held = inner.weight.data  # somebody has a view
        nn.init.constant_(inner.bias, 5.0 + dist.get_rank())
        report = shardwise.load_pretrained(inner, tmp_path, strict=False)
        assert report.missing == ["bias"]
        assert torch.equal(held, torch.full((3, 3), 2.0))
    with zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(inner.weight, torch.full((3, 3), 2.0))
        assert torch.equal(inner.bias, torch.full((3,), 5.0))


class Large(nn.Module):
    """Three tensors of some megabytes."""

    def __init__(self, width: int = 2000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))


def save_large(directory: Path, dtype: torch.dtype) -> int:
    """Returns its bytes."""
    tensors = {Key("weight", f"layers.{number}.weight"): torch.rand(2000, 2000).to(dtype) for number in range(3)}
    if dist.get_rank() == 0:
        write_run(directory, "saved", tensors, Facts()).close()
    dist.barrier()
    return sum(value.nbytes for value in tensors.values())


@ranks(2)
def test_each_rank_reads_what_it_holds(tmp_path: Path) -> None:
    total = save_large(tmp_path, torch.bfloat16)
    with zero.Init():
        model = Large()
    source = NativeSource(Folder(tmp_path), "saved")
    shardwise.load_pretrained(model, source)
    assert 0 <= source.stats.bytes_read - total // 2 <= 8 * BLOCK
    source.close()


def field(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no high-water mark")
@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_than_one_tensor_is_in_memory_besides_the_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path / "small")
    save_large(tmp_path, dtype)
    with zero.Init():
        small, model = fresh(), Large()
    shardwise.load_pretrained(small, tmp_path / "small")  # makes what stays
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that is free already would be used, unnoticed
    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS:")
    shardwise.load_pretrained(model, tmp_path)
    gained = field("VmHWM:") - before
    assert 0 <= gained < 2000 * 2000 * 4, f"{gained} bytes"


# ---- engines


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_gets_weights_and_masters_and_keeps_the_rest(stage: int, precision: str, tmp_path: Path) -> None:
    save(tmp_path)
    ends: list[dict[str, Tensor]] = []
    for begun in (False, True):
        with open_engine(stage, precision, fresh()) as engine:
            train_on(engine, 2)
            moments = safe_get_full_optimizer_state(engine.module.embed.weight, "exp_avg")
            if begun:  # this window is forgotten
                engine.backward(engine(torch.ones(6, 4, dtype=torch.int64)).float().square().sum())
            shardwise.load_pretrained(engine, tmp_path)
            assert trainer_of(engine).window.backwards == 0
            check(engine.module)
            for (name, master), wanted in zip(masters(engine).items(), trained().parameters(), strict=True):
                assert torch.equal(master, wanted.detach().to(master.dtype)) or not wanted.requires_grad, name
            assert torch.equal(safe_get_full_optimizer_state(engine.module.embed.weight, "exp_avg"), moments)
            assert engine.global_steps == 2
            train_on(engine, 1)
            assert engine.was_step_applied()
            ends.append(masters(engine))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def masters(engine: Any) -> dict[str, Tensor]:
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


@ranks(2)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_that_rest_elsewhere_are_filled(stage: int, device: str, tmp_path: Path) -> None:
    save(tmp_path)
    where = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    with open_engine(stage, "bf16", fresh(), zero_optimization={"stage": stage, "offload_optimizer": where}) as engine:
        train_on(engine, 1)
        shardwise.load_pretrained(engine, tmp_path)
        check(engine.module)
        for (name, parameter), wanted in zip(engine.module.named_parameters(), trained().parameters(), strict=True):
            if parameter.requires_grad:
                assert torch.equal(safe_get_full_fp32_param(parameter), wanted.detach()), name


@ranks(2)
def test_a_part_of_an_engines_model_and_its_module(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        write_run(tmp_path, "saved", {Key("weight", "weight"): torch.full((5, 5), 3.0)}, Facts()).close()
    dist.barrier()
    with open_engine(3, "fp32", fresh()) as engine:
        part = engine.module.blocks[0][0]
        report = shardwise.load_pretrained(part, tmp_path, strict=False)
        assert (report.missing, report.unexpected) == (["bias"], [])
        assert torch.equal(safe_get_full_fp32_param(part.weight), torch.full((5, 5), 3.0))
        save(tmp_path / "all")
        shardwise.load_pretrained(engine.module, tmp_path / "all")
        check(engine.module)


@ranks(2)
def test_damage_is_an_error_on_all_ranks_and_the_engine_waits_for_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path / "whole")
    if dist.get_rank() == 0:
        damage(tmp_path / "saved" / "rank-00001.safetensors")
    dist.barrier()
    with open_engine(3, "fp32", fresh()) as engine:
        raises(
            CheckpointDamagedError, r"rank-00001\.safetensors is damaged", lambda: shardwise.load_pretrained(engine, tmp_path)
        )
        raises(UsageError, "no valid weights", lambda: train_on(engine, 1))
        shardwise.load_pretrained(engine, tmp_path / "whole")
        assert trainer_of(engine).unusable == ""
        train_on(engine, 1)


# ---- plain models


@ranks(1, 2)
def test_a_plain_model_is_filled_in_place_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path)
    model = fresh()
    places = {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()}
    versions = {name: value._version for name, value in model.named_parameters()}
    shardwise.load_pretrained(model, tmp_path, tag="saved")
    check(model)
    assert places == {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()}
    assert all(value._version > versions[name] for name, value in model.named_parameters())


@ranks(1)
def test_what_was_exported_fits(tmp_path: Path) -> None:
    save(tmp_path)
    kinds: tuple[Any, ...] = ("safetensors", "torch", "dcp")
    for kind in kinds:
        out = tmp_path / kind
        export(NativeSource(Folder(tmp_path), "saved"), out, format=kind, max_shard_size=300)
        model = fresh()
        shardwise.load_pretrained(model, out)
        check(model)


# ---- what does not fit


@ranks(2)
@pytest.mark.parametrize("where", ["plain", "init", "engine"])
def test_what_does_not_fit_is_the_same_error_everywhere(where: str, tmp_path: Path) -> None:
    save(tmp_path)

    def make(**sizes: int) -> nn.Module:
        if where == "init":
            with zero.Init():
                return Rich(**sizes)
        return open_engine(3, "fp32", Rich(**sizes)) if where == "engine" else Rich(**sizes)

    model = make(words=8)
    expected = r"'embed\.weight' has another shape .* expected \(8, 5\), as in the model, found \(7, 5\)"
    raises(CheckpointError, expected, lambda: shardwise.load_pretrained(model, tmp_path))
    raises(CheckpointError, "there is nothing at", lambda: shardwise.load_pretrained(model, tmp_path / "nowhere"))
    other = make()
    inner = other.module if where == "engine" else other
    inner.register_buffer("more", torch.zeros(2))
    raises(
        CheckpointError,
        r"missing in the checkpoint: more\. pass strict=False to load what fits",
        lambda: shardwise.load_pretrained(other, tmp_path),
    )
    report = shardwise.load_pretrained(other, tmp_path, strict=False)
    assert report.missing == ["more"]
    check(inner)
    for each in (model, other):
        if where == "engine":
            each.destroy()


def test_parameters_without_memory_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ParameterError, match=r"'weight' is on the meta device .*zero\.Init"):
        shardwise.load_pretrained(model, "nowhere")
