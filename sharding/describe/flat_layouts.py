"""The layouts of the parameters in a flat one, each over all ranks that hold its elements.

The mesh has up to three kinds of axes, in this order, each only if it has more than one rank: the
ranks that replicate the shards, the ranks that share them, and the axes of tensor parallelism,
which has divided the parameters before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sharding.describe.dtensor import Grids, check_divides_evenly, describe
from sharding.describe.members import FlatSlice
from sharding.engine.flat_param_group import FlatParamGroup
from sharding.engine.parameter import as_dtensor
from sharding.layout import FlatShard, Layout, Mesh

NOWHERE = Mesh.grid((), ())


def slices_of(param_group: FlatParamGroup) -> list[FlatSlice]:
    """Returns, by parameter, its slice of this rank's shard, with its layout."""
    found = []
    groups = param_group.groups
    axes = {"replicate": groups.replicate.ranks, "shard": groups.shard.ranks}
    grids = Grids(axes["shard"][groups.shard.rank], axes, groups.grid)
    for index, before in enumerate(_divided_before(param_group)):
        begin, lo, hi = param_group.piece(index)
        slot = param_group.packing.slots[index]
        divided = param_group.is_divided and slot.numel
        cut = FlatShard(slot.at, param_group.packing.shard_numel) if divided else None
        layout = grids.layout(slot.shape, before, cut)
        found.append(FlatSlice(begin, begin + hi - lo, layout, (id(param_group), index)))
    return found


def _divided_before(param_group: FlatParamGroup) -> Iterator[Layout | None]:
    """Yields, by parameter, its layout under tensor parallelism; None without tensor parallelism.

    Raises UnknownPlacementError if it divides a parameter unevenly: the flat parameters of its
    ranks are then cut at different places, which no single layout describes.
    """
    for entry in param_group.parameters:
        if entry.distributed is None:
            yield None
            continue
        like = as_dtensor(torch.empty(entry.shape, device="meta"), entry.distributed)
        _, layout = describe(like, entry.name, NOWHERE)
        check_divides_evenly(layout, entry.name)
        yield layout
