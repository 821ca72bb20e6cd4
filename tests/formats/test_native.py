"""The native format's bytes: the same ones for ever, and what is written is what is read."""

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import ckpt
from formats.catalog import OutgoingTensor, TensorRef, Tree
from formats.dtypes import BY_NAME, DTYPES, DType, count_nonfinite
from formats.errors import FormatError
from formats.native import codec, shard, shard_writer
from formats.native.manifest import Manifest, ShardFile, StoredTensor, dump, load
from formats.native.shard import OWN_ENTRIES, TABLE, ShardSummary
from formats.native.shard_writer import write_shard
from formats.native.tree import NAN_BITS
from formats.safetensors.file import BITS, parse
from formats.storage import Buffer
from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Shard,
    Split,
    StridedShard,
)
from tests.selection import examples


class MemoryFile:
    """A file in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self.data += buffer

    def rewrite_start(self, data: Buffer) -> None:
        self.data[: len(data)] = data


def outgoing(name: str, dtype: str, shape: tuple[int, ...], *blocks: bytes) -> OutgoingTensor:
    return OutgoingTensor(name, shape, BY_NAME[dtype], lambda: iter(map(memoryview, blocks)))


def written(*tensors: OutgoingTensor, compress: bool = False) -> tuple[bytes, ShardSummary]:
    file = MemoryFile()
    summary = write_shard(file, tensors, compress)
    return bytes(file.data), summary


GOLDEN_HEADER = (
    b'{"__metadata__":{"format":"pt","ckpt.chunk_bytes":"65536","ckpt.codec":"raw"},'
    b'"z":{"dtype":"F64","shape":[1,2],"data_offsets":[0,16]},'
    b'"n":{"dtype":"I64","shape":[],"data_offsets":[16,24]},'
    b'"e":{"dtype":"F32","shape":[0,3],"data_offsets":[24,24]},'
    b'"h":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},'
    b'"b":{"dtype":"BOOL","shape":[2],"data_offsets":[30,32]},'
    b'"__chunks__":{"dtype":"U8","shape":[80],"data_offsets":[32,112]}}'
)
GOLDEN_DATA = bytes.fromhex(
    "000000000000f03f 0000000000000040"  # z: 1 + 2i
    "0700000000000000"  # n: 7
    "803f 0040 4040"  # h: 1 2 3
    "01 00"  # b
    "cd5d4ed9d0bb36b22029723e30b63531 10000000"
    "deb6d224c549cbd3e8c0d782b2f61276 08000000"
    "bbf01262d3ba2a4b5b65fa69210d0f3d 06000000"
    "4d6ac5b7d1a1655cab94ac0ace7276c0 02000000"
)


def test_a_shard_has_these_bytes() -> None:
    data, summary = written(
        outgoing("b", "BOOL", (2,), b"\1\0"),
        outgoing("h", "BF16", (3,), bytes.fromhex("803f00404040")),
        outgoing("e", "F32", (0, 3)),
        outgoing("n", "I64", (), (7).to_bytes(8, "little")),
        outgoing("z", "C128", (1,), np.complex128(1 + 2j).tobytes()),
    )
    header = GOLDEN_HEADER.ljust(-(-(8 + len(GOLDEN_HEADER)) // 64) * 64 - 8)
    assert data == len(header).to_bytes(8, "little") + header + GOLDEN_DATA
    assert summary == ShardSummary(
        len(data), 8 + len(header), 80, "8d963a87ba756d4742f1570c298de9f1"
    )


def golden_manifest() -> Manifest:
    """One of every kind of mesh, placement and value."""
    tensors = {
        "w": StoredTensor(
            (8, 3), BY_NAME["BF16"], Layout((8, 3), Mesh.grid(("dp",), (2,)), (Shard(0),))
        ),
        "s": StoredTensor(
            (8, 3),
            BY_NAME["F32"],
            Layout((8, 3), Mesh.grid(("dp", "tp"), (2, 2)), (StridedShard(0, 2), Shard(0))),
        ),
        "t.0": StoredTensor(
            (5,),
            BY_NAME["C128"],
            Layout((5,), Mesh.of_ranks(("pp",), (3,), (5, 0, 2)), (FlatShard(1, 2),)),
        ),
        "t.1": StoredTensor(
            (),
            BY_NAME["I64"],
            Layout((), Mesh(("a", "b"), (2, 2), 3, (-1, -2)), (Only(1), Split())),
        ),
    }
    tree: Tree = {
        "w": TensorRef("w"),
        "s": TensorRef("s"),
        "t": [TensorRef("t.0"), TensorRef("t.1")],
        "tied": TensorRef("w"),
        "v": [
            None,
            True,
            -3,
            0.1,
            math.nan,
            -math.inf,
            "é",
            b"\0",
            complex(1, -0.0),
            BY_NAME["BF16"],
        ],
        "d": {1: (), None: {"$x": 2}},
    }
    files = (ShardFile("00000000000000a1-00000.safetensors", 0, 999, 640, 40, "0" * 32),)
    return Manifest(tensors, {"tied": "w"}, tree, files, {"ckpt": "1.0.0"})


GOLDEN_MANIFEST = (
    b'{"digest":"DIGEST","format":"ckpt","version":1,"writer":{"ckpt":"1.0.0"},"meshes":['
    b'{"names":["dp"],"sizes":[2],"offset":0,"strides":[1]},'
    b'{"names":["dp","tp"],"sizes":[2,2],"offset":0,"strides":[2,1]},'
    b'{"names":["pp"],"sizes":[3],"offset":5,"strides":[0],"table":[5,0,2]},'
    b'{"names":["a","b"],"sizes":[2,2],"offset":3,"strides":[-1,-2]}],'
    b'"layouts":[[0,["S(0)"]],[1,["SS(0,2)","S(0)"]],[2,["F(1,2)"]],[3,["only(1)","split"]]],'
    b'"files":[["00000000000000a1-00000.safetensors",0,999,640,40,'
    b'"00000000000000000000000000000000"]],"state":{"w":{"$tensor":["BF16",[8,3],0]},'
    b'"s":{"$tensor":["F32",[8,3],1]},"t":[{"$tensor":["C128",[5],2]},{"$tensor":["I64",[],3]}],'
    b'"tied":{"$alias":"w"},"v":[null,true,-3,0.1,{"$float":"nan"},{"$float":"-inf"},"\\u00e9",'
    b'{"$bytes":"AA=="},{"$complex":[1.0,-0.0]},{"$dtype":"BF16"}],'
    b'"d":{"$dict":[[1,{"$tuple":[]}],[null,{"$dict":[["$x",2]]}]]}}}'
)


def test_a_manifest_has_these_bytes() -> None:
    expected = GOLDEN_MANIFEST.replace(b"DIGEST", b"c5c425535369c89d99b80ab59b644e7f")
    assert dump(golden_manifest()) == expected


def test_a_manifest_is_read_back_as_it_was() -> None:
    manifest = golden_manifest()
    found = load(dump(manifest), stored=False)  # as a summary: it lacks most ranks' files
    assert list(found.files) == list(manifest.files)
    # By repr, for it has a NaN.
    assert repr((found.tensors, found.aliases, found.tree, found.writer)) == repr(
        (manifest.tensors, manifest.aliases, manifest.tree, manifest.writer)
    )


def test_a_manifest_tells_strides_the_modules_of_optimizers_and_versions_if_there_are_some() -> (
    None
):
    more = replace(
        golden_manifest(),
        strides={"w": (1, 8)},
        optimizers={"o": "m", "p": None},
        versions={"m": {"0": 2}},
    )
    written = dump(more)
    told = (
        b'"strides":{"w":[1,8]},"optimizers":{"o":"m","p":null},"versions":{"m":{"0":2}},"state":'
    )
    assert told in written
    found = load(written, stored=False)
    assert (found.strides, found.optimizers) == (more.strides, more.optimizers)
    assert found.versions == more.versions
    assert found.tensors == more.tensors  # a reader that ignores both keys reads the same


EVERY = [dtype for dtype in DTYPES if dtype.name not in ("F4_E2M1X2", "C32", "F8_E8M0")]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sample(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits of a type; few of them set for bool."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype.name == "BOOL" else 256
    nbytes = (dtype.nbytes(shape),)
    raw = torch.randint(high, nbytes, generator=generator, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype.torch_name)).reshape(shape)


def test_the_safetensors_library_opens_every_shard(tmp_path: Path) -> None:
    state = {
        f"{dtype.name}.{index}": sample(dtype, shape, index)
        for dtype in EVERY
        for index, shape in enumerate([(), (3, 5), (0, 2), (70_000, 2)])
    }
    ckpt.save(tmp_path, state)
    (path,) = tmp_path.glob("*.safetensors")
    found = load_file(path)
    assert found.pop(TABLE).dtype == torch.uint8
    assert found.keys() == {name for name, tensor in state.items() if tensor.numel()}
    for name, tensor in found.items():
        assert bits(tensor) == bits(state[name]), name
        carrier = BY_NAME[name.split(".")[0]].carrier
        if carrier == name.split(".")[0]:
            assert tensor.dtype == state[name].dtype
            assert tensor.shape == state[name].shape
    with safe_open(path, "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "ckpt.chunk_bytes": "65536",
            "ckpt.codec": "raw",
        }


def test_every_entry_is_aligned_to_its_elements(tmp_path: Path) -> None:
    state = {f"{dtype.name}/{n}": sample(dtype, (n,), n) for n in (3, 1, 7) for dtype in EVERY}
    ckpt.save(tmp_path, state)
    (path,) = tmp_path.glob("*.safetensors")
    header = parse(path.read_bytes(), path.name, path.stat().st_size)
    assert header.data_offset % 64 == 0
    assert list(header.entries)[-1] == TABLE
    for entry in header.entries.values():
        assert entry.begin % (BITS[entry.dtype] // 8) == 0, entry


def test_a_compressed_shard_opens_as_bytes(tmp_path: Path) -> None:
    state = {
        "zeros": torch.zeros(400_000, dtype=torch.bfloat16),
        "noise": sample(BY_NAME["U8"], (99,), 0),
    }
    ckpt.save(tmp_path, state, compress=True)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.stat().st_size < 4000
    found = load_file(path)
    assert {tensor.dtype for tensor in found.values()} == {torch.uint8}
    assert torch.equal(found["noise"], state["noise"])  # no frame makes it smaller
    loaded: Any = ckpt.read(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", OWN_ENTRIES)
def test_a_conversion_refuses_the_names_of_a_shard_s_own_entries(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2), "w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=f"{name}: this name is taken"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "out", to="ckpt")
    assert not (tmp_path / "out").exists()


@st.composite
def streams(draw: st.DrawFn) -> tuple[DType, tuple[int, ...], list[bytes]]:
    """A tensor's type, shape and bytes in blocks of any sizes."""
    dtype = draw(st.sampled_from([d for d in EVERY if d.name != "BOOL"]))
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    nbytes = dtype.nbytes(shape)
    data = np.random.default_rng(draw(st.integers(0, 9))).bytes(nbytes)
    if draw(st.booleans()):
        data = bytes(nbytes)
    cuts = sorted(draw(st.lists(st.integers(0, nbytes), max_size=6)))
    return dtype, shape, [data[a:b] for a, b in pairwise([0, *cuts, nbytes])]


@settings(max_examples=examples(150))
@given(
    parts=st.lists(streams(), max_size=5), compress=st.booleans(), chunk=st.sampled_from([16, 48])
)
def test_blocks_of_any_sizes_come_back_as_the_tensors_they_were(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[tuple[DType, tuple[int, ...], list[bytes]]],
    compress: bool,
    chunk: int,
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    tensors = {
        str(index): OutgoingTensor(str(index), shape, dtype, reused(blocks))
        for index, (dtype, shape, blocks) in enumerate(parts)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "CHUNK_BYTES", chunk)
        patch.setattr(shard, "COMPRESSED_CHUNK_BYTES", chunk)
        data, summary = written(*tensors.values(), compress=compress)
    name = "00000000000000a1-00000.safetensors"
    (folder / name).write_bytes(data)
    manifest = Manifest(
        {n: StoredTensor(t.shape, t.dtype, Layout.single(t.shape)) for n, t in tensors.items()},
        {},
        {n: TensorRef(n) for n in tensors},
        [summary.to_file(name, 0)],
    )
    (folder / "manifest.json").write_bytes(dump(manifest))
    found: Any = ckpt.read(folder)
    for index, (_, shape, blocks) in enumerate(parts):
        assert bits(found[str(index)]) == b"".join(blocks)
        assert tuple(found[str(index)].shape) == shape


def reused(blocks: list[bytes]) -> Any:
    """A stream that gives every block in the same memory, as a reader's buffer does."""

    def stream() -> Iterator[memoryview]:
        memory = bytearray(max(map(len, blocks)))
        for block in blocks:
            memory[:] = b"\xee" * len(memory)
            memory[: len(block)] = block
            yield memoryview(memory)[: len(block)]

    return stream


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "zstd"])
@pytest.mark.parametrize("blocks", [[b"1234567"], [b"12345678", b"9"], []])
def test_a_stream_of_another_length_is_refused_by_name(blocks: list[bytes], compress: bool) -> None:
    with pytest.raises(FormatError, match=r"w: its stream has .* bytes, its shape and dtype 8"):
        written(outgoing("w", "F32", (2,), *blocks), compress=compress)


@settings(max_examples=examples(100))
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    elements=st.integers(1, 3000),
    spread=st.sampled_from([0, 1, 255]),
)
def test_what_is_compressed_decodes_to_what_it_was(width: int, elements: int, spread: int) -> None:
    generator = np.random.default_rng(elements)
    raw = generator.integers(0, spread, width * elements, np.uint8, endpoint=True).tobytes()
    frame = codec.compress(memoryview(raw), width)
    if frame is None:
        assert spread == 255 or len(raw) < 64
        return
    assert len(frame) < len(raw) - len(raw) // 32
    decoded = bytearray(len(raw))
    codec.decompress(frame, width, memoryview(decoded), "here")
    assert bytes(decoded) == raw


@given(st.lists(st.booleans(), max_size=200))
def test_chunks_are_tried_until_three_do_not_shrink_and_then_one_in_sixteen(
    shrinks: list[bool],
) -> None:
    effort, misses, idle = codec.Effort(), 0, 0
    for shrank in shrinks:
        tried = effort.tries_next()
        assert tried == (misses < codec.MISSES or idle == codec.SAMPLE_EVERY - 1)
        idle = 0 if tried else idle + 1
        if tried:
            effort.note(shrank)
            misses = 0 if shrank else misses + 1


def test_noise_is_stored_as_it_is_and_what_shrinks_after_it_is_found(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)
    state = {"w": torch.cat([noise, torch.zeros(40 << 20, dtype=torch.uint8)])}
    ckpt.save(tmp_path, state, compress=True)
    (file,) = tmp_path.glob("*.safetensors")
    assert 24 << 20 < file.stat().st_size < 48 << 20
    assert torch.equal(ckpt.read(tmp_path)["w"], state["w"])


@given(
    blocks=st.lists(st.binary(max_size=400), max_size=5),
    chunk=st.sampled_from([16, 48]),
    stable=st.booleans(),
)
def test_the_bytes_of_a_shard_depend_neither_on_batches_nor_on_threads(
    blocks: list[bytes], chunk: int, stable: bool
) -> None:
    size = sum(map(len, blocks))
    files = []
    for overlap, batch in ((False, 8 << 20), (False, 3 * chunk), (True, 3 * chunk)):
        stream = [memoryview(block) for block in blocks]
        tensor = OutgoingTensor(
            "w", (size,), BY_NAME["U8"], lambda stream=stream: iter(stream), stable
        )
        file = MemoryFile()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "CHUNK_BYTES", chunk)
            patch.setattr(shard_writer, "WRITE_BYTES", batch)
            summary = write_shard(file, [tensor], overlap=overlap)
        files.append((bytes(file.data), summary))
    assert files[0] == files[1] == files[2]
    assert b"".join(blocks) in files[0][0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_finite_are_counted_as_torch_counts_them(dtype: DType) -> None:
    kind = getattr(torch, dtype.torch_name, None)
    if kind is None:
        pytest.skip("this torch lacks the dtype")
    size = dtype.component_bytes
    if size <= 2:  # every pattern of bits
        raw = np.arange(1 << (8 * size), dtype=f"u{size}").tobytes()
    else:
        specials = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan], f"f{size}")
        raw = np.random.default_rng(0).bytes(4 << 10) + specials.tobytes() * 2
    each = [False] * (len(raw) // size)
    if (kind.is_floating_point or kind.is_complex) and not dtype.name.endswith("X2"):
        given = torch.frombuffer(bytearray(raw), dtype=kind)
        numbers = torch.view_as_real(given) if kind.is_complex else given
        wide = numbers if size == 8 else numbers.float()
        each = (~wide.isfinite()).flatten().tolist()
        assert any(each)
    assert count_nonfinite(memoryview(raw), dtype) == sum(each)
    assert count_nonfinite(memoryview(b""), dtype) == 0
    for at in range(0, len(each), 1 + len(each) // 512):  # alone, so that no sign hides another
        one = raw[at * size : (at + 1) * size]
        assert count_nonfinite(memoryview(one * 4), dtype) == 4 * each[at]


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000000", "7ff0000000000001"])
def test_a_nan_keeps_its_bits(bits: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    tree: Any = {"a": number, "c": complex(1.0, number)}
    data = dump(Manifest({}, {}, tree, ()))
    assert (b'"version":3' in data) == (bits != NAN_BITS)
    found: Any = load(data).tree
    for one in (found["a"], found["c"].imag):
        assert struct.pack(">d", one).hex() == bits
