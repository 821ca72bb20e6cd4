"""Temporary unsharded parameters in new memory, which a user may read and change.

The unsharded parameters of a flat group, in new memory, for users and state dicts.

These parameters have the dtype of the shards. Users see them in the places and in the order of the
module before it was wrapped. Shards do not change until the parameters are written back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from sharding.engine.flat_param_group import FlatParamGroup, flat_param_groups
from sharding.engine.parameter import UnshardedBuffer, local_of
from sharding.engine.runtime import is_running
from sharding.engine.unit import Unit, Whole, units_of
from sharding.errors import MisuseError, TorchAssertionError
from sharding.fsdp1.entry_point import check_units


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Gives modules unsharded parameters inside the block, in the dtype of the shards.

    All ranks enter and leave the block; communicates. `writeback` keeps changes made inside. With
    `rank0_only`, only the first rank has unsharded parameters, and its changes count. `with_grads`
    adds unsharded gradients. Raises AssertionError in forward or backward.
    """
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
                    _unshard(param_group, writeback, rank0_only, offload_to_cpu, with_grads)
                )
            stack.enter_context(_mark(unit, rank0_only))
        yield


@contextmanager
def _mark(unit: Unit, rank0_only: bool) -> Iterator[None]:
    unit.whole = Whole.EVERYWHERE
    if rank0_only:
        first = all(is_first(group) for group in flat_param_groups(unit.param_groups))
        unit.whole = Whole.HERE_ALONE if first else Whole.ELSEWHERE
    try:
        yield
    finally:
        unit.whole = Whole.NOWHERE


@contextmanager
def _unshard(
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
    if writeback or not with_grads:
        parameters.check_gradients()


class UnshardedParameters:
    """The constructor gathers the parameters; all ranks call it. See the top of this file."""

    def __init__(self, param_group: FlatParamGroup, with_grads: bool, to_cpu: bool) -> None:
        self._param_group = param_group
        param_group.reshard()
        param_group.settle_replaced()
        self._buffer = param_group.fetch()
        self._gradients = _unshard_gradients(param_group) if with_grads else None
        if to_cpu:
            self._buffer = self._buffer.to(torch.device("cpu"))
        self._shown: list[nn.Parameter] = []
        self._stray: list[str] = []
        """The parameters with gradients that the shards have no place for."""

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        param_group = self._param_group
        if not param_group.form.use_orig_params:
            del param_group.form.home._parameters[param_group.form.name]
        for index, parameter in enumerate(param_group.parameters):
            leaf = param_group.as_it_was(index, self._buffer.leaves[index])
            unsharded = nn.Parameter(leaf, requires_grad=parameter.sharded.requires_grad)
            gradient = self._gradients[index] if self._gradients is not None else None
            if gradient is not None:
                unsharded.grad = param_group.as_it_was(index, gradient)
            self._shown.append(unsharded)
        param_group.whole = self
        self.place()

    def place(self) -> None:
        """Puts the unsharded parameters into the modules, in their first order."""
        param_group = self._param_group
        for parameter, unsharded in zip(param_group.parameters, self._shown, strict=True):
            for module, attribute in parameter.owners:
                module.__dict__.pop(attribute, None)
            parameter.place(unsharded)
        for module, keys in param_group.keys.items():
            parameters = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update(
                {key: parameters.pop(key) for key in keys if key in parameters} | parameters
            )

    def fill(self, buffer: UnshardedBuffer) -> None:
        """Copies the present values into a buffer of the group, in which a forward reads them.

        Raises MisuseError if gradients of this forward would be lost behind those of the user.
        """
        param_group = self._param_group
        if self._gradients is not None and torch.is_grad_enabled() and param_group.requires_grad:
            raise MisuseError(
                "forward with gradients inside summon_full_params with with_grads=True: at its end "
                "the gradients in the modules replace those of this backward; use torch.no_grad(), "
                "or with_grads=False"
            )
        self._collect()
        whole = [(0, self._buffer.numel)]
        with torch.no_grad():
            parts = zip(buffer.parts(whole), buffer.split(whole, [self._buffer.raw]), strict=True)
            for part, values in parts:
                part.copy_(values)
        if not param_group.form.use_orig_params:  # forward has plain tensors in their places
            self._take_out()

    def hide(self) -> None:
        """Puts the sharded parameters back; keeps values that a user has put into the modules."""
        param_group = self._param_group
        param_group.reshard()  # what a forward inside has gathered is not in the shards
        self._collect()
        for index, unsharded in enumerate(self._shown):
            shown = self._gradients[index] if self._gradients is not None else None
            if shown is None and unsharded.grad is not None:
                self._stray.append(param_group.parameters[index].name)
            if self._gradients is not None:
                self._gradients[index] = unsharded.grad
            _refuse_gradient(unsharded, param_group.parameters[index].name)
        param_group.whole = None
        if not param_group.form.use_orig_params:
            param_group.form.home.register_parameter(param_group.form.name, param_group.flat)
            self._take_out()
        param_group.place_sharded()

    def check_gradients(self) -> None:
        """Raises MisuseError if backward gave unsharded parameters gradients that are lost now."""
        if self._stray:
            raise MisuseError(
                f"inside summon_full_params backward gave gradients to {', '.join(self._stray)}, "
                "which no rank reduces, so they are dropped: run forward through the wrapper, not "
                "through the module inside it; or set these gradients to None before the block "
                "ends"
            )

    def _collect(self) -> None:
        """Takes values that a user has put into the modules."""
        param_group = self._param_group
        for index, parameter in enumerate(param_group.parameters):
            module, attribute = parameter.owners[0]
            current = module._parameters.get(attribute)
            if current is None:
                continue
            leaf = self._buffer.leaves[index]
            mine = local_of(current.detach(), parameter.distributed)
            if mine.data_ptr() != leaf.data_ptr():
                leaf.copy_(mine)
            self._shown[index] = current
            if param_group.form.use_orig_params:
                parameter.sharded.requires_grad_(current.requires_grad)

    def _take_out(self) -> None:
        for parameter in self._param_group.parameters:
            for module, attribute in parameter.owners:
                module._parameters.pop(attribute, None)

    def write_back(self, from_first: bool) -> None:
        """Writes values into shards and gradients; with `from_first` the first rank's. Waits."""
        param_group, buffer = self._param_group, self._buffer
        if from_first:
            for shard_group in (param_group.groups.shard, param_group.groups.replicate):
                if shard_group.group is not None:
                    first = dist.get_global_rank(shard_group.group, 0)
                    dist.broadcast(buffer.raw, first, group=shard_group.group)
        [(lo, hi)] = param_group.packing.spans(param_group.groups.shard.rank)
        with torch.no_grad():
            param_group.flat.data.copy_(buffer.raw[lo:hi])
        for index, unsharded in enumerate(self._gradients or ()):
            shard = param_group.gradient_part(index)
            if unsharded is not None and shard is not None:
                _, lo, hi = param_group.piece(index)
                local = local_of(unsharded, param_group.parameters[index].distributed)
                shard.reshape(-1).copy_(local.reshape(-1)[lo:hi])


def is_first(param_group: FlatParamGroup) -> bool:
    """Returns True on the first of all ranks that share and replicate."""
    return param_group.groups.shard.rank == 0 and param_group.groups.replicate.rank == 0


def _refuse_gradient(unsharded: nn.Parameter, name: str) -> None:
    """Makes a backward that still reaches a hidden parameter fail: no module has its gradient."""

    def refuse(gradients: object) -> None:
        raise MisuseError(
            f"backward reaches {name} as it was inside summon_full_params, which has ended: run "
            "forward through the wrapper, not through the module inside it"
        )

    if unsharded.is_leaf and unsharded.requires_grad:  # the hook lives as long as such a graph
        get_gradient_edge(unsharded).node.register_prehook(refuse)


def _unshard_gradients(param_group: FlatParamGroup) -> list[torch.Tensor | None]:
    """Returns the unsharded gradients; None for a gradient that no rank has. Waits."""
    packing = param_group.packing
    parts = [param_group.gradient_part(index) for index in range(len(param_group.parameters))]
    dtype = next((part.dtype for part in parts if part is not None), param_group.flat.dtype)
    shard = torch.zeros(packing.shard_numel, dtype=dtype, device=param_group.flat.device)
    for index, part in enumerate(parts):
        if part is not None:
            param_group.shard_view(index, shard).copy_(part)
    flags = torch.tensor([float(part is not None) for part in parts], device=param_group.device)
    param_group.all_reduce_now(flags)
    full = UnshardedBuffer.of(packing.slots, packing.numel, dtype, param_group.device)
    param_group.all_gather_now([shard.to(param_group.device)], full)
    return [
        leaf if flag > 0 else None for leaf, flag in zip(full.leaves, flags.tolist(), strict=True)
    ]
