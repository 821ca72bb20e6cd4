"""`fully_shard`: the entry point with one DTensor per parameter, with torch's signature.

`FSDPModule`: the methods that `fully_shard` adds to modules, with torch's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sharding.describe.dtensor import check_gathers
from sharding.engine.chunk_param_group import ChunkParamGroup, MeshGroups
from sharding.engine.forward_hooks import ForwardHooks
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter, is_hooked
from sharding.engine.runtime import attach, reset
from sharding.engine.unit import (
    UNIT,
    FreeParameter,
    Unit,
    UnitPolicy,
    find_tied_group,
    free_parameters,
    refuse_copy,
    units_of,
)
from sharding.errors import ArgumentError
from sharding.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from sharding.torch_versions import current_accelerator

Sharded = TypeVar("Sharded", bound="nn.Module | list[nn.Module]")
PlacementFunction = Callable[[nn.Parameter], "Shard | None"]


def fully_shard(
    module: Sharded,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Sharded:
    """Returns `module` as one unit of sharded data parallelism; it trains like the unsharded one.

    Every parameter that no inner call has taken becomes a DTensor, sharded by torch.chunk's rule
    over the mesh; the module's class gets the methods of `FSDPModule`. Call this on inner modules
    first, then on the outermost, and make the optimizer afterwards. All ranks of the mesh call
    this, in the same order. It does not communicate, so ranks must have or load equal parameters.
    Over a mesh of GPUs it moves parameters and buffers there, and the outermost module its inputs.

    Args:
        mesh: one dimension to shard over, or two: to replicate over and to shard over. By default
            all ranks of the default process group. Parameters that are DTensors over another
            dimension of the same root mesh (tensor parallelism) are sharded further.
        reshard_after_forward: whether to free the unsharded parameters after forward and gather
            them again for backward; by default all units but the outermost do. A divisor of the
            number of ranks that share: keep a part of the unsharded parameters on each of so many
            ranks, which may be nearer, and gather from these ranks.
        shard_placement_fn: returns the dimension to shard a parameter on; None for the first.
        mp_policy: the dtypes for gathers, reductions and computation.
        offload_policy: `CPUOffloadPolicy()` keeps shards and their gradients in host memory.
        ignored_params: parameters to leave as they are.

    Raises:
        ArgumentError: the module was given to `fully_shard` before, or is a container without a
            forward, or an argument does not fit the mesh or a parameter.

    >>> import torch, torch.distributed as dist
    >>> from ckpt.sharding import fully_shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(torch.nn.Linear(2, 3))
    >>> type(model).__name__, model.weight.placements
    ('FSDPLinear', (Shard(dim=0),))
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model.bias.grad.full_tensor()
    tensor([4., 4., 4.])
    >>> dist.destroy_process_group()
    """
    modules = tuple(module) if isinstance(module, list) else (module,)
    _check(modules)
    given = () if mesh is None else (mesh,)
    if mesh is None:
        mesh = init_device_mesh(_device_type(), (dist.get_world_size(),))  # its ranks ascend
    placing = MeshGroups.of(mesh)
    reshard = reshard_setting(reshard_after_forward, placing.groups.shard.size)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    free = list(free_parameters(modules, ignored_params or ()))
    taken = [candidate for candidate in free if candidate.borrowed is None]
    device = _device_of(mesh)
    if device is not None:
        _move([candidate.parameter for candidate in taken], modules, device)
    # All checks, for every parameter, before any parameter is replaced.
    dims = [_dimension(candidate, shard_placement_fn) for candidate in taken]
    entries = list(map(partial(_shard, placing, offload), taken, dims))
    _check_ranks(given, mesh.ndim, entries)
    borrowed = list(dict.fromkeys(b for b in map(find_tied_group, free) if b is not None))
    alike: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    for candidate, entry in zip(taken, entries, strict=True):
        entry.place(entry.sharded)
        candidate.assign(entry)
        alike.setdefault((entry.sharded.dtype, entry.sharded.requires_grad), []).append(entry)
    param_groups: list[ParamGroup] = []
    for together in alike.values():
        param_group = ChunkParamGroup(together, placing, mp_policy, placing.groups.next_number())
        param_groups.append(param_group)
        for entry in together:
            entry.param_group = param_group
    inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
    policy = UnitPolicy(inputs, inputs, mp_policy.output_dtype, reshard, input_device=device)
    unit = Unit(modules, param_groups, borrowed, policy)
    attach(unit)
    forward_hooks = ForwardHooks(unit)
    for part in modules:
        become_unit(part, unit, forward_hooks)
    return module


def _check_ranks(given: Iterable[DeviceMesh], axes: int, entries: Iterable[Parameter]) -> None:
    """Raises ArgumentError for a mesh over which gathers or reductions would mix parts.

    The mesh over which the unit shards, of so many `axes`, is checked if the caller has given it.
    """
    for mesh in given:
        check_gathers(mesh, range(axes)[::-1])
    meshes = dict.fromkeys(entry.sharded.device_mesh for entry in entries)  # type: ignore[attr-defined]
    for each in meshes:
        if each.ndim > axes:  # tensor parallelism cuts first
            check_gathers(each, range(each.ndim), range(each.ndim)[::-1])


def _dimension(candidate: FreeParameter, placement_fn: PlacementFunction | None) -> int:
    parameter = candidate.parameter
    placement = placement_fn(parameter) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ArgumentError(
            f"shard_placement_fn gave {placement!r} for {candidate.name}; it gives a Shard(dim), "
            "or None for the first dimension"
        )
    if not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ArgumentError(
            f"{candidate.name} of shape {tuple(parameter.shape)} has no dimension {placement.dim}"
        )
    return placement.dim % parameter.ndim


def _shard(placing: MeshGroups, offload: bool, candidate: FreeParameter, dim: int) -> Parameter:
    parameter = candidate.parameter
    sharded = placing.parameter(parameter, dim, offload)
    is_hooked(sharded, candidate.name)
    distributed = parameter._spec if isinstance(parameter, DTensor) else None
    unsharded = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    entry = Parameter(candidate.name, candidate.owners, sharded, dim, tuple(unsharded.shape))
    entry.distributed = distributed
    return entry


def _check(modules: tuple[nn.Module, ...]) -> None:
    if not modules or len(set(map(id, modules))) < len(modules):
        names = ", ".join(type(module).__name__ for module in modules) or "none"
        raise ArgumentError(f"fully_shard takes modules, each once; given in one list: {names}")
    for module in modules:
        if isinstance(module, FSDPModule) or hasattr(module, UNIT):
            raise ArgumentError(
                f"{type(module).__name__} has been given to fully_shard before; call it once a "
                "module"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ArgumentError(
                f"fully_shard does not support containers that do not implement forward: {module}; "
                "call it on the modules in it"
            )


def _device_of(mesh: DeviceMesh) -> torch.device | None:
    """Returns this process's device of a mesh; None for the CPU."""
    if mesh.device_type == "cpu":
        return None
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _move(
    parameters: Iterable[nn.Parameter], modules: Iterable[nn.Module], device: torch.device
) -> None:
    """Moves what a unit takes, and its buffers, to the device of the mesh, as torch does."""
    buffers = (buffer for module in modules for buffer in module.buffers())
    for tensor in (*parameters, *buffers):
        if tensor.device.type not in ("meta", device.type):
            tensor.data = tensor.data.to(device)


def _device_type() -> str:
    accelerator = current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


_FORWARD_HOOKS = "_sharding_forward_hooks"
"""The attribute of a module for the hooks around its forward."""
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def become_unit(module: nn.Module, unit: Unit, forward_hooks: ForwardHooks) -> None:
    """Gives the module the unit, its hooks, and a class with FSDPModule's methods."""
    forward_hooks.hook(module)
    unit.hook_state_dict(module)
    setattr(module, UNIT, unit)
    setattr(module, _FORWARD_HOOKS, forward_hooks)
    module.__class__ = _shard_class(type(module))


class FSDPModule:
    """The methods that `fully_shard` adds to a module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a plain container of the sharded modules for a slice of a sharded container."""
        plain = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = plain.__new__(plain)  # type: ignore[call-overload]
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshards the unit; with `async_op`, only the `wait` of the handle waits for it."""
        unit = _unit(self)
        unit.unshard_for_user()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshards the unit: frees the memory of its unsharded parameters."""
        _unit(self).reshard()

    def reset_iter_state(self) -> None:
        """Drops the state and the gradients that an error in forward or backward has left.

        The next forward does the same without this call.
        """
        reset(_units(self, recurse=True))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Has no effect: every backward ends with all gradients in place."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward reduces gradients to the shards; else they add up on every rank."""
        for param_group in _param_groups(self, recurse):
            param_group.reduces = param_group.replicates = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward sums over replicas; else sums of shards add up until it does."""
        for param_group in _param_groups(self, recurse):
            param_group.replicates = requires_all_reduce

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Sets whether forward frees the unsharded parameters; a number as in `fully_shard`."""
        units = _units(self, recurse)
        settings = [reshard_setting(reshard_after_forward, _shard_group(unit)) for unit in units]
        for unit, setting in zip(units, settings, strict=True):
            unit.policy = replace(unit.policy, reshard_after_forward=setting)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward frees the unsharded parameters at its end."""
        for unit in _units(self, recurse):
            unit.policy = replace(unit.policy, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules to gather while this one runs forward; default: the followers."""
        unit = _unit(self)
        unit.policy = replace(unit.policy, units_to_forward_prefetch=_units_given(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules to gather while this one runs backward; default: those before it."""
        unit = _unit(self)
        unit.policy = replace(unit.policy, units_to_backward_prefetch=_units_given(modules))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the divisor of summed gradients, in place of the number of ranks."""
        for param_group in _param_groups(self, recurse=False):
            param_group.divide = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: object = None
    ) -> None:
        """Calls `hook(reduced)` with the reduced gradients of a shard, flat, from now on.

        The hook may change the tensor in place, for example sum it over further ranks. Behind the
        gradients the tensor has one element for each parameter: positive if any rank has its
        gradient. `stream` has no effect: the hook runs in the stream of the reduction.
        """
        for param_group in _param_groups(self, recurse=False):
            cast(ChunkParamGroup, param_group).reduced_hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: gradients are always summed, then divided."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Has no effect: a rank that does not use a parameter contributes zeros."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward gathers the parameters; False if it does not need them."""
        unit = _unit(self)
        unit.policy = replace(unit.policy, unshard_in_backward=unshard_in_backward)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Reshards, so that `to`, `float` and others change the sharded parameters."""
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy(cast(nn.Module, self))

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(cast(nn.Module, self))


class UnshardHandle:
    """The handle of an all-gather in flight."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits until the unsharded parameters are in the modules, unless they are resharded."""
        for param_group in self._unit.used:
            if param_group.holders:
                param_group.wait()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module gather and free parameters as `forward` does."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ArgumentError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)
    forward_hooks = cast(ForwardHooks, getattr(module, _FORWARD_HOOKS))

    @wraps(method)
    def as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = forward_hooks.before(self, args, kwargs)
            return forward_hooks.after(self, args, method(*args, **kwargs))
        finally:
            forward_hooks.end_failed(self, args, None)

    setattr(module, method_name, MethodType(as_forward, module))


def reshard_setting(value: bool | int | None, size: int) -> bool | int | None:
    """Returns the setting, checked: a number must divide the number of ranks that share."""
    if value is None or isinstance(value, bool):
        return value
    if value < 1 or size % value:
        raise ArgumentError(
            f"reshard_after_forward={value} does not divide the {size} ranks that the module is "
            "sharded over; pass True, False, None or a divisor"
        )
    return {1: False, size: True}.get(value, value)


def _unit(module: object) -> Unit:
    return cast(Unit, getattr(module, UNIT))


def _units_given(modules: Iterable[object]) -> tuple[Unit, ...]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentError(f"{type(module).__name__} was not given to fully_shard: {module}")
    return tuple(_unit(module) for module in modules)


def _shard_group(unit: Unit) -> int:
    """Returns the number of ranks over which a unit's own parameters are sharded."""
    return unit.param_groups[0].groups.shard.size if unit.param_groups else 1


def _units(module: object, recurse: bool) -> list[Unit]:
    if not recurse:
        return [_unit(module)]
    return list(units_of((cast(nn.Module, module),)))


def _param_groups(module: object, recurse: bool) -> list[ParamGroup]:
    return [param_group for unit in _units(module, recurse) for param_group in unit.param_groups]


def _shard_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class with FSDPModule's methods: one per class, so that `type(a) is type(b)`."""
    made = _classes.get(cls) or type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes.setdefault(cls, made)
