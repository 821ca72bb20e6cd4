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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import xxhash

from formats.errors import CorruptError, FormatError
from formats.native.borrowed import (
    BORROWED,
    COUNTS_KEY,
    DELTA,
    DELTAS,
    RUN,
    Lent,
    LentChunks,
    Root,
    Run,
    Runs,
    pack_deltas,
    unpack_deltas,
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
BOTH_EVERY = 16
"""One chunk in this many is compressed both by itself and as a delta, to see which pays."""
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
    deltas: bool = False,
    overlap: bool = True,
) -> ShardSummary:
    """Stream the tensors into a shard file and return what the manifest needs of it.

    With `compress` or `lent` the file must have been created `rewritable`: its header is filled in
    last. A chunk that is the same in `lent` is borrowed from there; with `deltas`, which go with
    `compress`, one that is not may be stored by what it differs in. `overlap` is for a writer that
    has a second core: one thread hashes while another writes.
    """
    ordered = stored_order(tensors)
    codec = "zstd" if compress else "raw"
    if lent is not None and (lent.codec, lent.chunk_bytes) != (codec, chunk_bytes_of(codec)):
        lent = None  # cut or encoded otherwise, no chunk of it is one of these
    if compress or lent is not None:
        return _write_as_it_comes(file, ordered, codec, lent, deltas and compress, progress)
    sizes = [tensor.nbytes for tensor in ordered]
    entries = [
        (t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), nbytes)
        for t, nbytes in zip(ordered, sizes, strict=True)
    ]
    entries.append(_table_entry(sum(-(-nbytes // CHUNK_BYTES) for nbytes in sizes)))
    header, _ = build(entries, _metadata("raw"), align=ALIGN)
    records: list[bytes] = []
    with _Gather(file, overlap) as out:
        out.add(header)
        for tensor, nbytes in zip(ordered, sizes, strict=True):
            for run, ends_block in _chunks(tensor, nbytes, CHUNK_BYTES, WRITE_BYTES):
                records += _records(run)
                out.add(run)
                if ends_block and not tensor.stable:
                    out.flush()
            if progress is not None:
                progress(nbytes)
        return _finish(out, header, b"", records)


def _records(run: memoryview) -> list[bytes]:
    """The table's records for the chunks of a run, which begins with a chunk and is stored raw."""
    digest, size = xxhash.xxh3_128_digest, len(run)
    if size <= CHUNK_BYTES:
        return [RECORD.pack(digest(run), size)]
    pack = RECORD.pack
    whole = size - size % CHUNK_BYTES
    found = [
        pack(digest(run[at : at + CHUNK_BYTES]), CHUNK_BYTES) for at in range(0, whole, CHUNK_BYTES)
    ]
    if whole < size:
        found.append(pack(digest(run[whole:]), size - whole))
    return found


def _write_as_it_comes(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    codec: str,
    lent: Lent | None,
    deltas: bool,
    progress: Progress | None,
) -> ShardSummary:
    """Write a file whose entries get their sizes on the way: compressed, or partly borrowed."""
    reserved = _reserved_header(tensors, codec)
    workers = min(4, os.cpu_count() or 1)
    with _Gather(file) as out, ThreadPoolExecutor(workers, "ckpt-compress") as pool:
        out.add(reserved)
        body = _Body(out, codec)
        for tensor in tensors:
            known = lent.tensors.get(tensor.name) if lent is not None else None
            body.begin(known)
            roots = (
                _Roots(lent, known) if lent is not None and known is not None and deltas else None
            )
            for packed, ends_block in _packed(tensor, codec, roots, pool, 2 * workers):
                body.add(packed)
                if ends_block and not tensor.stable:
                    out.flush()  # it must be gone before the next block is asked for
            body.end(tensor)
            if progress is not None:
                progress(tensor.nbytes)
        header, tables = body.header(len(reserved))
        summary = _finish(out, header, tables, body.records)
    file.rewrite_start(header)
    if lent is None or not body.used:
        return summary
    nbytes = body.borrowed_bytes
    return replace(summary, used=body.used, borrowed_bytes=nbytes, base_mark=lent.mark)


def _packed(
    tensor: OutgoingTensor, codec: str, roots: _Roots | None, pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[_Packed, bool]]:
    """A tensor's chunks as they are stored, in order, each with whether a block ends with it."""
    chunks = _chunks(tensor, tensor.nbytes, chunk_bytes_of(codec))
    if codec == "raw":
        for chunk, ends_block in chunks:
            yield _Packed(_record(chunk), chunk), ends_block
        return
    from formats.native.codec import Effort

    effort = Effort()
    pending: deque[Future[_Packed]] = deque()

    def take(ends_block: bool) -> tuple[_Packed, bool]:
        packed = pending.popleft().result()
        if packed.shrank is not None:
            effort.note(packed.shrank)
        if roots is not None:
            roots.note(packed)
        return packed, ends_block and not pending

    for number, (chunk, ends_block) in enumerate(chunks):
        # By the chunks taken so far, not by those that happen to be done.
        width, try_it = tensor.dtype.component_bytes, effort.tries_next()
        delta = roots.of(number) if roots is not None else None
        pending.append(pool.submit(_pack, chunk, width, try_it, delta))
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
    shrank: bool | None = None
    """None where compressing it was not tried."""
    root: Root | None = None
    """What it is a delta from."""
    same: bool = False
    """It is what the base has."""
    tried: bool = False
    """Both ways were tried: `root` says which was better."""


@dataclass(frozen=True, slots=True)
class _Delta:
    """How one chunk may become a delta."""

    root: Root
    fetch: Callable[[Root, int, memoryview], None]
    try_both: bool
    """Whether to compress the chunk itself too, and keep the smaller."""
    lends: bool
    """Whether the root is the base's chunk itself, to be borrowed where nothing differs."""


class _Roots:
    """Which chunks of one tensor to take deltas of, by how it went with those before."""

    def __init__(self, lent: Lent, known: LentChunks) -> None:
        self._fetch = lent.fetch
        self._known = known
        self._wins: bool | None = None

    def of(self, number: int) -> _Delta | None:
        """What to try for a chunk; the first ones and one in `BOTH_EVERY` are tried both ways."""
        root, both = self._known.roots[number], self._wins is None or number % BOTH_EVERY == 0
        if root is None or not (self._wins or both):
            return None
        return _Delta(root, self._fetch, both, bool(self._known.records[number]))

    def note(self, packed: _Packed) -> None:
        """How a chunk went."""
        if packed.tried:
            self._wins = packed.root is not None


def _pack(raw: memoryview, width: int, try_it: bool, delta: _Delta | None) -> _Packed:
    from formats.native.codec import compress, differ

    if delta is not None:
        root = memoryview(bytearray(len(raw)))
        delta.fetch(delta.root, width, root)
        if delta.lends and raw == root:
            return _Packed(b"", b"", same=True)
        differ(raw, root, root)
        frame = compress(root, width)
        itself = compress(raw, width) if delta.try_both or frame is None else None
        shorter = frame is not None and (itself is None or len(frame) < len(itself))
        if frame is not None and shorter:
            return _Packed(_record(frame), frame, root=delta.root, tried=delta.try_both)
        stored: Buffer = raw if itself is None else itself
        return _Packed(_record(stored), stored, itself is not None, tried=delta.try_both)
    frame = compress(raw, width) if try_it else None
    stored = raw if frame is None else frame
    return _Packed(_record(stored), stored, frame is not None if try_it else None)


def _record(stored: Buffer) -> bytes:
    return RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored))


def _reserved_header(tensors: Sequence[OutgoingTensor], codec: str) -> bytes:
    """Blanks in the place of a header, at least as long as the final one can be."""
    chunks = [-(-tensor.nbytes // chunk_bytes_of(codec)) for tensor in tensors]
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in tensors]
    sizes = ((DELTAS, DELTA.size), (BORROWED, RUN.size), (TABLE, RECORD.size))
    tail = [(name, sum(chunks) * size) for name, size in sizes]
    entries += [(name, "U8", (nbytes,), nbytes) for name, nbytes in tail]
    longest, _ = build(entries, _metadata(codec, chunks))
    # An entry that becomes U8 of one dimension may have a digit or two more than its shape has.
    length = len(longest) + SPARE_BYTES * len(tensors)
    return bytes(length + -length % ALIGN)


class _Body:
    """The data of a file in the making, for a header that is made when it is complete."""

    def __init__(self, out: _Gather, codec: str) -> None:
        self.records: list[bytes] = []
        self.borrowed_bytes = 0
        self._runs = Runs()
        self._roots: dict[int, Root] = {}
        self._out = out
        self._codec = codec
        self._known: LentChunks | None = None
        self._entries: list[tuple[str, str, tuple[int, ...], int]] = []
        self._counts: list[int] = []
        self._first = self._stored = 0
        self._borrows = False

    def begin(self, known: LentChunks | None) -> None:
        """The chunks that come now are those of one tensor, of which the base has these."""
        self._known = known
        self._first, self._stored, self._borrows = len(self.records), 0, False

    def add(self, packed: _Packed) -> None:
        """One chunk: written, or borrowed where the base has the same in the same place."""
        chunk, known = len(self.records), self._known
        at = chunk - self._first
        if (
            known is not None
            and known.records[at]
            and (packed.same or known.records[at] == packed.record)
        ):
            record = known.records[at]
            _, stored_bytes = RECORD.unpack(record)
            self._runs.add(chunk, known.places[at], stored_bytes, starts=at == 0)
            self.borrowed_bytes += stored_bytes
            self._borrows = True
            self.records.append(record)
            return
        if packed.root is not None:
            self._roots[chunk] = packed.root
        self.records.append(packed.record)
        self._out.add(packed.stored)
        self._stored += len(packed.stored)

    @property
    def used(self) -> int:
        """A bit for the number of every base that something is borrowed from, or a delta from."""
        bases = {run.place.base for run in self._runs.found}
        bases |= {root.place.base for root in self._roots.values()}
        return sum(1 << base for base in bases)

    def end(self, tensor: OutgoingTensor) -> None:
        """The tensor is complete."""
        self._counts.append(len(self.records) - self._first)
        if self._borrows or self._codec != "raw":
            self._entries.append((tensor.name, "U8", (self._stored,), self._stored))
        else:
            shape = tensor.dtype.carrier_shape(tensor.shape)
            self._entries.append((tensor.name, tensor.dtype.carrier, shape, self._stored))

    def header(self, reserved: int) -> tuple[bytes, bytes]:
        """The header, as long as what was reserved, and what goes before the chunk table."""
        before = {DELTAS: pack_deltas(self._roots), BORROWED: self._runs.pack()}
        before = {name: data for name, data in before.items() if data}
        entries = [*self._entries]
        entries += [(name, "U8", (len(data),), len(data)) for name, data in before.items()]
        entries.append(_table_entry(len(self.records)))
        metadata = _metadata(self._codec, self._counts if before else ())
        header, _ = build(entries, metadata, align=ALIGN, reserve_bytes=reserved)
        return header, b"".join(before.values())


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
    tensor: OutgoingTensor, nbytes: int, chunk_bytes: int, run_bytes: int = 0
) -> Iterator[tuple[memoryview, bool]]:
    """The chunks of a stream, each with whether its block ends with it.

    A chunk that lies in one block is a view of it, one that spans blocks a copy. With `run_bytes`,
    whole chunks, as many of one block come in one piece as that holds. Raises FormatError when the
    stream is not as long as the tensor.
    """
    step = run_bytes or chunk_bytes
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
        for at in range(start, stop, step):
            end = min(at + step, stop)
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

    With `overlap`, a full batch is written by a thread of its own while the caller prepares the
    next one: hashing and writing both let go of the GIL. What fits into one batch needs no thread.
    """

    def __init__(self, file: FileWriter, overlap: bool = True) -> None:
        self._file = file
        self._overlap = overlap
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
            if not self._overlap:
                self._file.write(self._take_batch())
                return
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
        or int(chunk_bytes) >= 1 << 31
        or int(chunk_bytes) % 16
    ):
        raise FormatError(f"{where}: not a ckpt shard: its chunk table is not where it belongs")
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
