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

from formats.catalog import Catalog, Chunk, Extent, FileRecord, StoredPiece, TensorRecord
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError
from formats.native.borrowed import BORROWED, Run, beside
from formats.native.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardFile,
    StoredTensor,
    load,
)
from formats.native.shard import RECORD, TABLE, ShardIndex, open_shard
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
                    index = open_shard(self._reader, file)
                    shard = Shard(file, index, self._reader.url, self.base_file)
                    self._opened[rank] = shard
        return shard

    def base_file(self, run: Run, where: str) -> str:
        """The name, as this checkpoint's reader knows it, of the base's file a run lies in.

        Raises CorruptError where the file is gone or has another size.
        """
        place = run.place
        base = self._bases[place.base] if place.base < len(self._bases) else None
        file = base[1].get(place.rank) if base is not None else None
        if base is None or file is None:
            raise FormatError(
                f"{where}: chunks {run.first}:{run.end} lie in the file of rank {place.rank} of "
                f"base {place.base}, which the manifest does not list"
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
        return NativePieces(self, name, stored)


class NativePieces:
    """One tensor's pieces, worked out from its layout for the box that is asked for."""

    def __init__(self, shards: Shards, name: str, stored: StoredTensor) -> None:
        self._shards = shards
        self._name = name
        self._stored = stored

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The stored pieces that hold some of `box`."""
        layout, itemsize = self._stored.layout, self._stored.dtype.itemsize
        for rank in layout.holders(box):
            parts = self.parts(rank)
            for piece in layout.pieces(rank):
                if not piece.box & box:
                    continue
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

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self._stored.shape))

    def parts(self, rank: int) -> list[Part]:
        """Where the local storage of a rank lies."""
        layout, dtype = self._stored.layout, self._stored.dtype
        lo, hi = layout.span(rank)
        part = (hi - lo,) if hi - lo != prod(layout.local_shape(rank)) else layout.local_shape(rank)
        return self._shards.shard(rank, self._name).parts(self._name, dtype, part)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a rank's part of a tensor that lies in one file."""

    begins: int
    """Its first byte, decoded, in the rank's part."""
    extent: Extent
    table: memoryview
    """The records of its chunks."""

    def records(self) -> Iterator[bytes]:
        """The records one by one."""
        for at in range(0, len(self.table), RECORD.size):
            yield bytes(self.table[at : at + RECORD.size])


class Shard:
    """One opened shard file: finds tensors and their chunks in it, or where it borrowed them."""

    def __init__(
        self, file: ShardFile, index: ShardIndex, url: str, base_file: Callable[[Run, str], str]
    ) -> None:
        self.file = file
        self.index = index
        self._where = f"{url}/{file.name}"
        self._base_file = base_file
        self._first: dict[str, int] | None = None
        self._starts = [run.first for run in index.runs]

    def parts(self, name: str, dtype: DType, shape: tuple[int, ...]) -> list[Part]:
        """Where a tensor's part, which has this shape, lies: in one range unless it is borrowed."""
        header = self.index.header
        entry = header.entries.get(name) if name not in (TABLE, BORROWED) else None
        where = f"{self._where}: {name}"
        if entry is None:
            raise CorruptError(f"{where} should be in this file and is not")
        nbytes = dtype.nbytes(shape)
        first = self._first_chunk(name)
        count = -(-nbytes // self.index.chunk_bytes)
        runs = self._runs(first, count)
        if self.index.codec == "raw" and not runs:
            if entry.dtype != dtype.carrier or entry.shape != dtype.carrier_shape(shape):
                raise FormatError(
                    f"{where} is {entry.dtype} {list(entry.shape)} in the file, the manifest says "
                    f"{dtype.carrier} {list(dtype.carrier_shape(shape))}"
                )
        elif entry.dtype != "U8":
            raise FormatError(f"{where} is compressed or borrowed and yet {entry.dtype}")
        offset = header.data_offset + entry.begin
        stored_bytes = entry.end - entry.begin
        if not runs:
            chunks = ChunkTable(self.index, first, offset, stored_bytes, nbytes, where)
            if self.index.codec == "zstd":
                chunks.check()
            extent = Extent(self.file.name, offset, nbytes, chunks, dtype.component_bytes)
            return [Part(0, extent, self._records(first, first + count))]
        return list(self._pieced(first, count, runs, offset, stored_bytes, nbytes, dtype, where))

    def _pieced(
        self,
        first: int,
        count: int,
        runs: Sequence[Run],
        offset: int,
        stored_bytes: int,
        nbytes: int,
        dtype: DType,
        where: str,
    ) -> Iterator[Part]:
        """The parts of a tensor of which some chunks are borrowed, in order, all of it."""
        chunk_bytes, at, own = self.index.chunk_bytes, first, 0
        for run in (*runs, None):
            upto = run.first if run is not None else first + count
            ranges = [(at, upto, self.file.name, offset + own)] if at < upto else []
            if ranges:
                own += stored_in(self.index, at, upto)
            if run is not None:
                ranges.append((run.first, run.end, self._base_file(run, where), run.place.offset))
                at = run.end
            for begin, end, file, there in ranges:
                starts = (begin - first) * chunk_bytes
                raw = min((end - first) * chunk_bytes, nbytes) - starts
                stored = stored_in(self.index, begin, end)
                chunks = ChunkTable(self.index, begin, there, stored, raw, where)
                chunks.check()
                extent = Extent(file, there, raw, chunks, dtype.component_bytes)
                yield Part(starts, extent, self._records(begin, end))
        if own != stored_bytes:
            raise FormatError(
                f"{where}: its own chunks take {own} bytes, its entry has {stored_bytes}"
            )

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
            self._first = first_chunks(self.index, self._where)
        return self._first[name]


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
        if entry.name in (TABLE, BORROWED):
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

    def __init__(
        self,
        index: ShardIndex,
        first: int,
        offset: int,
        stored_bytes: int,
        raw_bytes: int,
        where: str,
    ) -> None:
        self._where = where
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
