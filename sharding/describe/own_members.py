"""The flat parameters of this package's own runtime, as members with layouts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sharding.describe.flat_layouts import slices_of
from sharding.describe.local_part import FlatSlice, LocalPart
from sharding.describe.members import FlatMember, names_in
from sharding.discovery import entry_of
from sharding.engine.flat_bucket import FLATTENED, FlatBucket, FlatParameter, flat_buckets
from sharding.engine.unit import Unit, units_of
from sharding.errors import LocalShapeError, ShardingError


def flat_members(module: nn.Module) -> Iterator[FlatMember]:
    """What an optimizer sees of the flat parameters in a module; what was whole is resharded.

    Original parameters that are not divided are not among them: they are what they were.
    """
    units = list(units_of((module,)))
    owner = {id(bucket): unit for unit in units for bucket in unit.buckets}
    buckets = list({id(b): b for unit in units for b in flat_buckets(unit.used)}.values())
    every = iter(names_in(module, [p.owners for bucket in buckets for p in bucket.parameters]))
    for bucket in buckets:
        names = [next(every) for _ in bucket.parameters]
        seen = _seen(bucket, owner.get(id(bucket)))
        if _is_as_it_was(bucket):
            continue
        # A tied parameter may be in the module, and others of its bucket outside.
        inside = [
            (index, tied, part)
            for index, (tied, part) in enumerate(zip(names, slices_of(bucket), strict=True))
            if tied
        ]
        if not bucket.form.use_orig_params:
            tied_names = tuple(tied for _, tied, _ in inside)
            slices = tuple(part for _, _, part in inside)
            yield FlatMember(seen[0], tied_names, slices, is_original=False)
            continue
        for index, tied, part in inside:
            parameter, numel = seen[index], part.hi - part.lo
            if parameter.numel() != numel:
                raise LocalShapeError(
                    f"{tied[0]} has {parameter.numel()} elements, but this rank's shard of it has "
                    f"{numel}: its data was replaced by a tensor of another shape"
                )
            own = FlatSlice(0, numel, part.layout, part.key)
            yield FlatMember(parameter, (tied,), (own,), is_original=True)


def part_of(tensor: torch.Tensor) -> LocalPart | None:
    """The part that an original parameter is by itself, without its module; None if it is none."""
    if not isinstance(tensor, nn.Parameter):
        return None
    entry = entry_of(tensor)
    if entry is None or entry.sharded is not tensor or not isinstance(entry.bucket, FlatBucket):
        return None
    if _is_as_it_was(entry.bucket):
        return None
    found = slices_of(entry.bucket)[entry.bucket.parameters.index(entry)]
    return LocalPart(tensor.detach(), found.layout, found.key)


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter: several parameters end to end, of which ranks have parts."""
    return isinstance(tensor, FlatParameter)


def check_is_whole(module: nn.Module) -> None:
    """Raise ShardingError for a part of a unit: its parameters are in a flat one outside."""
    inside = {id(bucket) for unit in units_of((module,)) for bucket in unit.used}
    for path, part in module.named_modules():
        for bucket in part.__dict__.get(FLATTENED, ()):
            if id(bucket) not in inside:
                raise ShardingError(
                    f"{path or type(module).__name__} has its parameters in the flat parameter of "
                    f"the {type(bucket.form.home).__name__} around it; use that module, or wrap it "
                    "with use_orig_params=True"
                )


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
