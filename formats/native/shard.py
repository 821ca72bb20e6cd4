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

import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from formats.errors import CorruptError, FormatError
from formats.native.manifest import ShardFile
from formats.outgoing import OutgoingTensor
from formats.safetensors_header import Header, build, parse
from formats.storage import Buffer, FileWriter, Reader

if TYPE_CHECKING:
    from formats.native.codec import Effort

CHUNK_BYTES = 64 << 10
"""Raw bytes of a chunk that is stored as it is: small, because a reader that needs a part of a
chunk reads all of it to verify it."""
COMPRESSED_CHUNK_BYTES = 1 << 20
"""Raw bytes of a chunk that is compressed: large enough for zstd to find its matches."""
TABLE = "__chunks__"
RECORD = struct.Struct("<16sI")
WRITE_BYTES = 8 << 20
"""Bytes handed to the operating system at once."""
WRITE_BUFFERS = 512
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

    def named(self, name: str, rank: int) -> ShardFile:
        """The manifest's entry for it."""
        return ShardFile(name, rank, self.size, self.header_bytes, self.table_bytes, self.digest)


def stored_order(tensors: Sequence[OutgoingTensor]) -> list[OutgoingTensor]:
    """The order in which tensors lie in a file (rule 4): a stable sort by element size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def write_shard(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    compress: bool = False,
    progress: Progress | None = None,
) -> ShardSummary:
    """Stream the tensors into a shard file and return what the manifest needs of it.

    A compressed file must have been created `rewritable`: its header is filled in last.
    """
    ordered = stored_order(tensors)
    if compress:
        return _write_compressed(file, ordered, progress)
    sizes = [tensor.nbytes for tensor in ordered]
    entries = [
        (t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), nbytes)
        for t, nbytes in zip(ordered, sizes, strict=True)
    ]
    entries.append(_table_entry(sum(-(-nbytes // CHUNK_BYTES) for nbytes in sizes)))
    header, _ = build(entries, _metadata(CHUNK_BYTES), align=ALIGN)
    records: list[bytes] = []
    digest, pack = xxhash.xxh3_128_digest, RECORD.pack
    with _Gather(file) as out:
        out.add(header)
        for tensor, nbytes in zip(ordered, sizes, strict=True):
            for chunk, ends_block in _chunks(tensor, nbytes, CHUNK_BYTES):
                records.append(pack(digest(chunk), len(chunk)))
                out.add(chunk)
                if ends_block and not tensor.stable:
                    out.flush()
            if progress is not None:
                progress(nbytes)
        return _finish(out, header, records)


def _write_compressed(
    file: FileWriter, tensors: Sequence[OutgoingTensor], progress: Progress | None
) -> ShardSummary:
    from formats.native.codec import Effort, compress

    chunk_counts = sum(-(-tensor.nbytes // COMPRESSED_CHUNK_BYTES) for tensor in tensors)
    table = _table_entry(chunk_counts)
    metadata = _metadata(COMPRESSED_CHUNK_BYTES, "zstd")
    # No entry becomes larger than it is raw, so this header has room for the final one.
    largest = [(t.name, "U8", (t.nbytes,), t.nbytes) for t in tensors]
    reserved, _ = build([*largest, table], metadata, align=ALIGN)
    records: list[bytes] = []
    entries = []

    def pack(raw: memoryview, width: int, try_it: bool) -> _Packed:
        frame = compress(raw, width) if try_it else None
        stored: Buffer = raw if frame is None else frame
        shrank = frame is not None if try_it else None
        return _Packed(RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored)), stored, shrank)

    workers = min(4, os.cpu_count() or 1)
    with _Gather(file) as out, ThreadPoolExecutor(workers, "ckpt-compress") as pool:
        out.add(reserved)
        for tensor in tensors:
            stored_bytes = 0
            effort = Effort()
            pending: deque[Future[_Packed]] = deque()
            for chunk, ends_block in _chunks(tensor, tensor.nbytes, COMPRESSED_CHUNK_BYTES):
                # By the chunks taken so far, not by those that happen to be done.
                width, try_it = tensor.dtype.component_bytes, effort.tries_next()
                pending.append(pool.submit(pack, chunk, width, try_it))
                # What is not stable must be gone before the next block is asked for.
                room = 0 if ends_block and not tensor.stable else 2 * workers
                while len(pending) > room:
                    stored_bytes += _take(pending, records, out, effort)
                if room == 0:
                    out.flush()
            while pending:
                stored_bytes += _take(pending, records, out, effort)
            out.flush()
            entries.append((tensor.name, "U8", (stored_bytes,), stored_bytes))
            if progress is not None:
                progress(tensor.nbytes)
        header, _ = build([*entries, table], metadata, align=ALIGN, reserve_bytes=len(reserved))
        summary = _finish(out, header, records)
    file.rewrite_start(header)
    return summary


@dataclass(frozen=True, slots=True)
class _Packed:
    """One chunk, ready to be written."""

    record: bytes
    stored: Buffer
    shrank: bool | None
    """None where compressing it was not tried."""


def _take(
    pending: deque[Future[_Packed]], records: list[bytes], out: _Gather, effort: Effort
) -> int:
    packed = pending.popleft().result()
    if packed.shrank is not None:
        effort.note(packed.shrank)
    records.append(packed.record)
    out.add(packed.stored)
    return len(packed.stored)


def _finish(out: _Gather, header: bytes, records: list[bytes]) -> ShardSummary:
    table = b"".join(records)
    out.add(table)
    out.flush()
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    return ShardSummary(out.total, len(header), len(table), hasher.hexdigest())


def _table_entry(chunks: int) -> tuple[str, str, tuple[int, ...], int]:
    return (TABLE, "U8", (chunks * RECORD.size,), chunks * RECORD.size)


def _metadata(chunk_bytes: int, codec: str = "raw") -> dict[str, str]:
    return {"format": "pt", "ckpt.chunk_bytes": str(chunk_bytes), "ckpt.codec": codec}


def _chunks(
    tensor: OutgoingTensor, nbytes: int, chunk_bytes: int
) -> Iterator[tuple[memoryview, bool]]:
    """The chunks of a stream, each with whether its block ends with it.

    A chunk that lies in one block is a view of it, one that spans blocks a copy. Raises FormatError
    when the stream is not as long as the tensor.
    """
    total, held = 0, bytearray()
    for block in tensor.blocks():
        total += len(block)
        start = 0
        if held:
            start = min(len(block), chunk_bytes - len(held))
            held += block[:start]
            if len(held) < chunk_bytes:
                continue
            yield memoryview(held), start == len(block)
            held = bytearray()
        whole = start + (len(block) - start) // chunk_bytes * chunk_bytes
        is_last = total == nbytes
        stop = len(block) if is_last else whole
        for at in range(start, stop, chunk_bytes):
            end = min(at + chunk_bytes, stop)
            yield block[at:end], end == stop
        if not is_last:
            held += block[whole:]
    if total != nbytes:
        raise FormatError(
            f"{tensor.name}: its stream has {total} bytes, its shape and dtype {nbytes}"
        )
    if held:
        yield memoryview(held), True


class _Gather:
    """Collects buffers so that many small ones go to the file in one call.

    A full batch is written by a thread of its own while the caller prepares the next one: hashing
    and writing both let go of the GIL. What fits into one batch needs no thread.
    """

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self.total = 0

    def __enter__(self) -> _Gather:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def add(self, buffer: Buffer) -> None:
        """Append a buffer, which has to stay as it is until the next `flush` returns."""
        self._waiting.append(buffer)
        self._waiting_bytes += len(buffer)
        if self._waiting_bytes >= WRITE_BYTES or len(self._waiting) >= WRITE_BUFFERS:
            self._finish_write()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "ckpt-write")
            self._writing = self._thread.submit(self._file.write, self._take_batch())

    def flush(self) -> None:
        """Everything added is written when this returns."""
        self._finish_write()
        if self._waiting:
            self._file.write(self._take_batch())

    def _take_batch(self) -> list[Buffer]:
        batch, self._waiting = self._waiting, []
        self.total += self._waiting_bytes
        self._waiting_bytes = 0
        return batch

    def _finish_write(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An opened shard file: its header, and its chunk table still packed."""

    header: Header
    table: bytes
    chunk_bytes: int
    codec: str


def open_shard(reader: Reader, file: ShardFile) -> ShardIndex:
    """Read and verify the header and the chunk table of a shard file, in two reads.

    Raises CorruptError naming the file when its size or a bit of either is not what was written.
    """
    where = f"{reader.url}/{file.name}"
    try:
        size = reader.size(file.name)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{where}: the file is missing; the manifest says rank {file.rank} wrote it"
        ) from error
    if size != file.size:
        raise CorruptError(
            f"{where}: the file has {size} bytes, {file.size} were written: it was "
            f"{'truncated' if size < file.size else 'appended to'}; restore it from another copy"
        )
    head = reader.read(file.name, 0, file.header_bytes)
    table = reader.read(file.name, size - file.table_bytes, file.table_bytes)
    hasher = xxhash.xxh3_128(head)
    hasher.update(table)
    if hasher.hexdigest() != file.digest:
        raise CorruptError(
            f"{where}: its header (bytes 0:{file.header_bytes}) and chunk table (bytes "
            f"{size - file.table_bytes}:{size}) do not have the digest the manifest has for them: "
            "they were changed after they were written; restore the file from another copy"
        )
    header = parse(head, where, size)
    entry = header.entries.get(TABLE)
    chunk_bytes = header.metadata.get("ckpt.chunk_bytes", "")
    if (
        header.data_offset != file.header_bytes
        or entry is None
        or entry.end - entry.begin != file.table_bytes
        or header.data_offset + entry.end != size
        or file.table_bytes % RECORD.size
        or not re.fullmatch("[1-9][0-9]{0,9}", chunk_bytes)
        or int(chunk_bytes) >= 1 << 31
        or int(chunk_bytes) % 16
    ):
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not where it belongs")
    codec = header.metadata.get("ckpt.codec", "")
    if codec not in ("raw", "zstd"):
        raise FormatError(f"{where}: unknown codec {codec[:80]!r}")
    return ShardIndex(header, table, int(chunk_bytes), codec)
