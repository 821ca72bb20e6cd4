"""Writes a shard file of unknown sizes: compressed, or partly borrowed.

The writer reserves space for the header, streams the data behind it, and writes the header last.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

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
    RECORD,
    TABLE,
    Progress,
    ShardSummary,
    chunk_bytes_of,
    metadata_of,
    table_entry,
)
from formats.native.streaming import Gather, chunks_of, finish, record_of
from formats.outgoing import OutgoingTensor
from formats.safetensors_header import build
from formats.storage import Buffer, FileWriter
from formats.threads import Pool

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
    reserved = _reserved_header(tensors, codec)
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
            for packed, ends_block in _packed(tensor, codec, roots, pool, 2 * workers):
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


def _packed(
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
        """Notes the result of a chunk."""
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


def _reserved_header(tensors: Sequence[OutgoingTensor], codec: str) -> bytes:
    """Returns zeros in the place of a header, at least as long as the final one can be."""
    chunks = [-(-tensor.nbytes // chunk_bytes_of(codec)) for tensor in tensors]
    entries = [(t.name, t.dtype.carrier, t.dtype.carrier_shape(t.shape), t.nbytes) for t in tensors]
    sizes = ((DELTAS, DELTA.size), (BORROWED, RUN.size), (TABLE, RECORD.size))
    tail = [(name, sum(chunks) * size) for name, size in sizes]
    entries += [(name, "U8", (nbytes,), nbytes) for name, nbytes in tail]
    longest, _ = build(entries, metadata_of(codec, chunks))
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
        """Ends the chunks of a tensor."""
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
        header, _ = build(entries, metadata, align=ALIGN, reserve_bytes=reserved)
        return header, b"".join(before.values())
