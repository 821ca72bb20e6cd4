"""The keys of the state dicts of modules with flat parameters, and their order.

Keys are paths through the modules, without what the wrappers add that take it away themselves:
FSDP's class and activation checkpointing. Their order is the one in which the module, before it was
wrapped, would have them: of each module its parameters, its buffers, its extra state, then what is
inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from sharding.engine.flat_bucket import FlatBucket, flat_buckets
from sharding.fsdp1.entry_point import FrontDoor, front_doors

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What is in modules' paths and not in state dicts' keys."""
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, eq=False)
class OwnKeys:
    """A bucket that an instance makes the state dict of, and its parameters' keys in the module."""

    bucket: FlatBucket
    keys: list[tuple[str, ...]]
    """By parameter: several where it is tied, none where it is outside of the module."""


def own_keys(door: FrontDoor) -> list[OwnKeys]:
    """What is an instance's to put into a state dict, and to take from one.

    Its unit's own buckets; and those that it uses of another unit, for tied parameters, unless that
    unit is around it and sees to all of their places.
    """
    buckets = flat_buckets(door.unit.buckets)
    for bucket in flat_buckets(door.unit.borrowed):
        if not any(part is door.owner for part in bucket.form.home.modules()):
            buckets.append(bucket)
    paths: dict[nn.Module, list[str]] = {}
    for path, part in door.module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(key_prefix(path))
    return [
        OwnKeys(
            bucket,
            [
                tuple(
                    dict.fromkeys(
                        prefix + name for owner, name in p.owners for prefix in paths.get(owner, ())
                    )
                )
                for p in bucket.parameters
            ],
        )
        for bucket in buckets
    ]


def key_prefix(path: str) -> str:
    """What a module's path puts before its keys.

    >>> key_prefix("layers.0._fsdp_wrapped_module"), key_prefix("")
    ('layers.0.', '')
    """
    return state_key(f"{path}.") if path else ""


def state_key(path: str) -> str:
    """A path without what is not in keys."""
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def in_order(module: nn.Module, keys: list[str]) -> list[str]:
    """Keys as the module would have them; those it would not have follow what they followed."""
    place = {key: at for at, key in enumerate(_expected(module))}
    places: dict[str, int] = {}
    last = -1
    for key in keys:
        last = place.get(key, last)
        places[key] = last
    return sorted(keys, key=places.__getitem__)


def _expected(module: nn.Module) -> Iterator[str]:
    flattened = {
        part: names
        for door in front_doors(module)
        for bucket in flat_buckets(door.unit.used)
        for part, names in bucket.keys.items()
    }
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = key_prefix(path)
        names = dict.fromkeys(flattened.get(part, ())) | dict.fromkeys(part._parameters)
        for name in (*names, *part._buffers, EXTRA_STATE):
            yield prefix + name
