"""The header parser and writer, held against the safetensors library."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from ckpt.stores.store import open_store
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.safetensors.file import BITS, MAX_HEADER_BYTES, Entry, build, parse, read_header
from tests.selection import examples

PAIR = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}

# What `build` gives for two tensors, byte by byte: 8 bytes of length, JSON, blanks up to 8 * n.
GOLDEN_HEADER = (
    b"\x90\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt"},'
    b'"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"\xc3\xa9":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}'
    b"   "
)
GOLDEN_DATA = b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x01"

NUMPY_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}

seeded = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=examples(300),
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
whole_byte_dtypes = st.sampled_from([name for name, bits in BITS.items() if bits >= 8])
described = st.dictionaries(names, st.tuples(whole_byte_dtypes, shapes), max_size=6)
metadata = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"])), max_size=3)


def a_file(header: object, data: bytes = b"") -> bytes:
    """A file with this header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_entry(**changes: object) -> bytes:
    """A file whose one entry has these changes; a value of None removes the key."""
    entry = {key: value for key, value in {**PAIR, **changes}.items() if value is not None}
    return a_file({"w": entry}, b"ab")


def entries_of(
    described: dict[str, tuple[str, tuple[int, ...]]],
) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(n, d, shape, prod(shape) * BITS[d] // 8) for n, (d, shape) in described.items()]


def the_library_accepts(file: bytes) -> bool:
    try:
        deserialize(file)
    except SafetensorError:
        return False
    return True


def test_the_bytes_of_a_header_are_these():
    header = build(
        [("w", "F32", (1, 2), 8), ("é", "BOOL", (), 1)],
        {"format": "pt"},
    )
    built = parse(header, "f")
    assert header == GOLDEN_HEADER
    assert built.data_offset == len(GOLDEN_HEADER)
    assert dict(deserialize(GOLDEN_HEADER + GOLDEN_DATA))["é"]["data"] == b"\x01"


def test_what_is_built_is_parsed_back():
    header = build(
        [("w", "F32", (1, 2), 8), ("é", "BOOL", (), 1)],
        {"format": "pt"},
    )
    built = parse(header, "f")
    assert parse(header, "f", len(header) + 9) == built
    assert built.metadata == {"format": "pt"}
    assert list(built.entries.values()) == [
        Entry("w", "F32", (1, 2), 0, 8),
        Entry("é", "BOOL", (), 8, 9),
    ]
    assert built.data_bytes == 9


@given(described, metadata, st.sampled_from([1, 8, 64, 4096]), st.integers(0, 2000))
@seeded
def test_the_library_reads_what_is_built(described, metadata, align, reserve_bytes):
    entries = entries_of(described)
    header = build(entries, metadata, align, reserve_bytes)
    built = parse(header, "f")
    data = bytes(index % 251 for index in range(built.data_bytes))
    assert len(header) == built.data_offset >= reserve_bytes
    assert len(header) % align == 0
    found = dict(deserialize(header + data))
    assert set(found) == set(described)
    for name, dtype, shape, _ in entries:
        entry = built.entries[name]
        assert (found[name]["dtype"], tuple(found[name]["shape"])) == (dtype, shape)
        assert found[name]["data"] == data[entry.begin : entry.end]
    assert parse(header, "f", len(header) + len(data)) == built


def test_the_library_finds_the_metadata(tmp_path: Path):
    header = build([], {"format": "pt", "é": "\n\x00"})
    (tmp_path / "f").write_bytes(header)
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "\n\x00"}


def test_a_header_can_grow_into_the_room_reserved_for_it():
    first = build([], {}, reserve_bytes=500)
    second = build([("w", "U8", (0,), 0)], {"digest": "x" * 100}, reserve_bytes=len(first))
    assert len(first) == len(second)


def test_a_header_of_many_entries_is_parsed_back():
    entries = [(f"layers.{i}.weight", "BF16", (4096, i), 8192 * i) for i in range(10_000)]
    header = build(entries, {})
    found = parse(header, "f", len(header) + sum(nbytes for *_, nbytes in entries)).entries.values()
    assert [(*entry[:3], entry.end - entry.begin) for entry in found] == entries


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        pytest.param(a_file({}), {}, id="no tensors"),
        pytest.param(a_file(b"{}      "), {}, id="blanks behind"),
        pytest.param(a_file({"__metadata__": None}), {}, id="metadata of null"),
        pytest.param(
            a_file({"w": {**PAIR, "note": {"a": [1]}}}, b"ab"), {"w": (0, 2)}, id="extra key"
        ),
        pytest.param(
            a_file({"b": {**PAIR, "data_offsets": [2, 4]}, "a": PAIR}, b"abcd"),
            {"a": (0, 2), "b": (2, 4)},
            id="any order",
        ),
        pytest.param(
            a_file({"b": PAIR, "a": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}}, b"ab"),
            {"a": (0, 0), "b": (0, 2)},
            id="empty tensor",
        ),
        pytest.param(
            a_file({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"ab"),
            {"a": (0, 2)},
            id="half bytes",
        ),
        pytest.param(
            a_file({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"abc"),
            {"a": (0, 3)},
            id="three quarters of a byte",
        ),
        pytest.param(
            a_file(rb'{"\ud83d\ude00":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
            {"😀": (0, 2)},
            id="escaped name",
        ),
    ],
)
def test_a_sound_header_is_accepted(file: bytes, entries: dict[str, tuple[int, int]]):
    assert the_library_accepts(file)
    found = parse(file, "f", len(file)).entries
    assert [(name, (e.begin, e.end)) for name, e in found.items()] == list(entries.items())


DEFECTS = [
    pytest.param(b"", CorruptError, "the file has 0 bytes", id="empty file"),
    pytest.param(b"1234567", CorruptError, "the file has 7 bytes", id="no length"),
    pytest.param(bytes(8), FormatError, "not JSON", id="no header"),
    pytest.param(
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        HostileError,
        "header_bytes would be 100000001",
        id="header too long",
    ),
    pytest.param(
        (99).to_bytes(8, "little") + b"{}", CorruptError, "ends at byte 107", id="header cut"
    ),
    pytest.param(a_file(b"\xff{}"), FormatError, "UTF-8", id="no UTF-8"),
    pytest.param(a_file(b"{"), FormatError, "not JSON", id="no JSON"),
    pytest.param(a_file(b"{}{}"), FormatError, "Extra data", id="two values"),
    pytest.param(a_file(b'{"a":NaN}'), FormatError, "NaN", id="NaN"),
    pytest.param(a_file(b'{"a":-1e999}'), FormatError, "larger than every float", id="1e999"),
    pytest.param(a_file(rb'{"__metadata__":{"\ud800":""}}'), FormatError, "surrogate", id="half"),
    pytest.param(a_file(b"[" * 100_000), HostileError, "nests too deep", id="nests too deep"),
    pytest.param(a_file([]), FormatError, "list, not an object", id="list"),
    pytest.param(
        a_file(b'{"__metadata__":{},"__metadata__":{}}'), HostileError, "twice", id="metadata twice"
    ),
    pytest.param(
        a_file(b'{"w":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
        HostileError,
        "'dtype' twice",
        id="dtype twice",
    ),
    pytest.param(
        a_file({"__metadata__": {"a": 1}}), FormatError, r"__metadata__\['a'\] is 1", id="metadata"
    ),
    pytest.param(a_file({"__metadata__": []}), FormatError, "is a list", id="metadata list"),
    pytest.param(a_file({"w": None}), FormatError, "w is described by None", id="entry null"),
    pytest.param(with_entry(dtype=None), FormatError, "w has no dtype", id="no dtype"),
    pytest.param(with_entry(shape=None), FormatError, "w has no shape", id="no shape"),
    pytest.param(with_entry(data_offsets=None), FormatError, "no data_offsets", id="no offsets"),
    pytest.param(with_entry(dtype="Q8"), UnsupportedError, "w has dtype 'Q8'", id="dtype"),
    pytest.param(with_entry(dtype=["U8"]), UnsupportedError, "w has dtype", id="dtype list"),
    pytest.param(with_entry(shape=2), FormatError, "w has shape 2", id="shape number"),
    pytest.param(with_entry(shape=[-2]), FormatError, "a size of -2", id="negative size"),
    pytest.param(with_entry(shape=[-2, -1]), FormatError, "a size of -2", id="negative sizes"),
    pytest.param(with_entry(shape=[2.0]), FormatError, "a size of 2.0", id="float size"),
    pytest.param(with_entry(shape=[2, True]), FormatError, "a size of True", id="bool size"),
    pytest.param(with_entry(shape=["2"]), FormatError, "a size of '2'", id="text size"),
    pytest.param(with_entry(shape=[2**62, 4]), HostileError, "absurd shape", id="huge shape"),
    pytest.param(
        a_file({"w": {"dtype": "U8", "shape": [2**63, 4, 0], "data_offsets": [0, 0]}}),
        HostileError,
        "absurd shape",
        id="huge shape of nothing",
    ),
    pytest.param(
        a_file({"w": {"dtype": "U8", "shape": [2**63], "data_offsets": [0, 2**63]}}),
        HostileError,
        "absurd shape",
        id="huge shape with offsets",
    ),
    pytest.param(with_entry(data_offsets=[2]), FormatError, "begin, end", id="one offset"),
    pytest.param(with_entry(data_offsets=[0, 2, 2]), FormatError, "begin, end", id="three offsets"),
    pytest.param(with_entry(data_offsets=[2, 0]), FormatError, "begin <= end", id="backwards"),
    pytest.param(with_entry(data_offsets=[-2, 0]), FormatError, "0 <= begin", id="negative"),
    pytest.param(with_entry(data_offsets=[0, 2.0]), FormatError, "begin", id="float offset"),
    pytest.param(
        with_entry(data_offsets=[False, 2]), FormatError, "begin <= end", id="bool offset"
    ),
    pytest.param(with_entry(shape=[3]), FormatError, "3 bytes; its data_offsets", id="size"),
    pytest.param(
        with_entry(dtype="F4", shape=[3]), FormatError, "1.5 bytes", id="not a whole byte"
    ),
    pytest.param(
        a_file({"w": {**PAIR, "data_offsets": [1, 3]}}, b"abc"),
        HostileError,
        "bytes 0:1, between the start of the data and w",
        id="hole at the start",
    ),
    pytest.param(
        a_file({"v": PAIR, "w": {**PAIR, "data_offsets": [4, 6]}}, b"abcdef"),
        HostileError,
        "bytes 2:4, between v and w",
        id="hole",
    ),
    pytest.param(
        a_file({"v": PAIR, "w": {**PAIR, "data_offsets": [1, 3]}}, b"abc"),
        HostileError,
        "v and w overlap in data bytes 1:2",
        id="overlap",
    ),
    pytest.param(a_file({"v": PAIR, "w": PAIR}, b"ab"), HostileError, "overlap", id="shared"),
    pytest.param(a_file({"w": PAIR}, b"abc"), CorruptError, "1 bytes follow", id="trailing"),
    pytest.param(
        a_file({"v": PAIR, "w": {**PAIR, "data_offsets": [2, 4]}}, b"abc"),
        CorruptError,
        "truncated within w",
        id="truncated",
    ),
]


@pytest.mark.parametrize(("file", "error", "message"), DEFECTS)
def test_each_defect_has_its_error(file: bytes, error: type[FormatError], message: str):
    assert not the_library_accepts(file)
    with pytest.raises(error, match=message) as raised:
        parse(file, "shard.safetensors", len(file))
    assert type(raised.value) is error
    assert str(raised.value).startswith("shard.safetensors: ")


def test_a_tensor_described_twice_is_refused_although_the_library_takes_the_last():
    entry = json.dumps(PAIR).encode()
    file = a_file(b'{"w":' + entry + b',"w":' + entry + b"}", b"ab")
    assert the_library_accepts(file)
    with pytest.raises(HostileError, match="'w' twice"):
        parse(file, "f", len(file))


def test_a_header_that_is_not_all_there_is_an_error_without_a_file_size_too():
    with pytest.raises(CorruptError, match="4 of them are there"):
        parse(GOLDEN_HEADER[:12], "f")


def agree(file: bytes) -> None:
    """What the library rejects is a FormatError here; what is read here it reads the same."""
    try:
        header = parse(file, "f", len(file))
    except FormatError:
        return
    found: dict[str, Any] = dict(deserialize(file))
    assert set(found) == set(header.entries)
    for name, entry in header.entries.items():
        start = header.data_offset
        assert found[name]["dtype"] == entry.dtype
        assert tuple(found[name]["shape"]) == entry.shape
        assert found[name]["data"] == file[start + entry.begin : start + entry.end]


@given(st.data())
@seeded
def test_a_header_with_changed_bytes_is_read_as_the_library_reads_it_or_refused(data):
    text = bytearray(GOLDEN_HEADER[8:])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        until = data.draw(st.integers(at, min(len(text), at + 3)))
        text[at:until] = data.draw(
            st.one_of(
                st.binary(max_size=3),
                st.text('0123456789[]{}:,".-eE \n\\utrfnaldsp_', max_size=3).map(str.encode),
            )
        )
    agree(a_file(bytes(text), GOLDEN_DATA))


numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, 1.0]),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
)
any_entry = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*BITS, "u8", "C128", "", 8]),
            "shape": st.one_of(st.lists(numbers, max_size=3), st.lists(st.integers(0, 3))),
            "data_offsets": st.one_of(
                st.lists(numbers, max_size=3), st.tuples(st.integers(0, 9), st.integers(0, 9))
            ),
        },
        optional={"more": numbers},
    ),
    numbers,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), any_entry, max_size=3),
    st.binary(max_size=12),
)
@seeded
def test_a_header_of_any_values_is_read_as_the_library_reads_it_or_refused(document, data):
    agree(a_file(document, data))


@given(described, st.randoms(use_true_random=False), st.data())
@seeded
def test_a_header_with_one_changed_entry_is_read_as_the_library_reads_it_or_refused(
    described, random, data
):
    header = build(entries_of(described), {})
    built = parse(header, "f")
    document = json.loads(header[8:])
    if document:
        entry = document[data.draw(st.sampled_from(sorted(document)))]
        key = data.draw(st.sampled_from(["shape", "data_offsets"]))
        if entry[key]:
            entry[key][data.draw(st.integers(0, len(entry[key]) - 1))] = data.draw(numbers)
    items = list(document.items())
    random.shuffle(items)
    agree(a_file(dict(items), bytes(built.data_bytes)))


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), shapes), max_size=6))
@seeded
def test_a_file_of_the_library_is_read(described):
    arrays = {
        name: np.zeros(shape, NUMPY_DTYPES[dtype]) for name, (dtype, shape) in described.items()
    }
    file = safetensors.numpy.save(arrays, {"format": "np"})
    header = parse(file, "f", len(file))
    assert header.metadata == {"format": "np"}
    assert {name: (e.dtype, e.shape) for name, e in header.entries.items()} == described


@pytest.mark.parametrize(
    ("entries", "metadata", "error", "message"),
    [
        ([("w", "C128", (1,), 16)], {}, UnsupportedError, "no dtype C128"),
        ([("w", "F32", (2,), 7)], {}, FormatError, "does not fill 7 bytes"),
        ([("w", "U8", (1,), 1)] * 2, {}, FormatError, "w: this name is taken"),
        ([("__metadata__", "U8", (1,), 1)], {}, FormatError, "name is taken"),
        ([("\ud800", "U8", (1,), 1)], {}, FormatError, "not Unicode text"),
        ([], {"step": 1}, FormatError, "'step' is of type int"),
    ],
)
def test_what_no_header_can_hold_is_refused(entries, metadata, error, message):
    with pytest.raises(error, match=message):
        build(entries, metadata)


def test_a_header_longer_than_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="write several files"):
        build([], {}, reserve_bytes=MAX_HEADER_BYTES + 9)


def test_a_shape_of_absurdly_many_dimensions_is_refused_without_multiplying_them():
    file = with_entry(shape=[2**62] * 200_000)
    with pytest.raises(HostileError, match="w has 200000 dimensions"):
        parse(file, "f", len(file))


def test_only_the_header_of_a_file_is_read(tmp_path: Path):
    header = build([("w", "U8", (2**40,), 2**40)], {})
    built = parse(header, "f")
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2**40)  # a hole on the disk: reading it would not end
    with open_store(tmp_path) as store:
        assert read_header(store, "large.safetensors") == built


def test_a_file_that_ends_in_its_first_bytes_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    with open_store(tmp_path) as store, pytest.raises(CorruptError, match=r"cut\.safetensors"):
        read_header(store, "cut.safetensors")


def test_every_dtype_of_the_library_is_known_with_its_size(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(with_entry(dtype="other"))
    with pytest.raises(SafetensorError, match="expected one of") as refused:
        safe_open(path, "numpy")
    assert set(re.findall(r"`(\w+)`", str(refused.value))) - {"other"} == set(BITS)
    eights = [(dtype, dtype, (8,), bits) for dtype, bits in BITS.items()]
    path.write_bytes(build(eights, {}) + bytes(sum(BITS.values())))
    with safe_open(path, "numpy") as file:
        assert file.offset_keys() == list(BITS)
