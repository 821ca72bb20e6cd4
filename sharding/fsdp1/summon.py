"""Temporary unsharded parameters in new memory, which a user may read and change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from sharding.engine.flat_param_group import FlatParamGroup, flat_param_groups
from sharding.engine.runtime import is_running
from sharding.engine.unit import Unit, Whole, units_of
from sharding.errors import TorchAssertionError
from sharding.fsdp1.entry_point import check_units
from sharding.fsdp1.unsharded_parameters import UnshardedParameters, is_first


@contextmanager
def summoned(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Gives modules unsharded parameters (`FullyShardedDataParallel.summon_full_params`)."""
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in "
            "the unsharded parameters being copied to CPU memory on every rank of the same "
            "machine, which may not have memory for all of them. Use rank0_only=True as well.",
            stacklevel=4,
        )
    units = list(units_of((module,)))
    if not recurse:
        units = [unit for unit in units if module in unit.modules]
    for unit in units:
        if is_running(unit):
            raise TorchAssertionError("Cannot manually unshard parameters during forward/backward")
        if unit.summoned:
            raise TorchAssertionError(
                "Cannot manually unshard parameters when already unsharding parameters"
            )
    check_units(module)
    with ExitStack() as stack:
        for unit in units:
            for param_group in flat_param_groups(unit.param_groups):
                stack.enter_context(
                    _unsharded(param_group, writeback, rank0_only, offload_to_cpu, with_grads)
                )
            stack.enter_context(_marked(unit, rank0_only))
        yield


@contextmanager
def _marked(unit: Unit, rank0_only: bool) -> Iterator[None]:
    unit.whole = Whole.EVERYWHERE
    if rank0_only:
        first = all(is_first(group) for group in flat_param_groups(unit.param_groups))
        unit.whole = Whole.HERE_ALONE if first else Whole.ELSEWHERE
    try:
        yield
    finally:
        unit.whole = Whole.NOWHERE


@contextmanager
def _unsharded(
    param_group: FlatParamGroup,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    parameters = UnshardedParameters(param_group, with_grads, offload_to_cpu)
    shown = not rank0_only or is_first(param_group)
    if shown:
        parameters.show()
    try:
        yield
    finally:
        if shown:
            parameters.hide()
        if writeback or not param_group.is_divided:  # undivided parameters have no other copy
            parameters.write_back(rank0_only)
    parameters.check_gradients()
