"""Directories of torch.distributed.checkpoint: read in all the forms people write, and written for that library."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint.contents import Key, Spec, real_dtype
from shardwise.checkpoint.foreign import DcpSource, open_foreign
from shardwise.checkpoint.foreign.boxes import Block, assemble, intervals
from shardwise.checkpoint.foreign.pieces import PieceSource
from shardwise.errors import CheckpointError
from tests.unit.foreign_support import Evil, Model, count_bytes, interval, same, save_dcp, state_of, trained, whole


def flattened(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One level, as some write it themselves."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        found |= flattened(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def check_model(source: DcpSource, model: Model) -> None:
    keys = {key.name: key for key in source.specs if key.kind != "optimizer"}
    assert keys.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert same(whole(source, keys[name]), tensor)
    assert keys["model.1.running_var"].kind == keys["model.1.num_batches_tracked"].kind == "buffer"
    assert keys["model.0.weight"].kind == "weight"


def check_optimizer(source: DcpSource, model: Model, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq") if parameter.dim() else ():
            assert same(whole(source, Key("optimizer", name, state)), optimizer.state[parameter][state])
    names = [name for name, _ in model.named_parameters()]
    assert source.facts.steps == dict.fromkeys(names, 3)
    groups = source.facts.groups
    assert sorted(name for group in groups for name in group["parameters"]) == sorted(names)
    lr = {name: group["options"]["lr"] for group in groups for name in group["parameters"]}
    assert lr["spectrum"] == 0.1 and lr["model.0.bias"] == 0.2
    betas = {name: group["options"]["betas"] for group in groups for name in group["parameters"]}
    assert tuple(betas["model.0.bias"]) == (0.5, 0.6)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda state: state, id="model and optim"),
        pytest.param(lambda state: {"model": state["model"], "optimizer": state["optim"]}, id="model and optimizer"),
        pytest.param(lambda state: {"app": state, "step": 3}, id="an application"),
        pytest.param(lambda state: {**state["model"], "optimizer": state["optim"]}, id="the model flat"),
    ],
)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_all_forms_of_state_dicts(tmp_path: Path, form: Any, flat: bool) -> None:
    model, optimizer = trained()
    save_dcp(form(state_of(model, optimizer, flat)), tmp_path)
    source = open_foreign(tmp_path)
    assert isinstance(source, DcpSource)
    check_model(source, model)
    check_optimizer(source, model, optimizer)


@pytest.mark.parametrize("paths", [True, False], ids=["with paths", "without"])
def test_keys_that_people_joined_themselves(tmp_path: Path, paths: bool) -> None:
    model, optimizer = trained()
    state = flattened(state_of(model, optimizer, flat=True))
    save_dcp(state, tmp_path)
    if not paths:
        edit_metadata(tmp_path, lambda metadata: setattr(metadata, "planner_data", None))
    source = DcpSource(tmp_path)
    check_model(source, model)
    check_optimizer(source, model, optimizer)


def test_a_model_alone_keeps_the_names_of_its_modules(tmp_path: Path) -> None:
    model, _ = trained()
    for number, state in enumerate(({"model": model.state_dict()}, model.state_dict())):
        save_dcp(state, tmp_path / str(number))
        source = DcpSource(tmp_path / str(number))
        check_model(source, model)
        assert source.facts.groups == [] and source.facts.steps == {}


def test_parameters_with_numbers_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    save_dcp({"model": model.state_dict(), "optim": optimizer.state_dict(), "loader": {"seen": torch.zeros(2)}}, tmp_path)
    source = DcpSource(tmp_path)
    check_model(source, model)
    assert not any(key.kind == "optimizer" for key in source.specs)
    assert "have a number and no name" in caplog.text and "loader" in source.facts.origin["left_out"]


def test_a_slice_is_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp({"model": {"a": torch.arange(10_000.0).view(100, 100)}}, tmp_path)
    with count_bytes(monkeypatch) as sizes:
        source = DcpSource(tmp_path)
        interval(source, Key("weight", "a"), 0, 1)  # finds out where it is
        assert sum(sizes) < 4_000
        sizes.clear()
        found = interval(source, Key("weight", "a"), 250, 450)
    assert torch.equal(found, torch.arange(250.0, 450.0))
    assert sizes == [800]


# Blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_intervals_cover_what_is_asked_in_order(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    found = [torch.empty(0, dtype=torch.int64)]
    for offsets, sizes in intervals(tuple(shape), start, stop):
        box = tensor
        for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, at, size)
        found.append(box.reshape(-1))
    assert torch.cat(found).tolist() == list(range(start, stop))
    assert len(found) <= 2 * max(1, len(shape)) + 1


def save_blocks(tensor: Tensor, cuts: list[list[int]], folder: Path) -> list[Block]:
    """A tensor cut along every dimension, one file for each block."""
    blocks: list[Block] = []
    spans = [list(zip(accumulate(cut, initial=0), cut, strict=False)) for cut in cuts]
    for number, box in enumerate(product(*spans)):
        part = tensor
        for dim, (at, size) in enumerate(box):
            part = part.narrow(dim, at, size)
        path = folder / str(number)
        torch.save(part.clone(), path)
        offsets = tuple(at for at, _ in box)
        blocks.append(Block(path, 0, path.stat().st_size, offsets, Spec(tuple(part.shape), part.dtype)))
    return blocks


class Assembled(PieceSource):
    def __init__(self, tensor: Tensor, blocks: list[Block]) -> None:
        super().__init__("here")
        spec = Spec(tuple(tensor.shape), tensor.dtype)
        self.add(Key("weight", "it"), spec, assemble(spec, blocks, Path("here")))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3), st.booleans(), st.randoms(use_true_random=False)
)
def test_tensors_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[list[int]], complex: bool, rng: random.Random
) -> None:
    shape = [sum(cut) for cut in cuts]
    tensor = torch.randn(shape, dtype=torch.complex64 if complex else torch.float32)
    blocks = save_blocks(tensor, cuts, tmp_path_factory.mktemp("blocks"))
    rng.shuffle(blocks)
    source, key = Assembled(tensor, blocks), Key("weight", "it")
    assert same(whole(source, key), tensor)
    flat = tensor.view(-1).view(real_dtype(tensor.dtype))
    for _ in range(4):
        start = rng.randint(0, flat.numel())
        stop = rng.randint(start, flat.numel())
        assert torch.equal(interval(source, key, start, stop), flat[start:stop])


@pytest.mark.parametrize("cuts", [[[2, 2], [4]], [[4], [2, 2]]], ids=["rows", "columns"])
def test_blocks_that_do_not_fit_are_refused(tmp_path: Path, cuts: list[list[int]]) -> None:
    tensor = torch.zeros(4, 4)
    blocks = save_blocks(tensor, cuts, tmp_path)
    twice = [blocks[0], Block(blocks[1].path, 0, 1, blocks[0].offsets, blocks[1].spec)]
    outside = [blocks[0], Block(blocks[1].path, 0, 1, (3, 3), blocks[1].spec)]
    for wrong in (blocks[:1], twice, outside, [*blocks, blocks[0]], []):
        with pytest.raises(CheckpointError, match="here is damaged"):
            Assembled(tensor, wrong)
    other = Spec(blocks[0].spec.shape, torch.float64)
    lying = [Block(block.path, 0, block.path.stat().st_size, block.offsets, other) for block in blocks]
    with pytest.raises(CheckpointError, match=r"0 is damaged: expected a block of .* torch.float64, found .* torch.float32"):
        whole(Assembled(tensor.double(), lying), Key("weight", "it"))


# Hostile directories


def edit_metadata(folder: Path, edit: Any) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def each_info(**changes: Any) -> Any:
    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(changes)

    return edit


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "dcp"
    save_dcp({"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}}, folder)
    return folder


@pytest.mark.parametrize(
    "edit, problem",
    [
        (each_info(relative_path="../outside.distcp"), r"metadata is damaged: .*the file name '\.\./outside"),
        (each_info(relative_path="/etc/passwd"), "the file name '/etc/passwd'"),
        (each_info(relative_path=7), "the file name 7"),
        (each_info(offset=-1), "no bytes of model.a"),
        (each_info(length="x"), "no bytes of model.a"),
        (each_info(transform_descriptors=["zstd"]), "is compressed"),
        (lambda metadata: metadata.storage_data.clear(), "no place of model.a"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", None), "no state_dict_metadata"),
        (lambda metadata: setattr(metadata.state_dict_metadata["model.a"], "size", torch.Size([2**62])), "without shape"),
        (lambda metadata: setattr(metadata.state_dict_metadata["model.a"], "size", torch.Size([3, 3])), "6 elements"),
        (lambda metadata: setattr(metadata.state_dict_metadata["model.a"], "properties", None), "without shape or dtype"),
        (lambda metadata: metadata.state_dict_metadata["model.a"].chunks.append(3), "without offsets"),
        (lambda metadata: metadata.state_dict_metadata["model.a"].chunks.clear(), "0 elements"),
    ],
)
def test_metadata_that_lies_is_refused(saved: Path, edit: Any, problem: str) -> None:
    edit_metadata(saved, edit)
    with pytest.raises(CheckpointError, match=problem):
        open_foreign(saved)


@pytest.mark.parametrize("changes", [{"offset": 10**15}, {"length": 10**15}, {"length": 10}, {"offset": 1}])
def test_an_entry_that_is_not_where_it_should_be(saved: Path, changes: dict[str, int]) -> None:
    edit_metadata(saved, each_info(**changes))
    source = DcpSource(saved)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp (is damaged|cannot be read)"):
        whole(source, Key("weight", "a"))


def test_metadata_that_runs_code_is_refused(saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps({"a": Evil(tmp_path / "mark")}))
    with pytest.raises(CheckpointError, match=r"metadata cannot be trusted.*posix.system"):
        open_foreign(saved)
    (saved / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match=r"metadata is damaged: expected metadata of a checkpoint, found list"):
        open_foreign(saved)
    assert not (tmp_path / "mark").exists()


def test_a_value_that_runs_code_is_refused(tmp_path: Path) -> None:
    folder, mark = tmp_path / "dcp", tmp_path / "mark"
    save_dcp({"model": {"a": torch.zeros(2)}, "optim": {"param_groups": [{"lr": Evil(mark)}]}}, folder)
    source = DcpSource(folder)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be trusted"):
        _ = source.facts
    assert not mark.exists()


def test_missing_files_are_named(saved: Path) -> None:
    source = DcpSource(saved)
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read"):
        whole(source, Key("weight", "a"))
    (saved / "__0_0.distcp").touch()
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no finished checkpoint.*a file \.metadata"):
        open_foreign(saved)


def test_metadata_of_old_versions_is_read(saved: Path) -> None:
    """Before torch 2.3 there were no paths of keys and no save id."""
    edit_metadata(saved, lambda metadata: [vars(metadata).pop(name) for name in ("planner_data", "storage_meta")])
    source = DcpSource(saved)
    assert {key.name for key in source.specs} == {"model.a", "model.b"}
    assert SimpleNamespace(**source.facts.origin).format == "dcp"
