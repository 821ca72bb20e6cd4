"""The division of a save's writes if each host has a folder of its own: a pure function.

Rules:

1. A tensor that all ranks hold whole is stored on each host; the host's ranks share the work.
2. A rank's part of a sharded tensor is stored on the rank's host: once, if several ranks of the
   host hold this part.
3. The ranks of a host thus read no other host's file, as long as no rank moves to another host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

from formats.native.manifest import StoredTensor
from sharding.errors import ArgumentError
from sharding.layout import Layout, Mesh, Only, Placement, Replicate


def host_layouts(
    tensors: Mapping[str, StoredTensor], host: Collection[int]
) -> dict[str, StoredTensor]:
    """Returns every tensor as the ranks of one host hold it; `stored_layouts` divides the result.

    Raises ArgumentError if no layout describes the part of this host alone.
    """
    ranks = frozenset(host)
    made: dict[int, StoredTensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            made[id(tensor)] = tensor
            if tensor.layout.replica_axes:
                layout = _on_host(name, tensor.layout, ranks)
                made[id(tensor)] = StoredTensor(tensor.shape, tensor.dtype, layout)
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def _on_host(name: str, layout: Layout, host: frozenset[int]) -> Layout:
    """The layout with its replicas on this host alone; unchanged if this host has no part."""
    mesh, axes = layout.mesh, layout.replica_axes
    found = {rank: mesh.coordinate(rank) for rank in host}
    here = {rank: where for rank, where in found.items() if where is not None}
    if here and all(isinstance(one, Replicate) for one in layout.placements):
        alone = Mesh.of_ranks(("host",), (len(here),), sorted(here))
        return Layout(layout.shape, alone, (Replicate(),))
    lowest = {axis: min((where[axis] for where in here.values()), default=0) for axis in axes}
    chosen: dict[int, Placement] = {axis: Only(index) for axis, index in lowest.items()}
    for axis in axes:  # the replicas along an axis share the work if they are all on this host
        every = product(here.values(), range(mesh.sizes[axis]))
        if here and all(mesh.rank(_at(where, {axis: i})) in host for where, i in every):
            del chosen[axis]
    kept = {axis: lowest[axis] for axis in chosen}
    if any(mesh.rank(_at(where, kept)) not in host for where in here.values()):
        raise ArgumentError(
            f"{name}: its replicas over the ranks {sorted(mesh.ranks())[:8]} lie so that this "
            f"host's ranks {sorted(host)[:8]} cannot store their parts alone; give the mesh an "
            "axis along which whole hosts are replicas, or leave out local="
        )
    placements = tuple(chosen.get(axis, one) for axis, one in enumerate(layout.placements))
    return Layout(layout.shape, mesh, placements)


def _at(where: tuple[int, ...], index: Mapping[int, int]) -> list[int]:
    """Returns the coordinate with other indexes along these axes."""
    return [index.get(axis, at) for axis, at in enumerate(where)]
