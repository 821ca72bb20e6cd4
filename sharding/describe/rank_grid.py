"""The grid of ranks that share a flat parameter, as one of them knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharding.errors import UnknownPlacementError
from sharding.layout import Layout, Mesh


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
