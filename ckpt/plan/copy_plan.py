"""Plans the copies of a conversion as values: which bytes of a new file come from which files.

`units_of` cuts a planned file (`formats.catalog`) into units: runs of its bytes that are brought
together in memory and written by one call. Rules:

1. Bytes that lie at the source as they lie in the tensor become byte ranges with a place in the
   unit. They are cut where the source has chunks, so that no chunk is read twice.
2. Other tensors (cut by columns, transposed, cast) become spans of row-major elements, each in a
   unit of its own.
3. A unit has `unit_bytes`, or up to twice as many, and the last part of the file fewer. Small
   tensors share units with the literal bytes between them. Only bytes that checksums decide are
   never cut.
4. Units come in the order of the file. Nothing here reads or holds tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import NamedTuple

from ckpt.plan.read_plan import BoxCopies, BoxCopy, ByteRange, Limits, byte_ranges_of, requests_for
from formats.catalog import Chunk, FilePlan, Late, OutgoingTensor, TensorRecord
from formats.dtypes import DType
from sharding.layout import Piece, Shape, span_boxes


class CopySource(NamedTuple):
    """The stored tensor from which an outgoing one is copied."""

    record: TensorRecord
    dtype: DType
    """The dtype to write: the record's own, or one to which its elements are cast."""


class Span(NamedTuple):
    """Row-major elements `[lo, hi)` of a tensor."""

    source: CopySource
    lo: int
    hi: int


class TensorRun(NamedTuple):
    """Bytes of a tensor in a unit."""

    tensor: int
    """The number of the tensor in its file."""
    lo: int
    """The first byte, in the tensor."""
    at: int
    """The first byte, in the unit."""
    nbytes: int


class Alike(NamedTuple):
    """Bytes `[lo, hi)` of a stored file, which a new file has as they are."""

    file: str
    lo: int
    hi: int
    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each run of the unit; none for a file without checksums."""


@dataclass(slots=True)
class CopyUnit:
    """A run of bytes of a file, and their origins. Places are bytes in the unit."""

    number: int
    offset: int
    """The first byte in the file."""
    nbytes: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    late: list[tuple[int, int, Late]] = field(default_factory=list)
    """The place of bytes that checksums decide, and the number of tensors before them."""
    ranges: list[ByteRange] = field(default_factory=list)
    """Bytes to read, in the order of the source's files. Target 0 is the unit."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The bytes `[lo, hi)` that are target 1, 2 ..."""
    span: Span | None = None
    """The elements that alone make up the unit."""
    runs: list[TensorRun] = field(default_factory=list)
    """The bytes of tensors."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the source's tensors that the unit needs."""
        if self.span is not None:
            return (self.span.hi - self.span.lo) * self.span.source.record.dtype.itemsize
        return sum([run.nbytes for run in self.runs])


def find_alike(unit: CopyUnit, chunk_bytes: int, nbytes_of: Callable[[int], int]) -> Alike | None:
    """Returns the bytes of one file that are a unit as it is; None if there are none.

    Only bytes count whose checksums the new file takes over: chunks of `chunk_bytes`, or, in a file
    without checksums, bytes without any. `nbytes_of` gives the bytes of a tensor by its number.
    """
    ranges = {same.at: same for same in unit.ranges}
    if unit.literals or unit.late or unit.places or unit.span or len(ranges) != len(unit.runs):
        return None
    begin, chunks = None, list[Sequence[Chunk]]()
    for run in unit.runs:
        same = ranges.get(run.at)
        begin = same if begin is None else begin
        if same is None or begin is None or same.file != begin.file or same.lo - begin.lo != run.at:
            return None
        stored = same.request.extent.chunks
        if not chunk_bytes:
            if stored is not None or same.request.extent.crc32 is not None:
                return None
            continue
        if stored is None or stored.compressed or same.chunk < 0 or run.lo % chunk_bytes:
            return None
        own = [stored[same.chunk + at] for at in range(-(-run.nbytes // chunk_bytes))]
        sizes = {chunk.stored_bytes for chunk in own[:-1]} | {stored.chunk_bytes}
        is_end = run.lo + run.nbytes == nbytes_of(run.tensor)
        last = own[-1].stored_bytes if own else chunk_bytes
        if sizes != {chunk_bytes} or not (last == chunk_bytes or is_end):
            return None
        if sum(chunk.stored_bytes for chunk in own) != run.nbytes:
            return None
        chunks.append(own)
    return None if begin is None else Alike(begin.file, begin.lo, begin.lo + unit.nbytes, chunks)


def units_of(
    plan: FilePlan,
    source_of: Callable[[str], CopySource],
    unit_bytes: int,
    span_bytes: int,
    verify: bool,
    limits: Limits,
) -> Iterator[CopyUnit]:
    """Yields the units of a file, end to end.

    `source_of` gives the source of each tensor by its name. A span has at most `span_bytes` at the
    source. With `verify`, byte ranges consist of whole chunks. `limits` bounds their sizes.

    Raises:
        HoleError: an element is stored nowhere, or in two pieces.
    """
    cutter, copies, tensor = _Cutter(unit_bytes), BoxCopies(), 0
    for part in plan.parts:
        if isinstance(part, bytes):
            yield from cutter.literal(part)
        elif isinstance(part, Late):
            yield from cutter.late(part, tensor)
        else:
            source = source_of(part.name)
            ranges = _ranges_of(part, source, verify, limits, copies)
            if ranges is None:
                yield from cutter.spans(part, source, tensor, span_bytes)
            else:
                yield from cutter.ranges(ranges, tensor)
            tensor += 1
    yield from cutter.rest()


class _Cutter:
    """Cuts the parts of a file into units."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._unit = CopyUnit(0, 0)

    def literal(self, data: bytes) -> Iterator[CopyUnit]:
        for lo in range(0, len(data), self._unit_bytes):
            cut = data[lo : lo + self._unit_bytes]
            self._unit.literals.append((self._unit.nbytes, cut))
            yield from self._grown(len(cut))

    def late(self, part: Late, tensors: int) -> Iterator[CopyUnit]:
        """Adds bytes that the checksums of the `tensors` before them decide."""
        self._unit.late.append((self._unit.nbytes, tensors, part))
        yield from self._grown(part.nbytes)

    def ranges(self, ranges: list[_Placed], tensor: int) -> Iterator[CopyUnit]:
        """Adds a tensor whose bytes lie at the source as they are, in their order."""
        for lo, byte_range in ranges:
            unit, nbytes = self._unit, byte_range.wanted_bytes
            if byte_range.direct:
                unit.ranges.append(byte_range._replace(at=unit.nbytes))
            else:
                unit.places.append((unit.nbytes, unit.nbytes + nbytes))
                unit.ranges.append(_retarget(byte_range, len(unit.places)))
            unit.runs.append(TensorRun(tensor, lo, unit.nbytes, nbytes))
            yield from self._grown(nbytes)

    def spans(
        self, part: OutgoingTensor, source: CopySource, tensor: int, span_bytes: int
    ) -> Iterator[CopyUnit]:
        """Adds a tensor in spans of elements, each in a unit of its own (rule 2)."""
        stored, written = source.record.dtype.itemsize, source.dtype.itemsize
        step, end = max(1, span_bytes // stored), part.first + prod(part.shape)
        for lo in range(part.first, end, step):
            yield from self.rest()
            span = Span(source, lo, min(lo + step, end))
            nbytes = (span.hi - lo) * written
            self._unit.span = span
            self._unit.runs.append(TensorRun(tensor, (lo - part.first) * written, 0, nbytes))
            self._unit.nbytes = nbytes
        yield from self.rest()

    def rest(self) -> Iterator[CopyUnit]:
        """Yields the unit that is being filled, unless it is empty, and begins the next."""
        done = self._unit
        if done.nbytes:
            done.ranges.sort(key=_FILE_AND_LO)
            self._unit = CopyUnit(done.number + 1, done.offset + done.nbytes)
            yield done

    def _grown(self, nbytes: int) -> Iterator[CopyUnit]:
        self._unit.nbytes += nbytes
        if self._unit.nbytes >= self._unit_bytes:
            yield from self.rest()


_FILE_AND_LO = itemgetter(0, 1)
_Placed = tuple[int, ByteRange]
"""A byte range, after the first byte of the tensor that it fills."""


def _ranges_of(
    part: OutgoingTensor, source: CopySource, verify: bool, limits: Limits, copies: BoxCopies
) -> list[_Placed] | None:
    """Returns byte ranges that fill a tensor from end to end; None if rule 2 applies to it."""
    record = source.record
    if source.dtype != record.dtype:
        return None
    requests = requests_for(record, _pieces(part, record.shape, copies), 0, copies)
    if not all(request.box_copy.is_direct for request in requests):
        return None
    placed: list[_Placed] = []
    for byte_range in byte_ranges_of(requests, verify, limits):
        copy = byte_range.box_copy
        lo = byte_range.at if copy is None else copy.target.at * record.dtype.itemsize
        placed.append((lo, byte_range))
    placed.sort(key=itemgetter(0))
    return placed


def _pieces(part: OutgoingTensor, shape: Shape, copies: BoxCopies) -> Sequence[Piece]:
    """Returns the pieces of a tensor of this shape that are a part of a file, end to end."""
    numel = prod(part.shape)
    if numel == prod(shape):
        return copies.whole(shape)
    return pieces_of_range(shape, part.first, part.first + numel)


def pieces_of_range(shape: Shape, lo: int, hi: int) -> list[Piece]:
    """Returns row-major elements `[lo, hi)` of a tensor of this shape as pieces, end to end.

    >>> [(str(piece.box), piece.at) for piece in pieces_of_range((4, 3), 2, 6)]
    [('[0:1, 2:3]', 0), ('[1:2, 0:3]', 1)]
    """
    pieces, at = [], 0
    for box in span_boxes(shape, lo, hi):
        pieces.append(Piece.packed(box, at))
        at += box.numel
    return pieces


def _retarget(byte_range: ByteRange, target: int) -> ByteRange:
    """Returns a byte range that fills a target of its own from the first byte on."""
    copy = byte_range.box_copy
    assert copy is not None
    alone = BoxCopy.of(copy.source, Piece.packed(copy.target.box))
    return byte_range._replace(request=byte_range.request._replace(target=target), box_copy=alone)
