"""`fully_shard`: the front door with one DTensor per parameter, with torch's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sharding.bucket import Bucket
from sharding.calling import Calling
from sharding.chunk_bucket import ChunkBucket, MeshSharing
from sharding.discovery import Found, borrowed_bucket, free_parameters
from sharding.extensions import is_hooked
from sharding.parameter import Parameter
from sharding.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from sharding.runtime import UNIT, units_of
from sharding.unit import Casts, Unit

ModuleT = TypeVar("ModuleT", bound=nn.Module)
PlacementFunction = Callable[[nn.Parameter], "Shard | None"]

_CALLING = "_sharding_calling"
"""The attribute of a module that is called around its forward."""
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@overload
def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> ModuleT: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFunction | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> list[nn.Module]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module | list[nn.Module]:
    """`module`, one unit of sharded data parallelism; trains as the whole module would.

    Every parameter that no inner call has taken becomes a DTensor, sharded by torch.chunk's rule
    over the mesh; the module's class gets the methods of `FSDPModule`. Call it on inner modules
    first, then on the outermost, and make the optimizer afterwards. All ranks of the mesh call it,
    in the same order; it does not communicate, so ranks must have equal parameters, or load them.

    Args:
        mesh: one dimension to shard over, or two: to replicate over and to shard over. By default
            all ranks of the default process group. Parameters that are DTensors over another
            dimension of the same root mesh (tensor parallelism) are sharded further.
        reshard_after_forward: whether to free the whole parameters after forward and gather them
            again for backward; by default all but the outermost module do. A number of ranks, a
            divisor of the mesh's: keep that part of the whole parameters on each of so many ranks,
            and gather from those, which may be nearer.
        shard_placement_fn: gives the dimension to shard a parameter on; None is the first.
        mp_policy: dtypes to gather, reduce and compute in.
        offload_policy: `CPUOffloadPolicy()` keeps shards and their gradients in host memory.
        ignored_params: parameters to leave as they are.

    Raises:
        ValueError: the module has been given to `fully_shard` before, or is a container without a
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
    placing = MeshSharing.of(mesh)
    reshard = _reshard_setting(reshard_after_forward, placing.sharing.peers.size)
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    free = list(free_parameters(modules, ignored_params or ()))
    taken = [found for found in free if found.borrowed is None]
    # What can fail, for every parameter, before any is replaced.
    dims = [_dimension(found, shard_placement_fn) for found in taken]
    entries = list(map(partial(_sharded, placing, offload), taken, dims))
    borrowed = list(dict.fromkeys(b for b in map(borrowed_bucket, free) if b is not None))
    alike: dict[tuple[torch.dtype, bool], list[Parameter]] = {}
    for found, entry in zip(taken, entries, strict=True):
        entry.place(entry.sharded)
        found.taken_as(entry)
        alike.setdefault((entry.sharded.dtype, entry.sharded.requires_grad), []).append(entry)
    buckets: list[Bucket] = []
    for together in alike.values():
        bucket = ChunkBucket(together, placing, mp_policy, placing.sharing.next_tag())
        buckets.append(bucket)
        for entry in together:
            entry.bucket = bucket
    inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
    casts = Casts(inputs, inputs, mp_policy.output_dtype)
    unit = Unit(modules, buckets, borrowed, casts, reshard)
    calling = Calling(unit)
    for part in modules:
        calling.hook(part)
        unit.hook_state_dict(part)
        setattr(part, UNIT, unit)
        setattr(part, _CALLING, calling)
        part.__class__ = _sharded_class(type(part))
    return module


class FSDPModule:
    """What a module can do besides, once it was given to `fully_shard`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A slice of a sharded container is a plain container of the sharded modules."""
        plain = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = plain.__new__(plain)  # type: ignore[call-overload]
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """The unit's parameters are whole; with `async_op`, when the handle's `wait` returns."""
        unit = _unit(self)
        unit.unshard_for_user()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """The unit's parameters are sharded, and the memory of the whole ones is free."""
        _unit(self).reshard()

    def reset_iter_state(self) -> None:
        """What an error in forward or backward left behind is gone, with its gradients.

        The next forward does this by itself.
        """
        unit = _unit(self)
        if unit.runtime is not None:
            unit.runtime.recover()
        for below in _units(self, recurse=True):
            below.refresh()
            below.reshard()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, and without effect: every backward ends with all gradients in place."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients to the shards; else they add up on every rank."""
        for bucket in _buckets(self, recurse):
            bucket.reduces = bucket.replicates = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums over replicas; else a shard's sums add up for one that does."""
        for bucket in _buckets(self, recurse):
            bucket.replicates = requires_all_reduce

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Whether the whole parameters are freed after forward; a number as in `fully_shard`."""
        units = _units(self, recurse)
        settings = [_reshard_setting(reshard_after_forward, _peers(unit)) for unit in units]
        for unit, setting in zip(units, settings, strict=True):
            unit.reshard_after_forward = setting

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the whole parameters are freed after backward."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """What to gather while this module runs forward, in place of what followed it last."""
        _unit(self).forward_prefetch = _units_given(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """What to gather while this module runs backward, in place of what ran before it."""
        _unit(self).backward_prefetch = _units_given(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What sums of gradients are divided by, in place of the number of ranks."""
        for bucket in _buckets(self, recurse=False):
            bucket.divide = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Have `hook(reduced)` called on what a shard gets, flat, before it is the gradient.

        It may change the tensor in place, by a sum over further ranks for one. Behind the
        gradients it has one more element for each parameter: positive where it has a gradient.
        """
        for bucket in _buckets(self, recurse=False):
            cast(ChunkBucket, bucket).reduced_hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted, and without effect: gradients are always summed, then divided."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted, and without effect: a parameter unused on some ranks counts as zero there."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters: False where it does not need them."""
        _unit(self).unshards_in_backward = unshard_in_backward

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `to`, `float` and the like change is the sharded parameters."""
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refused: shards and process groups cannot be copied or pickled."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: its parameters are spread over "
            "ranks; copy the module before fully_shard, or save its state_dict()"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refused, for the same reason."""
        self.__reduce_ex__(memo)


class UnshardHandle:
    """Whole parameters on their way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """The whole parameters are in the modules, unless they were resharded since."""
        for bucket in self._unit.used:
            if bucket.holders:
                bucket.wait()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a sharded module gather and free parameters as `forward` does."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)
    calling = cast(Calling, getattr(module, _CALLING))

    @wraps(method)
    def as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = calling.before(self, args, kwargs)
            return calling.after(self, args, method(*args, **kwargs))
        finally:
            calling.ended(self, args, None)

    setattr(module, method_name, MethodType(as_forward, module))


def _dimension(found: Found, placement_fn: PlacementFunction | None) -> int:
    """Which dimension of a parameter is divided."""
    parameter = found.parameter
    placement = placement_fn(parameter) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for {found.name}; it gives a Shard(dim), or "
            "None for the first dimension"
        )
    if not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ValueError(
            f"{found.name} of shape {tuple(parameter.shape)} has no dimension {placement.dim}"
        )
    return placement.dim % parameter.ndim


def _sharded(placing: MeshSharing, offload: bool, found: Found, dim: int) -> Parameter:
    parameter = found.parameter
    sharded = placing.parameter(parameter, dim, offload)
    is_hooked(sharded, found.name)
    distributed = parameter._spec if isinstance(parameter, DTensor) else None
    whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    entry = Parameter(found.name, found.owners, sharded, dim, tuple(whole.shape))
    entry.distributed = distributed
    return entry


def _reshard_setting(given: bool | int | None, size: int) -> bool | int | None:
    """The setting, where it makes sense: a number divides the ranks that share."""
    if given is None or isinstance(given, bool):
        return given
    if given < 1 or size % given:
        raise ValueError(
            f"reshard_after_forward={given} does not divide the {size} ranks that the module is "
            "sharded over; pass True, False, None or a divisor"
        )
    return {1: False, size: True}.get(given, given)


def _check(modules: tuple[nn.Module, ...]) -> None:
    if not modules or len(set(map(id, modules))) < len(modules):
        names = ", ".join(type(module).__name__ for module in modules) or "none"
        raise ValueError(f"fully_shard takes modules, each once; given in one list: {names}")
    for module in modules:
        if isinstance(module, FSDPModule) or hasattr(module, UNIT):
            raise ValueError(
                f"{type(module).__name__} has been given to fully_shard before; call it once a "
                "module"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {module}; "
                "call it on the modules in it"
            )


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _unit(module: object) -> Unit:
    return cast(Unit, getattr(module, UNIT))


def _units_given(modules: Iterable[object]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{type(module).__name__} was not given to fully_shard: {module}")
    return [_unit(module) for module in modules]


def _peers(unit: Unit) -> int:
    """Over how many ranks a unit's own parameters are sharded."""
    return unit.buckets[0].sharing.peers.size if unit.buckets else 1


def _units(module: object, recurse: bool) -> list[Unit]:
    if not recurse:
        return [_unit(module)]
    return list(units_of((cast(nn.Module, module),)))


def _buckets(module: object, recurse: bool) -> list[Bucket]:
    return [bucket for unit in _units(module, recurse) for bucket in unit.buckets]


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class with FSDPModule's methods: one for every class, so that `type(a) is type(b)`."""
    made = _classes.get(cls) or type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes.setdefault(cls, made)
