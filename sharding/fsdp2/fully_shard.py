"""`fully_shard`: the entry point with one DTensor per parameter, with torch's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sharding.describe.dtensor import check_gathers
from sharding.discovery import FreeParameter, borrowed_param_group, free_parameters
from sharding.engine.chunk_param_group import ChunkParamGroup, MeshGroups
from sharding.engine.extensions import is_hooked
from sharding.engine.forward_hooks import ForwardHooks
from sharding.engine.order_check import OrderCheck
from sharding.engine.param_group import ParamGroup
from sharding.engine.parameter import Parameter
from sharding.engine.runtime import attach, runtime_of
from sharding.engine.unit import UNIT, Unit, UnitPolicy
from sharding.errors import ArgumentError
from sharding.fsdp2.fsdp_module import FSDPModule, become_unit, reshard_setting
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

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(2, 3))
    >>> type(model).__name__, model.weight.placements
    ('FSDPLinear', (Shard(dim=0),))
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model.bias.grad.full_tensor()
    tensor([4., 4., 4.])
    >>> dist.destroy_process_group()
    """
    modules = tuple(module) if isinstance(module, list) else (module,)
    _check(modules)
    if mesh is None:
        mesh = init_device_mesh(_device_type(), (dist.get_world_size(),))
    placing = MeshGroups.of(mesh)
    reshard = reshard_setting(reshard_after_forward, placing.groups.shard.size)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    free = list(free_parameters(modules, ignored_params or ()))
    taken = [found for found in free if found.borrowed is None]
    # All checks, for every parameter, before any parameter is replaced.
    dims = [_dimension(found, shard_placement_fn) for found in taken]
    entries = list(map(partial(_sharded, placing, offload), taken, dims))
    _check_ranks(mesh, entries)
    borrowed = list(dict.fromkeys(b for b in map(borrowed_param_group, free) if b is not None))
    alike: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    for found, entry in zip(taken, entries, strict=True):
        entry.place(entry.sharded)
        found.taken_as(entry)
        alike.setdefault((entry.sharded.dtype, entry.sharded.requires_grad), []).append(entry)
    param_groups: list[ParamGroup] = []
    for together in alike.values():
        param_group = ChunkParamGroup(together, placing, mp_policy, placing.groups.next_number())
        param_groups.append(param_group)
        for entry in together:
            entry.param_group = param_group
    inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
    policy = UnitPolicy(inputs, inputs, mp_policy.output_dtype, reshard)
    check = OrderCheck.if_wanted()
    unit = Unit(modules, param_groups, borrowed, policy, lambda: _check_order(unit, check))
    attach(unit)
    forward_hooks = ForwardHooks(unit)
    for part in modules:
        become_unit(part, unit, forward_hooks)
    return module


def _check_order(unit: Unit, check: OrderCheck | None) -> None:
    """Checks the root's order of units, if the debug level asks for it."""
    if unit.is_root:
        runtime_of(unit).order_check = check


def _check_ranks(mesh: DeviceMesh, entries: Iterable[Parameter]) -> None:
    """Raises ArgumentError for a mesh over which gathers or reductions would mix parts."""
    check_gathers(mesh, range(mesh.ndim)[::-1])
    meshes = dict.fromkeys(entry.sharded.device_mesh for entry in entries)  # type: ignore[attr-defined]
    for each in meshes:
        if each.ndim > mesh.ndim:  # tensor parallelism cuts first
            check_gathers(each, range(each.ndim), range(each.ndim)[::-1])


def _dimension(found: FreeParameter, placement_fn: PlacementFunction | None) -> int:
    """Returns the dimension of a parameter to divide."""
    parameter = found.parameter
    placement = placement_fn(parameter) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ArgumentError(
            f"shard_placement_fn gave {placement!r} for {found.name}; it gives a Shard(dim), or "
            "None for the first dimension"
        )
    if not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ArgumentError(
            f"{found.name} of shape {tuple(parameter.shape)} has no dimension {placement.dim}"
        )
    return placement.dim % parameter.ndim


def _sharded(placing: MeshGroups, offload: bool, found: FreeParameter, dim: int) -> Parameter:
    parameter = found.parameter
    sharded = placing.parameter(parameter, dim, offload)
    is_hooked(sharded, found.name)
    distributed = parameter._spec if isinstance(parameter, DTensor) else None
    unsharded = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    entry = Parameter(found.name, found.owners, sharded, dim, tuple(unsharded.shape))
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


def _device_type() -> str:
    accelerator = current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
