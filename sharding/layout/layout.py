"""The pieces of one tensor on every rank, symbolically: a mesh, and one placement for each axis.

`Layout(shape, mesh, placements)` does not grow with the world. `pieces(rank)` costs O(1) in ranks
and `holders(box)` costs O(result). The constructor rejects layouts with holes: `replicas` ranks
hold every element.

[Note: placements]
The placements apply in this order, independent of the axes' order in the mesh (rule P1): first
every `Shard` and `StridedShard`, left to right, which cut the tensor along dimensions and leave a
rank its *local array*, of `local_shape(rank)`; then every `FlatShard`, left to right, which cuts
the array's row-major elements; last all `Split` together, which divide the remaining elements
evenly. `Replicate` and `Only` cut nothing: all coordinates of a `Replicate` axis hold the result,
and one coordinate of an `Only` axis holds it. A rank keeps a span of its local array, its *local
storage*, in which pieces have their places.

`Shard` follows torch.chunk (rule P2): every coordinate but the last few gets `ceil(n / size)`
indices, the next one the rest, the others none. `StridedShard` is torch's placement of the
same name (rule P3): the dimension is first cut into `split` chunks, then each chunk over the axis,
and a coordinate holds its part of every chunk, end to end. FSDP over tensor parallelism needs it.

[Note: meshes]
No rank is at two coordinates. Almost every mesh in use is *nested*:
`rank = offset + sum(coordinate * stride)`, and a step along one axis passes over all ranks that the
axes of smaller strides reach. Its description does not grow with the world. A mesh that is not
nested keeps its ranks as a table. Rank to coordinate and back cost O(axes).

[Note: holders]
Division inverts an axis that cuts a dimension. Axes that cut row-major elements are walked: from
the first element of the box to the shard that has it, from the end of that shard to the next
element of the box. Every visited shard holds elements of the box, so the cost is that of the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from sharding.errors import ArgumentError
from sharding.layout.box import (
    Box,
    Piece,
    Segments,
    Shape,
    chunk,
    inside,
    length,
    row_major,
    span_boxes,
    take_part,
    take_range,
    touching,
)


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
        coordinate = [0] * len(self.sizes)
        for axis, size, step, last in self._digits:
            index, rest = divmod(rest, step)
            if not 0 <= index < size:
                return None
            coordinate[axis] = last - index if last else index
        return None if rest else tuple(coordinate)

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


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement per mesh axis for a tensor of `shape`.

    >>> layout = Layout((5, 4), Mesh.grid(("dp",), (2,)), (Shard(0),))
    >>> [str(piece.box) for piece in layout.pieces(1)]
    ['[3:5, 0:4]']
    >>> layout.holders(Box((2, 0), (3, 4)))
    (0,)
    """

    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.sizes):
            raise ArgumentError(
                f"{len(self.placements)} placements for a mesh of {len(self.mesh.sizes)} axes: "
                "give one per axis"
            )
        if any(size < 0 for size in self.shape):
            raise ArgumentError(f"no tensor has the shape {self.shape}")
        for placement, size in zip(self.placements, self.mesh.sizes, strict=True):
            _check(placement, size, self.shape)
        _check_flats_fit(self)

    @classmethod
    def replicated(cls, shape: Sequence[int], world_size: int) -> Layout:
        """Returns the layout in which every rank of a world holds the whole tensor."""
        return cls(tuple(shape), Mesh.grid(("world",), (world_size,)), (Replicate(),))

    @classmethod
    def single(cls, shape: Sequence[int], rank: int = 0) -> Layout:
        """Returns the layout in which one rank holds the whole tensor."""
        return cls(tuple(shape), Mesh.grid((), (), rank), ())

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold each element."""
        return prod(
            size
            for placement, size in zip(self.placements, self.mesh.sizes, strict=True)
            if isinstance(placement, Replicate)
        )

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The mesh axes, of more than one rank, along which ranks hold the same elements."""
        return tuple(
            axis
            for axis, placement in enumerate(self.placements)
            if isinstance(placement, Replicate) and self.mesh.sizes[axis] > 1
        )

    def local_shape(self, rank: int) -> Shape:
        """Returns the shape of the rank's local array; zeros for a rank outside the mesh.

        Outside the mesh a 0-d tensor has the shape `(0,)`, because no 0-d array is empty.
        """
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return (0,) * max(1, len(self.shape))
        return self._local_shape(coordinate)

    def span(self, rank: int) -> tuple[int, int]:
        """Returns the elements `[lo, hi)` of the rank's local array that form its local storage."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return (0, 0)
        return self._span(coordinate, prod(self._local_shape(coordinate)))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns a rank's pieces, with places in its local storage; none outside the mesh.

        Boxes are disjoint. A tensor that torch.chunk's rule cuts along dimensions has one piece, a
        flat shard at most `2 * ndim - 1`, a strided dimension `split`.
        """
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return ()
        segments = self._segments(coordinate)
        local = tuple(map(length, segments))
        numel = prod(local)
        lo, hi = self._span(coordinate, numel)
        if lo >= hi:
            return ()
        if hi - lo == numel and all(len(dim) == 1 for dim in segments):  # nearly all layouts
            ranges = [dim[0] for dim in segments]
            box = Box(tuple([lo for lo, _ in ranges]), tuple([hi for _, hi in ranges]))
            return (Piece(box, 0, row_major(local)),)
        strides = row_major(local)
        parts = (Box.whole(local),) if hi - lo == numel else span_boxes(local, lo, hi)
        return tuple(
            Piece(box, at - lo, strides)
            for part in parts
            for box, at in _to_global(part, segments, strides)
        )

    def holders(self, box: Box, near: int | None = None) -> tuple[int, ...]:
        """Returns the ranks that hold at least one element of `box`, one per replica group.

        Of replicas, returns the one that shares the most replica coordinates with rank `near`, or
        the first.
        """
        box = box & Box.whole(self.shape)
        if not box:
            return ()
        wish = self.mesh.coordinate(near) if near is not None else None
        replica = wish or (0,) * len(self.placements)
        found = holding(self.shape, self.mesh.sizes, self.placements, box, replica)
        return tuple(map(self.mesh.rank, found))

    def __str__(self) -> str:
        """Returns all axes with size and placement, as `ckpt inspect` shows them: `dp:2=S(0)`."""
        axes = zip(self.mesh.names, self.mesh.sizes, self.placements, strict=True)
        return ", ".join(f"{name}:{size}={placement}" for name, size, placement in axes)

    def _local_shape(self, coordinate: Sequence[int]) -> Shape:
        if all(isinstance(placement, Replicate) for placement in self.placements):
            return self.shape  # nearly all layouts of small tensors
        return tuple(map(length, self._segments(coordinate)))

    def _segments(self, coordinate: Sequence[int]) -> list[Segments]:
        """Returns the global indices of the local array: each dimension's rest after all cuts."""
        segments: list[Segments] = [((0, size),) for size in self.shape]
        for placement, size, index in zip(
            self.placements, self.mesh.sizes, coordinate, strict=True
        ):
            if isinstance(placement, (Shard, StridedShard)):
                dim = placement.dim
                segments[dim] = take_part(segments[dim], size, index, placement.split)
        return segments

    def _span(self, coordinate: Sequence[int], numel: int) -> tuple[int, int]:
        """Returns the span of a local array of `numel` elements that the other axes leave."""
        lo, hi = 0, numel
        part, parts = 0, 1
        for placement, size, index in zip(
            self.placements, self.mesh.sizes, coordinate, strict=True
        ):
            if isinstance(placement, FlatShard):
                lo, hi = flat_range(placement, index, lo, hi)
            elif isinstance(placement, Split):
                part, parts = part * size + index, parts * size
            elif isinstance(placement, Only) and placement.index != index:
                return (0, 0)
        if parts == 1:
            return (lo, hi) if lo < hi else (0, 0)
        first, last = chunk(hi - lo, parts, part)
        return (lo + first, lo + last) if first < last else (0, 0)


def _check(placement: Placement, size: int, shape: Shape) -> None:
    """Raises ArgumentError if one axis' placement cannot divide a tensor of this shape."""
    if isinstance(placement, (Shard, StridedShard)) and not 0 <= placement.dim < len(shape):
        raise ArgumentError(
            f"{placement} cuts dimension {placement.dim} of a tensor of shape {shape}"
        )
    if isinstance(placement, StridedShard) and placement.split < 1:
        raise ArgumentError(f"{placement}: the split is at least 1")
    if isinstance(placement, FlatShard) and (placement.stride < 1 or placement.offset < 0):
        raise ArgumentError(f"{placement}: the stride is at least 1 and the offset not negative")
    if isinstance(placement, Only) and not 0 <= placement.index < size:
        raise ArgumentError(f"{placement}: the axis has {size} coordinates")


def _check_flats_fit(layout: Layout) -> None:
    """Raises ArgumentError if flat axes leave elements to no rank."""
    if not any(isinstance(placement, FlatShard) for placement in layout.placements):
        return
    # Coordinate 0 of an axis that cuts dimensions has the most elements: others need no check.
    most = prod(map(length, layout._segments((0,) * len(layout.placements))))
    for placement, size in zip(layout.placements, layout.mesh.sizes, strict=True):
        if not isinstance(placement, FlatShard):
            continue
        if placement.offset + most > size * placement.stride:
            raise ArgumentError(
                f"{placement}: {most} elements from {placement.offset} do not fit into "
                f"{size} shards of {placement.stride}"
            )
        # One of the first two non-empty shards is the longest.
        first = placement.offset // placement.stride
        most = max(
            hi - lo for lo, hi in (flat_range(placement, first + i, 0, most) for i in range(2))
        )


def _to_global(
    local: Box, segments: Sequence[Segments], strides: Shape
) -> Iterator[tuple[Box, int]]:
    """Yields the global boxes of a box of the local array, each with its index in that array."""
    per_dim = [
        take_range(dim, lo, hi) for dim, lo, hi in zip(segments, local.lo, local.hi, strict=True)
    ]
    for parts in product(*per_dim):
        box = Box(tuple(part[0] for part in parts), tuple(part[1] for part in parts))
        yield box, sum(part[2] * step for part, step in zip(parts, strides, strict=True))


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
                    [*left[:dim], take_part(left[dim], size, index, split), *left[dim + 1 :]],
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
