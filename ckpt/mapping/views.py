"""Views of stored tensors: transposed, cut, joined and reshaped pieces over the same bytes.

A view is what `formats.catalog.Pieces` asks for: it locates the pieces of a box. It makes them from
the pieces of the tensors below, and changes boxes and strides only.

Rules:

1. A view computes the pieces of one box at a time. Dimensions that are merged out of order, such as
   the halves of rotary heads, have a piece for each run of rows; a whole model has millions.
2. Each element of the box comes in one piece. A piece may be cut to the box.
3. Rows that lie end to end at both sides are pieces of their own: they are read straight into their
   places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from formats.catalog import StoredPiece, TensorRecord
from sharding.layout import Box, Piece, Shape, span_boxes

ROW_ELEMENTS = 128
"""The shortest row that is worth a piece."""

_Run = tuple[int, int, int, int]
"""Indices `[lo, hi)` of a dimension, the place of the first one, and the stride."""


class View(ABC):
    """The pieces of a tensor, with its shape."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of the tensor."""

    @abstractmethod
    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the pieces of the elements of a box, and perhaps of more."""

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self.shape))


@dataclass(frozen=True, slots=True)
class Stored(View):
    """A tensor as it is stored."""

    record: TensorRecord

    @property
    def shape(self) -> Shape:
        return self.record.shape

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        return self.record.pieces.locate(box)


@dataclass(frozen=True, slots=True)
class Permuted(View):
    """A tensor with its dimensions in another order: dimension `d` was `order[d]`."""

    below: View
    order: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return _pick(self.below.shape, self.order)

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        order = self.order
        for piece, extent in self.below.locate(Box(_pick(box.lo, back), _pick(box.hi, back))):
            mine = Box(_pick(piece.box.lo, order), _pick(piece.box.hi, order))
            yield StoredPiece(Piece(mine, piece.at, _pick(piece.strides, order)), extent)


@dataclass(frozen=True, slots=True)
class Narrowed(View):
    """The indices `[lo, hi)` of one dimension."""

    below: View
    dim: int
    lo: int
    hi: int

    @property
    def shape(self) -> Shape:
        return _replace(self.below.shape, self.dim, 1, (self.hi - self.lo,))

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        wanted = _shift(box, self.dim, self.lo)
        for piece, extent in self.below.locate(wanted):
            own = piece.box & wanted
            if own:
                part = piece.part(own)
                mine = _shift(own, self.dim, -self.lo)
                yield StoredPiece(Piece(mine, part.at, part.strides), extent)


@dataclass(frozen=True, slots=True)
class Joined(View):
    """Tensors behind one another along dimension `dim`, as `torch.cat` joins them."""

    parts: tuple[View, ...]
    dim: int
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [part.shape[self.dim] for part in self.parts]
        object.__setattr__(self, "_starts", tuple(accumulate(sizes, initial=0)))

    @property
    def shape(self) -> Shape:
        return _replace(self.parts[0].shape, self.dim, 1, (self._starts[-1],))

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        lo, hi = box.lo[self.dim], box.hi[self.dim]
        index = max(0, bisect_right(self._starts, lo) - 1)
        while index < len(self.parts) and self._starts[index] < hi:
            start, part = self._starts[index], self.parts[index]
            wanted = _shift(box, self.dim, -start) & Box.whole(part.shape)
            for piece, extent in part.locate(wanted) if wanted else ():
                mine = _shift(piece.box, self.dim, start)
                yield StoredPiece(Piece(mine, piece.at, piece.strides), extent)
            index += 1


@dataclass(frozen=True, slots=True)
class Unflattened(View):
    """A tensor with dimension `dim` divided into dimensions of these sizes, the last fastest.

    Without sizes it loses the dimension, which has size 1.
    """

    below: View
    dim: int
    sizes: Shape

    @property
    def shape(self) -> Shape:
        return _replace(self.below.shape, self.dim, 1, self.sizes)

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the pieces that overlap `box`, up to `2 * len(sizes) - 1` for each one below."""
        if not box:
            return
        dim, end = self.dim, self.dim + len(self.sizes)
        inner = Piece.packed(Box.whole(self.sizes))
        own = Box(box.lo[dim:end], box.hi[dim:end])
        part = inner.part(own)
        below = Box(
            (*box.lo[:dim], part.at, *box.lo[end:]),
            (*box.hi[:dim], part.at + part.hull_elements, *box.hi[end:]),
        )
        for piece, extent in self.below.locate(below):
            first, step = piece.box.lo[dim], piece.strides[dim]
            strides = _replace(piece.strides, dim, 1, [each * step for each in inner.strides])
            for run in span_boxes(self.sizes, first, piece.box.hi[dim]):
                if run & own:
                    lo = _replace(piece.box.lo, dim, 1, run.lo)
                    hi = _replace(piece.box.hi, dim, 1, run.hi)
                    at = piece.at + (inner.part(run).at - first) * step
                    yield StoredPiece(Piece(Box(lo, hi), at, strides), extent)


@dataclass(frozen=True, slots=True)
class Flattened(View):
    """A tensor with `count` dimensions from `dim` on merged into one, the last the fastest.

    Of no dimensions it is a new one, of size 1.
    """

    below: View
    dim: int
    count: int

    @property
    def shape(self) -> Shape:
        shape = self.below.shape
        return _replace(
            shape, self.dim, self.count, (prod(shape[self.dim : self.dim + self.count]),)
        )

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the pieces of `box`: one for each run of indices with an even stride."""
        dim, end = self.dim, self.dim + self.count
        sizes = self.below.shape[dim:end]
        for run in span_boxes(sizes, box.lo[dim], box.hi[dim]):
            wanted = Box(
                (*box.lo[:dim], *run.lo, *box.lo[dim + 1 :]),
                (*box.hi[:dim], *run.hi, *box.hi[dim + 1 :]),
            )
            for stored, extent in self.below.locate(wanted):
                own = stored.box & wanted
                if not own:
                    continue
                piece = stored.part(own)
                merged = Box(own.lo[dim:end], own.hi[dim:end])
                runs = _runs(sizes, merged, piece.strides[dim:end])
                for lo, hi, at, step in runs if len(runs) == 1 else self._as_rows(piece, runs):
                    mine = Box(
                        _replace(own.lo, dim, self.count, (lo,)),
                        _replace(own.hi, dim, self.count, (hi,)),
                    )
                    strides = _replace(piece.strides, dim, self.count, (step,))
                    yield StoredPiece(Piece(mine, piece.at + at, strides), extent)

    def _as_rows(self, piece: Piece, runs: list[_Run]) -> list[_Run]:
        """Returns single indices in the place of runs, if each is a row end to end (rule 3).

        `piece` is the one below that has the runs.
        """
        shape, end, step = piece.box.shape, self.dim + self.count, runs[0][3]
        row = Piece(Box.whole(shape[end:]), 0, piece.strides[end:])
        elements = prod(shape[end:])
        is_row = elements >= ROW_ELEMENTS and prod(shape[: self.dim]) == 1 and row.is_packed
        if not is_row or step == elements:  # one row behind the other
            return runs
        return [
            (index, index + 1, at + (index - lo) * step, step)
            for lo, hi, at, step in runs
            for index in range(lo, hi)
        ]


def _runs(sizes: Shape, box: Box, strides: Shape) -> list[_Run]:
    """Returns the runs of a box in the merged dimension.

    >>> _runs((2, 3), Box((0, 0), (2, 3)), (3, 1))
    [(0, 6, 0, 1)]
    >>> _runs((2, 3), Box((0, 0), (2, 3)), (1, 2))
    [(0, 3, 0, 2), (3, 6, 1, 2)]
    """
    if not sizes:
        return [(0, 1, 0, 1)]
    first, last = box.lo[0], box.hi[0]
    size = prod(sizes[1:])
    inner = _runs(sizes[1:], Box(box.lo[1:], box.hi[1:]), strides[1:])
    lo, hi, _, step = inner[0]
    if size == 1:
        return [(first, last, 0, strides[0])]
    if hi - lo == size and (last - first == 1 or strides[0] == size * step):
        return [(first * size, last * size, 0, step)]
    return [
        (row * size + lo, row * size + hi, at + (row - first) * strides[0], step)
        for row in range(first, last)
        for lo, hi, at, step in inner
    ]


def _pick(values: Shape, order: Sequence[int]) -> Shape:
    return tuple([values[dim] for dim in order])


def _replace(values: Shape, dim: int, count: int, new: Sequence[int]) -> Shape:
    return (*values[:dim], *new, *values[dim + count :])


def _shift(box: Box, dim: int, by: int) -> Box:
    return Box(
        _replace(box.lo, dim, 1, (box.lo[dim] + by,)),
        _replace(box.hi, dim, 1, (box.hi[dim] + by,)),
    )
