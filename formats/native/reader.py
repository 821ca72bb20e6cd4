"""A native checkpoint as a catalog: symbolic layouts from the manifest, offsets from the shards.

Opening reads the manifest only. A shard file's header and chunk table are read, once, when the
first piece in it is located; a reader that needs one rank's part opens one rank's file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod

from formats.catalog import Catalog, Chunk, Extent, FileRecord, StoredPiece, TensorRecord
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError
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
from sharding.layout import Box


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
    )


class Shards:
    """The shard files of one checkpoint, each opened at most once."""

    def __init__(self, reader: Reader, manifest: Manifest) -> None:
        self._reader = reader
        self.files = {file.rank: file for file in manifest.files}
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
                    shard = Shard(file, open_shard(self._reader, file), self._reader.url)
                    self._opened[rank] = shard
        return shard

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
        layout = self._stored.layout
        for rank in layout.holders(box):
            extent = self._extent(rank)
            for piece in layout.pieces(rank):
                if piece.box & box:
                    yield StoredPiece(piece, extent)

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self._stored.shape))

    def _extent(self, rank: int) -> Extent:
        layout, dtype = self._stored.layout, self._stored.dtype
        lo, hi = layout.span(rank)
        part = (hi - lo,) if hi - lo != prod(layout.local_shape(rank)) else layout.local_shape(rank)
        return self._shards.shard(rank, self._name).extent(self._name, dtype, part)


class Shard:
    """One opened shard file: finds tensors and their chunks in it."""

    def __init__(self, file: ShardFile, index: ShardIndex, url: str) -> None:
        self.file = file
        self.index = index
        self._where = f"{url}/{file.name}"
        self._first: dict[str, int] | None = None

    def extent(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Extent:
        """Where a tensor's part, which has this shape, lies in the file."""
        header = self.index.header
        entry = header.entries.get(name) if name != TABLE else None
        if entry is None:
            raise CorruptError(f"{self._where}: {name} should be in this file and is not")
        nbytes = dtype.nbytes(shape)
        if self.index.codec == "raw" and (
            entry.dtype != dtype.carrier or entry.shape != dtype.carrier_shape(shape)
        ):
            raise FormatError(
                f"{self._where}: {name} is {entry.dtype} {list(entry.shape)} in the file, the "
                f"manifest says {dtype.carrier} {list(dtype.carrier_shape(shape))}"
            )
        if self.index.codec == "zstd" and entry.dtype != "U8":
            raise FormatError(f"{self._where}: {name} is compressed and yet {entry.dtype}")
        offset = header.data_offset + entry.begin
        where = f"{self._where}: {name}"
        first = self._first_chunk(name)
        chunks = ChunkTable(self.index, first, offset, entry.end - entry.begin, nbytes, where)
        if self.index.codec == "zstd":
            chunks.check()
        return Extent(self.file.name, offset, nbytes, chunks, dtype.component_bytes)

    def _first_chunk(self, name: str) -> int:
        """The index of a tensor's first record in the chunk table."""
        if self._first is None:
            self._first = first_chunks(self.index, self._where)
        return self._first[name]


def first_chunks(index: ShardIndex, where: str) -> dict[str, int]:
    """The number of chunks before each tensor, in a table whose length it must fit."""
    first, count = {}, 0
    records = len(index.table) // RECORD.size
    for entry in index.header.entries.values():
        first[entry.name] = count
        if entry.name == TABLE:
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
