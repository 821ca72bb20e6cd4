"""Plans the reads of a load as values: read requests, and the byte ranges of files.

A `ReadRequest` has one box of a tensor, with its elements in an extent and its elements in target
number n. Tensors with equal places at both ends share one `BoxCopy`, so a tensor costs a look-up in
the place of the geometry. `byte_ranges_of` turns requests into ranges of files. A range is read
either directly into its target, or into scratch memory and placed from there.

Rules:

1. If the bytes have checksums and the caller wants them verified, a byte range is whole chunks. A
   small record with one checksum counts as one chunk (rule 3 bounds its size). Any other
   uncompressed range is exactly the wanted bytes.
2. Uncompressed elements that are contiguous at both ends are read directly into the target. The
   chunks at the two ends go through scratch memory if they hold other bytes too.
3. Reading beyond the need is bounded: rows further apart than `gap_bytes`, or than one chunk, are
   byte ranges of their own.
4. This module reads no bytes and holds no memory: a target is a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from operator import itemgetter
from typing import NamedTuple

from formats.catalog import Extent, TensorRecord
from formats.errors import FormatError
from sharding.layout import Box, HoleError, Layout, Piece, Shape

NOWHERE = -1
"""The target number of bytes that are read for their checksum alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of byte ranges and reads, in bytes."""

    read_bytes: int
    """The limit of one read, unless one byte range that cannot be cut is longer. The part of a read
    through scratch memory has at most `scratch_bytes`, unless it is one byte range."""
    direct_bytes: int
    """The limit of a byte range that is read directly into its target."""
    scratch_bytes: int
    """The limit of a byte range through scratch memory, unless one chunk is longer."""
    gap_bytes: int = 64 << 10
    """The most unwanted bytes between two ranges that are read together."""


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """One box, with its place at the source and its place at the target."""

    source: Piece
    target: Piece
    numel: int
    is_packed: bool
    """Whether its elements are contiguous at the source."""
    is_direct: bool
    """Whether its elements are contiguous at both ends."""

    @classmethod
    def of(cls, source: Piece, target: Piece) -> BoxCopy:
        """Returns the copy between two pieces of the same box."""
        is_packed = source.is_packed
        numel = prod(source.box.shape)
        return cls(source, target, numel, is_packed, is_packed and target.is_packed)


class ReadRequest(NamedTuple):
    """One box to bring from an extent into a target."""

    name: str
    itemsize: int
    box_copy: BoxCopy
    """The source counts elements of the extent, the target counts elements of the target."""
    extent: Extent
    target: int
    """The number of the target, or `NOWHERE`."""

    @property
    def nbytes(self) -> int:
        """Bytes that the target receives."""
        return self.box_copy.numel * self.itemsize


class BoxCopies:
    """Box copies and pieces, computed once for all tensors with equal places.

    Pieces and layouts are looked up by identity. Layouts that are equal give the same pieces.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[Piece, Piece, BoxCopy | None]] = {}
        self._pieces: dict[tuple[int, int], tuple[Layout, tuple[Piece, ...]]] = {}
        self._equal: dict[tuple[Layout, int], tuple[Piece, ...]] = {}
        self._wholes: dict[Shape, tuple[Piece]] = {}
        self._numels: dict[int, tuple[Piece, int]] = {}

    def of(self, stored: Piece, wanted: Piece) -> BoxCopy | None:
        """Returns the copy of the elements that two pieces share; None if they share none."""
        key = id(stored), id(wanted)
        known = self._copies.get(key)
        if known is None:
            box = stored.box & wanted.box
            found = BoxCopy.of(stored.part(box), wanted.part(box)) if box else None
            # The pieces are kept too: an id is unique only while its object lives.
            known = self._copies[key] = stored, wanted, found
        return known[2]

    def numel(self, piece: Piece) -> int:
        known = self._numels.get(id(piece))
        if known is None:
            known = self._numels[id(piece)] = piece, piece.box.numel
        return known[1]

    def pieces(self, layout: Layout, rank: int) -> tuple[Piece, ...]:
        """Returns the pieces of a rank: the same objects for equal layouts."""
        known = self._pieces.get((id(layout), rank))
        if known is None:
            pieces = self._equal.get((layout, rank))
            if pieces is None:
                pieces = self._equal[layout, rank] = layout.pieces(rank)
            known = self._pieces[id(layout), rank] = layout, pieces
        return known[1]

    def whole(self, shape: Shape) -> tuple[Piece]:
        """Returns the one, packed piece of a whole tensor: the same object for the same shape."""
        found = self._wholes.get(shape)
        if found is None:
            found = self._wholes[shape] = (Piece.packed(Box.whole(shape)),)
        return found


def requests_for(
    record: TensorRecord,
    pieces: Iterable[Piece],
    target: int = 0,
    copies: BoxCopies | None = None,
    name: str | None = None,
) -> list[ReadRequest]:
    """Returns requests that fill `pieces` of a target from stored pieces, each element once.

    Errors call the tensor `name`, by default as the record does.

    Raises:
        HoleError: an element is stored nowhere, or in two pieces.
    """
    copies = BoxCopies() if copies is None else copies
    name, itemsize = record.name if name is None else name, record.dtype.itemsize
    requests: list[ReadRequest] = []
    for piece in pieces:
        covered = 0
        for stored, extent in record.pieces.locate(piece.box):
            copy = copies.of(stored, piece)
            if copy is not None:
                covered += copy.numel
                requests.append(ReadRequest(name, itemsize, copy, extent, target))
        if covered != copies.numel(piece):
            is_hole = covered < piece.box.numel
            count = f"only {covered}" if is_hole else f"{covered} in place"
            cause = "a part is missing" if is_hole else "parts overlap"
            raise HoleError(
                f"{name}: {count} of the {piece.box.numel} elements of {piece.box} are in the "
                f"checkpoint: {cause}; copy the files of all ranks of one save"
            )
    return requests


class ByteRange(NamedTuple):
    """Bytes `[lo, hi)` of a file, and their place in a target."""

    file: str
    lo: int
    hi: int
    request: ReadRequest
    direct: bool
    """Whether the bytes go into the target as they lie in the file."""
    at: int
    """If direct, the first byte in the target; else the first byte of the decoded extent."""
    chunk: int
    """The extent's first chunk in the range; -1 if the range is neither verified nor decoded."""
    box_copy: BoxCopy | None
    """Places elements from the decoded bytes; None if direct, or read for a checksum alone."""

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the target receives, or that the checksum alone needs."""
        if self.box_copy is None:
            return self.hi - self.lo
        return self.box_copy.numel * self.request.itemsize


def byte_ranges_of(
    requests: Iterable[ReadRequest], verify: bool, limits: Limits
) -> list[ByteRange]:
    """Returns the byte ranges that fulfil all requests, sorted by file and offset."""
    ranges: list[ByteRange] = []
    direct_bytes = limits.direct_bytes
    cuts: dict[tuple[int, int, int, int], tuple[int, list[ByteRange], BoxCopy]] = {}
    for request in requests:
        _, itemsize, box_copy, extent, _ = request
        file, offset, nbytes, chunks, _, _ = extent
        lo = box_copy.source.at * itemsize
        hi = lo + box_copy.numel * itemsize
        is_plain = chunks is None or not chunks.compressed
        size = _unit_bytes(extent, verify, limits)
        if box_copy.is_direct and hi - lo <= direct_bytes and is_plain:
            is_whole = not size or (not lo % size and (hi == nbytes or not hi % size))
            if is_whole and lo < hi <= nbytes:  # most tensors of most models
                at, chunk = box_copy.target.at * itemsize, lo // size if size else -1
                ranges.append(
                    ByteRange(file, offset + lo, offset + hi, request, True, at, chunk, None)
                )
                continue
        key = id(box_copy), itemsize, nbytes, size
        if is_plain and key in cuts:  # a tensor of this geometry was cut before, at another place
            first, cut, _ = cuts[key]
            by = offset - first
            cut = [
                piece._replace(lo=piece.lo + by, hi=piece.hi + by, request=request, file=file)
                for piece in cut
            ]
        else:
            cut = list(_Cut(request, verify, limits).byte_ranges(box_copy))
            if is_plain:
                cuts[key] = offset, cut, box_copy  # kept: an id is unique while its object lives
        ranges.extend(cut)
    ranges.sort(key=_FILE_AND_LO)
    return ranges


_FILE_AND_LO = itemgetter(0, 1)


def _unit_bytes(extent: Extent, verify: bool, limits: Limits) -> int:
    """Returns the bytes of an extent that are read as a unit; 0 if each byte can be read alone."""
    chunks = extent.chunks
    if chunks is not None:
        return chunks.chunk_bytes if verify or chunks.compressed else 0
    is_unit = verify and extent.crc32 is not None and extent.nbytes <= limits.gap_bytes
    return extent.nbytes if is_unit else 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts one request into byte ranges."""

    request: ReadRequest
    verify: bool
    limits: Limits

    @property
    def _is_plain(self) -> bool:
        """Whether the bytes lie in the file as they are."""
        chunks = self.request.extent.chunks
        return chunks is None or not chunks.compressed

    @property
    def _chunk_bytes(self) -> int:
        return _unit_bytes(self.request.extent, self.verify, self.limits)

    def byte_ranges(self, box_copy: BoxCopy) -> Iterator[ByteRange]:
        """Yields the byte ranges of a part of the request."""
        box, source = box_copy.source.box, box_copy.source
        if not box:
            return
        extent, itemsize = self.request.extent, self.request.itemsize
        if self._is_plain and box_copy.is_direct:
            yield from self._direct(box_copy)
            return
        if min(source.strides, default=0) < 0:
            raise FormatError(
                f"{extent.file}: {self.request.name} has negative strides {source.strides}"
            )
        hull = source.hull_elements * itemsize
        dim = _widest(source)
        if dim is not None and not (box_copy.is_packed and hull <= self.limits.scratch_bytes):
            step = source.strides[dim] * itemsize
            inner = hull - (box.shape[dim] - 1) * step
            rows = self._rows(step, inner) if step else box.shape[dim]
            if step - inner > max(self.limits.gap_bytes, self._chunk_bytes):
                rows = 1
            if rows < box.shape[dim]:
                for lo in range(box.lo[dim], box.hi[dim], rows):
                    part = box.narrow(dim, lo, min(lo + rows, box.hi[dim]))
                    yield from self.byte_ranges(
                        BoxCopy.of(source.part(part), box_copy.target.part(part))
                    )
                return
        yield self._place(box_copy, source.at * itemsize, source.at * itemsize + hull)

    def _rows(self, step: int, inner: int) -> int:
        """Returns the number of rows of one byte range, which ends with a chunk if possible."""
        rows = max(1, (self.limits.scratch_bytes - inner) // step + 1)
        whole = self._chunk_bytes // gcd(step, self._chunk_bytes) if self._chunk_bytes else 1
        return rows // whole * whole or rows

    def _direct(self, box_copy: BoxCopy) -> Iterator[ByteRange]:
        """Yields a contiguous range: whole chunks directly, partial ones at its ends by scratch."""
        itemsize, extent = self.request.itemsize, self.request.extent
        lo = box_copy.source.at * itemsize
        hi = lo + box_copy.numel * itemsize
        self._check_inside(lo, hi)
        unit = self._chunk_bytes
        first = -(-lo // unit) * unit if unit else lo
        last = hi if not unit or hi == extent.nbytes else hi // unit * unit
        if first >= last:
            yield self._place(_flat_part(box_copy, itemsize, lo, hi), lo, hi)
            return
        if lo < first:
            yield self._place(_flat_part(box_copy, itemsize, lo, first), lo, first)
        most = self.limits.direct_bytes
        step = max(unit, most // unit * unit) if unit else most
        shift = box_copy.target.at * itemsize - lo
        for start in range(first, last, step):
            stop = min(start + step, last)
            begin, end = extent.offset + start, extent.offset + stop
            chunk = start // unit if unit else -1
            yield ByteRange(extent.file, begin, end, self.request, True, start + shift, chunk, None)
        if last < hi:
            yield self._place(_flat_part(box_copy, itemsize, last, hi), last, hi)

    def _place(self, box_copy: BoxCopy, lo: int, hi: int) -> ByteRange:
        """Returns the byte range that decodes to bytes `[lo, hi)` of the extent, and more."""
        self._check_inside(lo, hi)
        extent = self.request.extent
        size, begin, end, chunk = self._chunk_bytes, lo, hi, -1
        if size:
            chunk = lo // size
            begin, end = chunk * size, min(-(-hi // size) * size, extent.nbytes)
        at = begin
        if extent.chunks is not None and not self._is_plain:
            tail = extent.chunks[-(-hi // size) - 1]
            begin = extent.chunks[chunk].offset - extent.offset
            end = tail.offset + tail.stored_bytes - extent.offset
        return ByteRange(
            extent.file,
            extent.offset + begin,
            extent.offset + end,
            self.request,
            False,
            at,
            chunk,
            box_copy,
        )

    def _check_inside(self, lo: int, hi: int) -> None:
        extent = self.request.extent
        if hi > extent.nbytes or lo < 0:
            raise FormatError(
                f"{extent.file}: {self.request.name} has {extent.nbytes} bytes there, {lo}:{hi} "
                "are wanted"
            )


def _widest(piece: Piece) -> int | None:
    """The dimension with the largest stride among those longer than 1."""
    dims = [dim for dim, size in enumerate(piece.box.shape) if size > 1]
    return max(dims, key=lambda dim: piece.strides[dim], default=None)


def _flat_part(box_copy: BoxCopy, itemsize: int, lo: int, hi: int) -> BoxCopy:
    """Returns bytes `[lo, hi)` of the extent as one row of a copy contiguous at both ends."""
    start, stop = lo // itemsize, hi // itemsize
    box = Box((0,), (stop - start,))
    target = box_copy.target.at + start - box_copy.source.at
    return BoxCopy.of(Piece.packed(box, start), Piece.packed(box, target))


def groups_of(byte_ranges: Iterable[ByteRange], limits: Limits) -> Iterator[list[ByteRange]]:
    """Yields groups of neighbouring byte ranges in a file, each for one read."""
    group: list[ByteRange] = []
    file, begin, end, direct_end = "", 0, 0, 0
    is_tight, through = limits.read_bytes > limits.scratch_bytes, 0
    for byte_range in byte_ranges:
        lo, hi, direct = byte_range[1], byte_range[2], byte_range[4]
        if is_tight and group:
            through += max(0, (lo if direct else hi) - end)
        if group and (
            lo - end > limits.gap_bytes
            or max(end, hi) - begin > limits.read_bytes
            or lo < (end if direct else direct_end)
            or len(group) == MAX_GROUP
            or byte_range[0] != file
            or through > limits.scratch_bytes
        ):
            yield group
            group = []
        if not group:
            file, begin, end, direct_end = byte_range[0], lo, hi, 0
            through = 0 if direct else hi - lo
        group.append(byte_range)
        end = max(end, hi)
        if direct:
            direct_end = hi
    if group:
        yield group


MAX_GROUP = 400
"""The most byte ranges in a group. A read has at most twice as many buffers."""


def delta_groups_of(byte_ranges: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """Yields groups of byte ranges in a file, near or far, each for one request of a delta."""
    group: list[ByteRange] = []
    wanted = 0
    for byte_range in byte_ranges:
        nbytes = byte_range.wanted_bytes
        is_full = wanted + nbytes > DELTA_BYTES or len(group) == MAX_GROUP
        if group and (is_full or byte_range.file != group[0].file):
            yield group
            group, wanted = [], 0
        group.append(byte_range)
        wanted += nbytes
    if group:
        yield group


DELTA_BYTES = 16 << 20
"""The most bytes for which one request asks a delta, unless one byte range has more."""
