"""The flat parameters of our own runtime, as members with layouts and in local state dicts.

The mesh of a layout has up to three kinds of axes, in this order, each only if it has more than one
rank: the ranks that replicate the shards, the ranks that share them, and the axes of tensor
parallelism, which has divided the parameters before.

[Note: local state dicts]
A local state dict shares this rank's memory: flat parameters, or this rank's elements of the
original ones. Its `_metadata` has a record of them under the name of the module that made it. A
record has only numbers, strings and tuples, so that it stays with the state dict and
`torch.load(weights_only=True)` accepts it.

Rules:

1. No function communicates, or needs the module that made the state dict.
2. Each flat parameter has a record: `flat_parameters` is a tuple of dicts with

       key              the flat parameter's key in the state dict; None with original parameters
       fqns             by parameter in it, all of the parameter's names in the module
       shapes           by parameter, its shape, or its local shape under tensor parallelism
       offsets          by parameter, its first element in the flat parameter
       numel            the number of elements, without padding
       shard_numel      the number of elements of every rank's shard, with padding
       layouts          by parameter, the whole shape, the mesh and its placements
       sharing          the ranks that share the flat parameter, in the order of its shards
       replicating      the ranks that hold the same shard
       rank, world_size the rank that made the state dict, and the number of ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sharding.describe.dtensor import Grids, describe_parallel
from sharding.describe.members import FLAT_PARAMETERS, FlatMember, FlatSlice, LocalPart, check_numel
from sharding.describe.wrappers import key_prefix, names_in
from sharding.engine.flat_param_group import (
    FLATTENED,
    FlatParameter,
    FlatParamGroup,
    flat_param_groups,
)
from sharding.engine.unit import entry_of, units_of
from sharding.errors import LocalShapeError, ShardingError, WorldMismatchError
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate, Shard, StridedShard


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


def slices_of(param_group: FlatParamGroup) -> list[FlatSlice]:
    """Returns, by parameter, its slice of this rank's shard, with its layout."""
    slices = []
    groups = param_group.groups
    axes = {"replicate": groups.replicate.ranks, "shard": groups.shard.ranks}
    grids = Grids(axes["shard"][groups.shard.rank], axes, groups.grid)
    for index, (entry, slot) in enumerate(
        zip(param_group.parameters, param_group.packing.slots, strict=True)
    ):
        begin, lo, hi = param_group.piece(index)
        spec = entry.distributed
        before = None if spec is None else describe_parallel(entry.shape, spec, entry.name)
        divided = param_group.is_divided and slot.numel
        cut = FlatShard(slot.at, param_group.packing.shard_numel) if divided else None
        layout = grids.layout(slot.shape, before, cut)
        slices.append(FlatSlice(begin, begin + hi - lo, layout, (id(param_group), index)))
    return slices


Record = dict[str, Any]
"""A record of rule 2."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnKeys:
    """A flat parameter group in one module's state dict, with the keys of its parameters."""

    param_group: FlatParamGroup
    keys: list[tuple[str, ...]]
    """By parameter: several keys if it is tied, none if it is outside the module."""


def record_of(param_group: FlatParamGroup, names: list[tuple[str, ...]]) -> Record:
    """Returns the record of a flat parameter group; `names` are those in the module."""
    form, packing, slots = param_group.form, param_group.packing, param_group.packing.slots
    return {
        "key": None if form.use_orig_params else form.name,
        "fqns": tuple(names),
        "shapes": tuple(slot.shape for slot in slots),
        "offsets": tuple(slot.at for slot in slots),
        "numel": sum(slot.numel for slot in slots),
        "shard_numel": packing.shard_numel,
        "layouts": tuple(_to_record(part.layout) for part in slices_of(param_group)),
        "sharing": tuple(param_group.groups.shard.ranks),
        "replicating": tuple(param_group.groups.replicate.ranks),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
    }


def record_of_layouts(names: list[tuple[str, ...]], layouts: list[Layout]) -> Record:
    """Returns the record of a module's DTensors, each a local tensor under its names."""
    rank = dist.get_rank()
    return {
        "key": None,
        "fqns": tuple(names),
        "shapes": tuple(layout.local_shape(rank) for layout in layouts),
        "offsets": (0,) * len(layouts),
        "numel": sum(layout.numel for layout in layouts),
        "shard_numel": 0,
        "layouts": tuple(map(_to_record, layouts)),
        "sharing": (rank,),
        "replicating": (rank,),
        "rank": rank,
        "world_size": dist.get_world_size(),
    }


def local_parts(
    state: Mapping[str, Any], *, rank: int | None = None, world_size: int | None = None
) -> dict[str, object]:
    """Returns a local state dict by parameter names: `LocalPart`s, and undivided values.

    Parts share the state dict's memory. Values without a record stay as they are. The order is the
    state dict's; the parameters in a flat one take its place.

    Raises ShardingError if the state dict has lost its `_metadata`, LocalShapeError if a shard has
    another size than its record, and WorldMismatchError if another `rank` or `world_size` than the
    given one made the state dict.
    """
    parts: dict[str, object] = {}
    records = dict(_by_key(state))
    if not records and any(key.rpartition(".")[2].startswith("_flat_param") for key in state):
        raise ShardingError(
            "this local state dict has flat parameters and no _metadata with their parameters; "
            "keep the state dict as `state_dict()` made it, not its items in another dict"
        )
    for key, value in state.items():
        entry = records.get(key)
        if entry is None:
            parts[key] = value
            continue
        check_made_by(key, entry.record, rank, world_size)
        _check_size(key, value, entry.record["rank"], entry.numel)
        parts |= entry.parts(value)
    return parts


def check_made_by(key: str, record: Record, rank: int | None, world_size: int | None) -> None:
    """Raises WorldMismatchError if a record is of another rank or world size than given."""
    if record["rank"] not in record["sharing"]:
        raise WorldMismatchError(
            f"{key}: the metadata of this local state dict says that rank {record['rank']} made it "
            f"and that the ranks {record['sharing']} share it; one of them was changed"
        )
    for what, wanted in (("world_size", world_size), ("rank", rank)):
        if wanted is not None and record[what] != wanted:
            raise WorldMismatchError(
                f"{key}: this local state dict was made by rank {record['rank']} of "
                f"{record['world_size']}, and this is {what.replace('_', ' ')} {wanted}; load it "
                "by the ranks that made it, or convert it by ckpt.state_dict.convert"
            )


def check_loadable(
    own: Sequence[OwnKeys], state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Raises if a local state dict does not fit a module's flat parameters, on this rank.

    LocalShapeError for a shard of another size, or a module that was wrapped in another way;
    WorldMismatchError if another rank or another number of ranks made it. Missing keys and values
    without metadata are not errors here.
    """
    rank, records = dist.get_rank(), metadata.get(FLAT_PARAMETERS, ())
    if records and len(records) != len(own):
        raise LocalShapeError(
            f"{prefix or 'the module'}: has {len(own)} flat parameters, and {len(records)} in the "
            "local state dict: wrap it as it was then, or load a full or sharded state dict"
        )
    for index, each in enumerate(own):
        param_group = each.param_group
        first = prefix + (
            each.keys[0][0] if param_group.form.use_orig_params else param_group.form.name
        )
        if records:
            check_made_by(first, records[index], rank, dist.get_world_size())
            _check_same(first, records[index], record_of(param_group, each.keys))
        sizes = {prefix + param_group.form.name: param_group.packing.shard_numel}
        if param_group.form.use_orig_params:
            pieces = [param_group.piece(number) for number in range(len(each.keys))]
            sizes = {
                prefix + key: hi - lo
                for keys, (_, lo, hi) in zip(each.keys, pieces, strict=True)
                for key in keys
            }
        for key, expected in sizes.items():
            if key in state:
                _check_size(key, state[key], rank, expected)


def _check_same(key: str, found: Record, mine: Record) -> None:
    for what in ("sharing", "replicating", "fqns", "shapes", "offsets", "shard_numel"):
        if found[what] != mine[what]:
            kind = WorldMismatchError if what in ("sharing", "replicating") else LocalShapeError
            raise kind(
                f"{key}: the {what} of this flat parameter are {mine[what]} on rank "
                f"{mine['rank']}, and {found[what]} in the local state dict: wrap the module as it "
                "was then, or load a full or sharded state dict"
            )


def _check_size(key: str, value: object, rank: int, expected: int) -> None:
    found = value.numel() if isinstance(value, torch.Tensor) else type(value).__name__
    if found != expected:
        raise LocalShapeError(
            f"{key}: the shard of rank {rank} has {found} elements in the local state dict, and "
            f"should have {expected}; it was truncated, or belongs to another rank or world size"
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """The record of one value of the state dict: a flat parameter, or a parameter in one."""

    record: Record
    prefix: str
    index: int | None
    """The index of the parameter; None: all of them, end to end."""

    @property
    def numel(self) -> int:
        """The number of elements of the value."""
        if self.index is None:
            return int(self.record["shard_numel"])
        lo, hi = self._layouts[self.index].span(self.record["rank"])
        return hi - lo

    def parts(self, value: torch.Tensor) -> dict[str, object]:
        flat = value.detach().reshape(-1)
        found: dict[str, object] = {}
        first = self.record["sharing"].index(self.record["rank"]) * self.record["shard_numel"]
        for index, layout in enumerate(self._layouts):
            if self.index not in (None, index):
                continue
            lo, hi = layout.span(self.record["rank"])
            begin = 0
            if self.index is None and hi > lo:
                begin = self.record["offsets"][index] + lo - first
            part = LocalPart(flat[begin : begin + hi - lo], layout, self._key(index))
            names = self.record["fqns"][index]
            found |= {f"{self.prefix}{name}": part for name in names}
        return found

    @property
    def _layouts(self) -> list[Layout]:
        return [_read(written) for written in self.record["layouts"]]

    def _key(self, index: int) -> object:
        return self.prefix, self.record["key"], self.record["offsets"][index], index


def _by_key(state: Mapping[str, Any]) -> Iterator[tuple[str, _Entry]]:
    """Yields the keys of a state dict that have a record."""
    for path, metadata in (getattr(state, "_metadata", None) or {}).items():
        prefix = key_prefix(path)
        for record in metadata.get(FLAT_PARAMETERS, ()):
            if record["key"] is not None:
                yield f"{prefix}{record['key']}", _Entry(record, prefix, None)
                continue
            for index, names in enumerate(record["fqns"]):
                for name in names:
                    yield f"{prefix}{name}", _Entry(record, prefix, index)


_PLACEMENTS = {
    "replicate": (Replicate, ()),
    "shard": (Shard, ("dim",)),
    "strided": (StridedShard, ("dim", "split")),
    "flat": (FlatShard, ("offset", "stride")),
}


def _to_record(layout: Layout) -> Record:
    """Returns a layout as numbers, strings and tuples."""
    placements = []
    for placement in layout.placements:
        for word, (kind, fields) in _PLACEMENTS.items():
            if type(placement) is kind:
                placements.append((word, *(getattr(placement, field) for field in fields)))
    mesh = layout.mesh
    return {
        "shape": layout.shape,
        "mesh": (mesh.names, mesh.sizes, mesh.offset, mesh.strides, mesh.table),
        "placements": tuple(placements),
    }


def _read(written: Record) -> Layout:
    names, sizes, offset, strides, table = map(_tuple, written["mesh"])
    placements: list[Placement] = [
        _PLACEMENTS[word][0](*numbers) for word, *numbers in written["placements"]
    ]
    mesh = Mesh(names, sizes, offset, strides, table)
    return Layout(tuple(written["shape"]), mesh, tuple(placements))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
