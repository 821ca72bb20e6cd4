"""The placements of a layout: the division of a tensor by one mesh axis each.

A layout has one placement per mesh axis. The placements apply in this order, independent of the
axes' order in the mesh (rule P1): first every `Shard` and `StridedShard`, left to right, which cut
the tensor along dimensions; then every `FlatShard`, left to right, which cuts the remaining
row-major elements; last all `Split` together, which divide the remaining elements evenly.
`Replicate` and `Only` cut nothing: all coordinates of a `Replicate` axis hold the result, and one
coordinate of an `Only` axis holds it.

`Shard` follows torch.chunk (rule P2): every coordinate but the last few gets `ceil(n / size)`
indices, the next one the rest, the others none. `StridedShard` is torch's placement of the
same name (rule P3): the dimension is first cut into `split` chunks, then each chunk over the axis,
and a coordinate holds its part of every chunk, end to end. FSDP over tensor parallelism needs it.

One dimension, cut repeatedly: the indices that a coordinate keeps, as ranges.

Rules that hold here:

1. `Segments` are disjoint ranges `[lo, hi)` of one dimension, held end to end in this order. They
   do not touch: neighbours that continue each other are one range.
2. A cut counts positions in the end-to-end concatenation, as torch.chunk counts in a local tensor.
3. A whole dimension is one segment, also when it is empty. A cut leaves no empty segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts dimension `dim` by torch.chunk's rule (P2)."""

    dim: int

    @property
    def split(self) -> int:
        """1: the dimension is cut as a whole."""
        return 1

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts each of `split` chunks of dimension `dim` (P3)."""

    dim: int
    split: int

    def __str__(self) -> str:
        return f"SS({self.dim},{self.split})"


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The tensor's elements are `[offset, offset + numel)` of a packed buffer cut every `stride`.

    Coordinate i holds buffer elements `[i * stride, (i + 1) * stride)`: FSDP1's flat parameters,
    ZeRO's and Megatron's distributed optimizers.
    """

    offset: int
    stride: int

    def __str__(self) -> str:
        return f"F({self.offset},{self.stride})"


@dataclass(frozen=True, slots=True)
class Split:
    """Replicas that share the work: each holds an even part of the elements, in row-major order.

    All `Split` axes count together, the last one fastest. A saved replicated tensor has this
    placement if each of its replicas wrote a part.
    """

    def __str__(self) -> str:
        return "split"


@dataclass(frozen=True, slots=True)
class Only:
    """Only coordinate `index` of the axis holds the elements."""

    index: int

    def __str__(self) -> str:
        return f"only({self.index})"


Placement = Replicate | Shard | StridedShard | FlatShard | Split | Only


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
    found: set[int] = set()
    for a, b in inside(segments, lo, hi):
        for first, last in _chunks(length(segments), split):
            low, high = max(a, first) - first, min(b, last) - first
            if low < high:
                step = -(-(last - first) // size)
                found.update(range(low // step, (high - 1) // step + 1))
    return sorted(found)


def inside(segments: Segments, lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """Returns the positions at which the segments hold indices in `[lo, hi)`, as ascending ranges.

    >>> inside(((0, 2), (5, 9)), 1, 7)
    ((1, 2), (2, 4))
    """
    found, at = [], 0
    for start, stop in segments:
        a, b = max(lo, start), min(hi, stop)
        if a < b:
            found.append((at + a - start, at + b - start))
        at += stop - start
    return tuple(found)


def take_range(segments: Segments, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Returns indices at positions `[lo, hi)`, as (first index, one past it, first position).

    >>> take_range(((0, 2), (5, 9)), 1, 4)
    [(1, 2, 1), (5, 7, 2)]
    """
    found, at = [], 0
    for start, stop in segments:
        a, b = max(lo, at), min(hi, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at, a))
        at += stop - start
    return found


def _between(segments: Segments, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    for start, stop, _ in take_range(segments, lo, hi):
        yield start, stop


def _chunks(numel: int, split: int) -> list[tuple[int, int]]:
    """Returns the chunks of torch.chunk that are not empty: at most one for each position."""
    if split == 1 or numel == 0:
        return [(0, numel)]
    step = -(-numel // split)
    return [(first, min(numel, first + step)) for first in range(0, numel, step)]
