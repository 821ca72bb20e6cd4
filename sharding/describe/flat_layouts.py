"""The layouts of the parameters in a flat one, each over all ranks that have elements of it.

The mesh has up to three kinds of axes, in this order, each only where it has more than one rank:
the ranks that replicate the shards, those that share them, and those of tensor parallelism, which
divided the parameters before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from sharding.describe.dtensor import describe
from sharding.describe.local_part import FlatSlice
from sharding.describe.rank_grid import check_divides_evenly, grid_around
from sharding.engine.dtensors import as_dtensor
from sharding.engine.flat_param_group import FlatParamGroup
from sharding.engine.shard_group import ShardGroup
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate

NOWHERE = Mesh.grid((), ())


def slices_of(param_group: FlatParamGroup) -> list[FlatSlice]:
    """By parameter, the slice of this rank's shard that is part of it, and its layout."""
    found = []
    grids: dict[Mesh | None, tuple[Mesh, int]] = {}
    groups = param_group.groups
    axes = {"replicate": _ranks(groups.replicate), "shard": _ranks(groups.shard)}
    me = axes["shard"][groups.shard.rank]
    for index, before in enumerate(_divided_before(param_group)):
        begin, lo, hi = param_group.piece(index)
        slot, stride = param_group.packing.slots[index], param_group.packing.shard_numel
        key = None if before is None else before.mesh
        if key not in grids:
            grids[key] = grid_around(me, axes, key)
        mesh, count = grids[key]
        own: list[Placement] = [Replicate()] * count
        if param_group.is_divided and slot.numel:
            own[-1] = FlatShard(slot.at, stride)
        if before is None:
            layout = Layout(slot.shape, mesh, tuple(own))
        else:
            layout = Layout(before.shape, mesh, (*own, *before.placements))
        found.append(FlatSlice(begin, begin + hi - lo, layout, (id(param_group), index)))
    return found


def _divided_before(param_group: FlatParamGroup) -> Iterator[Layout | None]:
    """By parameter, how tensor parallelism divided it before it was flattened; None if it did not.

    Raises UnknownPlacementError where it divided one unevenly: the flat parameters of its ranks are
    cut in different places then, and no one layout says where.
    """
    for entry in param_group.parameters:
        if entry.distributed is None:
            yield None
            continue
        like = as_dtensor(torch.empty(entry.shape, device="meta"), entry.distributed)
        _, layout = describe(like, entry.name, NOWHERE)
        check_divides_evenly(layout, entry.name)
        yield layout


def _ranks(shard_group: ShardGroup) -> list[int]:
    """Ranks in the default group."""
    if shard_group.group is None:
        return [dist.get_rank()]
    ranks = dist.get_process_group_ranks(shard_group.group)
    return [ranks[member] for member in shard_group.members]
