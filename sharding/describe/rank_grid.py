"""The grid of ranks that share a flat parameter, as one of them knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharding.errors import UnknownPlacementError
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate


class Grids:
    """The grids of the parameters in one flat one: a grid for each mesh of tensor parallelism."""

    def __init__(self, me: int, axes: Mapping[str, Sequence[int]]) -> None:
        self._me, self._axes = me, axes
        self._known: dict[Mesh | None, tuple[Mesh, int]] = {}

    def layout(
        self, shape: tuple[int, ...], before: Layout | None, cut: FlatShard | None
    ) -> Layout:
        """The layout of a parameter; `before` is that of tensor parallelism, None without it.

        `cut` divides it along the last of the named axes; None: all ranks of those have all of it.
        """
        key = None if before is None else before.mesh
        if key not in self._known:
            self._known[key] = grid_around(self._me, self._axes, key)
        mesh, count = self._known[key]
        own: list[Placement] = [Replicate()] * count
        if cut is not None:
            own[-1] = cut
        if before is None:
            return Layout(shape, mesh, tuple(own))
        return Layout(before.shape, mesh, (*own, *before.placements))


def grid_around(
    me: int, axes: Mapping[str, Sequence[int]], before: Mesh | None = None
) -> tuple[Mesh, int]:
    """The mesh of named axes and then those of another mesh; the number of the named ones.

    `axes` has, for each axis, the ranks of the row that the rank `me` is in. Axes of one rank are
    left out, except the first where there is no other. A rank knows no other rows: it assumes that
    the rest of the grid is regular. Where it is not, ranks find different grids, and saving reports
    the difference.

    >>> mesh, axes = grid_around(2, {"replicate": [0, 2], "shard": [2, 3]})
    >>> mesh.names, list(mesh.ranks()), axes
    (('replicate', 'shard'), [0, 1, 2, 3], 2)
    """
    several = {name: ranks for name, ranks in axes.items() if len(ranks) > 1}
    kept = several or dict(list(axes.items())[:1])
    names, sizes, rows = list(kept), [len(row) for row in kept.values()], list(kept.values())
    if before is not None:
        names += before.names
        sizes += before.sizes
        rows.append(list(before.ranks()))
    ranks = [me]
    for row in rows:
        ranks = [rank + other - me for rank in ranks for other in row]
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise UnknownPlacementError(
            f"the ranks {kept}, of which this is {me}, are no grid in which every row continues as "
            "this rank's does; make the groups from one device mesh"
        )
    return Mesh.of_ranks(names, sizes, ranks), len(kept)


def check_divides_evenly(layout: Layout, name: str) -> None:
    """Raise UnknownPlacementError where tensor parallelism divided a parameter unevenly.

    The flat parameters of its ranks are cut in different places then, and no one layout says where.
    """
    if len({layout.local_shape(rank) for rank in layout.mesh.ranks()}) > 1:
        raise UnknownPlacementError(
            f"{name}: tensor parallelism divides its shape {layout.shape} unevenly, and flat "
            "parameters over that have no layout; use sharding.fully_shard, or a size that divides "
            "evenly"
        )
