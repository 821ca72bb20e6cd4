"""The place of each parameter of a group in the unsharded buffer and in every rank's shard.

The unsharded buffer holds the parameters end to end, each in one contiguous *slot*, so that a
parameter is a contiguous view of the buffer, and is not copied. A rank holds a list of *spans*,
ranges of the unsharded buffer; end to end they are its shard. There are two divisions:

- `ChunkPacking`: each parameter by torch.chunk's rule along one dimension, a span per parameter. A
  slot's rows run along that dimension (a parameter sharded on another than its first arrives
  transposed in its slot, and is then put into row-major order by a copy). A parameter without
  dimensions cannot be divided: every rank holds it.
- `FlatPacking`: the whole buffer in equal parts, one span per rank, padded at the end.

This module computes with integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

Span = tuple[int, int]
"""`[lo, hi)`, in elements."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the unsharded buffer."""

    shape: tuple[int, ...]
    """The unsharded shape."""
    dim: int
    """The dimension whose indices are the slot's rows."""
    at: int
    """The slot's first element in the unsharded buffer."""

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded parameter."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The number of indices of the sharded dimension."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def arrived_shape(self) -> tuple[int, ...]:
        """The slot's shape when its rows have arrived: the sharded dimension first."""
        if not self.shape:
            return (1,)
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    def chunk(self, size: int, rank: int) -> Span:
        """Returns the chunk of `rank` of `size` by torch.chunk's rule, in the unsharded buffer.

        >>> Slot((5, 2), 0, 100).chunk(2, 1)
        (106, 110)
        >>> Slot((), 0, 100).chunk(2, 1)
        (100, 101)
        """
        if not self.shape:
            return self.at, self.at + 1
        lo, hi = chunk(self.rows, size, rank)
        inner = self.numel // self.rows if self.rows else 0
        return self.at + lo * inner, self.at + hi * inner


@dataclass(frozen=True)
class ChunkPacking:
    """Each parameter is divided by torch.chunk's rule along its dimension.

    >>> packing = ChunkPacking(pack([(3,), (2, 2)], [0, 0]), 2)
    >>> packing.numel, packing.spans(1), packing.cuts(1)
    (7, ((2, 3), (5, 7)), ((2, 3), (2, 4)))
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded buffer."""
        return _end(self.slots)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans of a rank: one for each slot."""
        return self._spans[rank]

    def cuts(self, rank: int) -> tuple[Span, ...]:
        """Returns each slot's span of a rank, counted from the slot's first element."""
        return self._cuts[rank]

    @cached_property
    def _spans(self) -> list[tuple[Span, ...]]:
        ranks = range(self.size)
        return [tuple(slot.chunk(self.size, rank) for slot in self.slots) for rank in ranks]

    @cached_property
    def _cuts(self) -> list[tuple[Span, ...]]:
        return [
            tuple((lo - s.at, hi - s.at) for s, (lo, hi) in zip(self.slots, spans, strict=True))
            for spans in self._spans
        ]


@dataclass(frozen=True, slots=True)
class FlatPacking:
    """The buffer, padded, is divided into equal parts.

    >>> packing = FlatPacking(pack([(3,), (2, 2)], [0, 0]), 2)
    >>> packing.numel, packing.spans(1), packing.piece(1, 0), packing.piece(1, 1)
    (8, ((4, 8),), (0, 1), (1, 4))
    """

    slots: tuple[Slot, ...]
    size: int

    @property
    def shard_numel(self) -> int:
        """The number of elements of every rank's shard."""
        return -(-_end(self.slots) // self.size)

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded buffer, with padding."""
        return self.shard_numel * self.size

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Returns the span of a rank."""
        return ((rank * self.shard_numel, (rank + 1) * self.shard_numel),)

    def piece(self, index: int, rank: int) -> Span:
        """Returns the elements `[lo, hi)` of parameter `index`, in row-major order, of a rank."""
        slot, lo = self.slots[index], rank * self.shard_numel
        first = min(max(lo - slot.at, 0), slot.numel)
        return first, min(max(lo + self.shard_numel - slot.at, first), slot.numel)


def slabs(slots: Sequence[Slot], numel: int, limit: int) -> tuple[Span, ...]:
    """Returns ranges of whole slots that tile a buffer; longer than `limit` only for a longer slot.

    >>> slabs(pack([(3,), (2,), (9,), (1,)], [0, 0, 0, 0]), 16, 5)
    ((0, 5), (5, 14), (14, 16))
    """
    begins = [0]
    for slot, after in zip(slots, [*(s.at for s in slots[1:]), numel], strict=True):
        if after - begins[-1] > limit and slot.at > begins[-1]:
            begins.append(slot.at)
    return tuple(zip(begins, [*begins[1:], numel], strict=True))


def chunk(rows: int, size: int, rank: int) -> Span:
    """Returns rows `[lo, hi)` of chunk `rank` by torch.chunk's rule; last chunks may be empty."""
    step = -(-rows // size)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def pack(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], align: int = 1
) -> tuple[Slot, ...]:
    """Returns slots for parameters of these shapes, in order, each at a multiple of `align`.

    >>> [slot.at for slot in pack([(3, 3), (4,)], [0, 0], align=8)]
    [0, 16]
    """
    slots, at = [], 0
    for shape, dim in zip(shapes, dims, strict=True):
        slots.append(Slot(shape, dim, at))
        at += -(-prod(shape) // align) * align
    return tuple(slots)


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].at + slots[-1].numel if slots else 0
