"""Writes shard files: a tensor's blocks are cut into chunks, and buffers gathered into few writes.

A file of known sizes has its header first. A file that is compressed, or borrows chunks, has
unknown sizes: the writer reserves space for the header, streams the data behind it, and writes the
header last.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import xxhash

from formats.catalog import FilePlan, Late, OutgoingTensor, length_of
from formats.errors import FormatError
from formats.native.borrowed import (
    BORROWED,
    DELTA,
    DELTAS,
    RUN,
    Lent,
    LentChunks,
    Root,
    Runs,
    pack_deltas,
)
from formats.native.codec import Effort, compress, differ
from formats.native.shard import (
    ALIGN,
    OWN_ENTRIES,
    RECORD,
    TABLE,
    Progress,
    ShardSummary,
    chunk_bytes_of,
    metadata_of,
    sort_for_file,
    table_entry,
)
from formats.safetensors.file import build
from formats.storage import Buffer, FileWriter, Pool


def write_shard(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    compress: bool = False,
    progress: Progress | None = None,
    lent: Lent | None = None,
    deltas: bool = False,
    overlap: bool = True,
) -> ShardSummary:
    """Streams the tensors into a shard file. Returns its facts for the manifest.

    With `compress` or `lent` the file must be `rewritable`: its header is written last. A chunk
    that is equal in `lent` is borrowed. With `deltas` and `compress`, another chunk may be stored
    as a delta. With `overlap`, for a writer with a second core, one thread hashes while another
    writes.
    """
    ordered = sort_for_file(tensors)
    codec = "zstd" if compress else "raw"
    if lent is not None and (lent.codec, lent.chunk_bytes) != (codec, chunk_bytes_of(codec)):
        lent = None  # its chunks have another size or codec, so none can be borrowed
    if compress or lent is not None:
        return write_as_it_comes(file, ordered, codec, lent, deltas and compress, progress)
    chunk_bytes = chunk_bytes_of(codec)
    sizes = [tensor.nbytes for tensor in ordered]
    header, _ = raw_header(ordered)
    records: list[bytes] = []
    with Gather(file, overlap) as out:
        out.add(header)
        for tensor, nbytes in zip(ordered, sizes, strict=True):
            for run, ends_block in chunks_of(tensor, nbytes, chunk_bytes, WRITE_BYTES):
                records += records_of(run, chunk_bytes)
                out.add(run)
                if ends_block and not tensor.stable:
                    out.flush()
            if progress is not None:
                progress(nbytes)
        return finish(out, header, b"", records)


def plan_shard(name: str, tensors: Sequence[OutgoingTensor]) -> FilePlan:
    """Plans an uncompressed shard file, whose chunk table comes last."""
    ordered = sort_for_file(tensors)
    header, table_bytes = raw_header(ordered)
    table = Late(table_bytes, lambda records: records)
    return FilePlan(name, [header, *ordered, table], chunk_bytes_of("raw"))


def plan_summary(plan: FilePlan, table: bytes) -> ShardSummary:
    """Returns the facts of a planned file with this chunk table."""
    header = plan.parts[0]
    assert isinstance(header, bytes)
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    size = sum(map(length_of, plan.parts))
    return ShardSummary(size, len(header), len(table), hasher.hexdigest())


def raw_header(ordered: Sequence[OutgoingTensor]) -> tuple[bytes, int]:
    """Returns the header of an uncompressed file, and the size of its chunk table.

    The tensors are in the file's order. Raises FormatError for a name of the file's own entries.
    """
    if taken := [tensor.name for tensor in ordered if tensor.name in OWN_ENTRIES]:
        raise FormatError(f"{taken[0]}: this name is taken; give the tensor another one")
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in ordered]
    chunk_bytes = chunk_bytes_of("raw")
    table = table_entry(sum(-(-nbytes // chunk_bytes) for *_, nbytes in entries))
    return build([*entries, table], metadata_of("raw"), align=ALIGN), table[-1]


def records_of(run: memoryview, chunk_bytes: int) -> list[bytes]:
    """Returns the table's records of a run of uncompressed chunks, which begins with a chunk."""
    digest, pack = xxhash.xxh3_128_digest, RECORD.pack
    chunks = (run[at : at + chunk_bytes] for at in range(0, len(run), chunk_bytes))
    return [pack(digest(chunk), len(chunk)) for chunk in chunks]


WORKERS = 4
"""The largest number of threads that compress; at most one for each core."""
BOTH_EVERY = 16
"""One chunk in so many is compressed both by itself and as a delta, to compare the sizes."""
SPARE_BYTES = 24
"""Additional bytes of a reserved header for each entry, whose size is unknown."""


def write_as_it_comes(
    file: FileWriter,
    tensors: Sequence[OutgoingTensor],
    codec: str,
    lent: Lent | None,
    deltas: bool,
    progress: Progress | None,
) -> ShardSummary:
    """Writes a file whose entries get their sizes on the way: compressed, or partly borrowed."""
    reserved = _reserve_header(tensors, codec)
    workers = min(WORKERS, os.cpu_count() or 1)
    with Gather(file) as out, Pool(workers, "ckpt-compress") as pool:
        out.add(reserved)
        body = _Body(out, codec)
        for tensor in tensors:
            known = lent.tensors.get(tensor.name) if lent is not None else None
            body.begin(known)
            roots = (
                _Roots(lent, known) if lent is not None and known is not None and deltas else None
            )
            for packed, ends_block in _pack_tensor(tensor, codec, roots, pool, 2 * workers):
                body.add(packed)
                if ends_block and not tensor.stable:
                    out.flush()  # the next block reuses the memory of this one
            body.end(tensor)
            if progress is not None:
                progress(tensor.nbytes)
        header, tables = body.header(len(reserved))
        summary = finish(out, header, tables, body.records)
    file.rewrite_start(header)
    if lent is None or not body.used:
        return summary
    nbytes = body.borrowed_bytes
    return replace(summary, used=body.used, borrowed_bytes=nbytes, base_digest=lent.manifest_digest)


def _pack_tensor(
    tensor: OutgoingTensor, codec: str, roots: _Roots | None, pool: Pool, ahead: int
) -> Iterator[tuple[_Packed, bool]]:
    """Yields a tensor's stored chunks in order, each with whether a block ends with it."""
    chunks = chunks_of(tensor, tensor.nbytes, chunk_bytes_of(codec))
    if codec == "raw":
        for chunk, ends_block in chunks:
            yield _Packed(record_of(chunk), chunk), ends_block
        return
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
        # The decision uses the chunks taken so far, so it does not depend on the threads' timing.
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
    """None if it was not compressed."""
    root: Root | None = None
    """The root, if the chunk is a delta."""
    same: bool = False
    """Whether the chunk equals the base's chunk."""
    tried: bool = False
    """Whether both ways were tried. `root` is set if the delta was smaller."""


@dataclass(frozen=True, slots=True)
class _Delta:
    """The possible delta of one chunk."""

    root: Root
    fetch: Callable[[Root, int, memoryview], None]
    try_both: bool
    """Whether to compress the chunk itself too, and keep the smaller result."""
    lends: bool
    """Whether the root is the base's chunk itself, which is borrowed if it is equal."""


class _Roots:
    """Decides which chunks of one tensor become deltas, by the results of earlier chunks."""

    def __init__(self, lent: Lent, known: LentChunks) -> None:
        self._fetch = lent.fetch
        self._known = known
        self._wins: bool | None = None

    def of(self, number: int) -> _Delta | None:
        """Returns the delta to try for a chunk. The first, and one in `BOTH_EVERY`, try both."""
        root, both = self._known.roots[number], self._wins is None or number % BOTH_EVERY == 0
        if root is None or not (self._wins or both):
            return None
        return _Delta(root, self._fetch, both, bool(self._known.records[number]))

    def note(self, packed: _Packed) -> None:
        if packed.tried:
            self._wins = packed.root is not None


def _pack(raw: memoryview, width: int, try_it: bool, delta: _Delta | None) -> _Packed:
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
            return _Packed(record_of(frame), frame, root=delta.root, tried=delta.try_both)
        stored: Buffer = raw if itself is None else itself
        return _Packed(record_of(stored), stored, itself is not None, tried=delta.try_both)
    frame = compress(raw, width) if try_it else None
    stored = raw if frame is None else frame
    return _Packed(record_of(stored), stored, frame is not None if try_it else None)


def _reserve_header(tensors: Sequence[OutgoingTensor], codec: str) -> bytes:
    """Returns zeros in the place of a header, at least as long as the final one can be."""
    chunks = [-(-tensor.nbytes // chunk_bytes_of(codec)) for tensor in tensors]
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in tensors]
    sizes = ((DELTAS, DELTA.size), (BORROWED, RUN.size), (TABLE, RECORD.size))
    tail = [(name, sum(chunks) * size) for name, size in sizes]
    entries += [(name, "U8", (nbytes,), nbytes) for name, nbytes in tail]
    longest = build(entries, metadata_of(codec, chunks))
    # An entry that becomes U8 of one dimension may have one or two more digits than its shape.
    length = len(longest) + SPARE_BYTES * len(tensors)
    return bytes(length + -length % ALIGN)


class _Body:
    """The data of a file so far, from which the header is made at the end."""

    def __init__(self, out: Gather, codec: str) -> None:
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
        """Begins the chunks of one tensor; `known` are the base's chunks of it."""
        self._known = known
        self._first, self._stored, self._borrows = len(self.records), 0, False

    def add(self, packed: _Packed) -> None:
        """Writes a chunk, or borrows it if the base has an equal chunk in this place."""
        chunk, known = len(self.records), self._known
        at = chunk - self._first
        # The delta of a chunk of zeros is the content of its root, so both have equal frames.
        if (
            known is not None
            and known.records[at]
            and (packed.same or (packed.root is None and known.records[at] == packed.record))
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
        """A mask with a bit for the index of each base that has a borrowed chunk or a root."""
        bases = {run.place.base for run in self._runs.found}
        bases |= {root.place.base for root in self._roots.values()}
        return sum(1 << base for base in bases)

    def end(self, tensor: OutgoingTensor) -> None:
        self._counts.append(len(self.records) - self._first)
        if self._borrows or self._codec != "raw":
            self._entries.append((tensor.name, "U8", (self._stored,), self._stored))
        else:
            shape = tensor.dtype.carrier_shape(tensor.shape)
            self._entries.append((tensor.name, tensor.dtype.carrier, shape, self._stored))

    def header(self, reserved: int) -> tuple[bytes, bytes]:
        """Returns the header, as long as the reserved one, and the tables before the chunks'."""
        before = {DELTAS: pack_deltas(self._roots), BORROWED: self._runs.pack()}
        before = {name: data for name, data in before.items() if data}
        entries = [*self._entries]
        entries += [(name, "U8", (len(data),), len(data)) for name, data in before.items()]
        entries.append(table_entry(len(self.records)))
        metadata = metadata_of(self._codec, self._counts if before else ())
        header = build(entries, metadata, align=ALIGN, reserve_bytes=reserved)
        return header, b"".join(before.values())


WRITE_BYTES = 8 << 20
"""Bytes of one write."""
WRITE_BUFFERS = 512


def chunks_of(
    tensor: OutgoingTensor, nbytes: int, chunk_bytes: int, run_bytes: int = 0
) -> Iterator[tuple[memoryview, bool]]:
    """Yields the chunks of a stream, each with whether its block ends with it.

    A chunk inside one block is a view of it; a chunk across blocks is a copy. With `run_bytes`, as
    many whole chunks of a block as it holds come in one piece. Raises FormatError if the length of
    the stream differs from the tensor.
    """
    step = run_bytes or chunk_bytes
    total, buffer = 0, bytearray()
    for block in tensor.blocks():
        total += len(block)
        start = 0
        if buffer:
            start = min(len(block), chunk_bytes - len(buffer))
            buffer += block[:start]
            if len(buffer) < chunk_bytes:
                continue
            yield memoryview(buffer), start == len(block)
            buffer = bytearray()
        whole = start + (len(block) - start) // chunk_bytes * chunk_bytes
        is_last = total == nbytes
        stop = len(block) if is_last else whole
        for at in range(start, stop, step):
            end = min(at + step, stop)
            yield block[at:end], end == stop
        if not is_last:
            buffer += block[whole:]
    if total != nbytes:
        raise FormatError(
            f"{tensor.name}: its stream has {total} bytes, its shape and dtype {nbytes}"
        )
    if buffer:
        yield memoryview(buffer), True


class Gather:
    """Collects buffers and writes many of them in one call.

    With `overlap`, another thread writes a full batch while the caller prepares the next one:
    hashing and writing both release the GIL. A file of one batch needs no thread.
    """

    def __init__(self, file: FileWriter, overlap: bool = True) -> None:
        self._file = file
        self._overlap = overlap
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._thread: Pool | None = None
        self._writing: Future[None] | None = None
        self.total = 0

    def __enter__(self) -> Gather:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def add(self, buffer: Buffer) -> None:
        """Appends a buffer, which must not change until the next `flush` returns."""
        self._waiting.append(buffer)
        self._waiting_bytes += len(buffer)
        if self._waiting_bytes >= WRITE_BYTES or len(self._waiting) >= WRITE_BUFFERS:
            if not self._overlap:
                self._file.write(self._take_batch())
                return
            self._finish_write()
            if self._thread is None:
                self._thread = Pool(1, "ckpt-write")
            self._writing = self._thread.submit(self._file.write, self._take_batch())
            # Hashing of small chunks never releases the GIL: without a pause the other thread would
            # begin to write only when this one waits for it.
            time.sleep(0)

    def flush(self) -> None:
        """Writes all added buffers."""
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


def record_of(stored: Buffer) -> bytes:
    """Returns the chunk table's record of a chunk."""
    return RECORD.pack(xxhash.xxh3_128_digest(stored), len(stored))


def finish(out: Gather, header: bytes, runs: bytes, records: list[bytes]) -> ShardSummary:
    """Writes the tables at the end of a file, and returns its facts."""
    table = runs + b"".join(records)
    out.add(table)
    out.flush()
    hasher = xxhash.xxh3_128(header)
    hasher.update(table)
    return ShardSummary(out.total, len(header), len(table), hasher.hexdigest())
