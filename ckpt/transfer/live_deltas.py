"""Deltas between two versions of a file in memory, for a reader that has the earlier one.

The server has both versions, and compares them element by element. The reader names *areas*: boxes
of elements, as they lie in the file. A delta has the changed elements of each area, and the reader
applies it to its own bytes, which may lie otherwise. This module imports no torch.

Rules:

1. An area is cut into pieces of at most `PIECE_BYTES`, by its shape alone, so that both sides cut
   alike. A piece with few changes has the distances between its changed elements and, for each,
   old XOR new. A piece with many has old XOR new of all elements.
2. The reader proves its result, not its base: the bytes have the checksums of the version's table,
   or, where the area is no whole chunk, those that the server sends. With another base the result
   is wrong, and the reader reads the bytes as if there were no deltas.
3. A delta is not trusted: a place outside its piece, or a length that does not fit, is a
   FormatError before anything outside the area is written. The bytes are then read.
4. Numbers are laid out by bytes, all first bytes before all second bytes, and compressed together:
   most high bytes of distances and differences are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf, prod
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import xxhash
import zstandard

from ckpt.plan.read_plan import NOWHERE, ByteRange
from formats.errors import FormatError
from formats.storage import Reader

MOST_BYTES = 32 << 20
"""The most bytes of all areas of one request."""
MOST_AREAS = 1000
WIDTHS = (1, 2, 4, 8)
"""The bytes of elements of which there are deltas."""
FEW = 4
"""The elements of a piece for each of its changed elements, if these are few."""
ALL = 0xFFFF_FFFF
"""The count of a piece with old XOR new of all elements."""
PIECE_BYTES = 1 << 20
"""The most bytes of a piece: old, new and their XOR stay in the processor's cache."""
LITTLE_BYTES = 32 << 10
"""The bytes up to which elements are compared at once: each step on words takes its time."""
WORD = 8
SUM_BYTES = 16
LEVEL = 1

Array: TypeAlias = "np.ndarray"


class Area(NamedTuple):
    """A box of elements in a file."""

    offset: int
    """The first byte."""
    width: int
    """Bytes of an element."""
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """Bytes from an element to the next one, of each dimension."""
    has_sums: bool
    """Whether the delta has a checksum of each piece."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.width

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return self.width + sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True))

    def of(self, memory: memoryview, at: int = 0, steps: tuple[int, ...] | None = None) -> Array:
        """Returns the elements in memory, from byte `at` on; by default they lie as in the file."""
        steps = self.steps if steps is None else steps
        found: Array = np.ndarray(self.shape, f"u{self.width}", memory, at, steps)
        return found

    def as_json(self) -> list[object]:
        """Returns the area as a value of a request."""
        return [self.offset, self.width, [*self.shape], [*self.steps], self.has_sums]


def areas_in(value: object) -> list[Area]:
    """Returns the areas in a request. Raises FormatError for what is none, or too much."""
    if not isinstance(value, list) or len(value) > MOST_AREAS:
        raise FormatError(f"a delta is asked for by a list of at most {MOST_AREAS} areas")
    areas = [_area_in(entry) for entry in value]
    if sum(area.nbytes for area in areas) > MOST_BYTES:
        raise FormatError(f"the areas have more than {MOST_BYTES:,} bytes")
    return areas


def _area_in(value: object) -> Area:
    match value:
        case [int(offset), int(width), [*shape], [*steps], bool(has_sums)]:
            numbers = [offset, *shape, *steps]
            is_sound = all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
            if is_sound and len(shape) == len(steps) <= 32 and 0 not in shape and width in WIDTHS:
                sizes, strides = cast("list[int]", shape), cast("list[int]", steps)
                return Area(offset, width, tuple(sizes), tuple(strides), has_sums)
    raise FormatError(f"{value!r:.200} is no area")


def _pieces(array: Array) -> Iterator[Array]:
    """Yields the pieces of an area in order, as views (rule 1)."""
    if array.nbytes <= PIECE_BYTES:
        yield array
        return
    each = array.nbytes // len(array)
    if each > PIECE_BYTES:
        for row in array:
            yield from _pieces(row)
        return
    rows = PIECE_BYTES // each
    for at in range(0, len(array), rows):
        yield array[at : at + rows]


def _flat(piece: Array, memory: Array) -> Array:
    """Returns the elements one behind the other: as they lie, or copied into memory."""
    if not piece.flags.c_contiguous:
        copied = memory[: piece.nbytes].view(piece.dtype).reshape(piece.shape)
        copied[...] = piece
        piece = copied
    return piece.reshape(-1)


def _few_changes(xor: Array, flags: Array) -> tuple[Array, Array] | None:
    """Returns the places of a piece's changes, and old XOR new of each; None if there are many.

    Words are searched, and the elements of those that differ, unless too many do.
    """
    if xor.nbytes % WORD == 0 and xor.nbytes > LITTLE_BYTES:
        words = xor.view(f"u{WORD}")
        few = _places_of(np.not_equal(words, 0, out=flags[: words.size]))
        if few is not None:
            xors = words[few].view(xor.dtype)
            inside = np.flatnonzero(xors != 0)
            places = _inside(few, inside, (WORD // xor.itemsize).bit_length() - 1)
            return None if FEW * len(places) > xor.size else (places, xors[inside])
    if FEW * np.count_nonzero(xor) > xor.size:
        return None
    places = np.flatnonzero(xor)
    return places, xor[places]


def _places_of(is_other: Array) -> Array | None:
    """Returns the places of words that differ; None if that is every second one."""
    count = np.count_nonzero(is_other)
    if 2 * count > len(is_other):
        return None
    if 12 * count > len(is_other) or len(is_other) % 8:
        return np.flatnonzero(is_other)
    eights = is_other.view("u8")  # a search costs by its hits: most places come in one sweep
    found = np.flatnonzero(eights != 0)
    return _inside(found, np.flatnonzero(eights[found].view(bool)), 3)


def _inside(outer: Array, inside: Array, bits: int) -> Array:
    """Returns the places of parts, numbered on through the wholes at `outer`."""
    places: Array = outer[inside >> bits]
    places <<= bits
    places += inside & ((1 << bits) - 1)
    return places


def _gaps(places: Array) -> Array:
    """Returns the elements between neighbouring places; in front of the first one, its place."""
    gaps: Array = places.astype("<u4")
    gaps[1:] -= gaps[:-1] + np.uint32(1)
    return gaps


def make_delta(areas: Sequence[Area], old: Sequence[Array], new: Sequence[Array]) -> bytes:
    """Returns the delta of areas, from the elements before to those after."""
    numbers: list[bytes] = []
    # Of all pieces: new memory costs more than the work in it.
    differences, copied = np.empty((2, PIECE_BYTES), "u1")
    flags = np.empty(PIECE_BYTES // WORD, bool)
    for area, before, after in zip(areas, old, new, strict=True):
        counts, gaps, values = [], [], []
        rest: list[bytes] = []
        for here, there in zip(_pieces(before), _pieces(after), strict=True):
            flat = _flat(there, copied) if area.has_sums else there
            target = differences[: here.nbytes].view(here.dtype).reshape(here.shape)
            xor = np.bitwise_xor(here, flat.reshape(here.shape), out=target).reshape(-1)
            changes = _few_changes(xor, flags)
            if changes is None:
                counts.append(ALL)
                rest.append(_planes(xor))
            else:
                counts.append(len(changes[0]))
                gaps.append(_gaps(changes[0]))
                values.append(changes[1])
            if area.has_sums:
                rest.append(xxhash.xxh3_128_digest(flat.data))
        numbers.append(np.array(counts, "<u4").tobytes())
        if gaps:
            numbers += [_planes(np.concatenate(gaps)), _planes(np.concatenate(values))]
        numbers += rest
    return zstandard.ZstdCompressor(LEVEL).compress(b"".join(numbers))


def _planes(numbers: Array) -> bytes:
    planes: bytes = numbers.view("u1").reshape(-1, numbers.itemsize).T.tobytes()
    return planes


class Delta:
    """A delta that came, area by area, in the order of the request."""

    def __init__(self, data: bytes, areas: Sequence[Area]) -> None:
        """Raises FormatError for bytes that are no delta of these areas."""
        self.nbytes = len(data)
        most = sum(area.nbytes + 4 * area.nbytes // area.width + 64 for area in areas)
        try:
            if zstandard.frame_content_size(data) > most:
                raise FormatError("the delta is longer than its areas")
            self._numbers = memoryview(zstandard.ZstdDecompressor().decompress(data))
        except zstandard.ZstdError as error:
            raise FormatError(f"the delta does not decompress: {error}") from None

    def apply(self, area: Area, target: Array) -> bool:
        """Changes the elements of the next area; returns whether they have the sums that came.

        True for an area without sums, which the caller compares. Raises FormatError.
        """
        pieces = [*_pieces(target)]
        counts = np.frombuffer(self._take(4 * len(pieces)), "<u4").tolist()
        ends = [*accumulate((count if count < ALL else 0 for count in counts), initial=0)]
        if ends[-1] > target.size:
            raise FormatError("an area has more changes than elements")
        gaps = self._take_planes(ends[-1], 4)
        values = self._take_planes(ends[-1], area.width)
        is_right = True
        for piece, count, (lo, hi) in zip(pieces, counts, pairwise(ends), strict=True):
            flat = np.ascontiguousarray(piece).reshape(-1)
            if count == ALL:
                flat ^= self._take_planes(flat.size, area.width)
            elif count:
                places = np.cumsum(gaps[lo:hi], dtype="i8")
                places += np.arange(count)
                if places[-1] >= flat.size:
                    raise FormatError("a change lies behind its piece")
                flat[places] ^= values[lo:hi]
            if area.has_sums:
                is_right &= xxhash.xxh3_128_digest(flat.data) == self._take(SUM_BYTES)
            if count and not np.shares_memory(flat, piece):
                piece[...] = flat.reshape(piece.shape)
        return is_right

    def _take_planes(self, count: int, width: int) -> Array:
        planes = np.frombuffer(self._take(count * width), "u1").reshape(width, count)
        numbers: Array = np.empty(count, f"<u{width}")
        for at, plane in enumerate(planes):
            numbers.view("u1")[at::width] = plane
        return numbers

    def _take(self, nbytes: int) -> memoryview:
        """Returns the next bytes. Raises FormatError if there are fewer."""
        found, self._numbers = self._numbers[:nbytes], self._numbers[nbytes:]
        if len(found) < nbytes:
            raise FormatError("the delta ends too early")
        return found


class AnyDelta(Protocol):
    """A delta of areas, wherever it lies."""

    nbytes: int
    """Bytes of it that were read."""

    def apply(self, area: Area, target: Array) -> bool | None:
        """As `Delta.apply`; None, and nothing has changed, where nobody knows a part's bytes."""
        ...


class DeltaReader(Reader, Protocol):
    """A reader that may have deltas since a version that a target has.

    If it has a method `keep(file, areas)`, it is told of areas, with their elements, that have this
    version now. These are no whole chunks: no checksum of the version tells about them. Its
    `is_next` then tells that a load before has left what it knows.
    """

    delta_range_bytes: int
    """The best size of a range of which there is a delta."""

    def delta(self, name: str, areas: Sequence[Area]) -> AnyDelta | None:
        """Returns the delta of areas of a file. None if there is none; raises FormatError."""
        ...


class Applied(NamedTuple):
    """The outcome of a delta."""

    left: list[ByteRange]
    """The ranges that are to be read."""
    is_base: bool
    """Whether no bytes for which there was a delta are wrong."""


def apply_delta(
    reader: Reader,
    ranges: Sequence[ByteRange],
    targets: Sequence[memoryview],
    most_part: float = inf,
) -> Applied | None:
    """Brings ranges of one file from an earlier version to this one, in their targets.

    Left are ranges without deltas, and those whose bytes are not right afterwards: all of them
    after an answer that is no delta. None if the reader gives no delta, or one of more than
    `most_part` of the bytes; nothing has changed then.
    """
    found = [_area_of(span) for span in ranges]
    areas = [area for area in found if area is not None]
    if not areas:
        return Applied([*ranges], True)
    try:
        delta = cast("DeltaReader", reader).delta(ranges[0].file, areas)
        if delta is None or delta.nbytes > most_part * sum(area.nbytes for area in areas):
            return None
        brought = [
            area and _is_brought(span, area, delta, targets[span.request.target])
            for span, area in zip(ranges, found, strict=True)
        ]
    except FormatError:  # it was damaged
        return Applied([*ranges], False)
    left = [span for span, is_right in zip(ranges, brought, strict=True) if not is_right]
    return Applied(left, False not in brought)


def parts_in(
    ranges: Sequence[ByteRange], targets: Sequence[memoryview]
) -> list[tuple[Area, Array]]:
    """Returns the areas of ranges that are no whole chunks, with their elements in the targets."""
    return [
        (area, _own(span, area, targets[span.request.target]))
        for span in ranges
        if (area := _area_of(span)) is not None and area.has_sums
    ]


def _area_of(span: ByteRange) -> Area | None:
    """Returns the elements of a range as an area of its file; None if they have no delta."""
    request, copy = span.request, span.box_copy
    chunks, width = request.extent.chunks, request.itemsize
    if chunks is None or chunks.compressed or width not in WIDTHS or request.target == NOWHERE:
        return None
    if copy is None:
        return Area(span.lo, width, ((span.hi - span.lo) // width,), (width,), span.chunk < 0)
    source = copy.source
    steps = tuple(stride * width for stride in source.strides)
    area = Area(request.extent.offset + source.at * width, width, source.box.shape, steps, True)
    return area if area.nbytes <= MOST_BYTES else None


def _is_brought(span: ByteRange, area: Area, delta: AnyDelta, memory: memoryview) -> bool | None:
    """Applies a delta to a range of a target; returns whether its bytes are right (rule 2)."""
    chunks = span.request.extent.chunks
    is_right = delta.apply(area, _own(span, area, memory))
    if area.has_sums or chunks is None or not is_right:
        return is_right
    return chunks.wrong(span.chunk, memory[span.at : span.at + span.hi - span.lo]) is None


def _own(span: ByteRange, area: Area, memory: memoryview) -> Array:
    """Returns the elements of a range in its target."""
    copy = span.box_copy
    if copy is None:
        return area.of(memory[span.at : span.at + span.hi - span.lo])
    steps = tuple(stride * area.width for stride in copy.target.strides)
    return area.of(memory, copy.target.at * area.width, steps)
