"""Small files that announce, share, nest or repeat so much that reading them would never end.

Each is refused by name, within a bound of memory that does not depend on what it announces.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt
from ckpt.opening import sources
from formats.errors import FormatError, HostileError
from formats.limits import ALIKE_KEYS, Limits, limits
from formats.native.manifest import MANIFEST
from formats.native.shard import RECORD
from tests.fuzz.folders import Files, Folder, exercise
from tests.fuzz.mutations import put_together, signed, zipped
from tests.fuzz.seeds import seeds

MOST_BYTES = 128 << 20
"""Memory that refusing any of these files may take; the largest of them has 4 MB."""

Bomb = tuple[Files, str | None]


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    return b"X" + pack("<I", len(value)) + value.encode()


def put(number: int) -> bytes:
    return b"r" + pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + pack("<I", number)


def a_torch_file(*steps: bytes) -> Bomb:
    """A file of torch.save with a pickle put together by hand."""
    pickled = b"\x80\x02" + b"".join(steps) + b"."
    return {"a.pt": zipped({"a/data.pkl": pickled, "a/version": b"3\n"})}, "a.pt"


def a_native_one(state: object, *layout: str) -> Bomb:
    """A native checkpoint of one empty shard with this state and one layout over one rank."""
    shard = put_together({}, b"")
    mesh = {"names": ["a"], "sizes": [1], "offset": 0, "strides": [0]}
    content = {
        "format": "ckpt",
        "version": 1,
        "writer": {},
        "meshes": [mesh],
        "layouts": [[0, layout]],
        "files": [["a.safetensors", 0, len(shard), len(shard), 0, "00"]],
        "state": state,
    }
    body = json.dumps(content)
    return {MANIFEST: signed(body.encode()), "a.safetensors": shard}, None


def a_dcp_folder(metadata: Metadata, items: bytes = b"") -> Bomb:
    return {".metadata": pickle.dumps(metadata, 4), "__0_0.distcp": items}, None


def laughs() -> Bomb:
    """A list of two of the list before, forty deep."""
    steps = [b"]" + put(0)]
    for number in range(1, 41):
        steps.append(b"0](" + get(number - 1) * 2 + b"e" + put(number))
    return a_torch_file(*steps)


def laughs_in_a_key() -> Bomb:
    steps = [b"}", b"K\x01" + put(0)]
    for number in range(1, 8):
        steps.append(b"0(" + get(number - 1) * 900 + b"t" + put(number))
    return a_torch_file(*steps, b"Ns")


def laughs_in_a_list(maker: bytes, count: int = 30_000, called: int = 30_000) -> Bomb:
    """A long list that is copied by a call again and again."""
    listed = b"](" + b"K\x01" * count + b"e" + put(0)
    return a_torch_file(listed, b"0](", (maker + get(0) + b"\x85R") * called, b"e")


def copied_text(maker: bytes, rest: bytes = b"\x85") -> Bomb:
    long = text("x" * 1_000_000) + put(0)
    return a_torch_file(b"](", long + b"0", (maker + get(0) + rest + b"R") * 20_000, b"e")


def keys_alike(key: Callable[[int], bytes], count: int = 60_000) -> Bomb:
    return a_torch_file(b"}(", b"".join(key(number) + b"N" for number in range(count)), b"u")


def long_integer(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


MODULUS = sys.hash_info.modulus


def complex_key(number: int) -> bytes:
    """Complex numbers of one hash: real + 1000003 * imaginary."""
    real, imaginary = pack(">d", float(-1000003 * number)), pack(">d", float(number))
    return b"cbuiltins\ncomplex\nG" + real + b"G" + imaginary + b"\x86R"


def index_key(number: int) -> bytes:
    """Items of one name whose offsets have one hash."""
    record = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81"
    offset = long_integer(number * MODULUS)
    return record + b"}(" + text("fqn") + text("w") + text("offset") + offset + b"\x85ub"


def long_names() -> Bomb:
    """A key of 100 kB on each of a hundred levels, above ten thousand tensors."""
    long = text("x" * 100_000) + put(0) + b"0"
    leaf = b"}(" + b"".join(text(str(number)) + b"K\x01" for number in range(10_000)) + b"u"
    return a_torch_file(long, (b"}" + get(0)) * 100, leaf, b"s" * 100)


def native_long_names() -> Bomb:
    return a_native_one({"x" * 1_000_000: {str(number): [number] for number in range(20_000)}})


def native_keys_alike() -> Bomb:
    return a_native_one({"$dict": [[number * MODULUS, 0] for number in range(60_000)]})


def many_splits() -> Bomb:
    tensors = {str(n): {"$tensor": ["U8", [131_072 + n], 0]} for n in range(30_000)}
    return a_native_one(tensors, "SS(0,65536)")


def large_claim() -> Bomb:
    return a_native_one({"w": {"$tensor": ["U8", [2**50], 0]}}, "S(0)")


def an_expanded_tensor() -> Bomb:
    target = io.BytesIO()
    torch.save({"w": torch.zeros(1).expand(2**20, 2**20)}, target)
    return {"a.pt": target.getvalue()}, "a.pt"


def overlapping_records() -> Bomb:
    """Every record of the directory is the first one, which is large."""
    data = zipped({"a/data.pkl": b"\x80\x02N.", **{f"a/data/{n}": b"x" * 500 for n in range(300)}})
    start = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    offset = data[start + 42 : start + 46]
    found = bytearray(data)
    while (start := data.find(b"PK\x01\x02", start + 4)) >= 0:
        found[start + 42 : start + 46] = offset
    return {"a.pt": bytes(found)}, "a.pt"


def a_deflated_bomb() -> Bomb:
    records = {"a/data.pkl": b"\x80\x02" + b"N0" * 50_000_000 + b"N."}
    return {"a.pt": zipped(records, zipfile.ZIP_DEFLATED)}, "a.pt"


def tensor_of(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)


def a_dcp_tensor(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], ...]]) -> Bomb:
    """A tensor whose chunks are these, as offsets and sizes, all in one item of one byte."""
    chunks = [ChunkStorageMetadata(torch.Size(lo), torch.Size(size)) for lo, size in boxes]
    places = {
        MetadataIndex("w", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 1) for chunk in chunks
    }
    return a_dcp_folder(Metadata({"w": tensor_of(shape, chunks)}, None, places), b"x")


def nested_cuts() -> Bomb:
    """Boxes that straight cuts take apart one by one: a strip, a column, a strip, ..."""
    boxes, lo, side = [], 0, 4_000
    for lo in range(side // 2):
        boxes.append(((lo, lo), (1, side - lo)))
        boxes.append(((lo + 1, lo), (side - lo - 1, 1)))
    return a_dcp_tensor((side, side), boxes)


def tangled_boxes() -> Bomb:
    return a_dcp_tensor((4_001,), [((at,), (2,)) for at in range(4_000)])


def values_in_one_item() -> Bomb:
    item = zipped({"a/data.pkl": b"\x80\x02" + b"N0" * 500_000 + b"N."})
    names = [str(number) for number in range(10_000)]
    return a_dcp_folder(
        Metadata(
            {name: BytesStorageMetadata() for name in names},
            None,
            {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, len(item)) for name in names},
        ),
        item,
    )


def overlapping_items() -> Bomb:
    names = [str(number) for number in range(1000)]
    return a_dcp_folder(
        Metadata(
            {name: BytesStorageMetadata() for name in names},
            None,
            {MetadataIndex(n): _StorageInfo("__0_0.distcp", int(n), 5000) for n in names},
        ),
        bytes(10_000),
    )


def a_changed_key() -> Bomb:
    """A key of the table of items that is given a list of lists of lists after it was put there."""
    steps = [b"]" + put(0)]
    for number in range(1, 60):
        steps.append(b"](" + get(number - 1) * 2 + b"e" + put(number))
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81" + put(100)
    info = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}b"
    table = b"}" + index + b"}(" + text("fqn") + text("w") + b"ub" + info + b"s" + put(101) + b"0"
    later = get(100) + b"}(" + text("fqn") + get(59) + b"ub0"
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
    fields = b"}(" + text("state_dict_metadata") + b"}" + text("storage_data") + get(101) + b"ub"
    pickled = b"\x80\x02" + b"".join(steps) + b"0" * 60 + table + later + metadata + fields + b"."
    return {".metadata": pickled}, None


def a_large_chunk() -> Bomb:
    """A gigabyte of zeros in one chunk of a few kilobytes."""
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    seed = next(seed for seed in seeds() if seed.kind == "native")
    manifest = json.loads(seed.files[MANIFEST])
    del manifest["digest"]
    table = RECORD.pack(bytes(16), len(frame))
    metadata = {"ckpt.chunk_bytes": str(1 << 30), "ckpt.codec": "zstd"}
    ends = len(frame) + len(table)
    header: dict[str, Any] = {
        "__metadata__": metadata,
        "w": {"dtype": "U8", "shape": [len(frame)], "data_offsets": [0, len(frame)]},
        "__chunks__": {"dtype": "U8", "shape": [20], "data_offsets": [len(frame), ends]},
    }
    shard = put_together(header, frame + table)
    head = shard[: -len(frame) - len(table)]
    digest = xxhash.xxh3_128_hexdigest(head + table)
    manifest["files"] = [["a.safetensors", 0, len(shard), len(head), len(table), digest]]
    manifest["meshes"] = [{"names": [], "sizes": [], "offset": 0, "strides": []}]
    manifest["layouts"] = [[0, []]]
    manifest["state"] = {"w": {"$tensor": ["U8", [1 << 26], 0]}}
    body = json.dumps(manifest).encode()
    return {MANIFEST: signed(body), "a.safetensors": shard}, None


OBJECT = b"c__main__\nM\n"


def modules_in_modules() -> Bomb:
    """A module with the one before as two of its modules, forty deep."""
    steps = [b"N" + put(0)]
    for number in range(1, 41):
        before = b"}(" + text("a") + get(number - 1) + text("b") + get(number - 1) + b"u"
        state = b"}(" + text("_parameters") + b"}" + text("_buffers") + b"}" + text("_modules")
        steps.append(b"0" + OBJECT + b")\x81" + put(number) + state + before + b"ub")
    return a_torch_file(*steps)


def objects_of_one(arguments: bytes, state: bytes = b"", count: int = 60_000) -> Bomb:
    """Many objects with the same arguments and state, which are long."""
    parts = arguments + put(0) + b"0" + (state + put(1) + b"0" if state else b"")
    each = OBJECT + (get(0) + b"\x81") + (get(1) + b"b" if state else b"")
    return a_torch_file(parts, b"](", each * count, b"e")


def optimizers_of_one() -> Bomb:
    listed = b"](" + b"K\x01" * 200_000 + b"e"
    group = b"](}" + text("params") + listed + b"se"
    state = b"}(" + text("state") + b"}" + text("param_groups") + group + b"u"
    return objects_of_one(b")", state, 30_000)


def storages_inside() -> Bomb:
    """The bytes of one storage, read again and again."""
    target = io.BytesIO()
    torch.save(torch.zeros(100_000).untyped_storage(), target, _use_new_zipfile_serialization=False)
    data = target.getvalue()
    inside = b"B" + pack("<I", len(data)) + data + put(0)
    call = b"ctorch.storage\n_load_from_bytes\n" + get(0) + b"\x85R"
    return a_torch_file(b"](", inside + b"0", call * 20_000, b"e")


def members_of_members() -> Bomb:
    """A member of a member, a hundred thousand deep, each with a longer name."""
    steps = (b"cbuiltins\ngetattr\n" + put(0) + b"0" + text("a") + put(1) + b"0" + OBJECT + put(2),)
    each = b"0" + get(0) + get(2) + get(1) + b"\x86R" + put(2)
    return a_torch_file(*steps, each * 100_000)


def numpy_texts() -> Bomb:
    maker = b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n" + text("U250000") + b"\x85R"
    return copied_text(maker)


BOMBS: dict[str, Callable[[], Bomb]] = {
    "a list of lists of lists": laughs,
    "a tuple of tuples as a key": laughs_in_a_key,
    "a list made into sets": lambda: laughs_in_a_list(b"cbuiltins\nset\n"),
    "a list made into shapes": lambda: laughs_in_a_list(b"ctorch\nSize\n"),
    "a text made into bytes": lambda: copied_text(b"c_codecs\nencode\n", text("latin1") + b"\x86"),
    "a text made into paths": lambda: copied_text(b"cpathlib\nPosixPath\n", get(0) + b"\x86"),
    "integers of one hash": lambda: keys_alike(lambda n: long_integer(n * MODULUS)),
    "tuples of one hash": lambda: keys_alike(lambda n: long_integer(n * MODULUS) + b"\x85"),
    "complex numbers of one hash": lambda: keys_alike(complex_key),
    "items of one hash": lambda: keys_alike(index_key, 10_000),
    "long names of many values": long_names,
    "a million sets": lambda: a_torch_file(b"](", b"\x8f" * 1_000_000, b"e"),
    "a number of the memo": lambda: a_torch_file(b"N", put(2**31)),
    "modules of modules": modules_in_modules,
    "objects of one long tuple": lambda: objects_of_one(b"(" + b"K\x01" * 200_000 + b"t"),
    "objects of one long state": lambda: objects_of_one(
        b")", b"}(" + b"".join(text(str(n)) + b"N" for n in range(100_000)) + b"u"
    ),
    "optimizers of one long list": optimizers_of_one,
    "storages in a pickle": storages_inside,
    "members of members": members_of_members,
    "texts of numpy": numpy_texts,
    "native: long names": native_long_names,
    "native: integers of one hash": native_keys_alike,
    "native: tensors cut too finely": many_splits,
    "native: a tensor of a petabyte": large_claim,
    "native: a chunk of a gigabyte": a_large_chunk,
    "torch: one element expanded": an_expanded_tensor,
    "torch: records that overlap": overlapping_records,
    "torch: a deflated pickle": a_deflated_bomb,
    "dcp: boxes in boxes": nested_cuts,
    "dcp: boxes that overlap": tangled_boxes,
    "dcp: a tensor too large to count": lambda: a_dcp_tensor((2**40, 2**40), []),
    "dcp: values in one item": values_in_one_item,
    "dcp: items that overlap": overlapping_items,
    "dcp: a key that is changed": a_changed_key,
}
HARMLESS = {"a number of the memo"}
"""Those that are read: they ask for nothing once they are understood as data."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_its_memory(name: str) -> None:
    files, file = BOMBS[name]()
    assert sum(map(len, files.values())) < 4_500_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak_bytes()
    assert (exercise(files, file) is not None) == (name in HARMLESS)
    assert peak_bytes() - before < MOST_BYTES


def peak_bytes() -> int:
    """The most memory that this process had since the peak was last set back."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) << 10


def test_the_longest_run_of_alike_keys_that_is_read_is_read() -> None:
    files, file = keys_alike(lambda n: long_integer(n * MODULUS), ALIKE_KEYS)
    assert exercise(files, file) is not None


RAISED = {
    "json_values": "native",
    "manifest_bytes": "native",
    "table_bytes": "native",
    "chunk_bytes": "native",
    "header_bytes": "safetensors",
    "index_bytes": "hf",
    "pickle_bytes": "torch",
    "pickle_steps": "torch",
    "zip_directory_bytes": "torch",
    "name_chars": "native",
    "expansion": "native",
}


@pytest.mark.parametrize("name", RAISED)
def test_every_limit_is_named_where_it_is_exceeded_and_can_be_raised(name: str) -> None:
    seed = next(seed for seed in seeds() if seed.kind == RAISED[name])
    files, file = seed.files, seed.file
    if name == "expansion":
        files, file = an_expanded_tensor()

    def read() -> None:
        folder: Any = Folder(files)
        found = sources._read_folder(folder) if file is None else sources._read_file(folder, file)
        for record in sources._credible("memory", found).tensors.values():
            list(record.pieces)

    with limits(**{name: 1}), pytest.raises(HostileError, match=name) as refused:
        read()
    assert f"ckpt.limits({name}=...)" in str(refused.value) or name == "manifest_bytes"
    with limits(**{name: 2**60}):
        read()


def test_a_checkpoint_keeps_the_limits_that_it_was_opened_with() -> None:
    seed = next(seed for seed in seeds() if seed.kind == "native")
    folder: Any = Folder(seed.files)
    with limits(header_bytes=1):
        refused = sources._read_folder(folder)
    opened = sources._read_folder(folder)
    with limits(header_bytes=1):
        for record in opened.tensors.values():
            list(record.pieces)
    with pytest.raises(HostileError, match="header_bytes"):
        list(refused.tensors["model.w"].pieces)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("headers=1", "there is no limit 'headers'; there are header_bytes"),
        ("header_bytes", "is no size"),
        ("header_bytes=many", "is no size"),
    ],
)
def test_an_environment_that_makes_no_sense_is_said_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, message: str
) -> None:
    for kind in ("native", "safetensors", "hf", "torch", "dcp"):
        seed = next(seed for seed in seeds() if seed.kind == kind)
        (tmp_path / kind).mkdir()
        for name, data in seed.files.items():
            if "/" not in name:
                (tmp_path / kind / name).write_bytes(data)
        monkeypatch.setenv("CKPT_LIMITS", setting)
        with pytest.raises(ValueError, match=message) as refused:
            ckpt.open(tmp_path / kind / (seed.file or ""))
        assert not isinstance(refused.value, FormatError)
        monkeypatch.delenv("CKPT_LIMITS")


def test_limits_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in seeds() if seed.kind == "torch")
    monkeypatch.setenv("CKPT_LIMITS", "pickle_bytes=1KiB, pickle_steps=10")
    assert exercise(seed.files, seed.file) is None
    monkeypatch.setenv("CKPT_LIMITS", "pickle_bytes=1GB")
    assert exercise(seed.files, seed.file) is not None


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_limit_is_a_positive_number(number: Any) -> None:
    with pytest.raises(ValueError, match="header_bytes"), limits(header_bytes=number):
        pass


def test_the_document_has_every_limit_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hostile-input.md").read_text()
    found = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", text, re.MULTILINE)
    }
    assert found == asdict(Limits())
