"""What to read for what is wanted, as values: requests, and the bites in which they are done.

A `Request` says that a box of a tensor lies at these elements of an extent and belongs at those
elements of a target's memory. Tensors that lie alike at both ends share one `Fit`, so that a
tensor costs a look-up and not the geometry again. `bites_of` turns requests into *bites*: ranges
of a file, each of which goes straight into its target or through scratch memory.

Rules:

1. Where the bytes have checksums and these are asked for, a bite is whole chunks. A record that has
   one checksum is a chunk too where it is so small that the rest is worth reading (rule 3).
   Otherwise, uncompressed, a bite is the bytes that are wanted and no others.
2. What lies contiguously at both ends, uncompressed, goes straight into the target; only the
   chunks at its two ends, where they hold other bytes too, go through scratch memory.
3. What is read beyond the need is bounded: rows that lie further apart than `gap_bytes`, or one
   chunk, are bites of their own.
4. Nothing is read here. No torch: a target is a `memoryview` of somebody's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from formats.catalog import Extent, TensorRecord
from formats.errors import FormatError
from sharding.layout import Box, HoleError, Layout, Piece, Shape

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray"
"""One-dimensional, of an unsigned integer type as wide as the tensor's elements."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large bites and reads may be."""

    read_bytes: int
    """One read, unless a bite that cannot be cut is longer. What of it does not go straight is no
    more than `scratch_bytes`, unless it is one bite."""
    straight_bytes: int
    """A bite that goes straight into its target."""
    scratch_bytes: int
    """A bite that goes through scratch memory, unless one chunk is longer."""
    gap_bytes: int = 64 << 10
    """Bytes worth reading for nothing rather than starting another read."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A box with its place at the source and its place at the target."""

    source: Piece
    target: Piece
    numel: int
    is_packed: bool
    """Whether it lies end to end at the source."""
    is_straight: bool
    """Whether it does so at both ends."""

    @classmethod
    def of(cls, source: Piece, target: Piece) -> Fit:
        """The fit of two pieces with the same box."""
        is_packed = source.is_packed
        numel = prod(source.box.shape)
        return cls(source, target, numel, is_packed, is_packed and target.is_packed)


class Request(NamedTuple):
    """One box to bring from an extent into a target."""

    name: str
    itemsize: int
    fit: Fit
    """The source's piece counts elements of the extent, the target's those of the memory."""
    extent: Extent
    memory: memoryview
    """The bytes of the target's storage."""


class Fits:
    """The geometry of tensors that was worked out once, for those that are laid out alike.

    It is kept by the identity of pieces and layouts: whoever has the same ones at hand again finds
    it, and others lose nothing. Layouts that are equal give the same pieces.
    """

    def __init__(self) -> None:
        self._fits: dict[tuple[int, int], tuple[Piece, Piece, Fit | None]] = {}
        self._pieces: dict[tuple[int, int], tuple[Layout, tuple[Piece, ...]]] = {}
        self._alike: dict[tuple[Layout, int], tuple[Piece, ...]] = {}
        self._wholes: dict[Shape, tuple[Piece]] = {}
        self._numels: dict[int, tuple[Piece, int]] = {}

    def of(self, stored: Piece, wanted: Piece) -> Fit | None:
        """What two pieces have in common; None where that is nothing."""
        key = id(stored), id(wanted)
        known = self._fits.get(key)
        if known is None:
            box = stored.box & wanted.box
            fit = Fit.of(stored.part(box), wanted.part(box)) if box else None
            known = self._fits[key] = stored, wanted, fit  # an id is unique while its object lives
        return known[2]

    def numel(self, piece: Piece) -> int:
        """The elements of a piece."""
        known = self._numels.get(id(piece))
        if known is None:
            known = self._numels[id(piece)] = piece, piece.box.numel
        return known[1]

    def pieces(self, layout: Layout, rank: int) -> tuple[Piece, ...]:
        """The pieces of a rank: the same objects for equal layouts."""
        known = self._pieces.get((id(layout), rank))
        if known is None:
            pieces = self._alike.get((layout, rank))
            if pieces is None:
                pieces = self._alike[layout, rank] = layout.pieces(rank)
            known = self._pieces[id(layout), rank] = layout, pieces
        return known[1]

    def whole(self, shape: Shape) -> tuple[Piece]:
        """The one piece of a whole tensor, packed: the same object for the same shape."""
        found = self._wholes.get(shape)
        if found is None:
            found = self._wholes[shape] = (Piece.packed(Box.whole(shape)),)
        return found


def requests_for(
    record: TensorRecord,
    pieces: Iterable[Piece],
    array: Array | memoryview,
    fits: Fits | None = None,
) -> list[Request]:
    """The requests that fill `pieces` of an array from a tensor's stored pieces, each element once.

    Raises HoleError when an element is stored nowhere, or by two pieces at once.
    """
    fits = Fits() if fits is None else fits
    memory = array if isinstance(array, memoryview) else memoryview(array.view("u1").data)
    name, itemsize = record.name, record.dtype.itemsize
    requests: list[Request] = []
    for wanted in pieces:
        found = 0
        for stored, extent in record.pieces.locate(wanted.box):
            fit = fits.of(stored, wanted)
            if fit is not None:
                found += fit.numel
                requests.append(Request(name, itemsize, fit, extent, memory))
        if found != fits.numel(wanted):
            raise HoleError(
                f"{record.name}: {found} of the {wanted.box.numel} elements of {wanted.box} are "
                "in the checkpoint"
            )
    return requests


class Bite(NamedTuple):
    """Bytes `[lo, hi)` of a file, and what becomes of them."""

    file: str
    lo: int
    hi: int
    request: Request
    straight: bool
    """Whether they are, as they lie, bytes of the target."""
    at: int
    """Straight: the first byte in the target. Else: the first byte of the extent, once decoded."""
    chunk: int
    """The first of the extent's chunks that they are; -1 where they are not verified or decoded."""
    fit: Fit | None
    """What is placed from them; None where they go straight, or are read to be verified alone."""

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the target gets, or the checksum alone."""
        if self.fit is None:
            return self.hi - self.lo
        return self.fit.numel * self.request.itemsize


def bites_of(requests: Iterable[Request], verify: bool, limits: Limits) -> list[Bite]:
    """The bites that do all requests, in the order of the files."""
    found: list[Bite] = []
    most = limits.straight_bytes
    for request in requests:
        _, itemsize, fit, extent, _ = request
        file, offset, nbytes, chunks, _, _ = extent
        lo = fit.source.at * itemsize
        hi = lo + fit.numel * itemsize
        if fit.is_straight and hi - lo <= most and (chunks is None or not chunks.compressed):
            size = _unit_bytes(extent, verify, limits)
            whole = not size or (not lo % size and (hi == nbytes or not hi % size))
            if whole and lo < hi <= nbytes:  # most tensors of most models
                at, chunk = fit.target.at * itemsize, lo // size if size else -1
                found.append(Bite(file, offset + lo, offset + hi, request, True, at, chunk, None))
                continue
        found.extend(_Cut(request, verify, limits).bites(fit))
    found.sort(key=_FILE_AND_LO)
    return found


_FILE_AND_LO = itemgetter(0, 1)


def _unit_bytes(extent: Extent, verify: bool, limits: Limits) -> int:
    """Bytes of an extent that are read as one; 0 where every byte can be read by itself."""
    chunks = extent.chunks
    if chunks is not None:
        return chunks.chunk_bytes if verify or chunks.compressed else 0
    is_unit = verify and extent.crc32 is not None and extent.nbytes <= limits.gap_bytes
    return extent.nbytes if is_unit else 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """One request, cut where it has to be."""

    request: Request
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

    def bites(self, fit: Fit) -> Iterator[Bite]:
        """The bites of a part of the request."""
        box, source = fit.source.box, fit.source
        if not box:
            return
        extent, itemsize = self.request.extent, self.request.itemsize
        if self._is_plain and fit.is_straight:
            yield from self._straight(fit)
            return
        if min(source.strides, default=0) < 0:
            raise FormatError(
                f"{extent.file}: {self.request.name} has negative strides {source.strides}"
            )
        hull = source.hull_elements * itemsize
        dim = _widest(source)
        if dim is not None and not (fit.is_packed and hull <= self.limits.scratch_bytes):
            step = source.strides[dim] * itemsize
            inner = hull - (box.shape[dim] - 1) * step
            rows = self._rows(step, inner) if step else box.shape[dim]
            if step - inner > max(self.limits.gap_bytes, self._chunk_bytes):
                rows = 1
            if rows < box.shape[dim]:
                for lo in range(box.lo[dim], box.hi[dim], rows):
                    part = _narrow(box, dim, lo, min(lo + rows, box.hi[dim]))
                    yield from self.bites(Fit.of(source.part(part), fit.target.part(part)))
                return
        yield self._placed(fit, source.at * itemsize, source.at * itemsize + hull)

    def _rows(self, step: int, inner: int) -> int:
        """How many rows a bite takes: as a rule so many that it ends where a chunk does."""
        rows = max(1, (self.limits.scratch_bytes - inner) // step + 1)
        whole = self._chunk_bytes // gcd(step, self._chunk_bytes) if self._chunk_bytes else 1
        return rows // whole * whole or rows

    def _straight(self, fit: Fit) -> Iterator[Bite]:
        """A contiguous range: whole chunks straight, the partial ones at its ends by scratch."""
        itemsize, extent = self.request.itemsize, self.request.extent
        lo = fit.source.at * itemsize
        hi = lo + fit.numel * itemsize
        self._check_inside(lo, hi)
        unit = self._chunk_bytes
        first = -(-lo // unit) * unit if unit else lo
        last = hi if not unit or hi == extent.nbytes else hi // unit * unit
        if first >= last:
            yield self._placed(_flat_part(fit, itemsize, lo, hi), lo, hi)
            return
        if lo < first:
            yield self._placed(_flat_part(fit, itemsize, lo, first), lo, first)
        most = self.limits.straight_bytes
        step = max(unit, most // unit * unit) if unit else most
        shift = fit.target.at * itemsize - lo
        for start in range(first, last, step):
            stop = min(start + step, last)
            begin, end = extent.offset + start, extent.offset + stop
            chunk = start // unit if unit else -1
            yield Bite(extent.file, begin, end, self.request, True, start + shift, chunk, None)
        if last < hi:
            yield self._placed(_flat_part(fit, itemsize, last, hi), last, hi)

    def _placed(self, fit: Fit, lo: int, hi: int) -> Bite:
        """The bite for decoded bytes `[lo, hi)` of the extent: which bytes of the file it takes."""
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
        return Bite(
            extent.file,
            extent.offset + begin,
            extent.offset + end,
            self.request,
            False,
            at,
            chunk,
            fit,
        )

    def _check_inside(self, lo: int, hi: int) -> None:
        extent = self.request.extent
        if hi > extent.nbytes or lo < 0:
            raise FormatError(
                f"{extent.file}: {self.request.name} has {extent.nbytes} bytes there, {lo}:{hi} "
                "are wanted"
            )


def _widest(piece: Piece) -> int | None:
    """The dimension of more than one index with the largest stride."""
    dims = [dim for dim, size in enumerate(piece.box.shape) if size > 1]
    return max(dims, key=lambda dim: piece.strides[dim], default=None)


def _narrow(box: Box, dim: int, lo: int, hi: int) -> Box:
    return Box(
        (*box.lo[:dim], lo, *box.lo[dim + 1 :]),
        (*box.hi[:dim], hi, *box.hi[dim + 1 :]),
    )


def _flat_part(fit: Fit, itemsize: int, lo: int, hi: int) -> Fit:
    """The part of a fit that is packed at both ends, by bytes of its extent, as one row."""
    start, stop = lo // itemsize, hi // itemsize
    box = Box((0,), (stop - start,))
    target = fit.target.at + start - fit.source.at
    return Fit.of(Piece.packed(box, start), Piece.packed(box, target))


def groups_of(bites: Iterable[Bite], limits: Limits) -> Iterator[list[Bite]]:
    """Bites that one read serves: neighbours in a file."""
    group: list[Bite] = []
    file, begin, end, straight_end = "", 0, 0, 0
    is_tight, through = limits.read_bytes > limits.scratch_bytes, 0
    for bite in bites:
        lo, hi, straight = bite[1], bite[2], bite[4]
        if is_tight and group:
            through += max(0, (lo if straight else hi) - end)
        if group and (
            lo - end > limits.gap_bytes
            or max(end, hi) - begin > limits.read_bytes
            or lo < (end if straight else straight_end)
            or len(group) == MAX_GROUP
            or bite[0] != file
            or through > limits.scratch_bytes
        ):
            yield group
            group = []
        if not group:
            file, begin, end, straight_end = bite[0], lo, hi, 0
            through = 0 if straight else hi - lo
        group.append(bite)
        end = max(end, hi)
        if straight:
            straight_end = hi
    if group:
        yield group


MAX_GROUP = 400
"""Bites in a group: the buffers of a read are at most twice as many."""
