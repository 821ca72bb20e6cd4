"""The copies between two layouts of one tensor: boxes with their source and target ranks.

Every wanted element is the target of exactly one copy. Replicas are a choice of source (the nearest
to the target), never a duplicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sharding.errors import ArgumentError, HoleError
from sharding.layout.box import Box, Piece
from sharding.layout.layout import Layout


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
        found = 0
        for source_rank in have.holders(target.box, near=rank):
            for source in have.pieces(source_rank):
                box = source.box & target.box
                if box:
                    found += box.numel
                    yield Copy(source_rank, source.part(box), rank, target.part(box))
        if found != target.box.numel:
            missing = target.box.numel - found
            raise HoleError(f"{missing} elements of box {target.box} are held by no rank of {have}")
