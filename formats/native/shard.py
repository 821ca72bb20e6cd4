"""One shard file: the stored part of one rank, as a safetensors file with checksums.

    length | header | tensor data ... | chunk table

Rules (docs/format.md is normative):

1. The data of each tensor is cut into chunks of `chunk_bytes`; the last one is shorter. No chunk
   spans two tensors. A compressed tensor is a U8 entry with the stored bytes of its chunks.
2. The chunk table is the last entry, `__chunks__`, U8. It has a record of 20 bytes for each chunk,
   in the order of the data: the xxh3_128 of the stored bytes (16 bytes, big-endian) and their
   number (4 bytes, little-endian). A chunk with fewer stored than raw bytes is a zstd frame.
3. The manifest has the digest of header and table, so a checksum covers every byte of the file.
4. Entries lie in descending order of their element size, so that each is aligned to its elements.
5. An opened shard gives the bytes of each tensor from this file or from a base. The tensor's part
   of the chunk table compares the checksums of its chunks and decodes them.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import xxhash

from formats.catalog import Chunk, Extent, OutgoingTensor
from formats.errors import CorruptError, FormatError, GoneError
from formats.limits import check
from formats.native.borrowed import (
    BORROWED,
    COUNTS_KEY,
    DELTAS,
    Place,
    Root,
    Run,
    unpack_deltas,
    unpack_runs,
)
from formats.native.codec import decompress, differ
from formats.native.manifest import ShardFile
from formats.safetensors.file import PREFIX_BYTES, Entry, Header, parse
from formats.storage import Reader, read_again

CHUNK_BYTES = 64 << 10
"""Raw bytes of an uncompressed chunk: small, because a reader of a part reads and verifies the
whole chunk."""
COMPRESSED_CHUNK_BYTES = 1 << 20
"""Raw bytes of a compressed chunk: large enough for zstd to find matches."""
TABLE = "__chunks__"
RECORD = struct.Struct("<16sI")
ALIGN = 64
"""The data section begins at a multiple of so many bytes."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """The facts of a written file for the manifest."""

    size: int
    header_bytes: int
    table_bytes: int
    digest: str
    used: int = 0
    """A mask with a bit for the index of each base from which the file borrows."""
    borrowed_bytes: int = 0
    base_digest: str = ""
    """The digest of the base's manifest at that time; empty if the file borrows nothing."""
    nonfinite: int | None = None
    """How many of its numbers are NaN or infinite; None if nobody has counted."""

    def to_file(self, name: str, rank: int) -> ShardFile:
        """Returns the manifest's entry of the file."""
        return ShardFile(name, rank, self.size, self.header_bytes, self.table_bytes, self.digest)


def chunk_bytes_of(codec: str) -> int:
    return CHUNK_BYTES if codec == "raw" else COMPRESSED_CHUNK_BYTES


def sort_for_file(tensors: Sequence[OutgoingTensor]) -> list[OutgoingTensor]:
    """Returns tensors in their order in a file (rule 4): a stable sort by element size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def table_entry(chunks: int) -> tuple[str, str, tuple[int, ...], int]:
    """Returns the header's entry for a table of so many chunks."""
    return (TABLE, "U8", (chunks * RECORD.size,), chunks * RECORD.size)


def metadata_of(codec: str, counts: Sequence[int] = ()) -> dict[str, str]:
    """Returns the header's metadata; with the `counts` of chunks if some are borrowed or deltas."""
    common = {
        "format": "pt",
        "ckpt.chunk_bytes": str(chunk_bytes_of(codec)),
        "ckpt.codec": codec,
    }
    return {**common, COUNTS_KEY: ",".join(map(str, counts))} if counts else common


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The header of an opened shard file, and its chunk table as bytes."""

    header: Header
    table: bytes
    chunk_bytes: int
    codec: str
    runs: tuple[Run, ...] = ()
    """The runs of borrowed chunks."""
    counts: tuple[int, ...] = ()
    """The number of chunks of each entry; only if some are borrowed or deltas."""
    deltas: Mapping[int, Root] = field(default_factory=dict)
    """The roots of the chunks that are deltas."""


def open_shard(
    reader: Reader, file: ShardFile, known: dict[tuple[bytes, int], Header] | None = None
) -> ShardIndex:
    """Reads and verifies the header and the chunk table of a shard file, in two reads.

    `known` has parsed headers by their bytes and the sizes of their files: ranks with equal parts
    of all tensors have equal headers. A new header is added.

    Raises:
        CorruptError: the file is missing, or its size, header or table was changed.
        FormatError: the file is not a shard file.
        HostileError: a size is above its limit.
    """
    where = f"{reader.url}/{file.name}"
    size = file.size
    check("header_bytes", file.header_bytes - PREFIX_BYTES, where)
    check("table_bytes", file.table_bytes, where)
    try:
        table = reader.read_end(file.name, size, file.table_bytes)
    except FileNotFoundError as error:
        raise GoneError(where, file.rank) from error
    head = reader.read(file.name, 0, file.header_bytes)
    if _digest((head, table)) != file.digest:

        def ends() -> tuple[bytes, bytes]:
            end = reader.read_end(file.name, size, file.table_bytes)
            return reader.read(file.name, 0, file.header_bytes), end

        place = file.name, 0, size
        right = read_again(
            reader, place, (head, table), ends, lambda found: _digest(found) == file.digest
        )
        if right is None:
            raise CorruptError(
                f"{where}: its header (bytes 0:{file.header_bytes}) and chunk table (bytes "
                f"{size - file.table_bytes}:{size}) do not have the digest the manifest has for "
                "them: they were changed after they were written; restore the file from another "
                "copy"
            )
        head, table = right
    known = {} if known is None else known
    header = known.get((head, size))
    if header is None:
        header = known[head, size] = parse(head, where, size)
    entry = header.entries.get(TABLE)
    before = [header.entries[name] for name in (DELTAS, BORROWED) if name in header.entries]
    tail = [*before, entry] if entry is not None else []
    chunk_bytes = header.metadata.get("ckpt.chunk_bytes", "")
    if (
        header.data_offset != file.header_bytes
        or entry is None
        or entry.end - tail[0].begin != file.table_bytes
        or header.data_offset + entry.end != size
        or any(part.end != other.begin for part, other in pairwise(tail))
        or (entry.end - entry.begin) % RECORD.size
        or not re.fullmatch("[1-9][0-9]{0,9}", chunk_bytes)
        or int(chunk_bytes) % 16
    ):
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not at its place")
    check("chunk_bytes", int(chunk_bytes), where)
    codec = header.metadata.get("ckpt.codec", "")
    if codec not in ("raw", "zstd"):
        raise FormatError(f"{where}: unknown codec {codec[:80]!r}")
    parts = {
        part.name: table[part.begin - tail[0].begin :][: part.end - part.begin] for part in tail
    }
    chunks = parts[TABLE]
    index = ShardIndex(header, chunks, int(chunk_bytes), codec)
    if not before:
        return index
    records = len(chunks) // RECORD.size
    return replace(
        index,
        runs=unpack_runs(parts.get(BORROWED, b""), records, where),
        counts=_counts(header, records, len(tail), where),
        deltas=unpack_deltas(parts.get(DELTAS, b""), records, where),
    )


def _digest(ends: tuple[bytes, bytes]) -> str:
    """Returns the digest of a header and a chunk table."""
    hasher = xxhash.xxh3_128(ends[0])
    hasher.update(ends[1])
    return hasher.hexdigest()


def _counts(header: Header, records: int, tail: int, where: str) -> tuple[int, ...]:
    """Returns the number of chunks of each entry, by the metadata."""
    text = header.metadata.get(COUNTS_KEY, "")
    if not re.fullmatch(r"([0-9]{1,10}(,[0-9]{1,10})*)?", text):
        raise FormatError(f"{where}: {COUNTS_KEY} in its metadata is {text[:80]!r}, not numbers")
    counts = tuple(map(int, text.split(","))) if text else ()
    if len(counts) != len(header.entries) - tail or sum(counts) != records:
        raise FormatError(
            f"{where}: {COUNTS_KEY} has {len(counts)} numbers, {sum(counts)} in all, for "
            f"{len(header.entries) - tail} entries and {records} records"
        )
    return counts


OWN_ENTRIES = (DELTAS, BORROWED, TABLE)
"""Entries of a shard file that are not tensors."""


class Expected(NamedTuple):
    """A rank's part of a tensor by the manifest, which the file must have."""

    carrier: str
    shape: tuple[int, ...]
    """The shape in the file's header."""
    nbytes: int
    component_bytes: int


class Start(NamedTuple):
    """The start of a tensor's part in a file."""

    offset: int
    first: int
    """The index of its first chunk in the table."""
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a rank's part of a tensor that lies in one file."""

    begins: int
    """Its first decoded byte, counted in the rank's part."""
    extent: Extent
    first: int
    """The index of its first chunk in the chunk table of the rank's file."""
    table: memoryview
    """The records of its chunks."""

    def records(self) -> Iterator[bytes]:
        for at in range(0, len(self.table), RECORD.size):
            yield bytes(self.table[at : at + RECORD.size])


class Shard:
    """One opened shard file. Finds tensors and their chunks in this file and in bases."""

    def __init__(
        self,
        file: ShardFile,
        index: ShardIndex,
        reader: Reader,
        base_file: Callable[[Place, int, str], str],
        known_first: dict[int, dict[str, int]],
    ) -> None:
        self.file = file
        self.index = index
        self.where = f"{reader.url}/{file.name}"
        self._reader = reader
        self._base_file = base_file
        self._known_first = known_first
        self._first: dict[str, int] | None = None
        self._starts = [run.first for run in index.runs]

    def parts(self, name: str, expected: Expected) -> list[Part]:
        """Returns the parts of a tensor: one range, unless chunks are borrowed."""
        entry, first = self._entry(name), self._first_chunk(name)
        count = -(-expected.nbytes // self.index.chunk_bytes)
        runs = self._runs(first, count)
        if not runs:
            extent = self.extent(name, expected)
            return [Part(0, extent, first, self._records(first, first + count))]
        where = f"{self.where}: {name}"
        if entry.dtype != "U8":
            raise FormatError(f"{where} is borrowed and yet {entry.dtype}")
        return list(self._iter_parts(first, count, runs, entry, expected, where))

    def start(self, name: str, expected: Expected) -> Start:
        """Returns the start of a tensor's part that is not borrowed, and checks it.

        All uncompressed files with an equal header have the same start.
        """
        _, dtype, shape, begin, end = self._entry(name)
        compressed = self.index.codec != "raw"
        if not compressed and (dtype != expected.carrier or shape != expected.shape):
            raise FormatError(
                f"{self.where}: {name} is {dtype} {list(shape)} in the file, the manifest says "
                f"{expected.carrier} {list(expected.shape)}"
            )
        if compressed and dtype != "U8":
            raise FormatError(f"{self.where}: {name} is compressed and yet {dtype}")
        return Start(self.index.header.data_offset + begin, self._first_chunk(name), end - begin)

    def extent(self, name: str, expected: Expected, start: Start | None = None) -> Extent:
        """Returns the extent of a tensor's part, with this start if it is known."""
        offset, first, stored_bytes = start or self.start(name, expected)
        _, _, nbytes, width = expected
        chunks = ChunkTable(self, name, first, offset, stored_bytes, nbytes)
        if chunks.compressed:
            chunks.check()
        return Extent(self.file.name, offset, nbytes, chunks, width)

    def _entry(self, name: str) -> Entry:
        entry = self.index.header.entries.get(name)
        if entry is None or name in OWN_ENTRIES:
            raise CorruptError(
                f"{self.where}: {name} should be in this file and is not; restore the file from "
                "another copy"
            )
        return entry

    def _iter_parts(
        self,
        first: int,
        count: int,
        runs: Sequence[Run],
        entry: Entry,
        expected: Expected,
        where: str,
    ) -> Iterator[Part]:
        """Yields all parts of a tensor with borrowed chunks, in order."""
        chunk_bytes, at, own = self.index.chunk_bytes, first, 0
        offset, nbytes = self.index.header.data_offset + entry.begin, expected.nbytes
        for run in (*runs, None):
            upto = run.first if run is not None else first + count
            ranges = []
            if at < upto:
                stored = sum_stored(self.index, at, upto)
                ranges.append((at, upto, self.file.name, offset + own, stored))
                own += stored
            if run is not None:
                stored = sum_stored(self.index, run.first, run.end)
                file = self._base_file(run.place, stored, where)
                ranges.append((run.first, run.end, file, run.place.offset, stored))
                at = run.end
            for begin, end, file, there, stored in ranges:
                starts = (begin - first) * chunk_bytes
                raw = min((end - first) * chunk_bytes, nbytes) - starts
                chunks = ChunkTable(self, entry.name, begin, there, stored, raw)
                chunks.check()
                extent = Extent(file, there, raw, chunks, expected.component_bytes)
                yield Part(starts, extent, begin, self._records(begin, end))
        if own != entry.end - entry.begin:
            raise FormatError(
                f"{where}: its own chunks take {own} bytes, its entry has {entry.end - entry.begin}"
            )

    def root_file(self, root: Root) -> str:
        """Returns the reader's name of the base's file with a root."""
        return self._base_file(root.place, root.stored_bytes, self.where)

    def fetch(self, root: Root, width: int, target: memoryview) -> None:
        """Fills `target` with the raw bytes of a root. Raises as `read_root` does."""
        read_root(self._reader, self.root_file(root), root, width, target)

    def _records(self, first: int, end: int) -> memoryview:
        return memoryview(self.index.table)[first * RECORD.size : end * RECORD.size]

    def _runs(self, first: int, count: int) -> Sequence[Run]:
        """Returns the runs among a tensor's chunks."""
        if not self._starts:
            return ()
        lo, hi = bisect_left(self._starts, first), bisect_left(self._starts, first + count)
        return self.index.runs[lo:hi]

    def _first_chunk(self, name: str) -> int:
        """Returns the index of a tensor's first record in the chunk table."""
        if self._first is None:
            self._first = self._known_first.get(id(self.index.header))
        if self._first is None:
            self._first = first_chunks(self.index, self.where)
            if self.index.codec == "raw":
                self._known_first[id(self.index.header)] = self._first
        return self._first[name]


def sum_stored(index: ShardIndex, first: int, end: int) -> int:
    """Returns the stored bytes of chunks `[first, end)`, in this file or in a base."""
    lo, hi = first * RECORD.size, end * RECORD.size
    return sum(stored for _, stored in RECORD.iter_unpack(index.table[lo:hi]))


def first_chunks(index: ShardIndex, where: str) -> dict[str, int]:
    """Returns the number of chunks before each tensor, and checks it against the table's length."""
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


@dataclass(slots=True, eq=False)
class ChunkTable:
    """The chunks of one tensor in one file, unpacked on demand."""

    _shard: Shard
    _name: str
    _first: int
    _offset: int
    _stored_bytes: int
    _raw_bytes: int
    _starts: list[int] | None = None
    chunk_bytes: int = field(init=False)
    compressed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chunk_bytes = self._shard.index.chunk_bytes
        self.compressed = self._shard.index.codec != "raw"

    def __len__(self) -> int:
        return -(-self._raw_bytes // self.chunk_bytes)

    def __getitem__(self, index: int) -> Chunk:
        table, record = self._shard.index.table, (self._first + index) * RECORD.size
        digest, stored = RECORD.unpack_from(table, record)
        at = index * self.chunk_bytes
        raw = min(self.chunk_bytes, self._raw_bytes - at)
        if not 0 < stored <= raw or (stored < raw and not self.compressed):
            raise FormatError(
                f"{self._where}: chunk {index} of {raw} bytes is recorded with {stored} stored "
                "bytes"
            )
        if self.compressed:
            at = self._chunk_starts()[index]
        return Chunk(self._offset + at, stored, raw, digest, stored < raw)

    def wrong(self, first: int, stored: memoryview) -> int | None:
        """Returns the first chunk with another digest, as `Chunks.wrong` does."""
        if self.compressed:
            return self._wrong_compressed(first, stored)
        table, digest, size = self._shard.index.table, xxhash.xxh3_128_digest, self.chunk_bytes
        record = (self._first + first) * RECORD.size
        for at in range(0, len(stored), size):
            data = stored[at : at + size]
            if digest(data) + len(data).to_bytes(4, "little") != table[record : record + 20]:
                return first + at // size
            record += RECORD.size
        return None

    def decode(self, index: int, stored: memoryview, width: int, target: memoryview) -> None:
        """Fills `target` with the raw bytes of a chunk, as `Chunks.decode` does."""
        if len(stored) == len(target):
            target[:] = stored
            return
        decompress(stored, width, target, self._where)
        root = self._shard.index.deltas.get(self._first + index)
        if root is not None:
            before = memoryview(bytearray(len(target)))
            self._shard.fetch(root, width, before)
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
        return f"{self._shard.where}: {self._name}"

    def check(self) -> None:
        """Raises FormatError unless the compressed chunks fill their entry exactly."""
        starts = self._chunk_starts()
        if len(starts) != len(self) + 1 or starts[-1] != self._stored_bytes:
            raise FormatError(
                f"{self._where}: its chunks take {starts[-1]} bytes, its entry has "
                f"{self._stored_bytes}"
            )

    def _chunk_starts(self) -> list[int]:
        if self._starts is None:
            starts, table = [0], self._shard.index.table
            for index in range(len(self)):
                at = (self._first + index) * RECORD.size
                if at + RECORD.size > len(table):
                    break
                stored = RECORD.unpack_from(table, at)[1]
                starts.append(starts[-1] + min(stored, self.chunk_bytes))
            self._starts = starts
        return self._starts


def read_root(reader: Reader, file: str, root: Root, width: int, target: memoryview) -> None:
    """Fills `target` with the raw bytes of a root in a file of the reader.

    Raises:
        CorruptError: the stored bytes have another checksum.
        FormatError: the size of the root is not possible.
    """
    where = f"{reader.url}/{file}"
    end = root.place.offset + root.stored_bytes
    if not 0 < root.stored_bytes <= len(target):
        raise FormatError(
            f"{where}: a chunk of {len(target)} bytes has {root.stored_bytes} stored bytes"
        )
    stored = reader.read(file, root.place.offset, root.stored_bytes)
    if xxhash.xxh3_128_digest(stored) != root.digest:
        right = read_again(
            reader,
            (file, root.place.offset, end),
            stored,
            lambda: reader.read(file, root.place.offset, root.stored_bytes),
            lambda found: xxhash.xxh3_128_digest(found) == root.digest,
        )
        if right is None:
            raise CorruptError(
                f"{where}: bytes {root.place.offset}:{end} do not have the checksum "
                f"{root.digest.hex()} of a delta's root: they were changed since; restore the file "
                "from another copy"
            )
        stored = right
    if len(stored) == len(target):
        target[:] = stored
    else:
        decompress(stored, width, target, where)
