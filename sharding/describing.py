"""A module's state in the words of the layout algebra: what this rank has of every tensor.

This is all that a checkpoint needs to know of the runtime: names, local tensors and layouts.

Rules:

1. Nothing communicates and nothing is gathered. Whatever of the modules is whole is resharded; a
   gather that is on its way is awaited.
2. Names are those that the modules have in themselves, without what wrappers add. A tied parameter
   has all of its names, and one part.
3. A local part shares the memory of what the optimizer sees: what is written to it is loaded.
4. State that an optimizer keeps for what it sees is divided as that is (`FlatSlice.of`).

The parameters of `fully_shard` are DTensors, which `sharding.dtensor` describes. A flat parameter
is a run of parameters end to end, cut evenly over the ranks that share it: of each, a rank has a
range of its row-major elements, `FlatShard` in the algebra. Whoever holds the same shard is a
replica. Where tensor parallelism divided the parameters first, the range is one of what that left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from sharding import dtensor
from sharding.errors import LocalShapeError, ShardingError
from sharding.layout import Layout, Mesh
from sharding.local_part import FlatSlice, LocalPart

if TYPE_CHECKING:
    from sharding.flat_bucket import FlatBucket
    from sharding.unit import Unit

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into names: FSDP's class, activation checkpointing, torch.compile."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatMember:
    """A parameter that an optimizer sees, and what of which parameters of the modules it is."""

    parameter: nn.Parameter
    names: tuple[tuple[str, ...], ...]
    """For each slice the names of its parameter, in the order of the modules."""
    slices: tuple[FlatSlice, ...]


Spread = torch.Tensor | LocalPart
"""A tensor of a state: a plain one, a DTensor, or a part."""


def describe(tensor: Spread, name: str, world: Mesh) -> tuple[torch.Tensor, Layout]:
    """The rank's own part of a tensor, detached and sharing its memory, and the tensor's layout.

    As `sharding.dtensor.describe`, of which this knows one kind more.
    """
    if isinstance(tensor, LocalPart):
        return tensor.local, tensor.layout
    return dtensor.describe(tensor, name, world)


def describe_module(module: nn.Module) -> dict[str, object]:
    """The module's state by name: a `LocalPart` for every parameter that lies in a flat one.

    The rest is what `module.state_dict(keep_vars=True)` has: tensors and DTensors, which
    `describe` takes, and what modules add to their state dicts.

    >>> import torch.distributed as dist
    >>> from sharding import FullyShardedDataParallel, ShardingStrategy
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> strategy = ShardingStrategy.NO_SHARD
    >>> model = FullyShardedDataParallel(nn.Linear(2, 3), sharding_strategy=strategy)
    >>> [(k, v.shape, str(v.layout)) for k, v in describe_module(model).items()]
    [('weight', (3, 2), 'replicate:1=R'), ('bias', (3,), 'replicate:1=R')]
    >>> dist.destroy_process_group()
    """
    _check_has_its_flat_parameters(module)
    members = {id(member.parameter): member for member in flat_members(module)}
    with _local_state_dicts(module):
        state = module.state_dict(keep_vars=True)
    entries: dict[str, object] = {}
    for name, value in state.items():
        member = members.get(id(value))
        if member is None:
            entries[name] = value
        elif _is_flat(member.parameter):
            entries |= _parts(member)
        else:
            [own] = member.slices
            entries[name] = own.of(member.parameter, own.key)
    for member in members.values():  # one may be outside, but for what is tied to it
        if _is_flat(member.parameter):
            for name, part in _parts(member).items():
                entries.setdefault(name, part)
    return entries


def _check_has_its_flat_parameters(module: nn.Module) -> None:
    """Raise ShardingError for a part of a unit: its parameters are in a flat one outside."""
    if not _is_runtime_in_use():
        return
    from sharding.flat_bucket import FLATTENED
    from sharding.runtime import units_of

    inside = {id(bucket) for unit in units_of((module,)) for bucket in unit.used}
    for path, part in module.named_modules():
        for bucket in part.__dict__.get(FLATTENED, ()):
            if id(bucket) not in inside:
                raise ShardingError(
                    f"{path or type(module).__name__} has its parameters in the flat parameter of "
                    f"the {type(bucket.form.home).__name__} around it; use that module, or wrap it "
                    "with use_orig_params=True"
                )


def flat_members(module: nn.Module) -> Iterator[FlatMember]:
    """What an optimizer sees of all flat parameters in a module.

    Original parameters that are not divided are not among them: they are what they were.
    """
    if not _is_runtime_in_use():
        return
    from sharding.flat_bucket import flat_buckets
    from sharding.flat_layouts import slices_of
    from sharding.runtime import units_of

    units = list(units_of((module,)))
    owner = {id(bucket): unit for unit in units for bucket in unit.buckets}
    buckets = {id(b): b for unit in units for b in flat_buckets(unit.used)}
    names = _names(module, list(buckets.values()))
    for bucket in buckets.values():
        seen = _seen(bucket, owner.get(id(bucket)))
        if _is_as_it_was(bucket):
            continue
        # A tied parameter may be in the module, and others of its bucket outside.
        inside = [
            (index, tied, part)
            for index, (tied, part) in enumerate(zip(names[bucket], slices_of(bucket), strict=True))
            if tied
        ]
        if not bucket.form.use_orig_params:
            every = tuple(tied for _, tied, _ in inside)
            yield FlatMember(seen[0], every, tuple(part for _, _, part in inside))
            continue
        for index, tied, part in inside:
            parameter, numel = seen[index], part.hi - part.lo
            if parameter.numel() != numel:
                raise LocalShapeError(
                    f"{tied[0]} has {parameter.numel()} elements, but this rank's shard of it has "
                    f"{numel}: its data was replaced by a tensor of another shape"
                )
            yield FlatMember(parameter, (tied,), (FlatSlice(0, numel, part.layout, part.key),))


def part_of(tensor: torch.Tensor) -> LocalPart | None:
    """The part that an original parameter is by itself, without its module; None if it is none."""
    if not _is_runtime_in_use() or not isinstance(tensor, nn.Parameter):
        return None
    from sharding.discovery import Found
    from sharding.flat_bucket import FlatBucket
    from sharding.flat_layouts import slices_of

    entry = Found(tensor, [], "").borrowed
    if entry is None or entry.sharded is not tensor or not isinstance(entry.bucket, FlatBucket):
        return None
    if _is_as_it_was(entry.bucket):
        return None
    found = slices_of(entry.bucket)[entry.bucket.parameters.index(entry)]
    return LocalPart(tensor.detach(), found.layout, found.key)


def load_rest(module: nn.Module, state: Mapping[str, object]) -> None:
    """The module's `load_state_dict` for what is no `LocalPart`: what was filled stays as it is."""
    rest = {name: value for name, value in state.items() if not isinstance(value, LocalPart)}
    with _local_state_dicts(module):
        module.load_state_dict(rest, strict=False)


def state_dict_names(module: nn.Module) -> list[str]:
    """The names that the module's `state_dict()` has, made without gathering anything."""
    with _local_state_dicts(module):
        return list(module.state_dict())


def clean_name(name: str) -> str:
    """A name without what wrappers put into it.

    >>> clean_name("_fsdp_wrapped_module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_runtime_in_use() -> bool:
    """False where no module can have a flat parameter; the runtime takes a second to import."""
    return "sharding.front_door" in sys.modules


@contextmanager
def _local_state_dicts(module: nn.Module) -> Iterator[None]:
    """Inside, state dicts have what this rank has, whatever kind a user has set."""
    if not _is_runtime_in_use():
        yield
        return
    from sharding.front_door import front_doors
    from sharding.policies import StateDictType
    from sharding.state_dict_settings import checked_settings

    before = [(door, door.state_dict_settings) for door in front_doors(module)]
    for door, _ in before:
        door.state_dict_settings = checked_settings(StateDictType.LOCAL_STATE_DICT, None, None)
    try:
        yield
    finally:
        for door, settings in before:
            door.state_dict_settings = settings


def _parts(member: FlatMember) -> dict[str, LocalPart]:
    """What is in a flat parameter, under all names."""
    parts: dict[str, LocalPart] = {}
    for names, part in zip(member.names, member.slices, strict=True):
        parts |= dict.fromkeys(names, part.of(member.parameter, part.key))
    return parts


def _is_flat(parameter: nn.Parameter) -> bool:
    from sharding.flat_bucket import FlatParameter

    return isinstance(parameter, FlatParameter)


def _is_as_it_was(bucket: FlatBucket) -> bool:
    """True where the optimizer sees what the modules had before they were wrapped."""
    divided = bucket.is_divided or any(p.distributed is not None for p in bucket.parameters)
    return bucket.form.use_orig_params and not divided


def _seen(bucket: FlatBucket, unit: Unit | None) -> list[nn.Parameter]:
    """What the optimizer sees of a bucket now, if the user replaced it: what it was replaced by."""
    if unit is not None and unit.summoned:  # modules have whole parameters
        return bucket.seen()
    bucket.reshard()
    return bucket.registered()


def _names(module: nn.Module, buckets: list[FlatBucket]) -> dict[FlatBucket, list[tuple[str, ...]]]:
    """By bucket and parameter, its names in a module, in the order of the modules (rule 2)."""
    places: dict[nn.Module, list[tuple[str, list[str]]]] = {}
    found: dict[FlatBucket, list[list[str]]] = {}
    for bucket in buckets:
        found[bucket] = [[] for _ in bucket.parameters]
        for parameter, names in zip(bucket.parameters, found[bucket], strict=True):
            for owner, attribute in parameter.owners:
                places.setdefault(owner, []).append((attribute, names))
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = clean_name(f"{path}.") if path else ""
        for attribute, names in places.get(part, ()):
            names.append(f"{prefix}{attribute}")
    return {bucket: [tuple(dict.fromkeys(n)) for n in names] for bucket, names in found.items()}
