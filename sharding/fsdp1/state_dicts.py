"""State dicts of modules with flat parameters, by the module's own `state_dict()`.

    full      full plain tensors, under the names that the module had before it was wrapped
    sharded   the same names, each a DTensor of which every rank has a chunk of rows
    local     this rank's flat parameters, or its elements of the original ones

Rules:

1. All ranks make and load a full or a sharded state dict together. A local one shares memory and
   does not communicate; its metadata describes it (`sharding.describe.own_members`).
2. A full state dict is made unit by unit, each tensor in new memory. Ranks that get no tensors of
   it drop each unit before the next is gathered.
3. A sharded state dict is made and loaded without an all-gather (`sharding.fsdp1.flat_states`).
4. A local state dict that does not fit is an error before any change. `load_state_dict` reports the
   misfits of the other kinds, with full shapes.

The keys of the state dicts of modules with flat parameters, and their order.

The order is that of the module before it was wrapped: the parameters, buffers and extra state of a
module, then those of its inner modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sharding.describe.describing import is_local_forced
from sharding.describe.members import FLAT_PARAMETERS
from sharding.describe.own_members import OwnKeys, check_loadable, record_of
from sharding.describe.wrappers import key_prefix, state_key
from sharding.engine.flat_param_group import FlatParamGroup, flat_param_groups
from sharding.engine.parameter import local_of
from sharding.engine.unit import UNIT
from sharding.errors import ArgumentError, ShardingError
from sharding.fsdp1.entry_point import EntryPoint, check_units, entry_point_of, entry_points
from sharding.fsdp1.flat_states import FlatPart, RowLoading, by_rows, use_unsharded
from sharding.fsdp1.unsharded import UnshardedParameters
from sharding.policies import (
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    check_settings,
    default_settings,
)
from sharding.reshard.dtensor_state_dicts import choose, chosen_for


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Sets the kind of state dicts of all instances in a module; returns the former settings.

    Raises ArgumentError if the instances have different settings.
    """
    before = get_state_dict_type(module)
    chosen = check_settings(state_dict_type, state_dict_config, optim_state_dict_config)
    instances = list(entry_points(module))
    for entry_point in instances:
        entry_point.state_dict_settings = chosen
    choose(module, None if instances or chosen == default_settings_of(module) else chosen)
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Sets the kind of state dicts of all instances in a module, inside the block.

    torch's helpers call this too, with torch's names of the arguments.
    """
    before = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        set_state_dict_type(
            module,
            before.state_dict_type,
            before.state_dict_config,
            before.optim_state_dict_config,
        )


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Returns the settings of all instances in a module. Raises ArgumentError if they differ."""
    settings = [entry_point.state_dict_settings for entry_point in entry_points(module)]
    for other in settings[1:]:
        if other != settings[0]:
            raise ArgumentError(
                "All FSDP modules must have the same state dict settings; got "
                f"{settings[0]} and {other}"
            )
    return settings[0] if settings else chosen_for(module) or default_settings_of(module)


def default_settings_of(module: nn.Module) -> StateDictSettings:
    """Returns the settings for full state dicts; for sharded ones if parameters are DTensors."""
    if any(hasattr(p, UNIT) and entry_point_of(p) is None for p in module.modules()):
        return check_settings(StateDictType.SHARDED_STATE_DICT, None, None)
    return default_settings()


def mesh_given(entry_point: EntryPoint) -> DeviceMesh | None:
    """Returns the mesh of the call that made an instance: sharded state dicts lie over it."""
    mesh: DeviceMesh | None = getattr(entry_point.owner, "_device_mesh", None)
    return mesh


def hook_state_dicts(entry_point: EntryPoint) -> None:
    """Makes the module's `state_dict()` and `load_state_dict()` work with whole parameters."""
    hooks = _Hooks(entry_point)
    owner = entry_point.owner
    owner.register_state_dict_pre_hook(hooks.before_saving)  # type: ignore[no-untyped-call]
    owner._register_state_dict_hook(hooks.after_saving)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_pre_hook(hooks.before_loading)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_post_hook(hooks.after_loading)  # type: ignore[no-untyped-call]


_shown: WeakKeyDictionary[FlatParamGroup, UnshardedParameters] = WeakKeyDictionary()
"""Unsharded parameters in the modules while a state dict is made or loaded."""
_loaded: WeakKeyDictionary[FlatParamGroup, tuple[list[str], set[str]]] = WeakKeyDictionary()
"""The keys that were last loaded from a sharded state dict, with the list of missing keys, which is
the same object in all hooks of one `load_state_dict`."""


class _Hooks:
    def __init__(self, entry_point: EntryPoint) -> None:
        self._entry_point = entry_point
        self._own: list[OwnKeys] = []
        self._open: list[FlatParamGroup] = []
        """The groups that this instance has unsharded in the modules."""
        self._filled: list[str] = []
        """Keys of flat parameters that are loaded before their modules look for them."""

    @property
    def _settings(self) -> StateDictSettings:
        if is_local_forced():
            return check_settings(StateDictType.LOCAL_STATE_DICT, None, None)
        return self._entry_point.state_dict_settings

    @property
    def _kind(self) -> StateDictType:
        return self._settings.state_dict_type

    @property
    def _is_kept(self) -> bool:
        """False if only another rank gets the full state dict."""
        config, settings = self._settings.state_dict_config, self._entry_point.settings
        if not isinstance(config, FullStateDictConfig) or not config.rank0_only:
            return True
        groups = settings.groups
        return groups.shard.rank == 0 and groups.replicate.rank == 0

    # Making a state dict.

    def before_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Unshards the unit's parameters for a full state dict, else reshard them."""
        self._close()  # an error may have ended the last state dict
        self._own = own_keys(self._entry_point)
        if self._entry_point.unit.summoned:
            return
        if self._kind is not StateDictType.LOCAL_STATE_DICT:
            check_units(module)
        for own in self._own:
            if own.param_group in _shown:
                continue
            own.param_group.reshard()
            own.param_group.settle_replaced()
            if self._kind is StateDictType.FULL_STATE_DICT:
                if self._is_kept:
                    self._show(own.param_group)
                else:
                    own.param_group.fetch()

    def after_saving(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        """Sets names of the module and values of the kind; reshards the unit. May communicate."""
        entry_point, inside = self._entry_point, prefix + self._entry_point.prefix
        config = self._settings.state_dict_config
        if entry_point.prefix:
            for key in [key for key in state if key.startswith(inside)]:
                state[prefix + key[len(inside) :]] = state.pop(key)
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            if not entry_point.unit.summoned:
                own = local_keys(entry_point)
                records = tuple(record_of(each.param_group, each.keys) for each in own)
                metadata[FLAT_PARAMETERS] = records
        elif self._kind is StateDictType.FULL_STATE_DICT:
            if self._is_kept:
                self._make_full(state, prefix, config.offload_to_cpu)
        else:
            self._make_rows(state, prefix, config.offload_to_cpu)
        self._close()
        if not self._is_kept:
            for key in [key for key in state if key.startswith(prefix)]:
                del state[key]
        self._keep_buffers(state, prefix)
        if config.offload_to_cpu:
            for key, value in state.items():
                if key.startswith(prefix) and isinstance(value, torch.Tensor):
                    state[key] = value.cpu()

    def _make_full(self, state: dict[str, Any], prefix: str, to_cpu: bool) -> None:
        """Replaces the unit's parameters by plain tensors in new memory."""
        for own in self._own:
            for keys in own.keys:
                names = [prefix + key for key in keys if prefix + key in state]
                if not names:
                    continue
                value = state[names[0]].detach()
                if isinstance(value, DTensor):  # tensor parallelism divides it too
                    value = value.full_tensor()
                value = value.to("cpu" if to_cpu else value.device, copy=True)
                state.update(dict.fromkeys(names, value))

    def _make_rows(self, state: dict[str, Any], prefix: str, to_cpu: bool) -> None:
        """Replaces the unit's parameters by DTensors, a flat one by all parameters in it."""
        for own in self._own:
            param_group = own.param_group
            parts, names, error = [], [], None
            for index, keys in enumerate(own.keys):
                if not keys:
                    continue
                if param_group.form.use_orig_params and not all(
                    prefix + key in state for key in keys
                ):
                    error = ShardingError(
                        f"{prefix}{keys[0]} is not in the state dict: a hook of a module renamed "
                        "or removed it, which a sharded state dict cannot follow; take a full one"
                    )
                local = self._elements(param_group, index, state.get(prefix + keys[0]))
                parts.append(FlatPart(prefix + keys[0], index, local))
                names.append(keys)
            mesh = mesh_given(self._entry_point)
            values = by_rows(param_group, parts, mesh, to_cpu=to_cpu, error=error)
            for keys, value in zip(names, values, strict=True):
                state.update({prefix + key: value for key in keys})
            if not param_group.form.use_orig_params:
                state.pop(prefix + param_group.form.name, None)
        if any(not own.param_group.form.use_orig_params for own in self._own):
            inside = [key[len(prefix) :] for key in state if key.startswith(prefix)]
            for key in in_order(self._entry_point.owner, inside):
                state[prefix + key] = state.pop(prefix + key)

    def _elements(self, param_group: FlatParamGroup, index: int, shown: Any) -> torch.Tensor:
        """Returns this rank's elements of a parameter, unsharded inside `summon_full_params`."""
        if self._entry_point.unit.summoned and isinstance(shown, torch.Tensor):
            unsharded = local_of(shown.detach(), param_group.parameters[index].distributed)
            if unsharded.shape == param_group.packing.slots[index].shape:
                _, lo, hi = param_group.piece(index)
                return unsharded.reshape(-1)[lo:hi]
        return param_group.shard_view(index, param_group.flat.detach()).reshape(-1)

    def _keep_buffers(self, state: dict[str, Any], prefix: str) -> None:
        """Gives buffers the dtype that they had before mixed precision cast them."""
        if not self._entry_point.buffer_dtypes:
            return
        paths: dict[nn.Module, list[str]] = {}
        for path, part in self._entry_point.module.named_modules(remove_duplicate=False):
            paths.setdefault(part, []).append(prefix + key_prefix(path))
        for (part, name), dtype in self._entry_point.buffer_dtypes.items():
            for path in paths.get(part, ()):
                if path + name in state:
                    state[path + name] = state[path + name].to(dtype)

    # Loading a state dict.

    def before_loading(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Sets names inside the wrapper and values that the module can copy. May communicate."""
        entry_point, inside = self._entry_point, prefix + self._entry_point.prefix
        self._close()
        self._own, self._filled = own_keys(entry_point), []
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            _check_local(entry_point.owner, state, prefix, metadata)
        if self._kind is not StateDictType.LOCAL_STATE_DICT and not entry_point.unit.summoned:
            check_units(module)
        for own in self._own:
            if own.param_group not in _shown:  # else an outer instance has it unsharded
                own.param_group.reshard()
                own.param_group.settle_replaced()
        if entry_point.prefix:
            for key in [key for key in state if key.startswith(prefix)]:
                if not key.startswith(inside):
                    state[inside + key[len(prefix) :]] = state.pop(key)
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            self._fill_flat(state, inside)
            return
        if self._kind is StateDictType.SHARDED_STATE_DICT and not entry_point.unit.summoned:
            for own in self._own:
                self._filled.append(state_key(inside + own.param_group.form.name))
                names = {state_key(inside + key) for tied in own.keys for key in tied}
                call, loaded = _loaded.get(own.param_group, (None, names))
                if call is missing and names <= loaded:  # by an outer instance
                    continue
                loading = RowLoading(own, mesh_given(entry_point), state, inside)
                loading.load(strict, missing, errors)
                _loaded[own.param_group] = missing, names
            return
        for own in self._own:
            if not entry_point.unit.summoned and own.param_group not in _shown:
                self._show(own.param_group)
            for parameter, keys in zip(own.param_group.parameters, own.keys, strict=True):
                present = [key for key in keys if isinstance(state.get(inside + key), torch.Tensor)]
                for key in keys if present else ():  # a missing tied name belongs to another unit
                    value = state[inside + (key if key in present else present[0])]
                    state[inside + key] = use_unsharded(value, parameter)

    def after_loading(self, module: nn.Module, incompatible: Any) -> None:
        """Writes loaded values into the shards; reports misfits by names of the module."""
        self._close(writeback=True)
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [key for key in map(state_key, names) if key not in self._filled]

    def _fill_flat(self, state: dict[str, Any], inside: str) -> None:
        """Moves the values of a local state dict into the flat parameters.

        The module that has a flat parameter may rename its keys, as activation checkpointing does.
        """
        for own in local_keys(self._entry_point):
            key = inside + own.param_group.form.name
            if not own.param_group.form.use_orig_params and key in state:
                with torch.no_grad():
                    own.param_group.flat.copy_(state.pop(key))
                self._filled.append(state_key(key))

    # Unsharded parameters in the modules.

    def _show(self, param_group: FlatParamGroup) -> None:
        """Puts unsharded parameters into the modules until `_close`. Waits for other ranks."""
        _shown[param_group] = UnshardedParameters(param_group, with_grads=False, to_cpu=False)
        _shown[param_group].show()
        self._open.append(param_group)

    def _close(self, writeback: bool = False) -> None:
        while self._open:
            param_group = self._open.pop()
            unsharded = _shown.pop(param_group)
            unsharded.hide()
            if writeback:
                unsharded.write_back(from_first=False)


def _check_local(
    owner: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Raises if a local state dict does not fit an instance, or an inner one (rule 4)."""
    every = {state_key(prefix): metadata}
    for path, found in (getattr(state, "_metadata", None) or {}).items():
        if FLAT_PARAMETERS in found:
            every[key_prefix(path)] = found
    for path, part in owner.named_modules():
        entry_point = entry_point_of(part)
        if entry_point is not None:
            inside = prefix + key_prefix(path)
            own = local_keys(entry_point)
            check_loadable(own, state, inside, every.get(state_key(inside), {}))


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
    place = {key: at for at, key in enumerate(_iter_expected(module))}
    places: dict[str, int] = {}
    last = -1
    for key in keys:
        last = place.get(key, last)
        places[key] = last
    return sorted(keys, key=places.__getitem__)


def _iter_expected(module: nn.Module) -> Iterator[str]:
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
