"""A native checkpoint as a catalog: symbolic layouts from the manifest, offsets from the shards.

Opening reads the manifest only. A shard file's header and chunk table are read, once, when the
first piece in it is located; a reader that needs one rank's part opens one rank's file. Of a base,
only chunks are ever read.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import xxhash

from formats.catalog import Catalog, Chunk, Extent, FileRecord, StoredPiece, TensorRecord
from formats.errors import CorruptError, FormatError, HostileError
from formats.native.borrowed import BORROWED, DELTAS, Place, Root, Run, beside
from formats.native.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardFile,
    StoredTensor,
    load,
)
from formats.native.shard import RECORD, TABLE, ShardIndex, open_shard
from formats.safetensors_header import Entry, Header
from formats.storage import Reader
from sharding.layout import Box, Piece


def read(reader: Reader) -> Catalog:
    """The catalog of the checkpoint in a folder that has a `manifest.json`."""
    size = reader.size(MANIFEST)
    if size > MAX_MANIFEST_BYTES:
        raise HostileError(
            f"{reader.url}/{MANIFEST}: {size} bytes; none has more than {MAX_MANIFEST_BYTES}"
        )
    manifest = load(reader.read(MANIFEST, 0, size), f"{reader.url}/{MANIFEST}")
    shards = Shards(reader, manifest)
    return Catalog(
        format="ckpt",
        tensors={
            name: TensorRecord(
                name, stored.shape, stored.dtype, shards.pieces(name, stored), stored.layout
            )
            for name, stored in manifest.tensors.items()
        },
        tree=manifest.tree,
        files=(
            FileRecord(MANIFEST, size),
            *(FileRecord(file.name, file.size, file.digest) for file in manifest.files),
        ),
        aliases=manifest.aliases,
        metadata=manifest.writer,
        bases=tuple(base.folder for base in manifest.bases if base is not None),
    )


OWN_ENTRIES = (DELTAS, BORROWED, TABLE)
"""Entries of a shard file that are no tensors."""


class Shards:
    """The shard files of one checkpoint, each opened at most once, and those of its bases."""

    def __init__(self, reader: Reader, manifest: Manifest) -> None:
        self._reader = reader
        self.files = {file.rank: file for file in manifest.files}
        self._bases = [
            None if base is None else (base.folder, {file.rank: file for file in base.files})
            for base in manifest.bases
        ]
        self._sound: set[str] = set()
        """The files of bases whose size is what it was."""
        self._opened: dict[int, Shard] = {}
        self._headers: dict[tuple[bytes, int], Header] = {}
        self._first: dict[int, dict[str, int]] = {}
        """By the identity of a header: ranks with the same one have their chunks alike."""
        self._places: dict[int, Places] = {}
        self._lock = threading.Lock()

    def shard(self, rank: int, name: str) -> Shard:
        """The opened file of a rank; `name` is the tensor that asks, for the error."""
        shard = self._opened.get(rank)
        if shard is None:
            file = self.files.get(rank)
            if file is None:
                raise CorruptError(
                    f"{self._reader.url}/{MANIFEST}: {name} lies in the file of rank {rank}, "
                    "which is not listed"
                )
            with self._lock:
                shard = self._opened.get(rank)
                if shard is None:
                    index = open_shard(self._reader, file, self._headers)
                    shard = Shard(file, index, self._reader, self.base_file, self._first)
                    self._opened[rank] = shard
        return shard

    def base_file(self, place: Place, where: str) -> str:
        """The name, as this checkpoint's reader knows it, of the base's file a place is in.

        Raises CorruptError where the file is gone or has another size.
        """
        base = self._bases[place.base] if place.base < len(self._bases) else None
        file = base[1].get(place.rank) if base is not None else None
        if base is None or file is None:
            raise FormatError(
                f"{where}: some of its chunks lie in the file of rank {place.rank} of base "
                f"{place.base}, which the manifest does not list"
            )
        name = beside(base[0], file.name)
        if name not in self._sound:
            try:
                size = self._reader.size(name)
            except FileNotFoundError as error:
                raise CorruptError(
                    f"{where}: it borrows from {base[0]}/{file.name}, in the folder beside this "
                    "one, and that file is missing: put it back"
                ) from error
            if size != file.size:
                raise CorruptError(
                    f"{where}: it borrows from {base[0]}/{file.name}, which has {size} bytes and "
                    f"had {file.size}: restore that file from another copy"
                )
            self._sound.add(name)
        return name

    def pieces(self, name: str, stored: StoredTensor) -> NativePieces:
        """Where a tensor's elements lie."""
        places = self._places.get(id(stored))
        if places is None:
            places = self._places[id(stored)] = Places(stored)
        return NativePieces(self, name, places)


class Expected(NamedTuple):
    """What a rank's file should have of a tensor, as the manifest says it."""

    carrier: str
    shape: tuple[int, ...]
    """As the file's header has it."""
    nbytes: int
    component_bytes: int


class Start(NamedTuple):
    """Where a tensor's part begins in a file."""

    offset: int
    first: int
    """Its first chunk's record in the table."""
    stored_bytes: int


class Places:
    """Where a tensor's pieces lie, worked out from its layout once for all that are like it."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self._expected: dict[Expected, Expected] = {}
        self._found: dict[Box, tuple[tuple[int, Expected, tuple[Piece, ...]], ...]] = {}

    def of(self, box: Box) -> tuple[tuple[int, Expected, tuple[Piece, ...]], ...]:
        """The ranks that hold some of a box, what their files have, and the pieces in it."""
        found = self._found.get(box)
        if found is None:
            layout = self.stored.layout
            found = self._found[box] = tuple(
                (rank, self.expected(rank), tuple(p for p in layout.pieces(rank) if p.box & box))
                for rank in layout.holders(box)
            )
        return found

    def expected(self, rank: int) -> Expected:
        """What the file of a rank should have."""
        layout, dtype = self.stored.layout, self.stored.dtype
        lo, hi = layout.span(rank)
        shape = layout.local_shape(rank)
        shape = (hi - lo,) if hi - lo != prod(shape) else shape
        carried = dtype.carrier_shape(shape)
        found = Expected(dtype.carrier, carried, dtype.nbytes(shape), dtype.component_bytes)
        return self._expected.setdefault(found, found)


class NativePieces:
    """One tensor's pieces."""

    __slots__ = ("_name", "_places", "_shards")

    def __init__(self, shards: Shards, name: str, places: Places) -> None:
        self._shards = shards
        self._name = name
        self._places = places

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The stored pieces that hold some of `box`."""
        shard, name = self._shards.shard, self._name
        header, alike, start = None, None, None
        for rank, expected, pieces in self._places.of(box):
            opened = shard(rank, name)
            if not opened.index.runs:
                # As a rule the files of all ranks have one header, and it says the same of this.
                if start is None or opened.index.header is not header or expected is not alike:
                    start = opened.start(name, expected)
                    header, alike = opened.index.header, expected
                extent = opened.extent(name, expected, start)
                if opened.index.codec != "raw":
                    start = None
                for piece in pieces:
                    yield StoredPiece(piece, extent)
            else:
                yield from self._among(opened.parts(name, expected), pieces, box)

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self._places.stored.shape))

    def parts(self, rank: int) -> list[Part]:
        """Where the local storage of a rank lies."""
        expected = self._places.expected(rank)
        return self._shards.shard(rank, self._name).parts(self._name, expected)

    def _among(
        self, parts: list[Part], pieces: tuple[Piece, ...], box: Box
    ) -> Iterator[StoredPiece]:
        """Pieces of a rank's local storage, cut where that goes on in another file."""
        itemsize = self._places.stored.dtype.itemsize
        for piece in pieces:
            if len(parts) == 1:
                yield StoredPiece(piece, parts[0].extent)
                continue
            for part in parts:
                first = part.begins // itemsize
                end = first + part.extent.nbytes // itemsize
                for some in piece.within(first, end):
                    if some.box & box:
                        there = Piece(some.box, some.at - first, some.strides)
                        yield StoredPiece(there, part.extent)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a rank's part of a tensor that lies in one file."""

    begins: int
    """Its first byte, decoded, in the rank's part."""
    extent: Extent
    first: int
    """The index of its first chunk in the chunk table of the file that was asked."""
    table: memoryview
    """The records of its chunks."""

    def records(self) -> Iterator[bytes]:
        """The records one by one."""
        for at in range(0, len(self.table), RECORD.size):
            yield bytes(self.table[at : at + RECORD.size])


class Shard:
    """One opened shard file: finds tensors and their chunks in it, or where it borrowed them."""

    def __init__(
        self,
        file: ShardFile,
        index: ShardIndex,
        reader: Reader,
        base_file: Callable[[Place, str], str],
        known_first: dict[int, dict[str, int]],
    ) -> None:
        self.file = file
        self.index = index
        self._where = f"{reader.url}/{file.name}"
        self._reader = reader
        self._base_file = base_file
        self._known_first = known_first
        self._first: dict[str, int] | None = None
        self._starts = [run.first for run in index.runs]

    def parts(self, name: str, expected: Expected) -> list[Part]:
        """Where a tensor's part lies: in one range unless it is borrowed."""
        entry, first = self._entry(name), self._first_chunk(name)
        count = -(-expected.nbytes // self.index.chunk_bytes)
        runs = self._runs(first, count)
        if not runs:
            extent = self.extent(name, expected, self.start(name, expected))
            return [Part(0, extent, first, self._records(first, first + count))]
        where = f"{self._where}: {name}"
        if entry.dtype != "U8":
            raise FormatError(f"{where} is borrowed and yet {entry.dtype}")
        return list(self._pieced(first, count, runs, entry, expected, where))

    def start(self, name: str, expected: Expected) -> Start:
        """Where a tensor's part begins that is not borrowed, checked against the manifest.

        The same in all raw files with this header.
        """
        _, dtype, shape, begin, end = self._entry(name)
        compressed = self.index.codec != "raw"
        if not compressed and (dtype != expected.carrier or shape != expected.shape):
            raise FormatError(
                f"{self._where}: {name} is {dtype} {list(shape)} in the file, the manifest says "
                f"{expected.carrier} {list(expected.shape)}"
            )
        if compressed and dtype != "U8":
            raise FormatError(f"{self._where}: {name} is compressed and yet {dtype}")
        return Start(self.index.header.data_offset + begin, self._first_chunk(name), end - begin)

    def extent(self, name: str, expected: Expected, start: Start) -> Extent:
        """Where a tensor's part lies that begins there."""
        offset, first, stored_bytes = start
        _, _, nbytes, width = expected
        chunks = ChunkTable(
            self.index, first, offset, stored_bytes, nbytes, self._where, name, self._fetch
        )
        if chunks.compressed:
            chunks.check()
        return Extent(self.file.name, offset, nbytes, chunks, width)

    def _entry(self, name: str) -> Entry:
        entry = self.index.header.entries.get(name)
        if entry is None or name in OWN_ENTRIES:
            raise CorruptError(f"{self._where}: {name} should be in this file and is not")
        return entry

    def _pieced(
        self,
        first: int,
        count: int,
        runs: Sequence[Run],
        entry: Entry,
        expected: Expected,
        where: str,
    ) -> Iterator[Part]:
        """The parts of a tensor of which some chunks are borrowed, in order, all of it."""
        chunk_bytes, at, own = self.index.chunk_bytes, first, 0
        offset, nbytes = self.index.header.data_offset + entry.begin, expected.nbytes
        for run in (*runs, None):
            upto = run.first if run is not None else first + count
            ranges = [(at, upto, self.file.name, offset + own)] if at < upto else []
            if ranges:
                own += stored_in(self.index, at, upto)
            if run is not None:
                ranges.append(
                    (run.first, run.end, self._base_file(run.place, where), run.place.offset)
                )
                at = run.end
            for begin, end, file, there in ranges:
                starts = (begin - first) * chunk_bytes
                raw = min((end - first) * chunk_bytes, nbytes) - starts
                stored = stored_in(self.index, begin, end)
                chunks = ChunkTable(
                    self.index, begin, there, stored, raw, self._where, entry.name, self._fetch
                )
                chunks.check()
                extent = Extent(file, there, raw, chunks, expected.component_bytes)
                yield Part(starts, extent, begin, self._records(begin, end))
        if own != entry.end - entry.begin:
            raise FormatError(
                f"{where}: its own chunks take {own} bytes, its entry has {entry.end - entry.begin}"
            )

    def root_file(self, root: Root) -> str:
        """The name, as the reader knows it, of the base's file that a root lies in."""
        return self._base_file(root.place, self._where)

    def _fetch(self, root: Root, width: int, target: memoryview) -> None:
        read_root(self._reader, self.root_file(root), root, width, target)

    def _records(self, first: int, end: int) -> memoryview:
        return memoryview(self.index.table)[first * RECORD.size : end * RECORD.size]

    def _runs(self, first: int, count: int) -> Sequence[Run]:
        """The runs among a tensor's chunks."""
        if not self._starts:
            return ()
        lo, hi = bisect_left(self._starts, first), bisect_left(self._starts, first + count)
        return self.index.runs[lo:hi]

    def _first_chunk(self, name: str) -> int:
        """The index of a tensor's first record in the chunk table."""
        if self._first is None:
            self._first = self._known_first.get(id(self.index.header))
        if self._first is None:
            self._first = first_chunks(self.index, self._where)
            if self.index.codec == "raw":
                self._known_first[id(self.index.header)] = self._first
        return self._first[name]


def read_root(reader: Reader, file: str, root: Root, width: int, target: memoryview) -> None:
    """Fill `target` with the raw bytes of a root that lies in a file of the reader's.

    Raises CorruptError naming the file where they are not what they were.
    """
    where = f"{reader.url}/{file}"
    end = root.place.offset + root.stored_bytes
    if not 0 < root.stored_bytes <= len(target):
        raise FormatError(f"{where}: a chunk of {len(target)} bytes has {root.stored_bytes} there")
    stored = reader.read(file, root.place.offset, root.stored_bytes)
    if xxhash.xxh3_128_digest(stored) != root.digest:
        raise CorruptError(
            f"{where}: bytes {root.place.offset}:{end} do not have the checksum "
            f"{root.digest.hex()} that a delta was taken from: they were changed since; restore "
            "the file from another copy"
        )
    if len(stored) == len(target):
        target[:] = stored
    else:
        from formats.native.codec import decompress

        decompress(stored, width, target, where)


def stored_in(index: ShardIndex, first: int, end: int) -> int:
    """The stored bytes of chunks `[first, end)`, here or in a base."""
    lo, hi = first * RECORD.size, end * RECORD.size
    return sum(stored for _, stored in RECORD.iter_unpack(index.table[lo:hi]))


def first_chunks(index: ShardIndex, where: str) -> dict[str, int]:
    """The number of chunks before each tensor, in a table whose length it must fit."""
    first, count = {}, 0
    records = len(index.table) // RECORD.size
    for number, entry in enumerate(index.header.entries.values()):
        first[entry.name] = count
        if entry.name in OWN_ENTRIES:
            continue
        if index.counts:
            count += index.counts[number]
            continue
        stored = entry.end - entry.begin
        if index.codec == "raw":
            count += -(-stored // index.chunk_bytes)
        else:
            while stored > 0 and count < records:
                stored -= RECORD.unpack_from(index.table, count * RECORD.size)[1]
                count += 1
    if count != records:
        raise FormatError(f"{where}: {count} chunks of data, {records} records in the chunk table")
    return first


class ChunkTable:
    """The chunks of one tensor in one file, unpacked as they are asked for."""

    __slots__ = (
        "_fetch",
        "_file",
        "_first",
        "_name",
        "_offset",
        "_raw_bytes",
        "_roots",
        "_starts",
        "_stored_bytes",
        "_table",
        "chunk_bytes",
        "compressed",
    )

    def __init__(
        self,
        index: ShardIndex,
        first: int,
        offset: int,
        stored_bytes: int,
        raw_bytes: int,
        file: str,
        name: str,
        fetch: Callable[[Root, int, memoryview], None],
    ) -> None:
        self._file = file
        self._roots = index.deltas
        self._fetch = fetch
        self._name = name
        self.chunk_bytes = index.chunk_bytes
        self.compressed = index.codec != "raw"
        self._table = index.table
        self._first = first
        self._offset = offset
        self._stored_bytes = stored_bytes
        self._raw_bytes = raw_bytes
        self._starts: list[int] | None = None

    def __len__(self) -> int:
        return -(-self._raw_bytes // self.chunk_bytes)

    def __getitem__(self, index: int) -> Chunk:
        digest, stored = RECORD.unpack_from(self._table, (self._first + index) * RECORD.size)
        at = index * self.chunk_bytes
        raw = min(self.chunk_bytes, self._raw_bytes - at)
        if self.compressed:
            at = self._stored_starts()[index]
        elif stored != raw:
            raise self._lie(index, stored, raw)
        if not 0 < stored <= raw:
            raise self._lie(index, stored, raw)
        return Chunk(self._offset + at, stored, raw, digest, stored < raw)

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """The first of the chunks whose stored bytes these are that is not what was written."""
        if self.compressed:
            return self._wrong_compressed(first, stored)
        table, digest, size = self._table, xxhash.xxh3_128_digest, self.chunk_bytes
        record = (self._first + first) * RECORD.size
        for at in range(0, len(stored), size):
            data = stored[at : at + size]
            if digest(data) + len(data).to_bytes(4, "little") != table[record : record + 20]:
                return first + at // size
            record += RECORD.size
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Fill `target` with the raw bytes of a chunk, as `Chunks.decode` says."""
        if len(stored) == len(target):
            target[:] = stored
            return
        from formats.native.codec import decompress, differ

        decompress(stored, width, target, self._where)
        root = self._roots.get(self._first + index)
        if root is not None:
            before = memoryview(bytearray(len(target)))
            self._fetch(root, width, before)
            differ(target, before, target)

    def _wrong_compressed(self, first: int, stored: memoryview) -> int | None:
        at = 0
        while at < len(stored):
            chunk = self[first]
            if xxhash.xxh3_128_digest(stored[at : at + chunk.stored_bytes]) != chunk.digest:
                return first
            at, first = at + chunk.stored_bytes, first + 1
        return None

    @property
    def _where(self) -> str:
        return f"{self._file}: {self._name}"

    def _lie(self, index: int, stored: int, raw: int) -> FormatError:
        return FormatError(
            f"{self._where}: chunk {index} of {raw} bytes is recorded with {stored} stored ones"
        )

    def check(self) -> None:
        """Raise FormatError unless compressed chunks are all there and fill their entry exactly."""
        starts = self._stored_starts()
        if len(starts) != len(self) + 1 or starts[-1] != self._stored_bytes:
            raise FormatError(
                f"{self._where}: its chunks take {starts[-1]} bytes, its entry has "
                f"{self._stored_bytes}"
            )

    def _stored_starts(self) -> list[int]:
        if self._starts is None:
            starts = [0]
            for index in range(len(self)):
                at = (self._first + index) * RECORD.size
                if at + RECORD.size > len(self._table):
                    break
                stored = RECORD.unpack_from(self._table, at)[1]
                starts.append(starts[-1] + min(stored, self.chunk_bytes))
            self._starts = starts
        return self._starts
