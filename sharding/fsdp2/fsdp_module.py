"""`FSDPModule`: the methods that `fully_shard` adds to modules, with torch's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import nn

from sharding.engine.chunk_param_group import ChunkParamGroup
from sharding.engine.forward_hooks import ForwardHooks
from sharding.engine.param_group import ParamGroup
from sharding.engine.runtime import reset
from sharding.engine.unit import UNIT, Unit, units_of
from sharding.errors import ArgumentError, ArgumentTypeError

_FORWARD_HOOKS = "_sharding_forward_hooks"
"""The attribute of a module for the hooks around its forward."""
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def become_unit(module: nn.Module, unit: Unit, forward_hooks: ForwardHooks) -> None:
    """Gives the module the unit, its hooks, and a class with FSDPModule's methods."""
    forward_hooks.hook(module)
    unit.hook_state_dict(module)
    setattr(module, UNIT, unit)
    setattr(module, _FORWARD_HOOKS, forward_hooks)
    module.__class__ = _sharded_class(type(module))


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

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Calls `hook(reduced)` with the reduced gradients of a shard, flat, from now on.

        The hook may change the tensor in place, for example sum it over further ranks. Behind the
        gradients the tensor has one element for each parameter: positive if any rank has its
        gradient.
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
        """Raises ArgumentTypeError: shards and process groups cannot be copied or pickled."""
        raise ArgumentTypeError(
            f"{type(self).__name__} cannot be pickled or copied: its parameters are spread over "
            "ranks; copy the module before fully_shard, or save its state_dict()"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises ArgumentTypeError, for the same reason."""
        self.__reduce_ex__(memo)


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
            forward_hooks.ended(self, args, None)

    setattr(module, method_name, MethodType(as_forward, module))


def reshard_setting(given: bool | int | None, size: int) -> bool | int | None:
    """Returns the setting, checked: a number must divide the number of ranks that share."""
    if given is None or isinstance(given, bool):
        return given
    if given < 1 or size % given:
        raise ArgumentError(
            f"reshard_after_forward={given} does not divide the {size} ranks that the module is "
            "sharded over; pass True, False, None or a divisor"
        )
    return {1: False, size: True}.get(given, given)


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


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class with FSDPModule's methods: one per class, so that `type(a) is type(b)`."""
    made = _classes.get(cls) or type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes.setdefault(cls, made)
