"""The inverse of a layout: the coordinates of its mesh that hold elements of a box.

Division inverts an axis that cuts a dimension. Axes that cut row-major elements are walked: from
the first element of the box to the shard that has it, from the end of that shard to the next
element of the box. Every visited shard holds elements of the box, so the cost is that of the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sharding.layout.box import Box, Shape, row_major
from sharding.layout.placement import FlatShard, Only, Placement, Shard, Split, StridedShard
from sharding.layout.segments import Segments, cut, inside, length, touching


def flat_range(placement: FlatShard, index: int, lo: int, hi: int) -> tuple[int, int]:
    """Returns the part of elements `[lo, hi)` that a coordinate holds; `(lo, lo)` if none.

    >>> flat_range(FlatShard(offset=3, stride=4), 1, 10, 20)
    (11, 15)
    """
    start = index * placement.stride - placement.offset
    first, last = lo + max(0, start), min(hi, lo + start + placement.stride)
    return (first, last) if first < last else (lo, lo)


def holding(
    shape: Shape,
    sizes: Sequence[int],
    placements: Sequence[Placement],
    box: Box,
    replica: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yields the coordinates that hold elements of `box`, each once.

    The box has elements and lies inside the tensor of `shape`. Along axes that replicate, the
    coordinate is that of `replica`, which has one index per axis.
    """
    flats = [axis for axis, p in enumerate(placements) if isinstance(p, FlatShard)]
    splits = [axis for axis, p in enumerate(placements) if isinstance(p, Split)]
    coordinate = [
        placement.index if isinstance(placement, Only) else index
        for placement, index in zip(placements, replica, strict=True)
    ]
    for indices, segments in _along_dims(shape, sizes, placements, box):
        for axis, index in indices.items():
            coordinate[axis] = index
        if not flats and not splits:
            yield tuple(coordinate)
            continue
        local = tuple(map(length, segments))
        bounds = zip(segments, box.lo, box.hi, strict=True)
        wanted = _Elements(row_major(local), tuple(inside(*bound) for bound in bounds))
        cutters = [p for p in placements if isinstance(p, FlatShard)]
        parts = prod(sizes[axis] for axis in splits)
        for *found, part in _along_elements(cutters, parts, wanted, 0, prod(local)):
            for axis, index in zip(flats, found, strict=True):
                coordinate[axis] = index
            for axis in reversed(splits):
                part, coordinate[axis] = divmod(part, sizes[axis])
            yield tuple(coordinate)


def _along_dims(
    shape: Shape, sizes: Sequence[int], placements: Sequence[Placement], box: Box
) -> Iterator[tuple[dict[int, int], list[Segments]]]:
    """Yields indices of the axes that cut dimensions, and the segments that they leave of each."""
    found: list[tuple[dict[int, int], list[Segments]]] = [({}, [((0, size),) for size in shape])]
    for axis, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        if isinstance(placement, (Shard, StridedShard)):
            dim, split = placement.dim, placement.split
            found = [
                (
                    {**indices, axis: index},
                    [*left[:dim], cut(left[dim], size, index, split), *left[dim + 1 :]],
                )
                for indices, left in found
                for index in touching(left[dim], size, box.lo[dim], box.hi[dim], split)
            ]
    yield from found


def _along_elements(
    flats: Sequence[FlatShard], parts: int, wanted: _Elements, lo: int, hi: int
) -> Iterator[tuple[int, ...]]:
    """Yields one index per flat axis, then the number of the part of an even split."""
    cutter = flats[0] if flats else FlatShard(0, -(-(hi - lo) // parts))
    element = wanted.at_or_after(lo)
    while element is not None and element < hi:
        index = (element - lo + cutter.offset) // cutter.stride
        first, last = flat_range(cutter, index, lo, hi)
        if flats:
            for inner in _along_elements(flats[1:], parts, wanted, first, last):
                yield (index, *inner)
        else:
            yield (index,)
        element = wanted.at_or_after(last)


@dataclass(frozen=True, slots=True)
class _Elements:
    """The elements of a row-major array whose indices all lie in given ranges."""

    strides: Shape
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    """The ranges of each dimension, ascending and not empty."""

    def at_or_after(self, element: int) -> int | None:
        """Returns the first element of the set at or after this one; None if there is none."""
        indices: list[int] = []
        rest = element
        for step, ranges in zip(self.strides, self.ranges, strict=True):
            wanted, rest = divmod(rest, step)
            index = _index_at_or_after(ranges, wanted)
            if index == wanted:
                indices.append(wanted)
                continue
            while index is None:
                if not indices:
                    return None
                wanted = indices.pop() + 1
                index = _index_at_or_after(self.ranges[len(indices)], wanted)
            indices.append(index)
            indices += [ranges[0][0] for ranges in self.ranges[len(indices) :]]
            return sum(i * step for i, step in zip(indices, self.strides, strict=True))
        return element


def _index_at_or_after(ranges: Sequence[tuple[int, int]], index: int) -> int | None:
    for lo, hi in ranges:
        if index < hi:
            return max(lo, index)
    return None
