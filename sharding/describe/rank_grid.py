"""One rank's view of the grid of ranks that share a flat parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharding.errors import UnknownPlacementError
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate


class Grids:
    """The grids for the parameters in a flat one: one for each mesh of tensor parallelism."""

    def __init__(
        self, me: int, axes: Mapping[str, Sequence[int]], grid: Mesh | None = None
    ) -> None:
        """`axes` are those of `grid_around`; `grid` has the ranks of all rows, where known."""
        self._me, self._axes = me, axes
        self._known: dict[Mesh | None, tuple[Mesh, int]] = {}
        if grid is not None and all(len(ranks) > 1 for ranks in axes.values()):
            named = Mesh.of_ranks(tuple(axes), grid.sizes, list(grid.ranks()))
            self._known[None] = named, len(axes)

    def layout(
        self, shape: tuple[int, ...], before: Layout | None, cut: FlatShard | None
    ) -> Layout:
        """Returns the layout of a parameter; `before` is that of tensor parallelism, or None.

        `cut` divides the parameter along the last of the named axes; None: all ranks along these
        axes have all of it.
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
    """Returns the mesh of named axes and those of another mesh, and the number of the named ones.

    `axes` has, for each axis, the ranks of the row with the rank `me`. Axes of one rank are left
    out, except the first if there is no other. A rank knows no other rows: it assumes that the rest
    of the grid is regular. If the grid is irregular, ranks find different grids, and a save reports
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
            f"the ranks {kept}, of which this is {me}, are not a grid in which every row continues "
            "like this rank's; make the groups from one device mesh"
        )
    return Mesh.of_ranks(names, sizes, ranks), len(kept)


def check_divides_evenly(layout: Layout, name: str) -> None:
    """Raises UnknownPlacementError if tensor parallelism divides a parameter unevenly.

    The flat parameters of its ranks are then cut at different places, which no single layout
    describes.
    """
    if len({layout.local_shape(rank) for rank in layout.mesh.ranks()}) > 1:
        raise UnknownPlacementError(
            f"{name}: tensor parallelism divides its shape {layout.shape} unevenly, and flat "
            "parameters over that have no layout; use ckpt.sharding.fully_shard, or a size that "
            "divides evenly"
        )
