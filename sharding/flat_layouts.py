"""Where the parameters of a flat one are: each as a layout over all ranks that have some of it.

The axes of the mesh are, in this order and where there are more ranks than one: those that
replicate the shards, those that share them, those over which tensor parallelism divided the
parameters before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from sharding.chunk_bucket import as_dtensor
from sharding.dtensor import describe
from sharding.errors import UnknownPlacementError
from sharding.flat_bucket import FlatBucket
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate
from sharding.local_part import FlatSlice
from sharding.peers import Peers, Sharing

NOWHERE = Mesh.grid((), ())


def slices_of(bucket: FlatBucket) -> list[FlatSlice]:
    """By parameter, what of it is in this rank's shard, and where."""
    found = []
    grids: dict[Mesh | None, tuple[Mesh, int]] = {}
    for index, before in enumerate(_divided_before(bucket)):
        begin, lo, hi = bucket.piece(index)
        slot, stride = bucket.packing.slots[index], bucket.packing.shard_numel
        key = None if before is None else before.mesh
        if key not in grids:
            grids[key] = _grid(bucket.sharing, key)
        mesh, axes = grids[key]
        own: list[Placement] = [Replicate()] * axes
        if bucket.is_divided and slot.numel:
            own[-1] = FlatShard(slot.at, stride)
        if before is None:
            layout = Layout(slot.shape, mesh, tuple(own))
        else:
            layout = Layout(before.shape, mesh, (*own, *before.placements))
        found.append(FlatSlice(begin, begin + hi - lo, layout, (id(bucket), index)))
    return found


def _divided_before(bucket: FlatBucket) -> Iterator[Layout | None]:
    """By parameter, how tensor parallelism divided it before it was flattened; None if it did not.

    Raises UnknownPlacementError where it divided one unevenly: the flat parameters of its ranks are
    cut in different places then, and no one layout says where.
    """
    for entry in bucket.parameters:
        if entry.distributed is None:
            yield None
            continue
        like = as_dtensor(torch.empty(entry.shape, device="meta"), entry.distributed)
        _, layout = describe(like, entry.name, NOWHERE)
        if len({layout.local_shape(rank) for rank in layout.mesh.ranks()}) > 1:
            raise UnknownPlacementError(
                f"{entry.name}: tensor parallelism divides its shape {layout.shape} unevenly, and "
                "flat parameters over that have no layout; use sharding.fully_shard, or a size "
                "that divides evenly"
            )
        yield layout


def _grid(sharing: Sharing, before: Mesh | None) -> tuple[Mesh, int]:
    """The ranks that replicate and share, besides those of a mesh; how many axes the former are.

    A rank knows the row and the column of the grid that it is in. The rest is taken to be in step
    with them; where it is not, ranks come to different grids, and saving says that they differ.
    """
    me = _ranks(sharing.peers)[sharing.peers.rank]
    axes = {"replicate": _ranks(sharing.replicas), "shard": _ranks(sharing.peers)}
    if len(axes["shard"]) == 1 or len(axes["replicate"]) == 1:
        del axes["replicate" if len(axes["shard"]) > 1 else "shard"]
    names, sizes, ranks = list(axes), [len(axis) for axis in axes.values()], [me]
    last = list(axes.values())
    if before is not None:
        names += before.names
        sizes += before.sizes
        last.append(list(before.ranks()))
    for axis in last:
        ranks = [rank + other - me for rank in ranks for other in axis]
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise UnknownPlacementError(
            f"the ranks {axes}, of which this is {me}, are no grid in which every row continues as "
            "this rank's does; make the groups from one device mesh"
        )
    return Mesh.of_ranks(names, sizes, ranks), len(axes)


def _ranks(peers: Peers) -> list[int]:
    """Ranks in the default group."""
    if peers.group is None:
        return [dist.get_rank()]
    ranks = dist.get_process_group_ranks(peers.group)
    return [ranks[member] for member in peers.members]
