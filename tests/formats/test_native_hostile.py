"""Manifests and shards that no writer writes, with every digest right: refused by name, at once."""

import copy
import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.native.borrowed import BORROWED, DELTA, DELTAS, RUN
from formats.native.manifest import Manifest, load
from formats.native.shard import OWN_ENTRIES, RECORD, TABLE
from formats.safetensors.file import build, parse
from tests.selection import examples

Json = Any


def signed(body: bytes) -> bytes:
    """A manifest of this JSON object with the digest that belongs to it."""
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"digest":"' + digest + b'",' + body[1:]


def encoded(content: Json) -> bytes:
    return signed(json.dumps(content, separators=(",", ":")).encode())


@cache
def real() -> tuple[dict[str, bytes], Json]:
    """The files of a sound checkpoint and its manifest without the digest."""
    with TemporaryDirectory() as folder:
        tied = torch.arange(12.0).reshape(4, 3)
        ckpt.save(
            folder,
            {"w": tied, "again": tied, "n": [torch.tensor(3), {"x": torch.ones(5)}], "step": 1},
        )
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    content = json.loads(files["manifest.json"])
    del content["digest"]
    return files, content


def changed(change: Callable[[Json], object]) -> bytes:
    """The real manifest with a change, signed."""
    content = copy.deepcopy(real()[1])
    change(content)
    return encoded(content)


def put(value: Json, *path: str | int) -> Callable[[Json], object]:
    """A change: this value at this place."""

    def change(content: Json) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return change


def both(*changes: Callable[[Json], object]) -> Callable[[Json], object]:
    return lambda content: [change(content) for change in changes]


def mesh(sizes: Json, strides: Json, offset: Json = 0, **more: Json) -> Callable[[Json], object]:
    names = [str(axis) for axis in range(len(sizes))]
    entry = {"names": names, "sizes": sizes, "offset": offset, "strides": strides, **more}
    return put(entry, "meshes", 0)


def layout(*placements: str) -> Callable[[Json], object]:
    return put([0, list(placements)], "layouts", 0)


def tensor(*fields: Json) -> Callable[[Json], object]:
    return put({"$tensor": list(fields)}, "state", "w")


def state(node: Json) -> Callable[[Json], object]:
    return put(node, "state", "step")


def nested(depth: int) -> Json:
    found: Json = 1
    for _ in range(depth):
        found = [found]
    return found


def test_the_real_manifest_is_accepted_as_it_is_signed_here() -> None:
    assert isinstance(load(encoded(real()[1])), Manifest)


CHANGES: dict[str, tuple[Callable[[Json], object], type[FormatError]]] = {
    **{
        f"file name {name!r}": (put(name, "files", 0, 0), HostileError)
        for name in (
            *("../x", "/etc/passwd", "a/b", ".", "..", "", ".hidden", "a\\b", "a\0b", "a\n"),
            *("C:x", "é", "x" * 300, 7, None, "manifest.json"),
        )
    },
    **{
        f"size {value!r}": (put(value, "files", 0, field), FormatError)
        for field, value in enumerate((-1, 2**63, 1.5, True), 1)
    },
    "header larger than the file": (put(2**62, "files", 0, 3), FormatError),
    "header and table together larger than the file": (
        lambda c: c["files"][0].__setitem__(4, c["files"][0][2]),
        FormatError,
    ),
    "a file of five fields": (put(["a", 0, 1, 1, 0], "files", 0), FormatError),
    "a digest that is a number": (put(7, "files", 0, 5), FormatError),
    "a file twice": (lambda c: c["files"].append(c["files"][0]), HostileError),
    "a rank twice": (lambda c: c["files"].append(["x", *c["files"][0][1:]]), HostileError),
    "shape 2**62": (tensor("F32", [2**62], 0), HostileError),
    "shape that multiplies": (tensor("F32", [2**32, 2**32], 0), HostileError),
    "shape behind a zero": (tensor("F32", [0, 2**61, 2**61], 0), HostileError),
    "negative shape": (tensor("F32", [-1, 3], 0), FormatError),
    "truth in a shape": (tensor("F32", [True, 3], 0), FormatError),
    "float in a shape": (tensor("F32", [4.0, 3], 0), FormatError),
    "shape that is a number": (tensor("F32", 4, 0), FormatError),
    "many dimensions": (tensor("F32", [1] * 65, 0), HostileError),
    "unknown dtype": (tensor("F31", [4, 3], 0), UnsupportedError),
    "dtype that is a list": (tensor(["F32"], [4, 3], 0), UnsupportedError),
    "no such layout": (tensor("F32", [4, 3], 1), FormatError),
    "two fields": (tensor("F32", [4, 3]), FormatError),
    "tensor that is a number": (put({"$tensor": 3}, "state", "w"), FormatError),
    "mesh 2**62": (mesh([2**62], [1]), HostileError),
    "mesh that multiplies": (mesh([2**20, 2**20], [2**20, 1]), HostileError),
    **{
        f"strides {steps!r} of {name}": (put({name: steps}, "strides"), FormatError)
        for name, steps in (
            *(("w", [3]), ("w", [3, 1, 1]), ("w", [6, 1]), ("w", [2, 1]), ("w", [0, 0])),
            *(("w", [1, -4]), ("w", [1.0, 4]), ("w", 3), ("again", [1, 4]), ("other", [1])),
        )
    },
    "strides that are a list": (put([["w", [1, 4]]], "strides"), FormatError),
    "the module of an optimizer is a number": (put({"o": 3}, "optimizers"), FormatError),
    "optimizers that are a list": (put(["o"], "optimizers"), FormatError),
    "a version that is a text": (put({"m": {"0": "2"}}, "versions"), FormatError),
    "versions that are a number": (put({"m": 2}, "versions"), FormatError),
    "many axes": (mesh([1] * 17, [0] * 17), HostileError),
    "empty axis": (mesh([0], [1]), FormatError),
    "negative mesh": (mesh([-1], [1]), FormatError),
    "truth as a mesh": (mesh([True], [1]), FormatError),
    "float stride": (mesh([2], [1.0]), FormatError),
    "truth as a stride": (mesh([2], [True]), FormatError),
    "stride 2**63": (mesh([2], [-(2**63)]), FormatError),
    "two coordinates on one rank": (mesh([2], [0]), FormatError),
    "overlapping strides": (mesh([2, 2], [1, 1]), FormatError),
    "strides that meet": (mesh([2, 3], [2, 1]), FormatError),
    "a rank twice in a table": (mesh([2], [0], table=[3, 3]), FormatError),
    "a short table": (mesh([3], [0], table=[1, 2]), FormatError),
    "a table of texts": (mesh([1], [0], table=["0"]), FormatError),
    "fewer strides": (mesh([2, 2], [1]), FormatError),
    "no such mesh": (put([5, ["R"]], "layouts", 0), FormatError),
    "a layout of one field": (put([0], "layouts", 0), FormatError),
    "a layout that replicates": (both(mesh([2], [1]), layout("R")), FormatError),
    "too many placements": (layout("R", "R"), FormatError),
    **{
        f"placement {name!r}": (layout(name), FormatError)
        for name in (
            *("X(0)", "S", "S(-1)", "S(9)", "SS(0)", "SS(0,0)", "F(0)", "F(0,0)", "only(5)"),
            *("", "S(0) ", f"S({10**30})", "split(1)", "SS(0,99999999)"),
        )
    },
    "placement that is a number": (put([0, [1]], "layouts", 0), FormatError),
    "too many splits": (
        both(mesh([1] * 4, [0] * 4), layout(*["SS(0,1000)"] * 4)),
        HostileError,
    ),
    "ranks without files": (
        both(mesh([2**24], [1]), layout("S(0)"), tensor("U8", [2**24], 0)),
        HostileError,
    ),
    "flat ranks without files": (
        both(mesh([2**24], [1]), layout("F(0,1)"), tensor("U8", [2**24], 0)),
        HostileError,
    ),
    "split over ranks without files": (
        both(mesh([2**24], [1]), layout("split"), tensor("U8", [2**24], 0)),
        HostileError,
    ),
    "alias of an alias": (put({"$alias": "again"}, "state", "step"), FormatError),
    "alias of itself": (put({"$alias": "step"}, "state", "step"), FormatError),
    "alias of nothing": (put({"$alias": "x"}, "state", "step"), FormatError),
    "alias of a number": (put({"$alias": 7}, "state", "step"), FormatError),
    "one name twice": (put({"$tensor": ["F32", [4, 3], 0]}, "state", "n.0"), HostileError),
    "deep lists": (state(nested(500)), HostileError),
    "deep version": (put(nested(900), "version"), FormatError),
    "unknown tag": (state({"$code": "import os"}), FormatError),
    "tuple of a number": (state({"$tuple": 3}), FormatError),
    "key twice": (state({"$dict": [[1, 2], [1, 3]]}), HostileError),
    "pair of three": (state({"$dict": [[1, 2, 3]]}), FormatError),
    "list as a key": (state({"$dict": [[[1], 2]]}), FormatError),
    "list in a key": (state({"$dict": [[{"$tuple": [[1]]}, 2]]}), FormatError),
    "tensor as a key": (state({"$dict": [[{"$tensor": ["F32", [], 0]}, 2]]}), FormatError),
    "odd float": (state({"$float": "1"}), FormatError),
    "odd bytes": (state({"$bytes": "é"}), FormatError),
    "large complex": (state({"$complex": [10**400, 0]}), FormatError),
    "complex of texts": (state({"$complex": ["1", 0.0]}), FormatError),
    "unknown type": (state({"$dtype": "F31"}), FormatError),
    "version 4": (put(4, "version"), UnsupportedError),
    "version 1.0": (put(1.0, "version"), FormatError),
    "another format": (put("zip", "format"), FormatError),
    **{
        f"no {key}": (lambda content, key=key: content.pop(key), FormatError)
        for key in ("format", "version", "writer", "meshes", "layouts", "files")
    },
    **{
        f"{key} that is a text": (put("x", key), FormatError)
        for key in ("writer", "meshes", "layouts", "files")
    },
}


def borrowing(bases: Json) -> Callable[[Json], object]:
    return both(put(2, "version"), put(bases, "bases"))


BASE_FILE = ["00000000000000a1-00000.safetensors", 0, 100]
CHANGES |= {
    **{
        f"base {name!r}": (borrowing([[name, []]]), HostileError)
        for name in ("..", ".", "", "a/b", "../a", "a\\b", "a\0b", "x" * 300, 7, None)
    },
    "file of a base": (borrowing([["a", [["../x", 0, 1]]]]), HostileError),
    "two files of one rank": (
        borrowing([["a", [BASE_FILE, ["other.safetensors", 0, 100]]]]),
        HostileError,
    ),
    "too many bases": (borrowing([["a", []]] * 33), HostileError),
    "bases that are no list": (borrowing({"a": []}), FormatError),
    "no bases": (put(2, "version"), FormatError),
    "half a base": (borrowing([["a"]]), FormatError),
    "half a file of a base": (borrowing([["a", [["x", 0]]]]), FormatError),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_no_writer_writes_is_refused_by_name(case: str) -> None:
    change, error = CHANGES[case]
    with pytest.raises(error, match=r"manifest"):
        load(changed(change), "manifest.json")


RAW: dict[str, tuple[bytes, type[FormatError]]] = {
    "deep brackets": (signed(b'{"a":' + b"[" * 100_000), HostileError),
    "deep objects": (signed(b'{"a":' * 100_000), HostileError),
    "nothing": (b"", CorruptError),
    "no JSON": (signed(b"{nothing}"), FormatError),
    "an array": (signed(b"[1]"), FormatError),
    "a key twice": (signed(b'{"format":"ckpt","format":"ckpt"}'), HostileError),
    "many keys twice": (
        signed(b"{" + b",".join(b'"%d":0' % (i // 2) for i in range(60_000, 0, -1)) + b"}"),
        HostileError,
    ),
    "an endless number": (signed(b'{"version":1' + b"0" * 100_000 + b"}"), FormatError),
    "no UTF-8": (signed(b'{"format":"\xff"}'), FormatError),
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_manifest_are_refused_by_name(case: str) -> None:
    data, error = RAW[case]
    with pytest.raises(error, match="manifest"):
        load(data, "manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        tensor("U8", [2**61], 0),
        tensor("F32", [2**40], 0),
        tensor("F32", [4, 4], 0),
        tensor("F64", [4, 3], 0),
        both(mesh([1], [0], 5)),
        put(5, "files", 0, 1),
        put([], "files"),
        both(mesh([3], [1]), layout("only(2)")),
        both(mesh([1], [0]), layout("SS(0,65536)"), tensor("F32", [2**40], 0)),
        put({"$tensor": ["U8", [20], 0]}, "state", "__chunks__"),
    ],
)
def test_a_manifest_that_lies_about_its_files_is_refused_before_memory_is_asked_for(
    tmp_path: Path, change: Callable[[Json], object]
) -> None:
    for name, data in real()[0].items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "manifest.json").write_bytes(changed(change))
    with pytest.raises(FormatError):
        ckpt.read(tmp_path)
    with pytest.raises(FormatError):
        ckpt.load(tmp_path, {})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**31, 2**62, 2**64, -(2**63), 1.5, 0.0])
    | st.sampled_from(["", "w", "R", "S(0)", "split", "only(0)", "F(0,3)", "F32", "U8", "../x"])
    | st.sampled_from([{"$alias": "w"}, {"$tensor": ["F32", [2], 0]}, {"$tuple": []}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "$tensor", "$dict", "$tuple", "names", "sizes"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=5,
)


def places(node: Json, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The way to every node of a JSON tree but the root."""
    found = [path] if path else []
    if isinstance(node, dict | list):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(item, (*path, key))
    return found


@settings(max_examples=examples(400))
@given(data=st.data())
def test_a_changed_manifest_is_sound_or_a_format_error(data: st.DataObject) -> None:
    content = copy.deepcopy(real()[1])
    for _ in range(data.draw(st.integers(1, 3))):
        where = places(content)
        if not where:
            break
        put(data.draw(JSON), *data.draw(st.sampled_from(where)))(content)
    try:
        manifest = load(encoded(content))
    except FormatError:
        return
    # What is accepted can be worked with.
    for stored in manifest.tensors.values():
        for rank in range(4):
            stored.layout.pieces(rank)


def checkpoint(
    folder: Path,
    entries: list[tuple[str, str, tuple[int, ...], int]],
    data: bytes,
    table: bytes,
    metadata: dict[str, str],
    want: Json,
) -> None:
    """A folder with one tensor `w` and a shard of these parts, all digests right."""
    header = build([*entries, (TABLE, "U8", (len(table),), len(table))], metadata, align=64)
    digest = xxhash.xxh3_128(header)
    digest.update(table)
    shard = header + data + table
    name = "00000000000000a1-00000.safetensors"
    content = copy.deepcopy(real()[1])
    content["files"] = [[name, 0, len(shard), len(header), len(table), digest.hexdigest()]]
    content["state"] = {"w": {"$tensor": want}}
    (folder / name).write_bytes(shard)
    (folder / "manifest.json").write_bytes(encoded(content))


def record(stored: bytes, nbytes: int | None = None) -> bytes:
    return RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored) if nbytes is None else nbytes)


RAW_CODEC = {"ckpt.chunk_bytes": "64", "ckpt.codec": "raw"}
ZSTD_CODEC = {"ckpt.chunk_bytes": "64", "ckpt.codec": "zstd"}
BLOCK = bytes(range(64))


def frame(data: bytes, content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=content_size).compress(data)


def zstd_case(stored: bytes, raw_bytes: int, *sizes: int) -> dict[str, Any]:
    """A compressed tensor of bytes whose chunks are recorded with these stored sizes."""
    table, at = b"", 0
    for size in sizes or (len(stored),):
        table += record(stored[at : at + size], size)
        at += size
    return {
        "entries": [("w", "U8", (len(stored),), len(stored))],
        "data": stored,
        "table": table,
        "metadata": ZSTD_CODEC,
        "want": ["U8", [raw_bytes], 0],
    }


def raw_case(table: bytes, metadata: dict[str, str] = RAW_CODEC) -> dict[str, Any]:
    return {
        "entries": [("w", "U8", (128,), 128)],
        "data": BLOCK * 2,
        "table": table,
        "metadata": metadata,
        "want": ["U8", [128], 0],
    }


BLOCKS = record(BLOCK) * 2
LYING = {
    "one record too few": raw_case(record(BLOCK)),
    "one record too many": raw_case(BLOCKS + record(b"")),
    "half a record": raw_case(BLOCKS[:-1]),
    "a record of another length": raw_case(record(BLOCK) + record(BLOCK, 63)),
    "no codec": raw_case(BLOCKS, {"ckpt.chunk_bytes": "64"}),
    "an unknown codec": raw_case(BLOCKS, {**RAW_CODEC, "ckpt.codec": "lzma"}),
    **{
        f"chunks of {size}": raw_case(BLOCKS, {**RAW_CODEC, "ckpt.chunk_bytes": size})
        for size in ("0", "", "-64", "6.4", "63", "٦٤", "4294967296", "9" * 10_000)
    },
    "a frame that claims more": zstd_case(frame(bytes(1 << 24)), 64),
    "a frame that claims less": zstd_case(frame(bytes(10)), 64),
    "a frame that claims nothing": zstd_case(frame(bytes(64), content_size=False), 64),
    "a frame that lies": zstd_case(b"\x28\xb5\x2f\xfd\x20\x40" + frame(bytes(10))[6:], 64),
    "no frame": zstd_case(bytes(20), 64),
    "a cut frame": zstd_case(frame(BLOCK + BLOCK)[:30], 128, 30, 0),
    "an empty chunk": zstd_case(frame(bytes(64)), 128, len(frame(bytes(64))), 0),
    "one chunk for two": zstd_case(frame(bytes(64)), 128),
    "two chunks for one": zstd_case(frame(bytes(64)) * 2, 64, *[len(frame(bytes(64)))] * 2),
    "a chunk longer than raw": zstd_case(BLOCK + b"x", 64),
    "an absurd size": zstd_case(frame(bytes(64)), 2**60),
    "not bytes": {
        **zstd_case(frame(bytes(64)), 64),
        "entries": [("w", "BOOL", (len(frame(bytes(64))),), len(frame(bytes(64))))],
    },
}


@pytest.mark.parametrize("case", LYING)
def test_a_shard_whose_table_or_frames_lie_is_refused_by_name(tmp_path: Path, case: str) -> None:
    checkpoint(tmp_path, **LYING[case])
    with pytest.raises(FormatError):
        ckpt.read(tmp_path)
    with pytest.raises(FormatError):
        ckpt.load(tmp_path, {})


def test_the_shards_above_are_sound_where_they_do_not_lie(tmp_path: Path) -> None:
    for name, parts in {"raw": raw_case(BLOCKS), "zstd": zstd_case(frame(bytes(64)), 64)}.items():
        (tmp_path / name).mkdir()
        checkpoint(tmp_path / name, **parts)
        found: Any = ckpt.read(tmp_path / name)
        assert bytes(found["w"].numpy()) == (BLOCK * 2 if name == "raw" else bytes(64))


def test_a_header_that_asks_for_more_than_the_file_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, **raw_case(BLOCKS))
    (shard,) = tmp_path.glob("*.safetensors")
    data = struct.pack("<Q", 1 << 60) + shard.read_bytes()[8:]
    shard.write_bytes(data)
    content = json.loads((tmp_path / "manifest.json").read_bytes())
    del content["digest"]
    entry = content["files"][0]
    digest = xxhash.xxh3_128(data[: entry[3]])
    digest.update(data[len(data) - entry[4] :])
    entry[5] = digest.hexdigest()
    (tmp_path / "manifest.json").write_bytes(encoded(content))
    with pytest.raises(FormatError, match=shard.name):
        ckpt.read(tmp_path)


def test_a_base_or_none_in_the_manifest_is_accepted() -> None:
    found = load(changed(borrowing([None, ["step 1", [BASE_FILE]]])))
    assert found.bases[0] is None
    assert found.bases[1] is not None
    assert found.bases[1].folder == "step 1"


def resign(folder: Path, path: Path, forged: dict[str, bytes]) -> None:
    """Put other tables into the only shard file of a checkpoint, all digests made right again."""
    data = path.read_bytes()
    header = parse(data, path.name)
    begin = min(header.entries[name].begin for name in OWN_ENTRIES if name in header.entries)
    entries, tail = [], b""
    for e in header.entries.values():
        part = forged.get(e.name, data[header.data_offset :][e.begin : e.end])
        own = e.name in OWN_ENTRIES
        entries.append((e.name, e.dtype, (len(part),) if own else e.shape, len(part)))
        tail += part if own else b""
    head = build(entries, header.metadata)
    path.write_bytes(head + data[header.data_offset :][:begin] + tail)
    content = json.loads((folder / "manifest.json").read_bytes())
    del content["digest"]
    digest = xxhash.xxh3_128_hexdigest(head + tail)
    content["files"][0][2:] = [path.stat().st_size, len(head), len(tail), digest]
    (folder / "manifest.json").write_bytes(encoded(content))


def forge_record(
    folder: Path, table: str, form: struct.Struct, change: Callable[[Any], Json]
) -> None:
    """Change the only record of a table in the only shard file, all digests made right again."""
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    header = parse(data, path.name)
    entry = header.entries[table]
    (record,) = form.iter_unpack(data[header.data_offset :][entry.begin : entry.end])
    resign(folder, path, {table: b"".join(form.pack(*fields) for fields in change(record))})


RUNS: dict[str, Callable[[Any], Json]] = {
    "past the table": lambda run: [(run[0], run[1] + 50, *run[2:])],
    "no chunks": lambda run: [(run[0], 0, *run[2:])],
    "twice": lambda run: [run, run],
    "an unknown base": lambda run: [(*run[:2], 7, *run[3:])],
    "an unknown rank": lambda run: [(*run[:3], 7, run[4])],
    "past the end of the file": lambda run: [(*run[:4], 2**40)],
    "other bytes": lambda run: [(*run[:4], run[4] + 4)],
    "half of the chunks": lambda run: [],
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_that_lie_are_refused_by_the_name_of_their_file(tmp_path: Path, case: str) -> None:
    """Signed all the way: only the content is wrong."""
    before = {"w": torch.arange(20.0), "v": torch.ones(7)}
    ckpt.save(tmp_path / "a", before)
    ckpt.save(tmp_path / "b", {**before, "v": torch.zeros(7)}, base=tmp_path / "a")
    forge_record(tmp_path / "b", BORROWED, RUN, RUNS[case])
    with pytest.raises(FormatError, match=r"safetensors"):
        ckpt.load(tmp_path / "b", {"w": torch.zeros(20), "v": torch.zeros(7)})
    assert not ckpt.verify(tmp_path / "b").sound


DELTA_CHANGES: dict[str, Callable[[Any], Json]] = {
    "past the table": lambda delta: [(delta[0] + 50, *delta[1:])],
    "twice": lambda delta: [delta, delta],
    "another digest": lambda delta: [(delta[0], b"x" * 16, *delta[2:])],
    "no bytes": lambda delta: [(*delta[:2], 0, *delta[3:])],
    "too many bytes": lambda delta: [(*delta[:2], 2**31, *delta[3:])],
    "an unknown base": lambda delta: [(*delta[:3], 7, *delta[4:])],
    "past the end of the file": lambda delta: [(*delta[:5], 2**40)],
}


@pytest.mark.parametrize("case", DELTA_CHANGES)
def test_deltas_that_lie_are_refused_by_the_name_of_a_file(tmp_path: Path, case: str) -> None:
    before = {"w": torch.arange(2000.0)}
    ckpt.save(tmp_path / "a", before, compress=True)
    after = {"w": before["w"] + 1e-3}
    ckpt.save(tmp_path / "b", after, base=tmp_path / "a", compress="delta")
    forge_record(tmp_path / "b", DELTAS, DELTA, DELTA_CHANGES[case])
    with pytest.raises(FormatError, match=r"safetensors"):
        ckpt.load(tmp_path / "b", {"w": torch.zeros(2000)})
    assert not ckpt.verify(tmp_path / "b").sound
