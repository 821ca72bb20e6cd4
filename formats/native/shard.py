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
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import xxhash

from formats.errors import CorruptError, FormatError
from formats.limits import check
from formats.native.borrowed import (
    BORROWED,
    COUNTS_KEY,
    DELTAS,
    Root,
    Run,
    unpack_deltas,
    unpack_runs,
)
from formats.native.manifest import ShardFile
from formats.outgoing import OutgoingTensor
from formats.safetensors.header import PREFIX_BYTES, Header, parse
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

    def named(self, name: str, rank: int) -> ShardFile:
        """Returns the manifest's entry of the file."""
        return ShardFile(name, rank, self.size, self.header_bytes, self.table_bytes, self.digest)


def chunk_bytes_of(codec: str) -> int:
    """Returns the raw bytes of a chunk."""
    return CHUNK_BYTES if codec == "raw" else COMPRESSED_CHUNK_BYTES


def stored_order(tensors: Sequence[OutgoingTensor]) -> list[OutgoingTensor]:
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
        raise CorruptError(
            f"{where}: the file is missing; the manifest says rank {file.rank} wrote it"
        ) from error
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
        or any(one.end != other.begin for one, other in pairwise(tail))
        or (entry.end - entry.begin) % RECORD.size
        or not re.fullmatch("[1-9][0-9]{0,9}", chunk_bytes)
        or int(chunk_bytes) % 16
    ):
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not at its place")
    check("chunk_bytes", int(chunk_bytes), where)
    codec = header.metadata.get("ckpt.codec", "")
    if codec not in ("raw", "zstd"):
        raise FormatError(f"{where}: unknown codec {codec[:80]!r}")
    parts = {one.name: table[one.begin - tail[0].begin :][: one.end - one.begin] for one in tail}
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
