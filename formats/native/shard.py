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
from dataclasses import dataclass, replace

import xxhash

from formats.errors import CorruptError, FormatError
from formats.native.borrowed import (
    BORROWED,
    COUNTS_KEY,
    RUN,
    Lent,
    LentChunks,
    Run,
    Runs,
    unpack_runs,
)
from formats.native.manifest import ShardFile
from formats.outgoing import OutgoingTensor
from formats.safetensors_header import Header, build, parse
from formats.storage import Buffer, FileWriter, Reader

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
SPARE_BYTES = 24
"""Of an entry's room in a header that is reserved before its size is known."""
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


def write_shard(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    compress: bool = False,
    progress: Progress | None = None,
    lent: Lent | None = None,
) -> ShardSummary:
    """Stream the tensors into a shard file and return what the manifest needs of it.

    With `compress` or `lent` the file must have been created `rewritable`: its header is filled in
    last. A chunk that is the same in `lent` is borrowed from there.
    """
    ordered = stored_order(tensors)
    codec = "zstd" if compress else "raw"
    if lent is not None and (lent.codec, lent.chunk_bytes) != (codec, chunk_bytes_of(codec)):
        lent = None  # cut or encoded otherwise, no chunk of it is one of these
    if compress or lent is not None:
        return _write_as_it_comes(file, ordered, codec, lent, progress)
    sizes = [tensor.nbytes for tensor in ordered]
    entries = [
        (t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), nbytes)
        for t, nbytes in zip(ordered, sizes, strict=True)
    ]
    entries.append(_table_entry(sum(-(-nbytes // CHUNK_BYTES) for nbytes in sizes)))
    header, _ = build(entries, _metadata("raw"), align=ALIGN)
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
        return _finish(out, header, b"", records)


def _write_as_it_comes(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    codec: str,
    lent: Lent | None,
    progress: Progress | None,
) -> ShardSummary:
    """Write a file whose entries get their sizes on the way: compressed, or partly borrowed."""
    reserved = _reserved_header(tensors, codec)
    workers = min(4, os.cpu_count() or 1)
    with _Gather(file) as out, ThreadPoolExecutor(workers, "ckpt-compress") as pool:
        out.add(reserved)
        body = _Body(out, codec, lent)
        for tensor in tensors:
            body.begin(tensor.name)
            packed = _packed(tensor, codec, pool, 2 * workers)
            for record, stored, ends_block in packed:
                body.add(record, stored)
                if ends_block and not tensor.stable:
                    out.flush()  # it must be gone before the next block is asked for
            body.end(tensor)
            if progress is not None:
                progress(tensor.nbytes)
        header, runs = body.header(len(reserved))
        summary = _finish(out, header, runs, body.records)
    file.rewrite_start(header)
    if lent is None or not body.runs.found:
        return summary
    used, nbytes = body.runs.used, body.borrowed_bytes
    return replace(summary, used=used, borrowed_bytes=nbytes, base_mark=lent.mark)


def _packed(
    tensor: OutgoingTensor, codec: str, pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[bytes, Buffer, bool]]:
    """A tensor's chunks as they are stored, in order: record, bytes, whether a block ends here."""
    chunks = _chunks(tensor, tensor.nbytes, chunk_bytes_of(codec))
    if codec == "raw":
        for chunk, ends_block in chunks:
            yield _record(chunk), chunk, ends_block
        return
    from formats.native.codec import Effort

    effort = Effort()
    pending: deque[Future[_Packed]] = deque()

    def take(ends_block: bool) -> tuple[bytes, Buffer, bool]:
        packed = pending.popleft().result()
        if packed.shrank is not None:
            effort.note(packed.shrank)
        return packed.record, packed.stored, ends_block and not pending

    for chunk, ends_block in chunks:
        # By the chunks taken so far, not by those that happen to be done.
        width, try_it = tensor.dtype.component_bytes, effort.tries_next()
        pending.append(pool.submit(_pack, chunk, width, try_it))
        room = 0 if ends_block and not tensor.stable else ahead
        while len(pending) > room:
            yield take(ends_block)
    while pending:
        yield take(ends_block=True)


@dataclass(frozen=True, slots=True)
class _Packed:
    """One chunk, ready to be written."""

    record: bytes
    stored: Buffer
    shrank: bool | None
    """None where compressing it was not tried."""


def _pack(raw: memoryview, width: int, try_it: bool) -> _Packed:
    from formats.native.codec import compress

    frame = compress(raw, width) if try_it else None
    stored: Buffer = raw if frame is None else frame
    return _Packed(_record(stored), stored, frame is not None if try_it else None)


def _record(stored: Buffer) -> bytes:
    return RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored))


def _reserved_header(tensors: Sequence[OutgoingTensor], codec: str) -> bytes:
    """Blanks in the place of a header, at least as long as the final one can be."""
    chunks = [-(-tensor.nbytes // chunk_bytes_of(codec)) for tensor in tensors]
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in tensors]
    tail = [(BORROWED, sum(chunks) * RUN.size), (TABLE, sum(chunks) * RECORD.size)]
    entries += [(name, "U8", (nbytes,), nbytes) for name, nbytes in tail]
    longest, _ = build(entries, _metadata(codec, chunks))
    # An entry that becomes U8 of one dimension may have a digit or two more than its shape has.
    length = len(longest) + SPARE_BYTES * len(tensors)
    return bytes(length + -length % ALIGN)


class _Body:
    """The data of a file in the making, for a header that is made when it is complete."""

    def __init__(self, out: _Gather, codec: str, lent: Lent | None) -> None:
        self.records: list[bytes] = []
        self.runs = Runs()
        self.borrowed_bytes = 0
        self._out = out
        self._codec = codec
        self._lent = lent
        self._known: LentChunks | None = None
        self._entries: list[tuple[str, str, tuple[int, ...], int]] = []
        self._counts: list[int] = []
        self._first = self._stored = 0
        self._borrows = False

    def begin(self, name: str) -> None:
        """The chunks that come now are this tensor's."""
        self._known = self._lent.tensors.get(name) if self._lent is not None else None
        self._first, self._stored, self._borrows = len(self.records), 0, False

    def add(self, record: bytes, stored: Buffer) -> None:
        """One chunk: written, or borrowed where the base has the same in the same place."""
        chunk, known = len(self.records), self._known
        at = chunk - self._first
        self.records.append(record)
        if known is not None and known.records[at] == record:
            self.runs.add(chunk, known.places[at], len(stored), starts=at == 0)
            self.borrowed_bytes += len(stored)
            self._borrows = True
        else:
            self._out.add(stored)
            self._stored += len(stored)

    def end(self, tensor: OutgoingTensor) -> None:
        """The tensor is complete."""
        self._counts.append(len(self.records) - self._first)
        if self._borrows or self._codec != "raw":
            self._entries.append((tensor.name, "U8", (self._stored,), self._stored))
        else:
            shape = tensor.dtype.carrier_shape(tensor.shape)
            self._entries.append((tensor.name, tensor.dtype.carrier, shape, self._stored))

    def header(self, reserved: int) -> tuple[bytes, bytes]:
        """The header, as long as what was reserved, and the runs that go before the chunk table."""
        tail = [(TABLE, len(self.records) * RECORD.size)]
        runs = self.runs.pack()
        if runs:
            tail.insert(0, (BORROWED, len(runs)))
        entries = self._entries + [(name, "U8", (nbytes,), nbytes) for name, nbytes in tail]
        metadata = _metadata(self._codec, self._counts if runs else ())
        header, _ = build(entries, metadata, align=ALIGN, reserve_bytes=reserved)
        return header, runs


def _finish(out: _Gather, header: bytes, runs: bytes, records: list[bytes]) -> ShardSummary:
    table = runs + b"".join(records)
    out.add(table)
    out.flush()
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    return ShardSummary(out.total, len(header), len(table), hasher.hexdigest())


def _table_entry(chunks: int) -> tuple[str, str, tuple[int, ...], int]:
    return (TABLE, "U8", (chunks * RECORD.size,), chunks * RECORD.size)


def _metadata(codec: str, counts: Sequence[int] = ()) -> dict[str, str]:
    common = {
        "format": "pt",
        "ckpt.chunk_bytes": str(chunk_bytes_of(codec)),
        "ckpt.codec": codec,
    }
    return {**common, COUNTS_KEY: ",".join(map(str, counts))} if counts else common


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
    runs: tuple[Run, ...] = ()
    """Where the chunks lie that this file borrows."""
    counts: tuple[int, ...] = ()
    """How many chunks each entry has; only where some are borrowed."""


def open_shard(
    reader: Reader, file: ShardFile, known: dict[tuple[bytes, int], Header] | None = None
) -> ShardIndex:
    """Read and verify the header and the chunk table of a shard file, in two reads.

    `known` has headers that were parsed, by their bytes and the sizes of their files: ranks that
    hold equally much of everything have the same. The new one is put there.

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
    known = {} if known is None else known
    header = known.get((head, size))
    if header is None:
        header = known[head, size] = parse(head, where, size)
    entry, borrowed = header.entries.get(TABLE), header.entries.get(BORROWED)
    runs_bytes = borrowed.end - borrowed.begin if borrowed is not None else 0
    chunk_bytes = header.metadata.get("ckpt.chunk_bytes", "")
    if (
        header.data_offset != file.header_bytes
        or entry is None
        or entry.end - entry.begin != file.table_bytes - runs_bytes
        or header.data_offset + entry.end != size
        or (borrowed is not None and borrowed.end != entry.begin)
        or (entry.end - entry.begin) % RECORD.size
        or not re.fullmatch("[1-9][0-9]{0,9}", chunk_bytes)
        or int(chunk_bytes) >= 1 << 31
        or int(chunk_bytes) % 16
    ):
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not where it belongs")
    codec = header.metadata.get("ckpt.codec", "")
    if codec not in ("raw", "zstd"):
        raise FormatError(f"{where}: unknown codec {codec[:80]!r}")
    chunks = table[runs_bytes:]
    if borrowed is None:
        return ShardIndex(header, chunks, int(chunk_bytes), codec)
    runs = unpack_runs(table[:runs_bytes], len(chunks) // RECORD.size, where)
    return ShardIndex(header, chunks, int(chunk_bytes), codec, runs, _counts(header, chunks, where))


def _counts(header: Header, table: bytes, where: str) -> tuple[int, ...]:
    """How many chunks each entry has, in a file that says so."""
    text = header.metadata.get(COUNTS_KEY, "")
    if not re.fullmatch(r"([0-9]{1,10}(,[0-9]{1,10})*)?", text):
        raise FormatError(f"{where}: {COUNTS_KEY} in its metadata is {text[:80]!r}, no numbers")
    counts = tuple(map(int, text.split(","))) if text else ()
    records = len(table) // RECORD.size
    if len(counts) != len(header.entries) - 2 or sum(counts) != records:
        raise FormatError(
            f"{where}: {COUNTS_KEY} has {len(counts)} numbers, {sum(counts)} in all, for "
            f"{len(header.entries) - 2} entries and {records} records"
        )
    return counts
