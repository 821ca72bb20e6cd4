"""Makes a unit with flat parameters from a module, for both entry points.

choose the groups    ->  the ranks that share and those that replicate
materialize          ->  no parameter is on the meta device
move                 ->  all parameters are on the compute device
synchronize          ->  all ranks have the first rank's values
flatten              ->  a parameter group for each dtype, trained and frozen ones apart
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.describe.dtensor import check_gathers
from sharding.device_rules import (
    check_one_device,
    compute_device,
    device_given,
    warn_of_host_memory,
)
from sharding.discovery import FreeParameter, borrowed_param_group, free_parameters
from sharding.engine.dtensors import local_of
from sharding.engine.flat_param_group import FlatForm, FlatParamGroup
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter, Precision
from sharding.engine.runtime import attach
from sharding.engine.shard_group import HybridGroups
from sharding.engine.unit import UNIT, Unit, UnitPolicy, units_of
from sharding.fsdp1.strategies import KEEPS_AFTER_FORWARD
from sharding.materialize import (
    broadcast_states,
    check_reachable,
    check_states,
    materialize,
    own_modules,
)
from sharding.policies import BackwardPrefetch, MixedPrecision, ShardingStrategy
from sharding.torch_versions import root_mesh


@dataclass(frozen=True, slots=True)
class FlatSettings:
    """A user's choices for a unit with flat parameters."""

    strategy: ShardingStrategy
    groups: HybridGroups
    use_orig_params: bool
    offload: bool = False
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    device_id: int | str | torch.device | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_params: frozenset[nn.Parameter] = frozenset()


def make_flat_unit(
    module: nn.Module, owner: nn.Module, settings: FlatSettings, prepare: Callable[[], None]
) -> Unit:
    """Returns the unit of a module's own parameters, which are in flat parameters from now on.

    `owner` is the module that has the unit: the wrapper, or the module itself. All ranks of the
    groups call this.
    """
    groups = settings.groups
    given = device_given(settings.device_id, groups.shard.rank)
    inner = {part for unit in units_of((module,)) for part in unit.modules}
    own = list(own_modules(module, settings.ignored_modules, inner))
    found, parameters = _found(module, settings)
    buffers = [b for part in own for b in part.buffers(recurse=False)]
    _check_ranks(parameters, groups)
    compute = compute_device(parameters, given)
    if any(tensor.is_meta for tensor in parameters + buffers):
        real = [p for p in parameters if not p.is_meta]
        if real and len(real) < len(parameters) and settings.param_init_fn is None:
            check_one_device(parameters, given)
        materialize(own, compute, settings.param_init_fn)
        found, parameters = _found(module, settings)
        buffers = [b for part in own for b in part.buffers(recurse=False)]
    check_one_device(parameters, given)
    if given is not None:
        _move(parameters, buffers, given)
    else:
        warn_of_host_memory(parameters, compute)
    if settings.sync_module_states:
        states: list[torch.Tensor] = [*parameters, *buffers]
        check_reachable(states, groups)
        check_states(module, states, (), groups, compute)
        broadcast_states(states, groups)
    param_groups, borrowed = _param_groups(found, module, settings, compute)
    unit = Unit((owner,), param_groups, borrowed, _policy(settings), prepare)
    attach(unit)
    setattr(owner, UNIT, unit)
    return unit


def _check_ranks(parameters: Iterable[nn.Parameter], groups: HybridGroups) -> None:
    """Raises ArgumentError if gathers over tensor parallelism would mix parts of parameters."""
    for mesh in dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)):
        root, inside = root_mesh(mesh), mesh.mesh_dim_names or ()
        axes = [
            axis
            for axis, name in enumerate(root.mesh_dim_names or ())
            if name in inside or root.get_group(axis) == groups.shard.group
        ]
        check_gathers(root, axes, axes[::-1])


def _found(
    module: nn.Module, settings: FlatSettings
) -> tuple[list[FreeParameter], list[nn.Parameter]]:
    """Returns a unit's parameters, and those of them that no other unit has divided already."""
    found = free_parameters((module,), settings.ignored_params, settings.ignored_modules)
    every = list(found)
    return every, [each.parameter for each in every if each.borrowed is None]


def _param_groups(
    found: Iterable[FreeParameter], module: nn.Module, settings: FlatSettings, compute: torch.device
) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """Returns the unit's parameter groups, and those of other units that it uses."""
    groups = settings.groups
    own: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    borrowed: dict[int, ParamGroup] = {}
    for each in found:
        param_group = borrowed_param_group(each)
        if param_group is not None:
            borrowed[id(param_group)] = param_group
            continue
        parameter = each.parameter
        spec = parameter._spec if isinstance(parameter, DTensor) else None
        local = local_of(parameter, spec)
        entry = Parameter(each.name, each.owners, parameter, 0, tuple(local.shape))
        entry.distributed = spec
        each.taken_as(entry)
        own.setdefault((parameter.dtype, parameter.requires_grad), []).append(entry)
    mixed = settings.mixed_precision
    precision = Precision(mixed.param_dtype, mixed.reduce_dtype, mixed.keep_low_precision_grads)
    unsafe = os.environ.get("FSDP_USE_UNSAFE_SETATTR") == "1"
    param_groups: list[ParamGroup] = []
    for number, entries in enumerate(own.values()):
        name = "_flat_param" if number == 0 else f"_flat_param_{number}"
        form = FlatForm(settings.use_orig_params, module, name, unsafe)
        param_group = FlatParamGroup(entries, groups, precision, groups.next_number(), form)
        param_group.compute_device = compute
        if settings.offload and compute.type != "cpu":
            param_group.flat.data = param_group.flat.data.cpu()
        param_groups.append(param_group)
        for entry in entries:
            entry.param_group = param_group
    return param_groups, list(borrowed.values())


def _policy(settings: FlatSettings) -> UnitPolicy:
    strategy, mixed = settings.strategy, settings.mixed_precision
    nested = mixed.param_dtype if mixed.cast_forward_inputs else None
    keeps = strategy in KEEPS_AFTER_FORWARD
    return UnitPolicy(
        cast_inputs=nested,
        cast_root_inputs=mixed.param_dtype if mixed.cast_root_forward_inputs else nested,
        reshard_after_forward=False if keeps or strategy is ShardingStrategy.NO_SHARD else None,
        reshard_after_unreduced_backward=not keeps,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=settings.backward_prefetch,
        always_show_sharded=True,
    )


def _move(
    parameters: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device
) -> None:
    with torch.no_grad():
        for tensor in [*parameters, *buffers]:
            if tensor.device != device and not tensor.is_meta:
                tensor.data = tensor.data.to(device)
