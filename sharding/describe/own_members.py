"""The flat parameters of this package's own runtime, as members with layouts.

The mesh of a layout has up to three kinds of axes, in this order, each only if it has more than one
rank: the ranks that replicate the shards, the ranks that share them, and the axes of tensor
parallelism, which has divided the parameters before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sharding.describe.dtensor import Grids, check_divides_evenly, describe
from sharding.describe.members import FlatMember, FlatSlice, LocalPart, check_numel
from sharding.describe.wrappers import names_in
from sharding.engine.flat_param_group import (
    FLATTENED,
    FlatParameter,
    FlatParamGroup,
    flat_param_groups,
)
from sharding.engine.parameter import as_dtensor
from sharding.engine.unit import entry_of, units_of
from sharding.errors import ShardingError
from sharding.layout import FlatShard, Layout, Mesh


def flat_members(module: nn.Module) -> Iterator[FlatMember]:
    """Yields the parameters that an optimizer sees for flat ones in a module; reshards the module.

    Original parameters that are not divided are left out: they are the same as before wrapping.
    """
    units = list(units_of((module,)))
    param_groups = list({id(b): b for unit in units for b in flat_param_groups(unit.used)}.values())
    every = iter(
        names_in(module, [p.owners for param_group in param_groups for p in param_group.parameters])
    )
    for param_group in param_groups:
        names = [next(every) for _ in param_group.parameters]
        param_group.reshard()
        seen = param_group.module_parameters()
        if _is_as_it_was(param_group):
            continue
        # A tied parameter may be in the module, and others of its parameter group may be outside.
        inside = [
            (index, tied, part)
            for index, (tied, part) in enumerate(zip(names, slices_of(param_group), strict=True))
            if tied
        ]
        if not param_group.form.use_orig_params:
            tied_names = tuple(tied for _, tied, _ in inside)
            slices = tuple(part for _, _, part in inside)
            yield FlatMember(seen[0], tied_names, slices, is_original=False)
            continue
        for index, tied, part in inside:
            parameter, numel = seen[index], part.hi - part.lo
            check_numel(parameter, tied[0], numel)
            own = FlatSlice(0, numel, part.layout, part.key)
            yield FlatMember(parameter, (tied,), (own,), is_original=True)


def part_of(tensor: torch.Tensor) -> LocalPart | None:
    """Returns the part that an original parameter is, without its module; None if it is none."""
    if not isinstance(tensor, nn.Parameter):
        return None
    entry = entry_of(tensor)
    if (
        entry is None
        or entry.sharded is not tensor
        or not isinstance(entry.param_group, FlatParamGroup)
    ):
        return None
    if _is_as_it_was(entry.param_group):
        return None
    found = slices_of(entry.param_group)[entry.param_group.parameters.index(entry)]
    return LocalPart(tensor.detach(), found.layout, found.key)


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter: several parameters end to end, divided over ranks."""
    return isinstance(tensor, FlatParameter)


def check_is_whole(module: nn.Module) -> None:
    """Raises ShardingError for a part of a unit, whose parameters are in a flat one outside."""
    inside = {id(param_group) for unit in units_of((module,)) for param_group in unit.used}
    for part in module.modules():
        for param_group in part.__dict__.get(FLATTENED, ()):
            if id(param_group) not in inside:
                path = next(path for path, other in module.named_modules() if other is part)
                raise ShardingError(
                    f"{path or type(module).__name__} has its parameters in the flat parameter of "
                    f"the {type(param_group.form.home).__name__} around it; use that module, or "
                    "wrap it with use_orig_params=True"
                )


def _is_as_it_was(param_group: FlatParamGroup) -> bool:
    """Whether the optimizer sees the parameters as they were before wrapping."""
    divided = param_group.is_divided or any(
        p.distributed is not None for p in param_group.parameters
    )
    return param_group.form.use_orig_params and not divided


NOWHERE = Mesh.grid((), ())


def slices_of(param_group: FlatParamGroup) -> list[FlatSlice]:
    """Returns, by parameter, its slice of this rank's shard, with its layout."""
    found = []
    groups = param_group.groups
    axes = {"replicate": groups.replicate.ranks, "shard": groups.shard.ranks}
    grids = Grids(axes["shard"][groups.shard.rank], axes, groups.grid)
    for index, before in enumerate(_iter_parallel_layouts(param_group)):
        begin, lo, hi = param_group.piece(index)
        slot = param_group.packing.slots[index]
        divided = param_group.is_divided and slot.numel
        cut = FlatShard(slot.at, param_group.packing.shard_numel) if divided else None
        layout = grids.layout(slot.shape, before, cut)
        found.append(FlatSlice(begin, begin + hi - lo, layout, (id(param_group), index)))
    return found


def _iter_parallel_layouts(param_group: FlatParamGroup) -> Iterator[Layout | None]:
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
