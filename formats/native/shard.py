"""One shard file: what one rank stores, as a safetensors file that verifies itself.

    length | header | tensor data ... | chunk table

Rules (docs/format.md is normative):

1. The data of every tensor is cut into chunks of `chunk_bytes`, the last one shorter; no chunk
   spans two tensors. Compressed, a tensor is a U8 entry that holds its chunks' stored bytes.
2. The chunk table is the last entry, `__chunks__`, U8: a record of 20 bytes per chunk, in the order
   of the data: xxh3_128 of the stored bytes (16, big-endian), their number (4, little-endian).
   A chunk is a zstd frame exactly when its number is less than its raw bytes.
3. The digest of header and table stands in the manifest; so every byte of the file is under one.
4. Entries lie in descending order of their element size, so that each is aligned to it.
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
from formats.safetensors_header import PREFIX_BYTES, Header, parse
from formats.storage import Reader

CHUNK_BYTES = 64 << 10
"""Raw bytes of a chunk that is stored as it is: small, because a reader that needs a part of a
chunk reads all of it to verify it."""
COMPRESSED_CHUNK_BYTES = 1 << 20
"""Raw bytes of a chunk that is compressed: large enough for zstd to find its matches."""
TABLE = "__chunks__"
RECORD = struct.Struct("<16sI")
ALIGN = 64
"""The data section begins at a multiple of this many bytes."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What the manifest says of a file that was written."""

    size: int
    header_bytes: int
    table_bytes: int
    digest: str
    used: int = 0
    """A bit for the number of every base that it borrows from."""
    borrowed_bytes: int = 0
    base_mark: str = ""
    """The digest of the base's manifest as it was then; empty where nothing is borrowed."""

    def named(self, name: str, rank: int) -> ShardFile:
        """The manifest's entry for it."""
        return ShardFile(name, rank, self.size, self.header_bytes, self.table_bytes, self.digest)


def chunk_bytes_of(codec: str) -> int:
    """Raw bytes of a chunk."""
    return CHUNK_BYTES if codec == "raw" else COMPRESSED_CHUNK_BYTES


def stored_order(tensors: Sequence[OutgoingTensor]) -> list[OutgoingTensor]:
    """The order in which tensors lie in a file (rule 4): a stable sort by element size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def table_entry(chunks: int) -> tuple[str, str, tuple[int, ...], int]:
    """The header's entry for the table of so many chunks."""
    return (TABLE, "U8", (chunks * RECORD.size,), chunks * RECORD.size)


def metadata_of(codec: str, counts: Sequence[int] = ()) -> dict[str, str]:
    """The header's metadata; `counts` of chunks only where some are borrowed or deltas."""
    common = {
        "format": "pt",
        "ckpt.chunk_bytes": str(chunk_bytes_of(codec)),
        "ckpt.codec": codec,
    }
    return {**common, COUNTS_KEY: ",".join(map(str, counts))} if counts else common


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An opened shard file: its header, and its chunk table still packed."""

    header: Header
    table: bytes
    chunk_bytes: int
    codec: str
    runs: tuple[Run, ...] = ()
    """Where the chunks lie that this file borrows."""
    counts: tuple[int, ...] = ()
    """How many chunks each entry has; only where some are borrowed or deltas."""
    deltas: Mapping[int, Root] = field(default_factory=dict)
    """The roots of the chunks that are deltas."""


def open_shard(
    reader: Reader, file: ShardFile, known: dict[tuple[bytes, int], Header] | None = None
) -> ShardIndex:
    """Read and verify the header and the chunk table of a shard file, in two reads.

    `known` has headers that were parsed, by their bytes and the sizes of their files: ranks that
    hold equally much of everything have the same. The new one is put there.

    Raises CorruptError naming the file when its size or a bit of either is not what was written.
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
    hasher = xxhash.xxh3_128(head)
    hasher.update(table)
    if hasher.hexdigest() != file.digest:
        raise CorruptError(
            f"{where}: its header (bytes 0:{file.header_bytes}) and chunk table (bytes "
            f"{size - file.table_bytes}:{size}) do not have the digest the manifest has for them: "
            "they were changed after they were written; restore the file from another copy"
        )
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
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not where it belongs")
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


def _counts(header: Header, records: int, tail: int, where: str) -> tuple[int, ...]:
    """How many chunks each entry has, in a file that says so."""
    text = header.metadata.get(COUNTS_KEY, "")
    if not re.fullmatch(r"([0-9]{1,10}(,[0-9]{1,10})*)?", text):
        raise FormatError(f"{where}: {COUNTS_KEY} in its metadata is {text[:80]!r}, no numbers")
    counts = tuple(map(int, text.split(","))) if text else ()
    if len(counts) != len(header.entries) - tail or sum(counts) != records:
        raise FormatError(
            f"{where}: {COUNTS_KEY} has {len(counts)} numbers, {sum(counts)} in all, for "
            f"{len(header.entries) - tail} entries and {records} records"
        )
    return counts
