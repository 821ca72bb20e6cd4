"""An instance of FSDP1: its unit and its checks, for both entry points with flat parameters.

Makes a unit with flat parameters from a module, for both entry points.

choose the groups    ->  the ranks that share and those that replicate
materialize          ->  no parameter is on the meta device
move                 ->  all parameters are on the compute device
synchronize          ->  all ranks have the first rank's values
flatten              ->  a parameter group for each dtype, trained and frozen ones apart

The ranks that share and those that replicate, for every strategy and form of groups.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sharding.describe.dtensor import check_gathers, mesh_of
from sharding.engine.composition import HybridGroups, ShardGroup
from sharding.engine.flat_param_group import CommHook, FlatForm, FlatParamGroup, flat_param_groups
from sharding.engine.forward_hooks import ForwardHooks
from sharding.engine.order_check import check_shards
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter, Precision, local_of
from sharding.engine.runtime import attach, runtime_of
from sharding.engine.unit import (
    UNIT,
    FreeParameter,
    Unit,
    UnitPolicy,
    find_tied_group,
    free_parameters,
    on_device,
    units_of,
)
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError
from sharding.fsdp1.preparation import (
    auto_wrap,
    broadcast_states,
    check_one_device,
    check_reachable,
    check_states,
    check_trainable_on,
    compute_device,
    device_given,
    materialize,
    own_modules,
    plan_wraps,
    warn_of_host_memory,
)
from sharding.policies import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    default_settings,
)
from sharding.torch_versions import release_with_groups, root_mesh

ENTRY_POINT = "_sharding_entry_point"
"""The attribute of a module that is its entry point."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The modules and parameters that an instance leaves as they are."""

    modules: frozenset[nn.Module]
    """The ignored modules: whole subtrees."""
    parameters: frozenset[nn.Parameter]


class EntryPoint:
    """One instance: its module, its unit, and the choices of a user."""

    def __init__(
        self, owner: nn.Module, module: nn.Module, settings: FlatSettings, prefix: str
    ) -> None:
        self.owner = owner
        """The wrapper, or the module itself."""
        self.module = module
        self.settings = settings
        self.prefix = prefix
        """The prefix that the instance adds to the names in the module."""
        self.hook: CommHook | None = None
        self.has_outer = False
        """Whether the instance is inside another one."""
        self.state_dict_settings: StateDictSettings = default_settings()
        self.full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        for inner in entry_points(module):
            inner.has_outer = True
        self.unit = make_flat_unit(module, owner, settings, self._prepare)
        self.forward_hooks = ForwardHooks(self.unit)
        devices = [param_group.device for param_group in self.unit.param_groups]
        self.compute_device = (
            devices[0] if devices else compute_device([], device_given(settings.device_id, 0))
        )
        modules = {part for unit in units_of((module,)) for part in unit.modules} - {module}
        self.buffers = [
            (part, name)
            for part in own_modules(module, settings.ignored_modules, modules)
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        """The places of the buffers that this instance casts."""
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        """The dtypes of buffers before they were cast."""

    def check_is_root(self) -> bool:
        """Returns True for the outermost instance."""
        return not self.has_outer

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshards the unit, as a hook of `owner`; returns the inputs, on its device, cast."""
        unit = self.unit
        runtime_of(unit)  # decides whether it is the root
        if unit.is_root:
            for entry_point in entry_points(self.owner):
                entry_point.choose_precision()
            if self.compute_device.type != "cpu":
                args = on_device(args, self.compute_device)
                kwargs = on_device(kwargs, self.compute_device)
        ready: tuple[tuple[Any, ...], dict[str, Any]]
        ready = self.forward_hooks.before(module, args, kwargs)
        return ready

    def choose_precision(self) -> None:
        """Sets full precision in evaluation, if the environment asks for it."""
        full = self.full_precision_in_eval and not self.owner.training
        self.unit.full_precision = full  # also of a unit whose parameters all belong to inner ones
        for param_group in self.unit.param_groups:
            param_group.full_precision = full
        if self.settings.mixed_precision.buffer_dtype is not None:
            self._cast_buffers(None if full else self.settings.mixed_precision.buffer_dtype)

    def _cast_buffers(self, dtype: torch.dtype | None) -> None:
        """Casts the buffers to a dtype; None: back to their original dtypes."""
        for part, name in self.buffers:
            buffer = part._buffers[name]
            if buffer is None or not buffer.is_floating_point():
                continue
            original = self.buffer_dtypes.setdefault((part, name), buffer.dtype)
            wanted = original if dtype is None else dtype
            if buffer.dtype != wanted:
                part._buffers[name] = buffer.to(wanted)

    def _prepare(self) -> None:
        """Raises ValueError or RuntimeError before the first forward, for devices and settings."""
        if self.unit.is_root:
            _check_homogeneous(list(entry_points(self.owner)))
        for param_group in flat_param_groups(self.unit.param_groups):
            for parameter in param_group.module_parameters():
                check_trainable_on(parameter.device, self.compute_device, self.settings.offload)
                if (
                    hasattr(parameter, "_in_backward_optimizers")
                    and not param_group.form.use_orig_params
                ):
                    raise MisuseError(
                        "FSDP optimizer in backward only supported with use_orig_params=True!"
                    )


def entry_point_of(module: nn.Module) -> EntryPoint | None:
    """Returns the instance that a module owns, or None."""
    entry_point: EntryPoint | None = module.__dict__.get(ENTRY_POINT)
    return entry_point


def entry_points(module: nn.Module) -> Iterator[EntryPoint]:
    """Yields all instances in a module, outer ones first."""
    for part in module.modules():
        entry_point = entry_point_of(part)
        if entry_point is not None:
            yield entry_point


def check_units(module: nn.Module) -> None:
    """Compares the units of the outermost instances in a module between the ranks, once; waits.

    All ranks that share shards call this, before they gather outside of a forward. Raises
    MisuseError on all of them if they differ.
    """
    for entry_point in entry_points(module):
        if entry_point.check_is_root():
            check_shards(entry_point.unit)


def wrap_inside(
    module: nn.Module,
    policy: Any,
    wrap_fn: Callable[..., nn.Module | None],
    root_kwargs: dict[str, Any],
    ignored: Ignored,
    groups: HybridGroups,
) -> None:
    """Wraps the modules that a policy chooses inside a module.

    Raises as `plan_wraps` does; with `sync_module_states` MisuseError on all ranks of `groups`,
    before anything is wrapped, if they choose different modules.
    """
    plan = plan_wraps(
        module,
        policy,
        root_kwargs=root_kwargs,
        ignored_modules=ignored.modules,
        ignored_params=ignored.parameters,
        is_wrapped=lambda part: entry_point_of(part) is not None,
    )
    if root_kwargs["sync_module_states"]:
        unit_device = device_given(root_kwargs["device_id"], groups.shard.rank)
        device = compute_device(module.parameters(), unit_device)
        left = [part for part in module.modules() if part not in ignored.modules]
        tensors: list[torch.Tensor] = []
        tensors += [p for p in module.parameters() if p not in ignored.parameters]
        tensors += [buffer for part in left for buffer in part.buffers(recurse=False)]
        check_states(module, tensors, plan.kwargs, groups, device)
    auto_wrap(module, plan, wrap_fn)


def check_not_sharded(module: nn.Module) -> None:
    """Raises ArgumentError if a module is a unit already."""
    if entry_point_of(module) is not None or getattr(module, UNIT, None) is not None:
        raise ArgumentError(
            f"{type(module).__name__} is sharded already; wrap a module once, and inner modules "
            "before outer ones"
        )


def find_ignored(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """Returns modules and parameters that a user or an inner instance ignores, with inner ones."""
    if modules is not None and states is not None:
        raise ArgumentError("Cannot pass both ignored_modules and ignored_states at the same time.")
    parameters: set[nn.Parameter] = set()
    ignored: list[nn.Module] = _list_of_modules(modules)
    for state in states or ():
        if isinstance(state, nn.Parameter):
            parameters.add(state)
        elif isinstance(state, nn.Module):
            ignored.append(state)
        else:
            raise ArgumentError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got "
                f"{type(state)}"
            )
    for module in ignored:
        if entry_point_of(module) is not None:
            raise ArgumentError("`ignored_modules` should not include FSDP modules")
    all_modules = {part for module in ignored for part in module.modules()}
    if root in all_modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored and is not well-supported: {root}",
            stacklevel=3,
        )
    for entry_point in entry_points(root):
        all_modules |= entry_point.settings.ignored_modules
        parameters |= entry_point.settings.ignored_params
    for module in all_modules:
        parameters |= set(module.parameters(recurse=False))
    return Ignored(frozenset(all_modules), frozenset(parameters))


def _list_of_modules(modules: Iterable[nn.Module] | None) -> list[nn.Module]:
    try:
        found = list(modules or ())
    except TypeError as error:
        raise ArgumentTypeError(
            f"`ignored_modules` should be an iterable of `torch.nn.Module`s but got {type(modules)}"
        ) from error
    for module in found:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                "`ignored_modules` should be an iterable of `torch.nn.Module`s but got an iterable "
                f"with {type(module)}"
            )
    return found


def _check_homogeneous(instances: list[EntryPoint]) -> None:
    for name, values in {
        "_use_orig_params": {entry_point.settings.use_orig_params for entry_point in instances},
        "limit_all_gathers": {entry_point.settings.limit_all_gathers for entry_point in instances},
        "_use_full_prec_in_eval": {entry_point.full_precision_in_eval for entry_point in instances},
    }.items():
        if len(values) > 1:
            raise ArgumentError(
                f"Expects one homogeneous value for {name} but got {sorted(values)}"
            )


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
    device = device_given(settings.device_id, groups.shard.rank)
    inner = {part for unit in units_of((module,)) for part in unit.modules}
    own = list(own_modules(module, settings.ignored_modules, inner))
    found, parameters = _find_parameters(module, settings)
    buffers = [b for part in own for b in part.buffers(recurse=False)]
    _check_ranks(parameters, groups)
    compute = compute_device(parameters, device)
    if any(tensor.is_meta for tensor in parameters + buffers):
        real = [p for p in parameters if not p.is_meta]
        if real and len(real) < len(parameters) and settings.param_init_fn is None:
            check_one_device(parameters, device)
        materialize(own, compute, settings.param_init_fn)
        found, parameters = _find_parameters(module, settings)
        buffers = [b for part in own for b in part.buffers(recurse=False)]
    check_one_device(parameters, device)
    if device is not None:
        _move(parameters, buffers, device)
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


def _find_parameters(
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
        param_group = find_tied_group(each)
        if param_group is not None:
            borrowed[id(param_group)] = param_group
            continue
        parameter = each.parameter
        spec = parameter._spec if isinstance(parameter, DTensor) else None
        local = local_of(parameter, spec)
        entry = Parameter(each.name, each.owners, parameter, 0, tuple(local.shape))
        entry.distributed = spec
        each.assign(entry)
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


HYBRID = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}
KEEPS_AFTER_FORWARD = {ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2}

Groups = ProcessGroup | tuple[ProcessGroup, ProcessGroup | None]
"""One group; or, for hybrid strategies, the ranks to shard over and those to replicate over."""


def chosen_groups(
    strategy: ShardingStrategy, groups: Groups | None, mesh: DeviceMesh | None, has_policy: bool
) -> Groups:
    """Returns the groups that a user names or implies. All ranks call this; it may make groups.

    Raises ArgumentError if a hybrid strategy has no groups and no policy, since every instance
    would make its own, or if group and mesh contradict the strategy.
    """
    if groups is not None and mesh is not None:
        raise ArgumentError("Cannot pass both process_group and device_mesh at the same time.")
    hybrid = strategy in HYBRID
    if mesh is not None:
        release_with_groups(mesh)
        if mesh.ndim != 1 + hybrid:
            raise ArgumentError(
                f"{strategy} takes a device_mesh of {1 + hybrid} dimensions, not of {mesh.ndim}"
            )
        check_gathers(mesh, range(mesh.ndim)[::-1])
        return (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group(0)
    if groups is not None:
        if hybrid != isinstance(groups, tuple):
            raise ArgumentError(
                f"Expected process_group to be passed in as a {'tuple' if hybrid else 'group'} for "
                f"{strategy}, but got {type(groups)}"
            )
        return groups
    if not hybrid:
        return _world()
    if not has_policy:
        raise ArgumentError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or "
            "device_mesh."
        )
    return _by_node()


def hybrid_groups_of(
    strategy: ShardingStrategy, groups: Groups, mesh: DeviceMesh | None = None
) -> HybridGroups:
    """Returns the groups of ranks that share and that replicate; `mesh` is the one they are of."""
    if isinstance(groups, tuple):
        to_shard, to_replicate = groups
        replicas = ShardGroup.alone() if to_replicate is None else ShardGroup.of(to_replicate)
        grid = None if mesh is None else mesh_of(mesh, (1, 0))  # sharding cuts first
        return HybridGroups(ShardGroup.of(to_shard), replicas, grid)
    if strategy is ShardingStrategy.NO_SHARD:
        return HybridGroups(ShardGroup.alone(), ShardGroup.of(groups))
    return HybridGroups(ShardGroup.of(groups), ShardGroup.alone())


def choose_strategy(strategy: ShardingStrategy | None, groups: Groups) -> ShardingStrategy:
    """Returns the strategy; over one rank NO_SHARD, with a UserWarning if that is a change."""
    asked = strategy or ShardingStrategy.FULL_SHARD
    if isinstance(groups, tuple) or dist.get_world_size(groups) > 1:
        return asked
    if asked is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {asked} since the world size is 1.",
            stacklevel=4,
        )
    return ShardingStrategy.NO_SHARD


def _by_node() -> Groups:
    """Returns the ranks of a node, which share, and those at one place in all nodes: replicas.

    A node has LOCAL_WORLD_SIZE ranks, which torchrun sets; without it, the ranks of one host name.
    """
    size = dist.get_world_size()
    local_size = os.environ.get("LOCAL_WORLD_SIZE")
    if local_size is not None and local_size.isdigit() and 0 < int(local_size) <= size:
        node = int(local_size)
    else:
        hosts: list[str] = [""] * size
        dist.all_gather_object(hosts, gethostname())
        node = hosts.count(hosts[0])
        if any(hosts[r] != hosts[r // node * node] for r in range(size)):
            node = 0
    if node == 0 or size % node:
        raise ArgumentError(
            f"the {size} ranks are not spread evenly over nodes, one after the other; pass "
            "process_group=(to shard over, to replicate over) or a device_mesh"
        )
    if node == size:
        return _world(), None
    mine: tuple[ProcessGroup, ProcessGroup | None] = (_world(), None)
    rank = dist.get_rank()
    for first in range(0, size, node):
        group = dist.new_group(list(range(first, first + node)))
        if first <= rank < first + node and group is not None:
            mine = group, mine[1]
    for place in range(node):
        group = dist.new_group(list(range(place, size, node)))
        if rank % node == place and group is not None:
            mine = mine[0], group
    return mine


def _world() -> ProcessGroup:
    group: ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ArgumentError(
            "there is no default process group; call torch.distributed.init_process_group first, "
            "or pass process_group"
        )
    return group
