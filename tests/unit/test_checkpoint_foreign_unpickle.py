"""Files of `torch.save`, read without running them."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.checkpoint.contents import real_dtype
from shardwise.checkpoint.foreign.archive import read_archive
from shardwise.checkpoint.foreign.files import Files
from shardwise.checkpoint.foreign.pieces import plain
from shardwise.checkpoint.foreign.stored import StridedTensor, load
from shardwise.checkpoint.foreign.unpickle import Record, unpickle
from shardwise.errors import CheckpointError
from tests.unit.foreign_support import Evil, same

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def values_of(tensor: StridedTensor) -> Tensor:
    with Files() as files:
        return load(tensor, files)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 5, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(-1)[:15].view(3, 5).bool() if dtype == torch.bool else bits.view(dtype).view(3, 5)
    torch.save({"it": tensor, "part": tensor[1:], "none": tensor[:0], "scalar": tensor[1, 2]}, tmp_path / "file")
    found = read_archive(tmp_path / "file")
    assert same(values_of(found["it"]), tensor)
    assert same(values_of(found["part"]), tensor[1:])
    assert found["none"].spec.shape == (0, 5)
    assert same(values_of(found["scalar"]), tensor[1, 2])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.int32, torch.complex64]),
)
def test_any_interval_of_any_view(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], random: Any, dtype: torch.dtype
) -> None:
    path = tmp_path_factory.mktemp("view") / "file"
    base = torch.arange(2 * torch.Size(shape).numel(), dtype=torch.float32).to(dtype).view(2, *shape)
    order = list(range(base.dim()))
    random.shuffle(order)
    view = base.permute(order)[random.choice([slice(None), slice(None, None, 2), slice(1, None)])]
    torch.save(view, path)
    flat = view.contiguous().view(-1).view(real_dtype(dtype))
    start = random.randint(0, flat.numel())
    stop = random.randint(start, flat.numel())
    found = torch.empty(stop - start, dtype=flat.dtype)
    with Files() as files:
        read_archive(path).read(files, start, found)
    assert torch.equal(found, flat[start:stop])


def test_containers_come_back_as_they_are(tmp_path: Path) -> None:
    value = {
        "numbers": [1, 2.5, True, None, 1j, -(2**70)],
        "text": ("a", b"\xff", bytearray(b"z")),
        "sets": [{1, 2}, frozenset({3})],
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "torch": [torch.Size([2, 3]), torch.bfloat16],
    }
    torch.save(value, tmp_path / "file")
    found = read_archive(tmp_path / "file")
    assert found == {**value, "torch": [(2, 3), torch.bfloat16]}
    assert type(found["ordered"]) is OrderedDict
    assert unpickle(pickle.dumps(defaultdict(list, a=[1])), "here") == {"a": [1]}
    assert unpickle(pickle.dumps(torch.device("cuda", 1)), "here") == "cuda:1"


def test_parameters_with_attributes_and_ties(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    weight.note = "an attribute"  # pyright: ignore
    torch.save({"one": weight, "two": weight, "flat": weight.detach().view(-1)}, tmp_path / "file")
    found = read_archive(tmp_path / "file")
    assert same(values_of(found["one"]), weight.detach())
    assert found["one"].identity == found["two"].identity != found["flat"].identity


def test_unknown_objects_are_inert(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.1), "path": tmp_path}, tmp_path / "file")
    found = read_archive(tmp_path / "file")
    assert isinstance(found["args"], Record) and found["args"].name == "argparse.Namespace"
    assert found["args"].get("lr") == 0.1
    assert isinstance(found["path"], Record)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Evil, id="os.system"),
        pytest.param(lambda mark: {"deep": [Evil(mark)]}, id="inside"),
        pytest.param(lambda mark: nn.Linear(1, 1), id="a module"),
        pytest.param(lambda mark: torch.nn.functional.relu, id="a function"),
        pytest.param(lambda mark: eval, id="eval"),
    ],
)
def test_code_is_refused_by_name_and_not_run(tmp_path: Path, value: Any) -> None:
    mark = tmp_path / "mark"
    torch.save(value(mark), tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"file cannot be trusted.*a pickle that names \w+\.") as caught:
        read_archive(tmp_path / "file")
    assert not mark.exists()
    assert caught.value.__cause__ is None


GLOBAL = b"\x80\x02cbuiltins\n%s\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(GLOBAL % b"bytearray" + b"J\xff\xff\xff\x7f\x85R.", id="two gigabytes of zeros"),
        pytest.param(b"\x80\x02Nr\xff\xff\xff\x7f.", id="a memo of two billion"),
        pytest.param(b"\x80\x02]p99999999999\n.", id="a memo number in text"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.", id="bytes that are not there"),
        pytest.param(b"\x80\x04\x95" + struct.pack("<Q", 2**50) + b"N.", id="a frame that is not there"),
        pytest.param(b"\x80\x02", id="nothing"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x63N.", id="protocol 99"),
        pytest.param(b"no pickle at all", id="text"),
        pytest.param(b"\x80\x02\x82\x01.", id="an extension code"),
        pytest.param(b"\x80\x02X\x01\x00\x00\x00aQ.", id="a storage outside of an archive"),
        # State for a function, which would set its attributes for the whole process.
        pytest.param(b"\x80\x02ccollections\nCounter\nN}X\x05\x00\x00\x00_makeK\x01s\x86b.", id="state for a function"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.", id="a dict for a function"),
        pytest.param(b"\x80\x02ctorch\nfloat32\nN}X\x01\x00\x00\x00aK\x01s\x86b.", id="state for a dtype"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)\x81.", id="a function as a class"),
    ],
)
def test_hostile_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="here is damaged"):
        unpickle(data, "here")


def test_members_of_enumerations_are_inert_and_nothing_else_has_members() -> None:
    """As Python 3.11.0 to 3.11.3 wrote them: `getattr` of the class and the name."""

    def pickled(owner: bytes) -> bytes:
        return b"cbuiltins\ngetattr\n(" + owner + b"S'RED'\ntR."

    found = unpickle(pickled(b"csome.enums\nColour\n"), "it", records=("some",))
    assert isinstance(found, Record)
    assert (found.name, found.arguments) == ("some.enums.Colour", ("RED",))
    for owner in (b"S'text'\n", b"cbuiltins\nlist\n", b"cbuiltins\ngetattr\n"):
        with pytest.raises(CheckpointError, match="it"):
            unpickle(pickled(owner), "it", records=("some",))


def test_memo_numbers_are_those_that_a_pickler_writes() -> None:
    """The interpreter would allocate a table as long as the number says, and accept it."""
    with pytest.raises(CheckpointError, match="memo number 65536"):
        unpickle(b"\x80\x02Nr\x00\x00\x01\x00.", "here")
    assert unpickle(b"\x80\x02Nr\x05\x00\x00\x00.", "here") is None


def test_a_record_class_cannot_be_changed_for_others() -> None:
    state = b"N}X\x04\x00\x00\x00nameX\x03\x00\x00\x00bads\x86b."
    with pytest.raises(CheckpointError):
        unpickle(b"\x80\x02cargparse\nNamespace\n" + state, "here")
    found = unpickle(pickle.dumps(argparse.Namespace()), "here")
    assert found.name == "argparse.Namespace" and Record.name == ""


def rebuilt(tmp_path: Path, **changes: Any) -> Path:
    """A file that claims something else of the tensor in it."""
    torch.save(torch.zeros(4), tmp_path / "whole")
    storage = ("storage", changes.get("kind", torch.FloatStorage), changes.get("key", "0"), "cpu", changes.get("count", 4))
    arguments = (changes.get("offset", 0), changes.get("shape", (4,)), changes.get("strides", (1,)), False, OrderedDict())

    class Claim:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (storage, *arguments, *changes.get("more", ()))

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(Claim())
    path = tmp_path / "claims"
    with (
        zipfile.ZipFile(tmp_path / "whole") as whole,
        zipfile.ZipFile(path, "w", changes.get("how", zipfile.ZIP_STORED)) as out,
    ):
        for entry in whole.infolist():
            out.writestr(entry.filename, buffer.getvalue() if entry.filename.endswith("data.pkl") else whole.read(entry))
    return path


def test_an_honest_claim_is_read(tmp_path: Path) -> None:
    assert same(values_of(read_archive(rebuilt(tmp_path))), torch.zeros(4))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (5,)},
        {"shape": (2**61,)},
        {"shape": (2**40, 2**40), "strides": (0, 0)},
        {"shape": (-4,)},
        {"shape": (4.0,)},
        {"strides": (2,)},
        {"strides": (-1,)},
        {"strides": (1, 1)},
        {"offset": 1},
        {"offset": -1},
        {"offset": None},
        {"count": 5},
        {"count": -5},
        {"count": 2**62},
        {"count": "4"},
        {"key": "1"},
        {"key": "../../data.pkl"},
        {"key": 0},
        {"kind": torch.nn.parameter.Parameter},
        {"more": ({"conj": True},)},
        {"shape": (1,) * 65, "strides": (1,) * 65},
        {"how": zipfile.ZIP_DEFLATED},
    ],
    ids=str,
)
def test_tensors_that_are_not_there_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="claims is damaged"):
        read_archive(rebuilt(tmp_path, **changes))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10.0), "b": torch.arange(3)}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    for length in range(0, len(data), 37):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="cut "):
            read_archive(tmp_path / "cut")


def test_bytes_changed_anywhere_give_a_checkpoint_error_or_values(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10.0), "b": [torch.arange(3), "text"]}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    for at in range(0, len(data), 7):
        (tmp_path / "bad").write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            found = read_archive(tmp_path / "bad")
            with Files() as files:
                plain(found, files)
        except (CheckpointError, ValueError) as error:
            assert isinstance(error, CheckpointError) or "plain" in str(error)


def test_the_old_format_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old cannot be read: expected a file of torch.save, in the format .* 1\.6"):
        read_archive(tmp_path / "old")


def test_values_that_repeat_themselves_are_no_plain_values() -> None:
    nested: Any = [1]
    for _ in range(60):
        nested = [nested, nested]
    loop: list[Any] = []
    loop.append(loop)
    for value in (nested, loop, object()):
        with Files() as files, pytest.raises(ValueError, match="plain value"):
            plain(value, files)
