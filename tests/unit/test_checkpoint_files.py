"""Data files, their headers, the index and plain values: what goes in comes out, and what was tampered with is refused."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint import (
    Contents,
    Destination,
    Facts,
    Folder,
    Key,
    NativeSource,
    Part,
    Spec,
    plain,
    write_checkpoint,
)
from shardwise.checkpoint.contents import DTYPES, real_dtype
from shardwise.checkpoint.datafile import BLOCK, Checksums, DataFile, Stats, Wanted, to_bytes, write_tensors
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.safetensors import read_header
from shardwise.errors import CheckpointDamagedError, CheckpointError

# ---- plain values


PLAIN: list[Any] = [
    None,
    True,
    -3,
    1.5,
    float("inf"),
    float("-inf"),
    "text",
    b"\0bytes",
    (1, (2.0, "x"), []),
    {"a": {1: (2,)}, "!": "no tag"},
    {1, 2},
    Counter({10: 2}),
    OrderedDict(b=1, a=2),
    torch.arange(6, dtype=torch.int16).view(2, 3),
    torch.tensor(0.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.float16,
    np.float64(0.1),
    np.int64(7),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any) -> None:
    found = plain.loads(plain.dumps({"x": [value]}, "it"), "it")["x"][0]
    if isinstance(value, Tensor):
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    else:
        assert found == value
        assert not isinstance(value, (tuple, Counter, set)) or type(found) is type(value)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
def test_any_plain_value_comes_back_exactly(value: Any) -> None:
    found = plain.loads(plain.dumps(value, "it"), "it")
    assert repr(found) == repr(value)


def test_what_is_not_plain_is_refused_with_its_place() -> None:
    with pytest.raises(
        CheckpointError, match=r"the schedule\['a'\]\[1\] cannot be saved: .*found builtins.object.*client_state"
    ):
        plain.dumps({"a": [1, object()]}, "the schedule")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        plain.dumps(torch.zeros(1 << 20), "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"!":"unknown"}',
        '{"!":"tensor","dtype":"save","shape":[1],"value":""}',
        '{"!":"bytes","value":"%"}',
        "[" * 5000,
    ],
)
def test_text_that_is_no_plain_value_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="it cannot be read"):
        plain.loads(text, "it")


# ---- data files


def write(path: Path, tensors: dict[str, Tensor]) -> Checksums:
    return write_tensors(path, tensors, {"format": "pt"})[0]


def test_every_dtype_and_shape_lies_as_the_header_says(tmp_path: Path) -> None:
    tensors = {
        f"{name} {shape}": torch.empty(shape, dtype=dtype).view(-1).view(torch.uint8).random_().view(dtype).view(shape)
        for name, dtype in DTYPES.items()
        for shape in ((), (3,), (2, 0), (2, 3, 1))
        if real_dtype(dtype) == dtype and dtype != torch.bool
    }
    write(tmp_path / "x", tensors)
    header = read_header(tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    assert header.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        stored = header.tensors[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        assert data[stored.start : stored.stop] == bytes(to_bytes(tensor))


SIZES = [0, 1, 63, BLOCK - 1, BLOCK, 2 * BLOCK + 5, (1 << 23) + 3]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_stretches_are_read_back(data: Any) -> None:
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {str(at): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=source) for at, size in enumerate(sizes)}
    total = sum(sizes)
    path = SCRATCH / "any"
    path.unlink(missing_ok=True)
    sums = write(path, tensors)
    whole = torch.cat(list(tensors.values())) if total else torch.empty(0, dtype=torch.uint8)
    start = sums.size - total
    edges = sorted(data.draw(st.lists(st.integers(0, total), max_size=8)))
    targets = [torch.zeros(stop - begin, dtype=torch.uint8) for begin, stop in zip(edges[::2], edges[1::2], strict=False)]
    stats = Stats()
    file = DataFile(path, sums, stats)
    file.read([Wanted(start + begin, to_bytes(target), "") for begin, target in zip(edges[::2], targets, strict=False)])
    file.verify()
    file.close()
    for begin, target in zip(edges[::2], targets, strict=False):
        assert torch.equal(target, whole[begin : begin + len(target)])
    wanted = sum(map(len, targets))
    assert stats.bytes_read - sums.size <= wanted + 2 * BLOCK * len(targets)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path) -> None:
    global SCRATCH  # noqa: PLW0603 - hypothesis runs one test function many times with one fixture
    SCRATCH = tmp_path


SCRATCH = Path()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x"
    sums = write(path, {"a": torch.arange(2 * BLOCK // 4 + 9, dtype=torch.int32)})
    whole = path.read_bytes()
    for at in (0, 9, len(whole) // 2, BLOCK - 1, BLOCK, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointDamagedError, match=rf"{path} is damaged: expected checksum [0-9a-f]{{8}} for the"):
            DataFile(path, sums, Stats()).verify()
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointDamagedError, match=f"expected {len(whole)} bytes, found {len(whole) + 4}"):
        DataFile(path, sums, Stats())


def header_of(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HOSTILE = {
    "empty": b"",
    "short": b"\1\0\0",
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "longer than the file": struct.pack("<Q", 100) + b"{}",
    "not JSON": header_of(b"{]"),
    "a list": header_of(b"[1,2]"),
    "not text": header_of(b"\xff\xfe{}"),
    "deep": header_of(b'{"a":' * 50_000),
    "no dtype": header_of(b'{"a":{"shape":[1],"data_offsets":[0,4]}}'),
    "unknown dtype": header_of(b'{"a":{"dtype":"PICKLE","shape":[1],"data_offsets":[0,4]}}') + b"1234",
    "negative": header_of(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}') + b"1234",
    "past the end": header_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}') + b"1234",
    "too few bytes": header_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}') + b"1234",
    "huge shape": header_of(b'{"a":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,4]}}') + b"1234",
    "overlap": header_of(
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}}'
    )
    + b"12345",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_headers_that_lie_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
        read_header(tmp_path / "x")


# ---- a whole checkpoint


class Alone:
    """The exchange of one rank after the other, in one process: the last is the first rank."""

    def collect(self, problem: str) -> list[str]:
        return [problem]

    def announce(self, problem: str) -> str:
        return problem


def save(root: Path, parts: list[list[Part]], specs: dict[Key, Spec], tag: str = "t") -> Folder:
    folder = Folder(root)
    written = folder.begin(tag)
    for rank in reversed(range(len(parts))):
        contents = Contents(parts[rank], specs=specs if rank == 0 else {}, facts=Facts(counters={"global_steps": 5}))
        write_checkpoint(contents, Destination(folder, tag, written, rank, len(parts)), Alone())
    return folder


@st.composite
def resharding(draw: Any) -> Any:
    """Tensors of any shape, cut at any places for some ranks, and asked for in any other pieces."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8])
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    tensors = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
    world = draw(st.integers(1, 4))
    cuts = [sorted(draw(st.lists(st.integers(0, 400), min_size=world - 1, max_size=world - 1))) for _ in tensors]
    again = [sorted(draw(st.lists(st.integers(0, 400), max_size=3))) for _ in tensors]
    return tensors, world, cuts, again


@settings(max_examples=60, deadline=None)
@given(resharding(), st.integers(0, 1000))
def test_any_cut_is_read_back_in_any_other(case: Any, number: int) -> None:
    tensors, world, cuts, again = case
    source = torch.Generator().manual_seed(number)
    specs: dict[Key, Spec] = {}
    values: dict[Key, Tensor] = {}
    parts: list[list[Part]] = [[] for _ in range(world)]
    for at, (shape, dtype) in enumerate(tensors):
        key, spec = Key("optimizer" if at % 2 else "weight", f"../{at}", "m" if at % 2 else ""), Spec(shape, dtype)
        specs[key] = spec
        raw = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=source)
        values[key] = raw.view(real_dtype(dtype))
        edges = [0, *(min(cut, spec.length) for cut in cuts[at]), spec.length]
        for rank in range(world):
            if edges[rank] < edges[rank + 1]:
                parts[rank].append(Part(key, spec, edges[rank], values[key][edges[rank] : edges[rank + 1]]))
    folder = save(SCRATCH / "run", parts, specs)
    opened = NativeSource(folder, "t")
    assert opened.specs == specs
    wanted: list[Part] = []
    for (key, spec), edges in zip(specs.items(), again, strict=True):
        edges = [0, *(min(edge, spec.length) for edge in edges), spec.length]
        for start, stop in itertools.pairwise(edges):
            wanted.append(Part(key, spec, start, torch.zeros(stop - start, dtype=real_dtype(spec.dtype))))
    opened.read(wanted)
    for part in wanted:
        expected = values[part.key][part.start : part.stop]
        assert torch.equal(part.values.view(torch.uint8), expected.view(torch.uint8)), part.key
    opened.verify()
    opened.close()


def small(root: Path) -> tuple[Folder, Path]:
    spec = Spec((4,), torch.float32)
    folder = save(root, [[Part(Key("weight", "w"), spec, 0, torch.ones(4))]], {Key("weight", "w"): spec})
    return folder, root / "t" / "index.json"


def resealed(change: Any, text: str) -> str:
    """The index with a change, and a checksum that fits it again."""
    found = json.loads(text)["index"]
    change(found)
    body = json.dumps(found)
    return f'{{"crc32":"{crc32(body.encode()):08x}","index":{body}}}\n'


def change_file(found: dict[str, Any], **changes: Any) -> None:
    found["files"][0].update(changes)


def change_weight(found: dict[str, Any], **changes: Any) -> None:
    found["tensors"]["weight"]["w"].update(changes)


BAD_INDEX = {
    "path upwards": lambda found: change_file(found, name="../../etc/passwd"),
    "absolute path": lambda found: change_file(found, name="/etc/passwd"),
    "no name": lambda found: change_file(found, name=""),
    "negative size": lambda found: change_file(found, bytes=-1),
    "too few checksums": lambda found: change_file(found, bytes=1 << 40),
    "a gap": lambda found: change_weight(found, pieces=[[0, 2, 0, 0]]),
    "twice": lambda found: change_weight(found, pieces=[[0, 4, 0, 0], [0, 4, 0, 0]]),
    "an unknown file": lambda found: change_weight(found, pieces=[[0, 4, 9, 0]]),
    "past the file": lambda found: change_weight(found, pieces=[[0, 4, 0, 1 << 40]]),
    "unknown dtype": lambda found: change_weight(found, dtype="X"),
    "huge shape": lambda found: change_weight(found, shape=[1 << 60, 1 << 60]),
    "fractional shape": lambda found: change_weight(found, shape=[4.0]),
    "another format": lambda found: found.update(format="other"),
    "a later version": lambda found: found.update(version=99),
    "no facts": lambda found: found.pop("facts"),
    "an unknown kind": lambda found: found["tensors"].update(virus={}),
}


@pytest.mark.parametrize("change", BAD_INDEX.values(), ids=BAD_INDEX.keys())
def test_an_index_that_lies_is_refused(change: Any, tmp_path: Path) -> None:
    folder, path = small(tmp_path)
    path.write_text(resealed(change, path.read_text()))
    with pytest.raises(CheckpointError, match=r"(index.json.*(is damaged|later version))|unknown dtype"):
        NativeSource(folder, "t")


def test_any_changed_byte_of_the_index_is_found(tmp_path: Path) -> None:
    folder, path = small(tmp_path)
    whole = path.read_bytes()
    for at in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            folder.read_index("t")
    path.write_bytes(whole)
    assert isinstance(folder.read_index("t"), Index)


def test_a_latest_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    folder, _ = small(tmp_path)
    for text in ("../..", "/etc", "", ".hidden"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="this tag cannot be used"):
            folder.newest()


def test_what_others_leave_is_theirs(tmp_path: Path) -> None:
    """Unfinished saves of processes that live, or of other machines, are not touched; those of the dead go."""
    folder, _ = small(tmp_path)
    host = f"{os.uname().nodename}@{Path('/proc/self/ns/pid').stat().st_ino}"
    alive = tmp_path / f".x.writing-{host}-{os.getpid()}-{Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
    reused = tmp_path / f".x.writing-{host}-{os.getpid()}-1"
    dead = tmp_path / f".y.leaving-{host}-{(1 << 22) + 5}-77"
    foreign = tmp_path / ".z.writing-elsewhere-1-1"
    for path in (alive, reused, dead, foreign):
        path.mkdir()
    folder.clean()
    assert [path.exists() for path in (alive, reused, dead, foreign)] == [True, False, False, True]
    for path in (foreign,):
        os.utime(path, (1, 1))
    folder.clean()
    assert not foreign.exists()


def test_client_state_of_unsafe_classes_is_not_unpickled(tmp_path: Path) -> None:
    import io

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    file = io.BytesIO()
    torch.save({"x": Evil()}, file)
    folder = Folder(tmp_path / "run")
    spec = Spec((1,), torch.float32)
    contents = Contents(
        [Part(Key("weight", "w"), spec, 0, torch.ones(1))], specs={Key("weight", "w"): spec}, client_state=file.getvalue()
    )
    write_checkpoint(contents, Destination(folder, "t", folder.begin("t"), 0, 1), Alone())
    with pytest.raises(CheckpointError, match=r"client_state in .*client_state.pt cannot be loaded.*add_safe_globals"):
        NativeSource(folder, "t").client_state()
    assert not (tmp_path / "owned").exists()
