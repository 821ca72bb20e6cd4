"""State dicts of modules with flat parameters, by the module's own `state_dict()`.

    full      whole plain tensors, under the names the module had before it was wrapped
    sharded   the same names, each a DTensor of which every rank has a chunk of rows
    local     what this rank has: its flat parameters, or its parts of the original ones

Units are gathered one after the other, into memory of their own, and let go of before the next; a
unit's values are written before those of the units inside it. All ranks call it, for all kinds.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sharding.flat_bucket import flat_buckets
from sharding.front_door import FrontDoor, front_doors
from sharding.parameter import Parameter
from sharding.policies import (
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from sharding.state_dict_settings import checked_settings, default_settings
from sharding.summon import whole_unit
from sharding.whole_parameters import is_first

_meshes: WeakKeyDictionary[ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def with_settings(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Set the kind of state dicts of all instances in a module; what it was before."""
    before = settings_of(module)
    chosen = checked_settings(kind, config, optim_config)
    for door in front_doors(module):
        door.state_dict_settings = chosen
    return before


def settings_of(module: nn.Module) -> StateDictSettings:
    """The kind of state dicts of all instances in a module. ValueError where they differ."""
    found = [door.state_dict_settings for door in front_doors(module)]
    for other in found[1:]:
        if other != found[0]:
            raise ValueError(
                "All FSDP modules must have the same state dict settings; got "
                f"{found[0]} and {other}"
            )
    return found[0] if found else default_settings()


def hook_state_dicts(door: FrontDoor) -> None:
    """Have the module's `state_dict()` and `load_state_dict()` mean whole parameters."""
    hooks = _Hooks(door)
    owner = door.owner
    owner.register_state_dict_pre_hook(hooks.before_saving)  # type: ignore[no-untyped-call]
    owner._register_state_dict_hook(hooks.after_saving)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_pre_hook(hooks.before_loading)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_post_hook(hooks.after_loading)  # type: ignore[no-untyped-call]


class _Hooks:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._open = ExitStack()

    @property
    def _kind(self) -> StateDictType:
        return self._door.state_dict_settings.state_dict_type

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """The unit's parameters are whole, or sharded for a local state dict."""
        if self._door.unit.summoned:
            return
        for bucket in self._door.unit.buckets:
            bucket.reshard()
        if self._kind is not StateDictType.LOCAL_STATE_DICT:
            self._open.enter_context(whole_unit(self._door.unit, writeback=False))

    def after_saving(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        """Names are those of the module, values those of the kind; the unit is sharded again."""
        door, inside = self._door, prefix + self._door.prefix
        config = door.state_dict_settings.state_dict_config
        own = {inside + name for name in _own_names(door)}
        for key in [key for key in state if key.startswith(inside)]:
            value = state.pop(key)
            if key in own and isinstance(value, torch.Tensor):
                if self._kind is StateDictType.SHARDED_STATE_DICT:
                    value = _as_sharded(value, door)
                elif isinstance(value, DTensor):  # divided by tensor parallelism besides
                    value = value.full_tensor()
                if config.offload_to_cpu and not isinstance(value, DTensor):
                    value = value.cpu()
            state[prefix + key[len(inside) :]] = value
        for (part, name), dtype in door.buffer_dtypes.items():
            for path in _paths(door, part):
                key = f"{prefix}{path}{name}"
                if key in state:
                    state[key] = state[key].to(dtype)
        self._open.close()
        if isinstance(config, FullStateDictConfig) and config.rank0_only and not _is_first(door):
            for key in [key for key in state if key.startswith(prefix)]:
                del state[key]

    def before_loading(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        """The unit's parameters are whole, and the state dict has the names inside the wrapper."""
        door, inside = self._door, prefix + self._door.prefix
        for bucket in door.unit.buckets:
            bucket.reshard()
        if door.prefix:
            for key in [key for key in state if key.startswith(prefix)]:
                if not key.startswith(inside):
                    state[inside + key[len(prefix) :]] = state.pop(key)
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return
        if not door.unit.summoned:
            self._open.enter_context(whole_unit(door.unit, writeback=True))
        for bucket in flat_buckets(door.unit.buckets):
            for parameter in bucket.parameters:
                for name in _names_of(door, parameter):
                    if isinstance(value := state.get(inside + name), torch.Tensor):
                        state[inside + name] = _as_whole(value, parameter)

    def after_loading(self, module: nn.Module, incompatible: Any) -> None:
        """The shards are what was loaded; names in complaints are those of the module."""
        self._open.close()
        if self._door.prefix and not self._door.has_outer:
            for names in (incompatible.missing_keys, incompatible.unexpected_keys):
                names[:] = [name.replace(self._door.prefix, "") for name in names]


def _own_names(door: FrontDoor) -> list[str]:
    """The names of a unit's own parameters inside its module."""
    buckets = flat_buckets(door.unit.buckets)
    return [n for b in buckets for parameter in b.parameters for n in _names_of(door, parameter)]


def _names_of(door: FrontDoor, parameter: Parameter) -> list[str]:
    """The names of a parameter inside the module: all of them, where it is tied."""
    return [f"{path}{name}" for owner, name in parameter.owners for path in _paths(door, owner)]


def _as_whole(value: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """A loaded value as the whole parameter takes it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    spec = parameter.distributed
    if spec is None:
        return value
    return distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)


def _paths(door: FrontDoor, part: nn.Module) -> list[str]:
    return [
        f"{path}." if path else ""
        for path, found in door.module.named_modules(remove_duplicate=False)
        if found is part
    ]


def _is_first(door: FrontDoor) -> bool:
    return all(is_first(bucket) for bucket in flat_buckets(door.unit.buckets))


def _as_sharded(whole: torch.Tensor, door: FrontDoor) -> torch.Tensor:
    """This rank's chunk of rows, as a DTensor over the ranks that share; whole if not divided."""
    peers = door.unit.buckets[0].sharing.peers
    if peers.group is None or whole.ndim == 0 or isinstance(whole, DTensor):
        return whole
    if peers.group not in _meshes:
        _meshes[peers.group] = DeviceMesh.from_group(peers.group, door.compute_device.type)
    parts = torch.chunk(whole, peers.size)
    part = parts[peers.rank] if peers.rank < len(parts) else whole[:0]
    return DTensor.from_local(
        part.clone(),
        _meshes[peers.group],
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
