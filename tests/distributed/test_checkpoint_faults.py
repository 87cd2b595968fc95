"""What goes wrong on one rank while saving or loading: the same error on all of them, and nothing is lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import CheckpointDamagedError, CheckpointError, DivergenceError, PeerLostError, StallError, UsageError
from tests.distributed.checkpoint_support import die_in_write, open_engine, same, state_of, train_on
from tests.distributed.scenario_support import end_process
from tests.harness import ranks


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@ranks(2, disposable=True)
def test_a_full_disk_on_one_rank_is_one_error_and_training_goes_on(tmp_path: Path) -> None:
    with open_engine(3) as engine:
        train_on(engine, 1)
        engine.save_checkpoint(tmp_path)
        train_on(engine, 1, first=1)
        before = state_of(engine)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(
            CheckpointError, match=r"saving checkpoint 'global_step2' failed: found .*rank-00001.* the disk is full"
        ):
            engine.save_checkpoint(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert names_in(tmp_path) == ["global_step1", "latest"]
        assert (tmp_path / "latest").read_text() == "global_step1"
        same(state_of(engine), before)
        train_on(engine, 1, first=2)
        engine.save_checkpoint(tmp_path)
        assert (tmp_path / "latest").read_text() == "global_step3"


@ranks(2)
def test_a_place_that_cannot_be_written_to_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with open_engine(2) as engine:
        refused = r"checkpoint 'global_step0' was not saved: found rank 0: .*file.* cannot be written"
        with pytest.raises(CheckpointError, match=refused):
            engine.save_checkpoint(tmp_path / "file" / "run")
        for tag in ("../up", "a/b", ".hidden", "", "latest"):
            with pytest.raises(CheckpointError, match="this tag cannot be used"):
                engine.save_checkpoint(tmp_path, tag=tag)
        train_on(engine, 1)


@ranks(2, dies=(1,))
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    engine = open_engine(3)
    train_on(engine, 1)
    engine.save_checkpoint(tmp_path)
    train_on(engine, 1, first=1)
    if dist.get_rank() == 1:
        die_in_write()
    with pytest.raises(PeerLostError, match="rank 1"):
        engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert [name for name in names_in(tmp_path) if not name.startswith(".")] == ["global_step1", "latest"]
    engine.destroy(restore=False)


@ranks(2, dies=(0, 1))
def test_a_rank_that_does_not_come_to_the_save_is_named(tmp_path: Path) -> None:
    engine = open_engine(2, watchdog_s=2)
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(StallError, match=r"did not finish within 2 s: expected rank 1 to take part.*agree on written"):
            engine.save_checkpoint(tmp_path)
        store.set("rank 0 has given up", "")
    else:
        store.wait(["rank 0 has given up"])
    end_process()


@ranks(2, dies=(0, 1))
def test_a_rank_that_trains_while_the_other_saves_is_named(tmp_path: Path) -> None:
    engine = open_engine(3)
    train_on(engine, 1)
    with pytest.raises((DivergenceError, PeerLostError), match=r"(?s)save a checkpoint|rank 0 has stopped|agree on written"):
        if dist.get_rank() == 0:
            engine.save_checkpoint(tmp_path)
        else:
            engine(torch.zeros(6, 4, dtype=torch.int64))
            engine.step()
    end_process()


@ranks(2)
def test_different_tags_are_told(tmp_path: Path) -> None:
    tag = f"rank-{dist.get_rank()}"
    told = "the ranks gave different tags: expected 'rank-0' on all, found 'rank-0', 'rank-1'"
    with open_engine(1, checkpoint={"tag_validation": "FAIL"}) as engine, pytest.raises(CheckpointError, match=told):
        engine.save_checkpoint(tmp_path, tag=tag)
    with open_engine(1) as engine:
        engine.save_checkpoint(tmp_path, tag=tag)
        assert names_in(tmp_path) == ["latest", "rank-0"]


@ranks(2)
@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "index", "index cut", "client state"])
def test_damage_is_found_and_the_newest_whole_one_is_taken(damage: str, tmp_path: Path) -> None:
    with open_engine(3) as engine:
        for step in range(3):
            train_on(engine, 1, first=step)
            engine.save_checkpoint(tmp_path, client_state={"step": step})
            if step == 1:
                whole = state_of(engine)
    names = {"index": "index.json", "index cut": "index.json", "client state": "client_state.pt"}
    name = names.get(damage, "rank-00001.safetensors")
    if dist.get_rank() == 0:
        spoil(tmp_path / "global_step3" / name, damage)
    dist.barrier()
    with open_engine(3) as engine:
        with pytest.raises(CheckpointDamagedError, match=rf"{name} (is damaged|cannot be read)"):
            engine.load_checkpoint(tmp_path)
        if damage in ("bit", "truncated", "missing"):  # found when weights were read already
            with pytest.raises(UsageError, match=r"no valid weights.*global_step3"):
                train_on(engine, 1)
            with pytest.raises(UsageError, match="no valid weights"):
                engine.save_checkpoint(tmp_path)
        path, client_state = engine.load_checkpoint(tmp_path, fallback=True)
        assert path == str(tmp_path / "global_step2")
        assert client_state == {"step": 1}
        same(state_of(engine), whole)
        train_on(engine, 1)


def spoil(path: Path, damage: str) -> None:
    if damage in ("truncated", "index cut"):
        os.truncate(path, path.stat().st_size - 7)
    elif damage == "missing":
        path.unlink()
    else:
        flip(path, path.stat().st_size * 3 // 4)


@ranks(2)
def test_nothing_there_yet_and_unknown_tags(tmp_path: Path) -> None:
    with open_engine(2) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, {})
        assert engine.load_checkpoint(tmp_path / "never made") == (None, {})
        engine.save_checkpoint(tmp_path, tag="one", save_latest=False)
        with pytest.raises(CheckpointError, match=r"there is no checkpoint 'two' in .*: expected one of: one"):
            engine.load_checkpoint(tmp_path, tag="two")
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "one")  # no file latest: the newest
        assert engine.load_checkpoint(tmp_path, tag="two", fallback=True)[0] == str(tmp_path / "one")
