"""Regions of a tensor as half-open integer boxes or ranges, and their places in flat storage.

Rules that hold here:

1. A `Box` is `lo <= index < hi` in every dimension; the box of a 0-d tensor has no dimensions and
   holds one element.
2. A `Piece` places a box in one-dimensional storage: the element at global index `g` lies at
   `at + sum((g[d] - lo[d]) * strides[d])`, counted in elements.
3. `Segments` are disjoint ranges `[lo, hi)` of one dimension, held end to end in this order. They
   do not touch: neighbours that continue each other are one range. A cut counts positions in the
   end-to-end concatenation, as torch.chunk counts in a local tensor. A whole dimension is one
   segment, also when it is empty; a cut leaves no empty segments.
4. This module knows no ranks, bytes or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    """Returns the strides, in elements, of a packed row-major array of this shape.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an array with these strides is packed: no gap, no element twice, in any order.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    if len(shape) != len(strides):
        return False
    packed = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and step != packed:
            return False
        packed *= size
    return True


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open region `lo <= index < hi` of one tensor.

    >>> Box((0, 2), (4, 6)) & Box((3, 0), (9, 3))
    Box(lo=(3, 2), hi=(4, 3))
    """

    lo: Shape
    """The first index in every dimension."""
    hi: Shape
    """One past the last index in every dimension."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """The extent in every dimension; never negative."""
        # tuple() of a list: tuple() of a generator takes twice as long, and plans call this most.
        return tuple([max(0, hi - lo) for lo, hi in zip(self.lo, self.hi, strict=True)])

    @property
    def numel(self) -> int:
        """The number of elements in the box: 1 for a 0-d box."""
        return prod(self.shape)

    def __bool__(self) -> bool:
        """Returns True when the box holds at least one element."""
        return all(lo < hi for lo, hi in zip(self.lo, self.hi, strict=True))

    def __and__(self, other: Box) -> Box:
        """Returns the elements in both boxes; an empty box (falsy) when there are none."""
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def __contains__(self, other: Box) -> bool:
        """Returns True when every element of `other` is in this box."""
        return not other or (
            all(a <= b for a, b in zip(self.lo, other.lo, strict=True))
            and all(a >= b for a, b in zip(self.hi, other.hi, strict=True))
        )

    def narrow(self, dim: int, lo: int, hi: int) -> Box:
        """Returns the box with the indices `[lo, hi)` of one dimension."""
        return Box(
            (*self.lo[:dim], lo, *self.lo[dim + 1 :]), (*self.hi[:dim], hi, *self.hi[dim + 1 :])
        )

    def cut(self, most: int) -> Iterator[Box]:
        """Yields parts of at most `most` elements in row-major order; none of an empty box.

        >>> [part.shape for part in Box((0, 2), (3, 6)).cut(8)]
        [(2, 4), (1, 4)]
        """
        if self.numel <= most:
            yield from (self,) if self else ()
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        step = max(1, most * self.shape[dim] // self.numel)
        for lo in range(self.lo[dim], self.hi[dim], step):
            yield from self.narrow(dim, lo, min(lo + step, self.hi[dim])).cut(most)

    def __str__(self) -> str:
        """Returns the box as a slice, as errors show it: `[0:4, 2:6]`."""
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(self.lo, self.hi, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and the places of its elements in one-dimensional storage (rule 2)."""

    box: Box
    at: int
    """Storage index of the box's first element, in elements."""
    strides: Shape
    """Steps in storage per global index, in elements, one a dimension."""

    @classmethod
    def packed(cls, box: Box, at: int = 0) -> Piece:
        """Returns the piece whose box is stored row-major without gaps from element `at`."""
        return cls(box, at, row_major(box.shape))

    def part(self, box: Box) -> Piece:
        """Returns the piece of `box`, which must lie inside this piece's box.

        >>> Piece.packed(Box((0, 0), (4, 6))).part(Box((1, 2), (3, 4)))
        Piece(box=Box(lo=(1, 2), hi=(3, 4)), at=8, strides=(6, 1))
        """
        at = self.at
        for lo, own, stride in zip(box.lo, self.box.lo, self.strides, strict=True):
            at += (lo - own) * stride
        return Piece(box, at, self.strides)

    def within(self, lo: int, hi: int) -> Iterator[Piece]:
        """Yields the parts of this piece at storage indices `[lo, hi)`, in their places.

        The piece must be of a row-major array: a step in one dimension passes over all elements of
        the later ones. There are at most `2 * ndim - 1` parts.

        >>> [str(part.box) for part in Piece.packed(Box((0, 0), (4, 3))).within(1, 10)]
        ['[0:1, 1:3]', '[1:3, 0:3]', '[3:4, 0:1]']
        """
        if self.box and lo < hi:
            for box in _boxes_within(self.box, self.strides, lo - self.at, hi - self.at):
                yield self.part(box)

    @property
    def is_packed(self) -> bool:
        """True when the elements lie end to end in row-major order; strides of size 1 are free."""
        expected = 1
        for size, stride in zip(reversed(self.box.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def hull_elements(self) -> int:
        """The length of the shortest storage range that holds every element; 0 for an empty box."""
        if not self.box:
            return 0
        sizes = zip(self.box.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in sizes)


def span_boxes(shape: Sequence[int], lo: int, hi: int) -> Iterator[Box]:
    """Yields the boxes that form elements `[lo, hi)` of a row-major array, in storage order.

    There are at most `2 * ndim - 1` boxes. Their storage ranges are consecutive, so the piece of
    each box has the array's own strides.

    >>> [str(box) for box in span_boxes((4, 3), 1, 10)]
    ['[0:1, 1:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if lo >= hi:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = lo // inner, (hi - 1) // inner
    rest = tuple(shape[1:])
    if first == last:
        yield from _rows(first, first + 1, span_boxes(rest, lo - first * inner, hi - first * inner))
        return
    if lo % inner:
        yield from _rows(first, first + 1, span_boxes(rest, lo - first * inner, inner))
        first += 1
    whole = hi // inner
    if first < whole:
        yield Box((first, *(0 for _ in rest)), (whole, *rest))
    if hi % inner:
        yield from _rows(whole, whole + 1, span_boxes(rest, 0, hi - whole * inner))


def _boxes_within(box: Box, strides: Shape, lo: int, hi: int) -> Iterator[Box]:
    """Yields the parts of a box with elements `[lo, hi)`, counted from its first element."""
    inner = Box(box.lo[1:], box.hi[1:])
    reach = Piece(inner, 0, strides[1:]).hull_elements
    if not box.lo:
        if lo <= 0 < hi:
            yield box
        return
    start, step, size = box.lo[0], strides[0], box.hi[0] - box.lo[0]
    if size == 1:
        yield from _rows(start, start + 1, _boxes_within(inner, strides[1:], lo, hi))
        return
    first = min(size, max(0, -(-lo // step)))  # the first row that begins inside
    last = min(size, max(0, (hi - reach) // step + 1))  # one past the last that ends inside
    before = range(max(0, first - 1), min(first, size))
    after = range(max(last, first), min(size, max(last, first) + 1))
    for row in before:
        cut = _boxes_within(inner, strides[1:], lo - row * step, hi - row * step)
        yield from _rows(start + row, start + row + 1, cut)
    if first < last:
        yield Box((start + first, *inner.lo), (start + last, *inner.hi))
    for row in after:
        cut = _boxes_within(inner, strides[1:], lo - row * step, hi - row * step)
        yield from _rows(start + row, start + row + 1, cut)


def _rows(lo: int, hi: int, inner: Iterator[Box]) -> Iterator[Box]:
    for box in inner:
        yield Box((lo, *box.lo), (hi, *box.hi))


Segments = tuple[tuple[int, int], ...]
"""Ranges `[lo, hi)` of one dimension, held end to end."""


def length(segments: Segments) -> int:
    """Returns the number of indices in the segments.

    >>> length(((0, 2), (5, 6)))
    3
    """
    return sum(hi - lo for lo, hi in segments)


def chunk(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range of chunk `index` of `parts` of `numel` positions, as torch.chunk has it.

    >>> [chunk(5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-numel // parts)
    return min(numel, index * step), min(numel, (index + 1) * step)


def take_part(segments: Segments, size: int, index: int, split: int = 1) -> Segments:
    """Returns the indices of coordinate `index` of `size`: its part of each of `split` chunks.

    >>> take_part(((0, 8),), 2, 1), take_part(((0, 8),), 2, 1, split=2)
    (((4, 8),), ((2, 4), (6, 8)))
    """
    if split == 1 and len(segments) == 1:  # nearly all cuts
        ((start, stop),) = segments
        lo, hi = chunk(stop - start, size, index)
        return ((start + lo, start + hi),) if lo < hi else ()
    kept: list[tuple[int, int]] = []
    for first, last in _chunks(length(segments), split):
        lo, hi = chunk(last - first, size, index)
        for start, stop in _between(segments, first + lo, first + hi):
            if kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            else:
                kept.append((start, stop))
    return tuple(kept)


def touching(segments: Segments, size: int, lo: int, hi: int, split: int = 1) -> list[int]:
    """Returns the coordinates whose cut keeps an index in `[lo, hi)` of the dimension, ascending.

    >>> touching(((0, 8),), 4, 3, 5)
    [1, 2]
    """
    coordinates: set[int] = set()
    for a, b in inside(segments, lo, hi):
        for first, last in _chunks(length(segments), split):
            low, high = max(a, first) - first, min(b, last) - first
            if low < high:
                step = -(-(last - first) // size)
                coordinates.update(range(low // step, (high - 1) // step + 1))
    return sorted(coordinates)


def inside(segments: Segments, lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """Returns the positions at which the segments hold indices in `[lo, hi)`, as ascending ranges.

    >>> inside(((0, 2), (5, 9)), 1, 7)
    ((1, 2), (2, 4))
    """
    ranges, at = [], 0
    for start, stop in segments:
        a, b = max(lo, start), min(hi, stop)
        if a < b:
            ranges.append((at + a - start, at + b - start))
        at += stop - start
    return tuple(ranges)


def take_range(segments: Segments, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Returns indices at positions `[lo, hi)`, as (first index, one past it, first position).

    >>> take_range(((0, 2), (5, 9)), 1, 4)
    [(1, 2, 1), (5, 7, 2)]
    """
    ranges, at = [], 0
    for start, stop in segments:
        a, b = max(lo, at), min(hi, at + stop - start)
        if a < b:
            ranges.append((start + a - at, start + b - at, a))
        at += stop - start
    return ranges


def _between(segments: Segments, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    for start, stop, _ in take_range(segments, lo, hi):
        yield start, stop


def _chunks(numel: int, split: int) -> list[tuple[int, int]]:
    """Returns the chunks of torch.chunk that are not empty: at most one for each position."""
    if split == 1 or numel == 0:
        return [(0, numel)]
    step = -(-numel // split)
    return [(first, min(numel, first + step)) for first in range(0, numel, step)]
