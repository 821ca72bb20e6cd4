"""An instance of FSDP1: its unit and its checks, for both entry points with flat parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sharding.device_rules import check_trainable_on, compute_device, device_given
from sharding.engine.flat_param_group import CommHook, flat_param_groups
from sharding.engine.forward_hooks import ForwardHooks
from sharding.engine.order_check import OrderCheck, check_shards
from sharding.engine.outputs import mapped
from sharding.engine.runtime import runtime_of
from sharding.engine.shard_group import HybridGroups
from sharding.engine.unit import UNIT, units_of
from sharding.errors import ArgumentError, ArgumentTypeError, MisuseError
from sharding.fsdp1.setup import FlatSettings, make_flat_unit
from sharding.fsdp1.wrap_plan import auto_wrap, planned
from sharding.materialize import check_states, own_modules
from sharding.policies import StateDictSettings
from sharding.state_dict_settings import default_settings

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
        self.order_check = OrderCheck.if_wanted()
        for inner in entry_points(module):
            inner.has_outer = True
        self.unit = make_flat_unit(module, owner, settings, self._prepare)
        self.forward_hooks = ForwardHooks(self.unit)
        devices = [param_group.device for param_group in self.unit.param_groups]
        self.compute_device = devices[0] if devices else _device_without_parameters(settings)
        self.buffers = [
            (part, name)
            for part in own_modules(module, settings.ignored_modules, _inner_modules(module))
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
        runtime = runtime_of(unit)
        if unit.is_root:
            for entry_point in entry_points(self.owner):
                entry_point.choose_precision()
            if self.compute_device.type != "cpu":
                args = mapped(args, lambda tensor: tensor.to(self.compute_device))
                kwargs = mapped(kwargs, lambda tensor: tensor.to(self.compute_device))
        if runtime.order_check is None:
            runtime.order_check = self.order_check
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
            for parameter in param_group.registered():
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

    Raises as `planned` does; with `sync_module_states` also MisuseError on all ranks of `groups`,
    before anything is wrapped, if they choose different modules.
    """
    plan = planned(
        module,
        policy,
        root_kwargs=root_kwargs,
        ignored_modules=ignored.modules,
        ignored_params=ignored.parameters,
        is_wrapped=lambda part: entry_point_of(part) is not None,
    )
    if root_kwargs["sync_module_states"]:
        given = device_given(root_kwargs["device_id"], groups.shard.rank)
        device = compute_device(module.parameters(), given)
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


def ignored_of(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """Returns modules and parameters that a user or an inner instance ignores, with inner ones."""
    if modules is not None and states is not None:
        raise ArgumentError("Cannot pass both ignored_modules and ignored_states at the same time.")
    parameters: set[nn.Parameter] = set()
    given: list[nn.Module] = _list_of_modules(modules)
    for state in states or ():
        if isinstance(state, nn.Parameter):
            parameters.add(state)
        elif isinstance(state, nn.Module):
            given.append(state)
        else:
            raise ArgumentError(
                f"ignored_states expects all nn.Parameter or all nn.Module list elements but got "
                f"{type(state)}"
            )
    for module in given:
        if entry_point_of(module) is not None:
            raise ArgumentError("`ignored_modules` should not include FSDP modules")
    all_modules = {part for module in given for part in module.modules()}
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


def _inner_modules(module: nn.Module) -> set[nn.Module]:
    return {part for unit in units_of((module,)) for part in unit.modules if part is not module}


def _device_without_parameters(settings: FlatSettings) -> torch.device:
    return compute_device([], device_given(settings.device_id, 0))
