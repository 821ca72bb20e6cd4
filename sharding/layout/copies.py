"""The copies between two layouts of one tensor: boxes with their source and target ranks.

Every wanted element is the target of exactly one copy. Replicas are a choice of source (the nearest
to the target), never a duplicate.

One rank's part in the move of a tensor from one layout into another: sends and receives.

Every rank computes its own part alone, and the parts agree: the sends of one rank are, copy for
copy and in the same order, the receives of the others. The cost grows with the result, not with the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from sharding.errors import ArgumentError, HoleError
from sharding.layout.box import Box, Piece, Shape, span_boxes
from sharding.layout.layout import Layout, Replicate, holding


@dataclass(frozen=True, slots=True)
class Copy:
    """One box, with its places at source and target."""

    source_rank: int
    source: Piece
    """The piece in the source rank's local storage; its box is the copied box."""
    target_rank: int
    target: Piece
    """The piece in the target rank's local storage; the same box."""

    @property
    def box(self) -> Box:
        """The copied region of the global tensor."""
        return self.target.box


def copies_to(have: Layout, want: Layout, rank: int) -> Iterator[Copy]:
    """Yields the copies that fill the part of `rank` in `want`, each element once.

    The cost grows with the result, not with the number of ranks. Raises `HoleError` with the first
    box that no rank of `have` holds.

    >>> from sharding.layout import Mesh, Shard
    >>> have = Layout((4,), Mesh.grid(("dp",), (2,)), (Shard(0),))
    >>> [(copy.source_rank, str(copy.box)) for copy in copies_to(have, Layout.single((4,)), 0)]
    [(0, '[0:2]'), (1, '[2:4]')]
    """
    if have.shape != want.shape:
        raise ArgumentError(f"one tensor cannot have both the shapes {have.shape} and {want.shape}")
    for target in want.pieces(rank):
        covered = 0
        for source_rank in have.holders(target.box, near=rank):
            for source in have.pieces(source_rank):
                box = source.box & target.box
                if box:
                    covered += box.numel
                    yield Copy(source_rank, source.part(box), rank, target.part(box))
        if covered != target.box.numel:
            missing = target.box.numel - covered
            raise HoleError(f"{missing} elements of box {target.box} are held by no rank of {have}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part in the move of a tensor from one layout into another."""

    sends: tuple[Copy, ...]
    """The copies from this rank to others, by target rank."""
    receives: tuple[Copy, ...]
    """The copies to this rank, from others and from itself, by source rank."""

    def within(self, box: Box) -> Exchange:
        """Returns the part of the exchange for the elements of a box."""
        return Exchange(_within(self.sends, box), _within(self.receives, box))


@lru_cache(4096)
def exchange(have: Layout, want: Layout, rank: int) -> Exchange:
    """Returns the sends and receives of `rank`. Raises as `copies_to` does.

    >>> from sharding.layout import Mesh, Shard
    >>> two = Mesh.grid(("dp",), (2,))
    >>> mine = exchange(Layout((4,), two, (Shard(0),)), Layout.replicated((4,), 2), 0)
    >>> [(c.target_rank, str(c.box)) for c in mine.sends]
    [(1, '[0:2]')]
    >>> [(c.source_rank, str(c.box)) for c in mine.receives]
    [(0, '[0:2]'), (1, '[2:4]')]
    """
    receives = sorted(copies_to(have, want, rank), key=lambda copy: copy.source_rank)
    sources = have.pieces(rank)
    targets = {t for source in sources for t in everyone_with(want, source.box)} - {rank}
    sends = []
    for target_rank in sorted(t for t in targets if _serves(have, rank, t)):
        for target in want.pieces(target_rank):
            for source in sources:
                box = source.box & target.box
                if box:
                    sends.append(Copy(rank, source.part(box), target_rank, target.part(box)))
    return Exchange(tuple(sends), tuple(receives))


def _serves(have: Layout, rank: int, target: int) -> bool:
    """Whether, among the replicas of a shard, `target` takes its elements from this rank."""
    mine = have.mesh.coordinate(rank)
    near = have.mesh.coordinate(target) or (0,) * len(have.placements)
    return mine is not None and all(
        own == wish
        for own, wish, placement in zip(mine, near, have.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def everyone_with(layout: Layout, box: Box) -> Iterator[int]:
    """Yields the ranks that hold at least one element of `box`, also replicas, each once.

    >>> from sharding.layout import Mesh, Shard
    >>> mesh = Mesh.grid(("replicate", "shard"), (2, 2))
    >>> layout = Layout((4,), mesh, (Replicate(), Shard(0)))
    >>> sorted(everyone_with(layout, Box((0,), (1,))))
    [0, 2]
    """
    box = box & Box.whole(layout.shape)
    if not box:
        return
    sizes = layout.mesh.sizes
    replicas = [
        range(size) if isinstance(placement, Replicate) else None
        for size, placement in zip(sizes, layout.placements, strict=True)
    ]
    for found in holding(layout.shape, sizes, layout.placements, box, (0,) * len(sizes)):
        axes = [(i,) if own is None else own for i, own in zip(found, replicas, strict=True)]
        for coordinate in product(*axes):
            yield layout.mesh.rank(coordinate)


def windows(shape: Shape, most: int) -> Iterator[Box]:
    """Yields boxes of at most `most` elements that cover a tensor once, in row-major order.

    >>> [str(box) for box in windows((3, 4), 8)]
    ['[0:2, 0:4]', '[2:3, 0:4]']
    """
    for lo in range(0, prod(shape), most):
        yield from span_boxes(shape, lo, min(lo + most, prod(shape)))


def _within(copies: tuple[Copy, ...], box: Box) -> tuple[Copy, ...]:
    copies_in = []
    for copy in copies:
        part = copy.box & box
        if part:
            source, target = copy.source.part(part), copy.target.part(part)
            copies_in.append(Copy(copy.source_rank, source, copy.target_rank, target))
    return tuple(copies_in)
