"""Situations in which a careful reader lost something: each has its right result."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint import Folder, NativeSource
from shardwise.errors import CheckpointError, UsageError
from shardwise.persistence import keeper
from tests.distributed.checkpoint_support import BATCH, build_rich, open_engine, same, state_of, train_on
from tests.distributed.scenario_support import settings
from tests.harness import ranks


@ranks(2)
def test_a_background_save_holds_the_counts_of_its_moment(tmp_path: Path) -> None:
    """Also those that an optimizer of torch keeps in tensors, which go on changing while the thread writes."""
    model = build_rich()
    model.turn.requires_grad_(False)
    config = settings(3, micro=BATCH // 2, optimizer={"type": "NAdam"}, checkpoint={"async": True})
    write = keeper.write_checkpoint

    def later(*args: Any) -> None:
        time.sleep(0.5)  # as a slow disk would
        write(*args)

    with shardwise.initialize(model=model, config=config)[0] as engine:
        train_on(engine, 2)
        keeper.write_checkpoint = later
        try:
            engine.save_checkpoint(tmp_path)
            train_on(engine, 3, first=2)
            engine.wait_for_checkpoint()
        finally:
            keeper.write_checkpoint = write
    numbers = NativeSource(Folder(tmp_path), "global_step2").facts.numbers
    assert {float(state["step"]) for state in numbers.values()} == {2.0}


@ranks(2)
def test_nothing_of_the_users_is_deleted(tmp_path: Path) -> None:
    with open_engine(2, checkpoint={"keep_last": 1}) as engine:
        if dist.get_rank() == 0:
            for name, text in (
                ("dataset", "[]"),
                ("future", '{"crc32":"00000000","index":{"format":"shardwise","version":99}}'),
            ):
                (tmp_path / name).mkdir()
                (tmp_path / name / "index.json").write_text(text)
            (tmp_path / "best").mkdir()
            (tmp_path / "best" / "tokenizer.json").write_text("{}")
        dist.barrier()
        for tag in "abc":
            engine.save_checkpoint(tmp_path, tag=tag)
        with pytest.raises(CheckpointError, match="best is there already: found something that is no checkpoint"):
            engine.save_checkpoint(tmp_path, tag="best")
        if dist.get_rank() == 0:
            (tmp_path / "c" / "tokenizer.json").write_text("{}")
            (tmp_path / "c" / "notes").mkdir()
            (tmp_path / "c" / "notes" / "x").write_text("kept")
        dist.barrier()
        engine.save_checkpoint(tmp_path, tag="c")
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["best", "c", "dataset", "future", "latest"]
        assert (tmp_path / "best" / "tokenizer.json").exists()
        assert (tmp_path / "c" / "notes" / "x").read_text() == "kept"
        assert (tmp_path / "c" / "tokenizer.json").exists()
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "c")


class Two(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words))


@ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_tied_weights_load_into_a_model_without_ties_and_back(stage: int, tmp_path: Path) -> None:
    def start(tied: bool) -> Any:
        torch.manual_seed(5 + tied)
        return shardwise.initialize(model=Two(tied), config=settings(stage, optimizer={"type": "Adam"}))[0]

    def step(engine: Any) -> None:
        engine.backward(engine(torch.arange(2)).square().sum())
        engine.step()

    with start(tied=True) as engine:
        step(engine)
        expected = engine.module_state_dict()
        engine.save_checkpoint(tmp_path / "tied")
    with start(tied=False) as engine:
        engine.load_checkpoint(tmp_path / "tied")
        found = engine.module_state_dict()
        if found is not None:
            assert torch.equal(found["head.weight"], expected["embed.weight"])
            assert torch.equal(found["embed.weight"], expected["embed.weight"])
        step(engine)
        engine.save_checkpoint(tmp_path / "apart")
    plain = Two(tied=False)
    assert not shardwise.load_pretrained(plain, tmp_path / "tied").missing
    if expected is not None:
        assert torch.equal(plain.head.weight, expected["embed.weight"])
    report = shardwise.load_pretrained(Two(tied=True), tmp_path / "apart")
    assert report.notes == ["tied to embed.weight in the model, their own values not loaded: head.weight"]


@ranks(2)
def test_the_users_own_loading_keeps_optimizer_state_and_fails_on_all_ranks(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        train_on(engine, 2)
        saved = state_of(engine)
        engine.save_checkpoint(tmp_path)

        def load(src: dict[str, Tensor], dst: nn.Module) -> None:
            with torch.no_grad():
                for name, parameter in dst.named_parameters():
                    parameter.copy_(src[name])

        def breaks(src: dict[str, Tensor], dst: nn.Module) -> None:
            if dist.get_rank() == 1:
                raise ValueError("of the user's")

    with open_engine(3) as engine:
        with pytest.raises(CheckpointError, match="rank 1: ValueError: of the user's"):
            engine.load_checkpoint(tmp_path, custom_load_fn=breaks)
        with pytest.raises(UsageError, match="no valid weights"):
            train_on(engine, 1)
        engine.load_checkpoint(tmp_path, custom_load_fn=load)
        after = state_of(engine)
        for name, value in saved.items():
            if name.startswith(("exp_avg", "weight")):
                assert torch.equal(after[name], value), name
        train_on(engine, 1, first=2)


class Breaks:
    """A schedule that cannot be saved on one rank."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("a schedule's own error")


@ranks(2)
def test_what_users_give_fails_on_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        for client_state, told in (
            ({"f": lambda: 0}, "checkpoint 'global_step0' was not saved: found rank 0: "),
            ([1, 2], "client_state cannot be saved: expected a dict, found list"),
        ):
            with pytest.raises(CheckpointError, match=told):
                engine.save_checkpoint(tmp_path, client_state=client_state)
        engine.lr_scheduler, schedule = Breaks(), engine.lr_scheduler
        with pytest.raises(CheckpointError, match=r"KeyError: .*a schedule's own error"):
            engine.save_checkpoint(tmp_path)
        engine.lr_scheduler = schedule
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        for directory in (None, 3, b"x"):
            with pytest.raises(UsageError, match="this is no directory: expected a path"):
                engine.save_checkpoint(directory)  # type: ignore[arg-type]
        for tag in ("a\n", "a ", b"x", "\udc80", 1.5):
            with pytest.raises(CheckpointError, match="this tag cannot be used"):
                engine.save_checkpoint(tmp_path, tag=tag)  # type: ignore[arg-type]
        engine.save_checkpoint(tmp_path, tag=7, client_state={"best": np.float64(2.5), "all": [np.int64(3)]})  # type: ignore[arg-type]
        assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "7"), {"best": 2.5, "all": [3]})
        train_on(engine, 1)
        engine.module.late = nn.Parameter(torch.zeros(2))
        with pytest.raises(CheckpointError, match="parameter 'late' was registered after initialize"):
            engine.save_checkpoint(tmp_path)
        del engine.module.late


class Odd:
    def __init__(self) -> None:
        self.x = 3


@ranks(2)
def test_a_client_state_of_other_classes_is_loaded_when_it_is_trusted(tmp_path: Path) -> None:
    with open_engine(1) as engine:
        engine.save_checkpoint(tmp_path, client_state={"odd": Odd()})
        with pytest.raises(CheckpointError, match="trust_client_state=True") as told:
            engine.load_checkpoint(tmp_path)
        assert "\x1b" not in str(told.value)
        train_on(engine, 1)  # nothing was touched
        assert engine.load_checkpoint(tmp_path, trust_client_state=True)[1]["odd"].x == 3


@ranks(2)
def test_a_relative_directory_is_that_of_the_call(tmp_path: Path) -> None:
    before = Path.cwd()
    try:
        (tmp_path / "there").mkdir(exist_ok=True)
        os.chdir(tmp_path)
        with open_engine(2, checkpoint={"async": True}) as engine:
            engine.save_checkpoint("run")
            os.chdir(tmp_path / "there")
            engine.wait_for_checkpoint()
    finally:
        os.chdir(before)
    assert (tmp_path / "run" / "latest").exists()


@ranks(2)
def test_two_engines_save_the_same_tag_into_one_directory(tmp_path: Path) -> None:
    with (
        open_engine(3, checkpoint={"async": True}) as one,
        open_engine(2, checkpoint={"async": True}) as other,
    ):
        one.save_checkpoint(tmp_path)
        other.save_checkpoint(tmp_path)
        one.wait_for_checkpoint()
        other.wait_for_checkpoint()
        NativeSource(Folder(tmp_path), "global_step0").verify()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step0", "latest"]


class Local(nn.Module):
    """Its loss depends on a running mean of what this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x - self.mean)


@ranks(2)
def test_buffers_that_differ_between_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    def run(engine: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            source = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = engine(torch.randn(2, 4, generator=source)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def start(stage: int) -> Any:
        torch.manual_seed(0)
        return shardwise.initialize(model=Local(), config=settings(stage, optimizer={"type": "Adam"}))[0]

    with start(3) as engine:
        run(engine, range(3))
        engine.save_checkpoint(tmp_path)
        own = engine.module.mean.clone()
        expected = run(engine, range(3, 6))
    with start(1) as engine:
        engine.load_checkpoint(tmp_path)
        assert torch.equal(engine.module.mean, own)
        assert run(engine, range(3, 6)) == expected


@ranks(2)
@pytest.mark.parametrize("text", ["", "../x", "\0\xff", "missing"])
def test_a_file_latest_that_leads_nowhere_is_passed_over(text: str, tmp_path: Path) -> None:
    with open_engine(2) as engine:
        engine.save_checkpoint(tmp_path)
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "latest").write_bytes(text.encode("latin-1"))
        dist.barrier()
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, fallback=True)[0] == str(tmp_path / "global_step0")


@ranks(2)
def test_ranks_wait_for_one_that_writes_long(tmp_path: Path) -> None:
    """Longer than the watchdog allows a collective: the save's size says how long a slow disk may take."""
    from shardwise.checkpoint import datafile

    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(1.5)
        fsync(descriptor)

    for background in (False, True):
        with open_engine(3, watchdog_s=1, checkpoint={"async": background}) as engine:
            before, keeper._SLOWEST = keeper._SLOWEST, 1000.0
            if dist.get_rank() == 1:
                datafile.os.fsync = slow
            try:
                engine.save_checkpoint(tmp_path, tag=f"background-{background}")
                engine.wait_for_checkpoint()
            finally:
                datafile.os.fsync = fsync
                keeper._SLOWEST = before
    assert (tmp_path / "background-True" / "index.json").exists()


@ranks(2)
def test_a_schedule_of_another_kind_is_left_and_told(tmp_path: Path) -> None:
    with open_engine(2) as engine:
        train_on(engine, 2)
        engine.save_checkpoint(tmp_path)
    index = json.loads((tmp_path / "global_step2" / "index.json").read_text())["index"]
    assert index["facts"]["origin"]["schedule"] == "GroupSchedule"
    model = build_rich()
    config = settings(2, micro=BATCH // 2)
    with shardwise.initialize(
        model=model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        config=config,
    )[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.lr_scheduler.last_epoch == 0


@ranks(2, disposable=True)
def test_whole_weights_on_a_full_disk_are_one_error(tmp_path: Path) -> None:
    import resource

    with open_engine(3) as engine:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        for name in ("pytorch_model.bin", "model.safetensors"):
            with pytest.raises(CheckpointError, match=f"{name}.* cannot be written"):
                engine.save_16bit_model(tmp_path, name)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train_on(engine, 1)
        engine.save_16bit_model(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
        same(state_of(engine), state_of(engine))
