"""Tensors in flat partitions: rows of elements that files share without regard to tensors.

Rules:

1. A `Line` is a row of elements, end to end, in storages of several zips of torch.save.
2. A tensor's row-major elements are dealt out to lines in equal shares, the last of which may be
   shorter. All of its shares begin at one place of their lines.
3. The pieces are computed on demand: a table would have a row for each tensor, rank and state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from formats.catalog import StoredPiece
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError
from formats.pickle_records import StoredTensor
from formats.zip_records import Archive
from sharding.layout import Box, Piece, row_major, span_boxes


class Segment(NamedTuple):
    """A one-dimensional packed tensor of a zip: consecutive elements of a line."""

    archive: Archive
    tensor: StoredTensor

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return self.tensor.shape[0]


class Line:
    """Segments end to end. Raises FormatError if their dtypes differ."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.dtype: DType = segments[0].tensor.dtype
        self.starts = [0, *accumulate(segment.numel for segment in segments)]
        for segment in segments:
            if segment.tensor.dtype != self.dtype:
                raise FormatError(
                    f"{segment.archive.where}: a flat partition has the dtype "
                    f"{segment.tensor.dtype}, that of another rank {self.dtype}"
                )

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.starts[-1]

    def between(self, lo: int, hi: int) -> range:
        """Returns the numbers of the segments from the one with element `lo` on, before `hi`."""
        return range(bisect_right(self.starts, lo) - 1, bisect_left(self.starts, hi))


class FlatPieces:
    """The pieces of one tensor in flat partitions (rule 2)."""

    def __init__(
        self, shape: tuple[int, ...], lines: Sequence[Line], offset: int, share: int
    ) -> None:
        """Share `i` has `share` elements and lies in `lines[i]` from `offset` on."""
        self._shape, self._lines, self._offset = shape, lines, offset
        self._share = max(1, share)
        self._strides = row_major(shape)
        self._numel = prod(shape)

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the pieces that overlap `box`."""
        if box:
            last = tuple(hi - 1 for hi in box.hi)
            for stored in self._between(self._index(box.lo), self._index(last) + 1):
                if stored.piece.box & box:
                    yield stored

    def __iter__(self) -> Iterator[StoredPiece]:
        return self._between(0, self._numel)

    def _between(self, lo: int, hi: int) -> Iterator[StoredPiece]:
        """Yields the pieces of the segments that have any of the row-major elements `[lo, hi)`."""
        for number in range(lo // self._share, -(-hi // self._share) if lo < hi else 0):
            line, begins = self._lines[number], number * self._share
            ends = min(self._numel, begins + self._share)
            back = self._offset - begins
            for at in line.between(max(lo, begins) + back, min(hi, ends) + back):
                start, stop = line.starts[at] - back, line.starts[at + 1] - back
                yield from self._boxes(
                    line.segments[at], start, max(start, begins), min(stop, ends)
                )

    def _boxes(self, segment: Segment, start: int, lo: int, hi: int) -> Iterator[StoredPiece]:
        """Yields the elements `[lo, hi)` of the tensor; the segment begins at its `start`."""
        if lo < hi:
            extent = segment.archive.extent(f"data/{segment.tensor.storage.key}")
            for box in span_boxes(self._shape, lo, hi):
                at = segment.tensor.at + self._index(box.lo) - start
                yield StoredPiece(Piece(box, at, self._strides), extent)

    def _index(self, place: tuple[int, ...]) -> int:
        return sum(i * stride for i, stride in zip(place, self._strides, strict=True))


def segment(archive: Archive, value: object, name: str) -> Segment:
    """Returns a tensor of a zip as a segment. `name` is that of the entry, for messages.

    Raises:
        FormatError: the value is not a packed tensor of one dimension.
        CorruptError: its storage is missing from the zip or has another size.
    """
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not _is_packed(value):
        raise FormatError(f"{archive.where}: {name} is not a packed tensor of one dimension")
    if value.shape[0]:
        found = archive.record(f"data/{value.storage.key}").nbytes
        if found != value.storage.nbytes:
            raise CorruptError(
                f"{archive.where}: the storage of {name} has {value.storage.nbytes} bytes by the "
                f"pickle, {found} by the zip"
            )
    return Segment(archive, value)


def _is_packed(tensor: StoredTensor) -> bool:
    return tensor.shape[0] < 2 or tensor.strides == (1,)
