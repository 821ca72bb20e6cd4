"""What the engine reads, and that it puts every element where it belongs, as numpy would."""

import random
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt.arguments import memory_budget
from ckpt.plan.read_plan import (
    MAX_GROUP,
    BoxCopies,
    ByteRange,
    Limits,
    ReadRequest,
    byte_ranges_of,
    groups_of,
    requests_for,
)
from ckpt.stores.local_store import LocalStore
from ckpt.transfer.read import SCRATCH_BYTES, ReadPolicy, bytes_of, read_requests
from formats.catalog import (
    Catalog,
    Chunk,
    Extent,
    OutgoingTensor,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
)
from formats.dtypes import BY_NAME
from formats.errors import CorruptError, FormatError
from formats.native import reader as native
from formats.native.codec import compress, decompress
from formats.native.manifest import Manifest, StoredTensor, dump
from formats.native.shard import CHUNK_BYTES, COMPRESSED_CHUNK_BYTES
from formats.native.shard_writer import write_shard
from formats.storage import LOCAL_READ_BYTES
from sharding.layout import Box, HoleError, Layout, Mesh, Piece, Replicate, Shard, Split, row_major

MEMORY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
DTYPES = {1: BY_NAME["U8"], 2: BY_NAME["F16"], 4: BY_NAME["F32"], 8: BY_NAME["F64"]} | {
    16: BY_NAME["C128"]
}
SMALL = Limits(read_bytes=128, direct_bytes=192, scratch_bytes=256, gap_bytes=32)
FAR = Limits(read_bytes=512, direct_bytes=512, scratch_bytes=96, gap_bytes=32)
"""Limits that tensors of a few dozen elements reach."""


class CountingReader:
    """Another reader, and what was read through it."""

    def __init__(self, inner: LocalStore) -> None:
        self.url = inner.url
        self.read_bytes = inner.read_bytes
        self.reads: list[tuple[str, int, int]] = []
        """(file, first byte, one past the last) in the order of reading."""
        self._inner = inner

    @property
    def nbytes(self) -> int:
        return sum(hi - lo for _, lo, hi in self.reads)

    def names(self) -> list[str]:
        return self._inner.names()

    def entries(self, folder: str = "") -> list[str]:
        return self._inner.entries(folder)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def read_whole(self, name: str, limit: int) -> bytes:
        data = self._inner.read_whole(name, limit)
        self.reads.append((name, 0, len(data)))
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        self.reads.append((name, size - length, size))
        return self._inner.read_end(name, size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        self.reads.append((name, offset, offset + length))
        return self._inner.read(name, offset, length)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        self.reads.append((name, offset, offset + sum(target.nbytes for target in targets)))
        self._inner.read_into(name, offset, *targets)


@dataclass(frozen=True)
class Chunked:
    """A chunk table of any chunk size, for extents as small as a test likes."""

    chunk_bytes: int
    compressed: bool
    chunks: Sequence[Chunk]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Chunk:
        return self.chunks[index]

    def wrong(self, first: int, stored: memoryview) -> int | None:
        at = 0
        for number, chunk in enumerate(self.chunks[first:], first):
            data = stored[at : at + chunk.stored_bytes]
            if data and xxhash.xxh3_128_digest(data) != chunk.digest:
                return number
            at += chunk.stored_bytes
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        if len(stored) < len(target):
            decompress(stored, width, target, f"chunk {index}")
        else:
            target[:] = stored


def stored_bytes(
    raw: bytes, offset: int, width: int, chunk_bytes: int, zstd: bool
) -> tuple[bytes, Chunked]:
    """How an extent that decodes to `raw` is stored from `offset` of its file on."""
    out, chunks = b"", []
    for at in range(0, len(raw), chunk_bytes):
        piece = raw[at : at + chunk_bytes]
        packed = compress(memoryview(piece), width) if zstd else None
        data = bytes(packed) if packed is not None else piece
        digest = xxhash.xxh3_128_digest(data)
        chunks.append(
            Chunk(offset + len(out), len(data), len(piece), digest, len(data) < len(piece))
        )
        out += data
    return out, Chunked(chunk_bytes, zstd, chunks)


def laid_out(part: np.ndarray, how: str, chance: random.Random) -> tuple[np.ndarray, Piece]:
    """One-dimensional storage that holds an array in some way, and where it lies in it."""
    shape, ndim = part.shape, part.ndim
    at, strides = 0, row_major(shape)
    storage = part.reshape(-1)
    if how == "transposed":
        axes = chance.sample(range(ndim), ndim)
        turned = part.transpose(axes)
        steps = row_major(turned.shape)
        strides = tuple(steps[axes.index(dim)] for dim in range(ndim))
        storage = turned.reshape(-1)
    elif how == "padded":
        before = [chance.randint(0, 2) for _ in shape]
        larger = [size + b + chance.randint(0, 2) for size, b in zip(shape, before, strict=True)]
        padded = np.full(larger, part.dtype.type(77))
        padded[tuple(slice(b, b + size) for b, size in zip(before, shape, strict=True))] = part
        strides = row_major(larger)
        at = sum(b * step for b, step in zip(before, strides, strict=True))
        storage = padded.reshape(-1)
    elif how == "expanded":  # along the first dimension
        strides = (0, *strides[1:])
        storage = part[:1].reshape(-1)
    gap = chance.randint(0, 3)
    filled = np.concatenate([np.full(gap, part.dtype.type(78)), storage])
    return filled, Piece(Box.whole(shape), at + gap, strides)


def moved(piece: Piece, lo: Sequence[int], at: int = 0) -> Piece:
    """A piece whose box begins at index `lo`, and that lies `at` elements later."""
    hi = tuple(a + size for a, size in zip(lo, piece.box.shape, strict=True))
    return Piece(Box(tuple(lo), hi), piece.at + at, piece.strides)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))


def cut(box: Box, dim: int, places: Sequence[int]) -> Iterator[Box]:
    """A box cut at these indices of a dimension."""
    edges = [box.lo[dim], *sorted(places), box.hi[dim]]
    for lo, hi in pairwise(edges):
        yield Box(
            (*box.lo[:dim], lo, *box.lo[dim + 1 :]),
            (*box.hi[:dim], hi, *box.hi[dim + 1 :]),
        )


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Some box of a tensor, perhaps an empty one."""
    bounds = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))


@dataclass(frozen=True)
class Case:
    """A stored tensor and what is wanted of it."""

    itemsize: int
    shape: tuple[int, ...]
    sources: tuple[tuple[Box, str], ...]
    """The stored pieces and how each lies in its file."""
    targets: tuple[tuple[Box, str], ...]
    encoding: str
    chunk_bytes: int
    limits: Limits | None
    seed: int


LAYOUTS = ("packed", "transposed", "padded")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    whole, wanted = Box.whole(shape), draw(boxes(shape))
    expanded = bool(shape) and draw(st.booleans())
    kinds = st.just("expanded") if expanded and shape[0] > 1 else st.sampled_from(LAYOUTS)

    def parts(box: Box, first_dim: int) -> list[Box]:
        if len(shape) <= first_dim or not box:
            return [box]
        dim = draw(st.integers(first_dim, len(shape) - 1))
        return list(
            cut(box, dim, draw(st.lists(st.integers(box.lo[dim], box.hi[dim]), max_size=2)))
        )

    return Case(
        draw(st.sampled_from(list(MEMORY))),
        shape,
        tuple((box, draw(kinds)) for box in parts(whole, 1 if expanded else 0) if box),
        tuple((box, draw(st.sampled_from(LAYOUTS))) for box in parts(wanted, 0)),
        draw(st.sampled_from(["plain", "record", "raw", "zstd"])),
        draw(st.sampled_from([16, 48, 64, 512])),
        draw(st.sampled_from([SMALL, FAR, None])),
        draw(st.integers(0, 1 << 32)),
    )


def write_case(case: Case, folder: Path) -> tuple[TensorRecord, np.ndarray]:
    """The record of a case's tensor, written to real files, and the tensor itself."""
    chance = random.Random(case.seed)
    nbytes = prod(case.shape) * case.itemsize
    content = bytes(chance.choices(range(4), k=nbytes))  # small numbers: zstd finds something
    whole = np.frombuffer(content, MEMORY[case.itemsize]).reshape(case.shape).copy()
    if any(how == "expanded" for _, how in case.sources):
        whole[:] = whole[:1].copy()
    files = {"a": chance.randbytes(5), "b": b""}
    width = DTYPES[case.itemsize].component_bytes
    pieces = []
    for box, how in case.sources:
        storage, piece = laid_out(whole[index(box)], how, chance)
        name = chance.choice("ab")
        offset, raw = len(files[name]), storage.tobytes()
        crc32 = zlib.crc32(raw) if case.encoding == "record" else None
        if case.encoding in ("plain", "record"):
            data, chunks = raw, None
        else:
            zstd = case.encoding == "zstd"
            data, chunks = stored_bytes(raw, offset, width, case.chunk_bytes, zstd)
        extent = Extent(name, offset, len(raw), chunks, width, crc32)
        pieces.append(StoredPiece(moved(piece, box.lo), extent))
        files[name] += data + chance.randbytes(chance.randint(0, 3))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return TensorRecord("t", case.shape, DTYPES[case.itemsize], PieceTable(pieces)), whole


@given(case=cases())
def test_any_box_of_any_storage_arrives_in_any_target(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    record, whole = write_case(case, folder)
    chance = random.Random(case.seed)
    expected, pieces, at = [], [], 0
    for box, how in case.targets:
        storage, piece = laid_out(whole[index(box)], how, chance)
        expected.append(storage)
        pieces.append(moved(piece, box.lo, at))
        at += len(storage)
    # The target is what is expected, but for the elements that are wanted.
    array = np.concatenate(expected)
    for piece in pieces:
        view(array, piece)[...] = array.dtype.type(99)
    requests = requests_for(record, pieces)
    assert sum(request.box_copy.numel for request in requests) == sum(
        box.numel for box, _ in case.targets
    )
    with LocalStore(folder) as store:
        done: list[int] = []
        read_requests(
            store,
            requests,
            [bytes_of(array)],
            progress=done.append,
            policy=None if case.limits is None else ReadPolicy(2, case.limits),
        )
    assert array.tobytes() == np.concatenate(expected).tobytes()
    assert sum(done) == sum(box.numel for box, _ in case.targets) * case.itemsize


def view(array: np.ndarray, piece: Piece) -> np.ndarray:
    """The elements of a piece, as an array over the same memory."""
    strides = tuple(step * array.itemsize for step in piece.strides)
    return as_strided(array[piece.at :] if piece.box else array[:0], piece.box.shape, strides)


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), data=st.data())
def test_what_is_read_of_each_contiguous_range_is_the_range_and_two_chunks_at_most(
    shape: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    box = data.draw(boxes(tuple(shape)))
    encoding, chunk_bytes = data.draw(st.sampled_from([("plain", 32), ("raw", 32), ("raw", 96)]))
    whole = Box.whole(shape)
    source = ((whole, "packed"),)
    case = Case(4, tuple(shape), source, ((box, "packed"),), encoding, chunk_bytes, SMALL, 7)
    record, content = write_case(case, folder)
    wanted = np.zeros(shape, dtype=np.int8)
    wanted[index(box)] = 1
    ranges = int((np.diff(wanted.reshape(-1), prepend=0) == 1).sum())
    array = np.zeros(box.numel, dtype=np.uint32)
    with LocalStore(folder) as store:
        reader = CountingReader(store)
        requests = requests_for(record, [Piece.packed(box)])
        read_requests(reader, requests, [bytes_of(array)], policy=ReadPolicy(2, SMALL))
    assert np.array_equal(array.reshape(box.shape), content[index(box)])
    assert reader.nbytes <= 4 * box.numel + ranges * 2 * chunk_bytes


def write_native(
    folder: Path, tensors: Mapping[str, tuple[np.ndarray, Layout]], zstd: bool = False
) -> Path:
    """A committed checkpoint whose tensors lie in the layouts that are given."""
    store = LocalStore(folder)
    stored, files = {}, []
    ranks = sorted({rank for _, layout in tensors.values() for rank in layout.mesh.ranks()})
    for name, (whole, layout) in tensors.items():
        stored[name] = StoredTensor(whole.shape, DTYPES[whole.itemsize], layout)
    for rank in ranks:
        parts = []
        for name, (whole, layout) in tensors.items():
            lo, hi = layout.span(rank)
            local = np.empty(hi - lo, dtype=whole.dtype)
            for piece in layout.pieces(rank):
                view(local, piece)[...] = whole[index(piece.box)]
            if lo < hi:
                shape = layout.local_shape(rank)
                shape = shape if prod(shape) == hi - lo else (hi - lo,)
                block = memoryview(local.view(np.uint8).data)
                parts.append(
                    OutgoingTensor(
                        name, shape, stored[name].dtype, lambda b=block: iter([b]), stable=True
                    )
                )
        file = f"{1:016x}-{rank:05d}.safetensors"
        with store.create(file, rewritable=zstd) as out:
            files.append(write_shard(out, parts, zstd).to_file(file, rank))
    tree = {name: TensorRef(name) for name in tensors}
    store.commit("manifest.json", dump(Manifest(stored, {}, tree, files)), replace=False)
    return folder


@dataclass
class Opened:
    """A catalog, read through a reader that counts."""

    reader: CountingReader
    catalog: Catalog = field(init=False)

    def __post_init__(self) -> None:
        self.catalog = native.read(self.reader)

    def requests(self, name: str, box: Box) -> tuple[list[ReadRequest], np.ndarray]:
        """What brings a box into a packed array; headers are read by this, and not counted."""
        record = self.catalog.tensors[name]
        array = np.zeros(box.numel, dtype=MEMORY[record.dtype.itemsize])
        found = list(requests_for(record, [Piece.packed(box)]))
        self.reader.reads.clear()
        return found, array

    def read(self, name: str, box: Box, verify: bool = True) -> np.ndarray:
        requests, array = self.requests(name, box)
        read_requests(self.reader, requests, [bytes_of(array)], verify)
        return array.reshape(box.shape)


def numbers(shape: tuple[int, ...], itemsize: int = 4) -> np.ndarray:
    """A tensor in which every element has a number of its own."""
    return np.arange(prod(shape), dtype=MEMORY[itemsize]).reshape(shape)


def over(world: int, shape: tuple[int, ...], dim: int = 0) -> Layout:
    return Layout(shape, Mesh.grid(("dp",), (world,)), (Shard(dim),))


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "zstd"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`w`, 5 MB over three ranks by rows, `v` by columns and `s` split flat; `one` is 0-d."""
    mesh = Mesh.grid(("dp",), (3,))
    return write_native(
        tmp_path_factory.mktemp("sharded") / "c",
        {
            "w": (numbers((1003, 1250)), over(3, (1003, 1250))),
            "v": (numbers((300, 700), 2), over(3, (300, 700), 1)),
            "s": (numbers((60_011, 7), 8), Layout((60_011, 7), mesh, (Split(),))),
            "one": (numbers(()), Layout.single((), 1)),
        },
        zstd=request.param,
    )


@pytest.mark.thorough
@given(data=st.data())
def test_boxes_of_a_native_checkpoint_equal_slices_of_what_was_written(
    sharded: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from("wvs"))
    with LocalStore(sharded) as store:
        opened = Opened(CountingReader(store))
        record = opened.catalog.tensors[name]
        box = data.draw(boxes(record.shape))
        expected = numbers(record.shape, record.dtype.itemsize)[index(box)]
        assert np.array_equal(opened.read(name, box), expected)
        assert np.array_equal(opened.read(name, box, verify=False), expected)


def test_a_scalar_and_an_empty_box_are_boxes_like_others(sharded: Path) -> None:
    with LocalStore(sharded) as store:
        opened = Opened(CountingReader(store))
        assert opened.read("one", Box((), ())) == 0
        assert opened.read("w", Box((5, 5), (5, 9))).shape == (0, 4)
        assert opened.reader.reads == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "dim"), [((2048, 1024), 0), ((4097, 1531), 0), ((512, 4096), 1), ((64, 128, 257), 0)]
)
@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (3, 4), (4, 4)])
def test_resharding_reads_hardly_more_than_what_is_needed(
    tmp_path: Path, shape: tuple[int, ...], dim: int, saving: int, loading: int
) -> None:
    if dim == 1 and loading > saving:
        pytest.skip("a part of every row is read with its neighbours, to verify them")
    whole = numbers(shape)
    assert whole.nbytes >= 8 << 20
    with LocalStore(
        write_native(tmp_path / "c", {"w": (whole, over(saving, shape, dim))})
    ) as store:
        opened = Opened(CountingReader(store))
        nbytes = 0
        for rank in range(loading):
            for piece in over(loading, shape, dim).pieces(rank):
                assert np.array_equal(opened.read("w", piece.box), whole[index(piece.box)])
                nbytes += opened.reader.nbytes
    shared_chunks = CHUNK_BYTES * loading  # one at each cut that is not between two chunks
    assert nbytes <= max(1.05 * whole.nbytes, whole.nbytes + shared_chunks)
    if shape == (2048, 1024) and saving != 3:  # every cut is between two chunks
        assert nbytes <= 1.05 * whole.nbytes


@pytest.mark.thorough
def test_many_small_tensors_come_in_few_reads(tmp_path: Path) -> None:
    count = 10_000
    tensors = {
        f"t{i}": (np.full(256, i, dtype=np.uint32), Layout.single((256,))) for i in range(count)
    }
    with LocalStore(write_native(tmp_path / "c", tensors)) as store:
        reader = CountingReader(store)
        catalog = native.read(reader)
        array = np.zeros(count * 256, dtype=np.uint32)
        requests = []
        for i, record in enumerate(catalog.tensors.values()):
            requests += requests_for(record, [Piece.packed(Box((0,), (256,)), i * 256)])
        reader.reads.clear()
        read_requests(reader, requests, [bytes_of(array)])
    assert np.array_equal(array, np.repeat(np.arange(count, dtype=np.uint32), 256))
    assert len(reader.reads) <= 1.05 * max(array.nbytes / LOCAL_READ_BYTES, count / MAX_GROUP)
    assert reader.nbytes == array.nbytes


def test_what_is_far_apart_is_not_read_through(tmp_path: Path) -> None:
    whole = numbers((16, 1 << 19))  # rows of 2 MiB
    with LocalStore(write_native(tmp_path / "c", {"w": (whole, over(1, whole.shape))})) as store:
        opened = Opened(CountingReader(store))
        assert np.array_equal(opened.read("w", Box((0, 5), (16, 6))), whole[:, 5:6])
        assert opened.reader.nbytes == 16 * CHUNK_BYTES
        assert np.array_equal(opened.read("w", Box((0, 5), (16, 6)), verify=False), whole[:, 5:6])
        assert opened.reader.nbytes == 16 * 4


@pytest.mark.parametrize(
    "box", [Box((3, 0), (4, 1000)), Box((0, 10), (1, 11)), Box((100, 0), (1000, 1000))], ids=str
)
def test_without_verification_only_the_bytes_of_a_slice_are_read(tmp_path: Path, box: Box) -> None:
    whole = numbers((1000, 1000))
    with LocalStore(write_native(tmp_path / "c", {"w": (whole, over(1, whole.shape))})) as store:
        opened = Opened(CountingReader(store))
        assert np.array_equal(opened.read("w", box, verify=False), whole[index(box)])
        assert opened.reader.nbytes == 4 * box.numel
        opened.read("w", box)
        assert opened.reader.nbytes <= 4 * box.numel + 2 * CHUNK_BYTES


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.thorough
def test_a_wrong_chunk_is_an_error_that_names_file_tensor_and_bytes(
    sharded: Path, tmp_path: Path
) -> None:
    chance = random.Random(3)
    for trial in range(30):
        folder = copied(sharded, tmp_path / str(trial))
        with LocalStore(folder) as store:
            opened = Opened(CountingReader(store))
            name = chance.choice("wvs")
            record = opened.catalog.tensors[name]
            stored = chance.choice(list(record.pieces))
            chunks = stored.extent.chunks
            assert chunks is not None
            chunk = chunks[chance.randrange(len(chunks))]
            at = chance.randrange(chunk.offset, chunk.offset + chunk.stored_bytes)
            with (folder / stored.extent.file).open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            with pytest.raises(CorruptError) as caught:
                opened.read(name, Box.whole(record.shape))
        message = str(caught.value)
        assert f"{stored.extent.file}: {name}: bytes {chunk.offset}:" in message
        assert f":{chunk.offset + chunk.stored_bytes} " in message


def test_a_wrong_chunk_that_is_not_wanted_does_no_harm(sharded: Path, tmp_path: Path) -> None:
    folder = copied(sharded, tmp_path / "copy")
    with LocalStore(folder) as store:
        opened = Opened(CountingReader(store))
        last = list(opened.catalog.tensors["w"].pieces)[-1].extent
        assert last.chunks is not None
        chunk = last.chunks[len(last.chunks) - 1]
        with (folder / last.file).open("r+b") as file:
            file.seek(chunk.offset)
            file.write(b"\xff\xff\xff\xff\xff")
        box = Box((0, 0), (700, 1250))
        assert np.array_equal(opened.read("w", box), numbers((1003, 1250))[:700])
        with pytest.raises(CorruptError):
            opened.read("w", Box.whole((1003, 1250)))


def test_a_file_that_was_truncated_after_it_was_opened_is_an_error(
    sharded: Path, tmp_path: Path
) -> None:
    folder = copied(sharded, tmp_path / "copy")
    with LocalStore(folder) as store:
        opened = Opened(CountingReader(store))
        requests, array = opened.requests("w", Box.whole((1003, 1250)))
        for file in folder.glob("*.safetensors"):
            with file.open("r+b") as shortened:
                shortened.truncate(2000)
        with pytest.raises(CorruptError, match="ends at 2000"):
            read_requests(store, requests, [bytes_of(array)])


@pytest.mark.thorough
@pytest.mark.parametrize("zstd", [False, True], ids=["raw", "zstd"])
@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
def test_memory_beyond_the_target_is_bounded(tmp_path: Path, zstd: bool, turned: bool) -> None:
    shape, workers = (3000, 6000), 2  # 72 MB
    folder = write_native(tmp_path / "c", {"w": (numbers(shape), over(2, shape))}, zstd)
    with LocalStore(folder) as store:
        record = native.read(store).tensors["w"]
        array = np.zeros(prod(shape), dtype=np.uint32)
        piece = Piece.packed(Box.whole(shape))
        if turned:
            piece = replace(piece, strides=(1, shape[0]))
        requests = list(requests_for(record, [piece]))
        usual = ReadPolicy.within(memory_budget(), store)
        policy = replace(usual, workers=workers)
        tracemalloc.start()
        try:
            read_requests(store, requests, [bytes_of(array)], policy=policy)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert np.array_equal(view(array, piece), numbers(shape))
    scratch = SCRATCH_BYTES
    chunk = COMPRESSED_CHUNK_BYTES if zstd else CHUNK_BYTES
    # Compressed, the stored bytes, what they decode to and the end-to-end copy of it.
    assert peak <= workers * (scratch + 2 * chunk) * (3 if zstd else 1) + (1 << 20)


def test_a_hole_and_an_overlap_in_what_is_stored_are_errors_that_name_the_tensor() -> None:
    extent = Extent("file", 0, 400)
    upper = StoredPiece(Piece.packed(Box((0, 0), (5, 10))), extent)
    lower = StoredPiece(Piece.packed(Box((6, 0), (10, 10))), extent)
    whole = [Piece.packed(Box.whole((10, 10)))]
    holed = TensorRecord("model.w", (10, 10), BY_NAME["F32"], PieceTable([upper, lower]))
    with pytest.raises(HoleError, match=r"model\.w: only 90 of the 100 elements of \[0:10, 0:10\]"):
        list(requests_for(holed, whole))
    doubled = TensorRecord("model.w", (10, 10), BY_NAME["F32"], PieceTable([upper, upper, lower]))
    with pytest.raises(HoleError, match=r"model\.w: 140 in place of the 100"):
        list(requests_for(doubled, whole))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_equal_layouts_give_the_same_pieces_and_so_share_their_box_copies(
    m: int, n: int, rank: int
) -> None:
    one, other = (Layout((m, n), Mesh.grid(("dp",), (4,)), (Shard(0),)) for _ in range(2))
    box_copies = BoxCopies()
    assert box_copies.pieces(one, rank) is box_copies.pieces(other, rank)
    assert box_copies.pieces(one, rank) == one.pieces(rank)
    whole = Piece.packed(Box.whole((m, n)))
    for piece, same in zip(
        box_copies.pieces(one, rank), box_copies.pieces(other, rank), strict=True
    ):
        assert box_copies.of(whole, piece) is box_copies.of(whole, same)


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "zstd"])
def alike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of one shape over two ranks; two have equal layouts and dtypes."""
    given = {
        name: (numbers((300, 110), itemsize), over(2, (300, 110), dim))
        for name, itemsize, dim in (("a", 4, 0), ("b", 4, 0), ("c", 2, 0), ("d", 4, 1))
    }
    return write_native(tmp_path_factory.mktemp("alike") / "c", given, zstd=request.param)


@given(data=st.data(), verify=st.booleans())
def test_tensors_of_one_geometry_have_the_byte_ranges_that_each_has_alone(
    alike: Path, data: st.DataObject, verify: bool
) -> None:
    limits = data.draw(
        st.sampled_from([replace(SMALL, scratch_bytes=9999), Limits(*[1 << 17] * 3)])
    )
    with LocalStore(alike) as store:
        records, copies = Opened(CountingReader(store)).catalog.tensors, BoxCopies()
        pieces = [Piece.packed(data.draw(boxes((300, 110)))) for _ in range(2)]
        requests = [
            one for record in records.values() for one in requests_for(record, pieces, 0, copies)
        ]
        alone = [one for each in requests for one in byte_ranges_of([each], verify, limits)]
        assert byte_ranges_of(requests, verify, limits) == sorted(alone, key=lambda one: one[:2])


def test_a_piece_that_reaches_over_the_end_of_its_extent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    array = np.zeros(100, dtype=np.uint32)
    for piece in (Piece.packed(Box((0,), (100,)), 1), Piece(Box((0,), (100,)), 0, (2,))):
        stored = StoredPiece(piece, Extent("file", 0, 400))
        record = TensorRecord("w", (100,), BY_NAME["F32"], PieceTable([stored]))
        requests = list(requests_for(record, [Piece.packed(Box((0,), (100,)))]))
        with LocalStore(tmp_path) as store, pytest.raises(FormatError, match="w has 400 bytes"):
            read_requests(store, requests, [bytes_of(array)])


def test_strides_that_run_backwards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(400))
    stored = StoredPiece(Piece(Box((0,), (100,)), 99, (-1,)), Extent("file", 0, 400))
    record = TensorRecord("w", (100,), BY_NAME["F32"], PieceTable([stored]))
    array = np.zeros(100, dtype=np.uint32)
    requests = list(requests_for(record, [Piece.packed(Box((0,), (100,)))]))
    with LocalStore(tmp_path) as store, pytest.raises(FormatError, match="negative strides"):
        read_requests(store, requests, [bytes_of(array)])


def test_replicas_of_a_layout_are_stored_once_and_read_once(tmp_path: Path) -> None:
    mesh, shape = Mesh.grid(("dp", "tp"), (2, 2)), (64, 64)
    layout = Layout(shape, mesh, (Split(), Shard(1)))
    assert Layout(shape, mesh, (Replicate(), Shard(1))).replicas == 2
    with LocalStore(write_native(tmp_path / "c", {"w": (numbers(shape), layout)})) as store:
        opened = Opened(CountingReader(store))
        assert np.array_equal(opened.read("w", Box.whole(shape)), numbers(shape))
        assert opened.reader.nbytes == 64 * 64 * 4


@pytest.mark.parametrize(("gap", "reads"), [(SMALL.gap_bytes, 1), (SMALL.gap_bytes + 1, 2)])
def test_one_read_covers_no_gap_that_is_larger_than_its_bound(gap: int, reads: int) -> None:
    request: ReadRequest = object()  # type: ignore[assignment] # groups do not look at it
    ranges = [ByteRange("f", lo, lo + 8, request, True, 0, 0, None) for lo in (0, 8 + gap)]
    assert len(list(groups_of(ranges, SMALL))) == reads
