"""The keys of the state dicts of modules with flat parameters, and their order.

The order is that of the module before it was wrapped: the parameters, buffers and extra state of a
module, then those of its inner modules.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sharding.describe.local_state_dicts import OwnKeys
from sharding.describe.members import key_prefix
from sharding.engine.flat_param_group import flat_param_groups
from sharding.fsdp1.entry_point import EntryPoint, entry_points

EXTRA_STATE = "_extra_state"


def own_keys(entry_point: EntryPoint) -> list[OwnKeys]:
    """Returns the groups that an instance puts into a state dict and takes from a state dict.

    These are its unit's own parameter groups, and those of other units with tied parameters of its
    modules, unless the other unit is around this one and serves all places of the parameters.
    """
    param_groups = flat_param_groups(entry_point.unit.param_groups)
    for param_group in flat_param_groups(entry_point.unit.borrowed):
        if not any(part is entry_point.owner for part in param_group.form.home.modules()):
            param_groups.append(param_group)
    paths: dict[nn.Module, list[str]] = {}
    for path, part in entry_point.module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(key_prefix(path))
    return [
        OwnKeys(
            param_group,
            [
                tuple(
                    dict.fromkeys(
                        prefix + name for owner, name in p.owners for prefix in paths.get(owner, ())
                    )
                )
                for p in param_group.parameters
            ],
        )
        for param_group in param_groups
    ]


def local_keys(entry_point: EntryPoint) -> list[OwnKeys]:
    """Returns the groups of `own_keys` that a local state dict has: a flat parameter only once.

    Its home has it, under the names there.
    """
    return [
        own
        for own in own_keys(entry_point)
        if own.param_group.form.use_orig_params or own.param_group.form.home is entry_point.module
    ]


def in_order(module: nn.Module, keys: list[str]) -> list[str]:
    """Returns keys in the module's order; a key that it lacks follows the same key as before."""
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
        for entry_point in entry_points(module)
        for param_group in flat_param_groups(entry_point.unit.used)
        for part, names in param_group.keys.items()
    }
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = key_prefix(path)
        names = dict.fromkeys(flattened.get(part, ())) | dict.fromkeys(part._parameters)
        for name in (*names, *part._buffers, EXTRA_STATE):
            yield prefix + name
