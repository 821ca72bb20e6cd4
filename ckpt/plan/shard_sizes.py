"""The sizes of a tensor's shards for all ranks together, by arithmetic on arrays.

A plan that divides work needs the sizes of shards of thousands of tensors. Calls of `Layout.span`
for each rank would take longer than the work.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from sharding.layout import FlatShard, Layout, Mesh, Only, Split


def elements_held(layout: Layout) -> np.ndarray:
    """Returns the largest number of elements of each mesh coordinate, in row-major order.

    The numbers are exact along `FlatShard` and `Only` axes. Along other axes that cut unevenly, all
    coordinates count like the one with the most elements.

    >>> from sharding.layout import Shard
    >>> mesh = Mesh.grid(("dp",), (3,))
    >>> elements_held(Layout((10,), mesh, (FlatShard(1, 5),))).tolist()
    [4, 5, 1]
    >>> elements_held(Layout((7,), mesh, (Shard(0),))).tolist()  # 3, 3 and 1
    [3, 3, 3]
    """
    sizes = layout.mesh.sizes
    axes = list(zip(layout.placements, sizes, np.indices(sizes, sparse=True), strict=True))
    # Coordinate 0 of an axis that cuts dimensions has the most.
    most = prod(layout.local_shape(layout.mesh.rank((0,) * len(sizes))))
    lo = np.zeros((1,) * len(sizes), np.int64)
    hi = lo + most
    for placement, _, index in axes:
        if isinstance(placement, FlatShard):
            start = index * placement.stride - placement.offset
            end = np.minimum(hi, lo + start + placement.stride)
            lo = lo + np.maximum(start, 0)
            hi = np.maximum(lo, end)
    held, parts = hi - lo, 1
    for placement, size, index in axes:
        if isinstance(placement, Only):
            held = held * (index == placement.index)
        elif isinstance(placement, Split):
            parts *= size
    return np.broadcast_to(-(-held // parts), sizes).reshape(-1)


@lru_cache(maxsize=64)
def positions(mesh: Mesh, world: Mesh) -> np.ndarray | None:
    """Returns the positions of a mesh's ranks in a world of one axis; None if one is not in it.

    The result is cached, because a model has thousands of tensors and few meshes, and is read-only.

    >>> positions(Mesh.grid(("tp",), (2,), 1), Mesh.grid(("world",), (4,)))
    array([1, 2])
    """
    found = [at[0] for at in map(world.coordinate, mesh.ranks()) if at is not None]
    if len(found) < mesh.size:
        return None
    array = np.array(found, np.int64)
    array.setflags(write=False)
    return array
