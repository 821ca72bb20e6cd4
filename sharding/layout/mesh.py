"""A grid of ranks: the rank at each coordinate.

Rules that hold here:

1. No rank is at two coordinates.
2. Almost every mesh in use is *nested*: `rank = offset + sum(coordinate * stride)`, and a step
   along one axis passes over all ranks that the axes of smaller strides reach. Its description
   does not grow with the world. A mesh that is not nested keeps its ranks as a table.
3. Both directions, rank to coordinate and back, cost O(axes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from sharding.errors import ArgumentError
from sharding.layout.box import row_major


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes over ranks.

    >>> mesh = Mesh.grid(("dp", "tp"), (2, 4))
    >>> mesh.coordinate(6), mesh.rank((1, 2)), mesh.size
    ((1, 2), 6, 8)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offset: int
    """The rank at coordinate (0, 0, ...)."""
    strides: tuple[int, ...]
    """The difference of ranks per step along each axis, negative if ranks descend.

    Always 0 along axes of one rank and with a `table`, so that equal meshes compare equal.
    """
    table: tuple[int, ...] = ()
    """All ranks in row-major order of coordinates; empty for a nested mesh."""
    _digits: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False, compare=False)
    """(axis, size, stride, last index if it descends else 0), the largest stride first."""
    _lowest: int = field(init=False, repr=False, compare=False)
    """The smallest rank: every descending axis is at its last index."""
    _positions: Mapping[int, int] = field(init=False, repr=False, compare=False)
    """Rank -> position in the table."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.strides):
            raise ArgumentError(
                f"a mesh needs one name, size and stride per axis, not {len(self.names)} names, "
                f"{len(self.sizes)} sizes and {len(self.strides)} strides"
            )
        if any(size < 1 for size in self.sizes):
            raise ArgumentError(f"every axis of a mesh has at least one rank, not {self.sizes}")
        if self.table and len(self.table) != prod(self.sizes):
            raise ArgumentError(f"{len(self.table)} ranks do not fill a mesh of {self.sizes}")
        positions = {rank: position for position, rank in enumerate(self.table)}
        if len(positions) != len(self.table):
            raise ArgumentError(f"a mesh of {self.sizes} names a rank twice: {self.table}")
        strides = tuple(
            0 if size == 1 or self.table else stride
            for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        digits = _digits(self.sizes, row_major(self.sizes) if self.table else strides)
        if not _is_nested(digits):
            raise ArgumentError(
                f"a mesh of {self.sizes} with strides {self.strides} is not nested: use "
                "Mesh.of_ranks with its ranks"
            )
        object.__setattr__(self, "strides", strides)
        object.__setattr__(self, "_digits", digits)
        reach_down = sum(step * last for _, _, step, last in digits)
        object.__setattr__(self, "_lowest", self.offset - reach_down)
        object.__setattr__(self, "_positions", positions)

    @classmethod
    def grid(cls, names: Sequence[str], sizes: Sequence[int], offset: int = 0) -> Mesh:
        """Returns the mesh of consecutive ranks from `offset`; the last axis runs fastest."""
        return cls(tuple(names), tuple(sizes), offset, row_major(sizes))

    @classmethod
    def of_ranks(cls, names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> Mesh:
        """Returns the mesh with these ranks in row-major order, without a table if it is nested.

        >>> Mesh.of_ranks(("dp", "tp"), (2, 2), (0, 2, 1, 3)).strides
        (1, 2)
        """
        names, sizes, ranks = tuple(names), tuple(sizes), tuple(ranks)
        if not ranks or len(ranks) != prod(sizes):
            raise ArgumentError(f"{len(ranks)} ranks do not fill a mesh of {sizes}")
        strides = tuple(
            ranks[step] - ranks[0] if size > 1 else 0
            for size, step in zip(sizes, row_major(sizes), strict=True)
        )
        if _is_nested(_digits(sizes, strides)):
            nested = cls(names, sizes, ranks[0], strides)
            if tuple(nested.ranks()) == ranks:
                return nested
        return cls(names, sizes, ranks[0], strides, ranks)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return prod(self.sizes)

    @property
    def lowest(self) -> int:
        """The smallest rank."""
        return min(self.table) if self.table else self._lowest

    def ranks(self) -> Iterator[int]:
        """Yields all ranks, in row-major order of coordinates."""
        return map(self.rank, product(*map(range, self.sizes)))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Returns the rank at a coordinate (one index per axis, each within its axis)."""
        if self.table:
            steps = row_major(self.sizes)
            return self.table[sum(i * step for i, step in zip(coordinate, steps, strict=True))]
        return self.offset + sum(i * step for i, step in zip(coordinate, self.strides, strict=True))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Returns the coordinate of a rank; None if the rank is not in the mesh."""
        if self.table:
            position = self._positions.get(rank)
            if position is None:
                return None
            rest = position
        else:
            rest = rank - self._lowest
        found = [0] * len(self.sizes)
        for axis, size, step, last in self._digits:
            index, rest = divmod(rest, step)
            if not 0 <= index < size:
                return None
            found[axis] = last - index if last else index
        return None if rest else tuple(found)

    def ascending(self, axes: Sequence[int]) -> Mesh | None:
        """Returns the mesh in which the ranks ascend along these axes; itself if they do already.

        Along such an axis a rank's coordinate becomes its place among the sorted ranks of its line,
        the ranks with the same coordinates along all other axes. `axes` are in the order of the
        cuts. None if ranks of one part of an earlier cut are not in one line of a later one.

        >>> list(Mesh.of_ranks(("dp", "tp"), (2, 2), (3, 2, 0, 1)).ascending([1]).ranks())
        [2, 3, 0, 1]
        """
        if not self.table and all(self.strides[axis] >= 0 for axis in axes):
            return self
        ranks, steps = list(self.ranks()), row_major(self.sizes)
        places = [
            [index // step % size for index in range(len(ranks))]
            for size, step in zip(self.sizes, steps, strict=True)
        ]
        cut: list[int] = []
        for axis in axes:
            step, last = steps[axis], self.sizes[axis] - 1
            for first in [index for index in range(len(ranks)) if index // step % (last + 1) == 0]:
                line = range(first, first + last * step + 1, step)
                if any(places[other][i] != places[other][first] for other in cut for i in line):
                    return None
                for place, index in enumerate(sorted(line, key=ranks.__getitem__)):
                    places[axis][index] = place
            cut.append(axis)
        found = dict(zip(zip(*places, strict=True), ranks, strict=True))
        ordered = tuple(found[coordinate] for coordinate in product(*map(range, self.sizes)))
        return self if ordered == tuple(ranks) else Mesh.of_ranks(self.names, self.sizes, ordered)

    def transposed(self, axes: Sequence[int]) -> Mesh:
        """Returns the same ranks with the axes in this order.

        >>> Mesh.grid(("dp", "tp"), (2, 4)).transposed((1, 0)).rank((3, 1))
        7
        """
        if sorted(axes) != list(range(len(self.sizes))):
            raise ArgumentError(
                f"{tuple(axes)} is not an order of the {len(self.sizes)} axes of a mesh"
            )
        names = tuple(self.names[axis] for axis in axes)
        sizes = tuple(self.sizes[axis] for axis in axes)
        if not self.table:
            return Mesh(names, sizes, self.offset, tuple(self.strides[axis] for axis in axes))
        strides = [row_major(self.sizes)[axis] for axis in axes]
        positions = Mesh(names, sizes, 0, tuple(strides)).ranks()
        return Mesh.of_ranks(names, sizes, tuple(self.table[position] for position in positions))


def _digits(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int, int, int], ...]:
    digits = (
        (axis, size, abs(stride), size - 1 if stride < 0 else 0)
        for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if size > 1
    )
    return tuple(sorted(digits, key=lambda digit: -digit[2]))


def _is_nested(digits: Sequence[tuple[int, int, int, int]]) -> bool:
    reach = 0
    for _, size, step, _ in reversed(digits):
        if step <= reach:
            return False
        reach += (size - 1) * step
    return True
