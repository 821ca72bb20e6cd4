"""From files into memory: the one way in which bytes are read, verified and placed.

A `Request` says that a box of a tensor lies at these elements of an extent and belongs at those
elements of a target. The engine turns requests into *bites*, each of which fits into a scratch
buffer or goes straight into its target, and works through them in the order of the files.

Rules:

1. Bytes with a checksum are verified before they are used, and whole chunks are read to do so.
   Unverified, uncompressed bytes are read to the byte.
2. What lies contiguously at both ends, uncompressed, is read straight into the target; only the
   chunks at its two ends, where they hold other bytes too, go through a scratch buffer.
3. Memory beyond the targets is at most `workers * (SCRATCH_BYTES + one chunk)`, and as much again
   for what is decompressed.
4. What is read beyond the need is bounded: rows that lie further apart than `GAP_BYTES`, or one
   chunk, are read one by one; files are read in ascending order.
5. No torch: targets are numpy arrays over somebody's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import xxhash

from formats.catalog import Chunk, Extent, TensorRecord
from formats.errors import CorruptError, FormatError
from formats.storage import Reader
from sharding.layout import Box, HoleError, Piece

SCRATCH_BYTES = 8 << 20
"""The largest read that goes through a scratch buffer."""
DIRECT_BYTES = 1 << 20
"""A contiguous range of at least this many bytes is read straight into its target."""
DIRECT_READ_BYTES = 8 << 20
"""A straight read is done in parts of this size: they are still in the cache when hashed."""
GAP_BYTES = 64 << 10
"""Bytes worth reading for nothing rather than starting another read."""
WORKERS = 2
"""Threads that read, hash and copy; all three let go of the GIL."""
THREAD_BYTES = 2 << 20
"""Reads of less than this, all together, are done by the caller: threads would cost more."""

Array = np.ndarray
"""One-dimensional, of an unsigned integer type as wide as the tensor's elements."""


@dataclass(frozen=True, slots=True)
class Request:
    """One box to bring from an extent into a target."""

    name: str
    itemsize: int
    source: Piece
    """In elements of the extent; its box is what is wanted."""
    extent: Extent
    target: Piece
    """In elements of `array`; the same box."""
    array: Array


def requests_for(record: TensorRecord, pieces: Iterable[Piece], array: Array) -> Iterator[Request]:
    """The requests that fill `pieces` of an array from a tensor's stored pieces, each element once.

    Raises HoleError when an element is stored nowhere, or by two pieces at once.
    """
    for target in pieces:
        found = 0
        for stored in record.pieces.locate(target.box):
            box = stored.piece.box & target.box
            found += box.numel
            yield Request(
                record.name,
                record.dtype.itemsize,
                stored.piece.part(box),
                stored.extent,
                target.part(box),
                array,
            )
        if found != target.box.numel:
            raise HoleError(
                f"{record.name}: {found} of the {target.box.numel} elements of {target.box} are "
                "in the checkpoint"
            )


@dataclass(frozen=True, slots=True)
class _Bite:
    """A request small enough to be done at once, and the bytes it needs."""

    request: Request
    lo: int
    """First byte in the file."""
    hi: int
    first: int
    """First decoded byte of the extent that `lo` stands for."""
    chunks: tuple[Chunk, ...]
    """What is verified and decoded; none where the extent has no checksums."""
    direct: bool


def transfer(
    reader: Reader,
    requests: Sequence[Request],
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
    workers: int = WORKERS,
) -> None:
    """All requests are done when this returns.

    Raises CorruptError naming file, tensor and bytes for a chunk that is not what was written; what
    the targets hold then is undefined.
    """
    Transfer(reader, verify, workers).run(requests, progress)


def _unchecked(request: Request) -> Request:
    """The request without checksums, where its bytes lie in the file as they are."""
    extent = request.extent
    if extent.chunks is None or extent.chunks.compressed:
        return request
    return replace(request, extent=replace(extent, chunks=None))


def _bites(request: Request) -> Iterator[_Bite]:
    """A request in parts that obey rules 2 to 4."""
    box, source, target = request.source.box, request.source, request.target
    if not box:
        return
    itemsize, extent = request.itemsize, request.extent
    chunk_bytes = extent.chunks.chunk_bytes if extent.chunks is not None else 0
    nbytes = box.numel * itemsize
    plain = extent.chunks is None or not extent.chunks.compressed
    if source.is_packed and nbytes < DIRECT_BYTES:  # most tensors of most models
        lo = source.at * itemsize
        yield _bite(request, lo, lo + nbytes, direct=False)
        return
    if plain and source.is_packed and target.is_packed:
        yield from _direct_bites(request, chunk_bytes)
        return
    hull = source.hull_elements * itemsize
    if min(source.strides, default=0) < 0:
        raise FormatError(f"{extent.file}: {request.name} has negative strides {source.strides}")
    dim = _widest(source)
    if dim is not None:
        step = source.strides[dim] * itemsize
        inner = hull - (box.shape[dim] - 1) * step
        rows = max(1, (SCRATCH_BYTES - inner) // step) if step else box.shape[dim]
        if step - inner > max(GAP_BYTES, chunk_bytes):
            rows = 1
        if rows < box.shape[dim]:
            for lo in range(box.lo[dim], box.hi[dim], rows):
                part = _narrow(box, dim, lo, min(lo + rows, box.hi[dim]))
                yield from _bites(
                    replace(request, source=source.part(part), target=target.part(part))
                )
            return
    yield _bite(request, source.at * itemsize, source.at * itemsize + hull, direct=False)


def _widest(piece: Piece) -> int | None:
    """The dimension of more than one index with the largest stride."""
    dims = [dim for dim, size in enumerate(piece.box.shape) if size > 1]
    return max(dims, key=lambda dim: piece.strides[dim], default=None)


def _narrow(box: Box, dim: int, lo: int, hi: int) -> Box:
    return Box(
        (*box.lo[:dim], lo, *box.lo[dim + 1 :]),
        (*box.hi[:dim], hi, *box.hi[dim + 1 :]),
    )


def _direct_bites(request: Request, chunk_bytes: int) -> Iterator[_Bite]:
    """A contiguous range: whole chunks straight, the partial ones at its ends by scratch."""
    itemsize = request.itemsize
    lo = request.source.at * itemsize
    hi = lo + request.source.box.numel * itemsize
    unit = chunk_bytes or DIRECT_READ_BYTES
    first = -(-lo // unit) * unit if chunk_bytes else lo
    last = hi if not chunk_bytes or hi == request.extent.nbytes else hi // unit * unit
    if first >= last:
        yield _bite(_flat_part(request, lo, hi), lo, hi, direct=False)
        return
    if lo < first:
        yield _bite(_flat_part(request, lo, first), lo, first, direct=False)
    step = max(unit, DIRECT_READ_BYTES // unit * unit)
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield _bite(_flat_part(request, start, stop), start, stop, direct=True)
    if last < hi:
        yield _bite(_flat_part(request, last, hi), last, hi, direct=False)


def _flat_part(request: Request, lo: int, hi: int) -> Request:
    """The part of a request that is packed at both ends, by bytes of its extent, as one row."""
    itemsize = request.itemsize
    start, stop = lo // itemsize, hi // itemsize
    box = Box((0,), (stop - start,))
    skipped = start - request.source.at
    return replace(
        request,
        source=Piece.packed(box, start),
        target=Piece.packed(box, request.target.at + skipped),
    )


def _bite(request: Request, lo: int, hi: int, direct: bool) -> _Bite:
    """The bite for decoded bytes `[lo, hi)` of an extent: which bytes of the file it takes."""
    extent = request.extent
    if hi > extent.nbytes or lo < 0:
        raise FormatError(
            f"{extent.file}: {request.name} has {extent.nbytes} bytes there, {lo}:{hi} are wanted"
        )
    table = extent.chunks
    if table is None:
        return _Bite(request, extent.offset + lo, extent.offset + hi, lo, (), direct)
    first, last = lo // table.chunk_bytes, -(-hi // table.chunk_bytes)
    chunks = tuple(table[index] for index in range(first, last))
    end = chunks[-1].offset + chunks[-1].stored_bytes
    return _Bite(request, chunks[0].offset, end, first * table.chunk_bytes, chunks, direct)


def _groups(bites: Sequence[_Bite]) -> Iterator[list[_Bite]]:
    """Bites that one read serves: neighbours in a file, or one that is read straight."""
    group: list[_Bite] = []
    end = 0
    for bite in bites:
        if group and (
            bite.direct
            or group[0].direct
            or bite.request.extent.file != group[0].request.extent.file
            or bite.lo - end > GAP_BYTES
            or max(end, bite.hi) - group[0].lo > SCRATCH_BYTES
        ):
            yield group
            group, end = [], 0
        group.append(bite)
        end = max(end, bite.hi)
    if group:
        yield group


class Transfer:
    """Does requests from one reader, as `transfer` does, and keeps its scratch memory for the next.

    Safe to use from several threads.
    """

    def __init__(self, reader: Reader, verify: bool = True, workers: int = WORKERS) -> None:
        self._reader = reader
        self._verify = verify
        self._workers = workers
        self._scratch = threading.local()

    def run(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """All requests are done when this returns. Raises as `transfer` does."""
        exact = requests if self._verify else map(_unchecked, requests)
        bites = sorted(
            (bite for request in exact for bite in _bites(request)),
            key=lambda bite: (bite.request.extent.file, bite.lo),
        )
        groups = list(_groups(bites))

        def work(group: list[_Bite]) -> None:
            self._do(group)
            if progress is not None:
                progress(sum(b.request.source.box.numel * b.request.itemsize for b in group))

        nbytes = sum(bite.hi - bite.lo for bite in bites)
        if len(groups) <= 1 or self._workers <= 1 or nbytes < THREAD_BYTES:
            for group in groups:
                work(group)
            return
        with ThreadPoolExecutor(self._workers, "ckpt-read") as pool:
            try:
                for _ in pool.map(work, groups):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _do(self, group: list[_Bite]) -> None:
        file = group[0].request.extent.file
        if group[0].direct:
            (bite,) = group
            target = _bytes(bite.request.array)
            at = bite.request.target.at * bite.request.itemsize
            part = target[at : at + bite.hi - bite.lo]
            self._reader.read_into(file, bite.lo, part)
            self._check(bite, part, bite.lo)
            return
        lo, hi = group[0].lo, max(bite.hi for bite in group)
        scratch = self._buffer(hi - lo)
        self._reader.read_into(file, lo, scratch)
        for bite in group:
            stored = scratch[bite.lo - lo : bite.hi - lo]
            self._check(bite, stored, bite.lo)
            _place(bite, self._decoded(bite, stored))

    def _check(self, bite: _Bite, stored: memoryview, lo: int) -> None:
        if not self._verify:
            return
        for chunk in bite.chunks:
            at = chunk.offset - lo
            if xxhash.xxh3_128_digest(stored[at : at + chunk.stored_bytes]) != chunk.digest:
                raise damaged(self._reader.url, bite.request.extent, bite.request.name, chunk)

    def _decoded(self, bite: _Bite, stored: memoryview) -> memoryview:
        """The bytes of the extent from `bite.first` on."""
        if not any(chunk.compressed for chunk in bite.chunks):
            return stored
        from formats.native.codec import decompress

        extent = bite.request.extent
        where = f"{self._reader.url}/{extent.file}: {bite.request.name}"
        decoded = self._buffer(sum(chunk.raw_bytes for chunk in bite.chunks), "decoded")
        done = 0
        for chunk in bite.chunks:
            at = chunk.offset - bite.lo
            data = stored[at : at + chunk.stored_bytes]
            target = decoded[done : done + chunk.raw_bytes]
            if chunk.compressed:
                decompress(data, extent.itemsize, target, where)
            else:
                target[:] = data
            done += chunk.raw_bytes
        return decoded

    def _buffer(self, nbytes: int, use: str = "stored") -> memoryview:
        """This thread's scratch memory, aligned to any element; kept, for fresh memory is slow."""
        held: Array | None = getattr(self._scratch, use, None)
        if held is None or held.nbytes < nbytes:
            held = None  # let go before there are two
            setattr(self._scratch, use, held)
            held = np.empty(-(-max(nbytes, SCRATCH_BYTES) // 16) * 2, dtype=np.uint64)
            setattr(self._scratch, use, held)
        return _bytes(held)[:nbytes]


def damaged(url: str, extent: Extent, name: str, chunk: Chunk) -> CorruptError:
    """The error for a chunk whose bytes are not what was written."""
    return CorruptError(
        f"{url}/{extent.file}: {name}: bytes {chunk.offset}:{chunk.offset + chunk.stored_bytes} do "
        f"not have the checksum {chunk.digest.hex()} they were written with: they were changed "
        "since; restore the file from another copy"
    )


def _bytes(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8).data)


def _place(bite: _Bite, data: memoryview) -> None:
    """Copy a bite's box from the decoded bytes into its target."""
    request = bite.request
    source, target, itemsize = request.source, request.target, request.itemsize
    start = source.at * itemsize - bite.first
    shape = source.box.shape
    if source.is_packed and target.is_packed:
        nbytes = prod(shape) * itemsize
        at = target.at * itemsize
        _bytes(request.array)[at : at + nbytes] = data[start : start + nbytes]
        return
    raw = np.frombuffer(data, dtype=np.uint8)
    here = np.ndarray(
        shape,
        dtype=request.array.dtype,
        buffer=raw,
        offset=start,
        strides=tuple(stride * itemsize for stride in source.strides),
    )
    there = np.ndarray(
        shape,
        dtype=request.array.dtype,
        buffer=request.array,
        offset=target.at * itemsize,
        strides=tuple(stride * itemsize for stride in target.strides),
    )
    there[...] = here
