"""The unsharded parameters of a flat group, in new memory, for users and state dicts.

These parameters have the dtype of the shards. Users see them in the places and in the order of the
module before it was wrapped. Shards do not change until the parameters are written back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sharding.engine.dtensors import local_of
from sharding.engine.flat_param_group import FlatParamGroup
from sharding.engine.unsharded_buffer import UnshardedBuffer


class UnshardedParameters:
    """The constructor gathers the parameters; all ranks call it. See the top of this file."""

    def __init__(self, param_group: FlatParamGroup, with_grads: bool, to_cpu: bool) -> None:
        self._param_group = param_group
        param_group.reshard()
        self._buffer = param_group.fetch()
        self._gradients = _unsharded_gradients(param_group) if with_grads else None
        if to_cpu:
            self._buffer = self._buffer.to(torch.device("cpu"))

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        param_group = self._param_group
        if not param_group.form.use_orig_params:
            del param_group.form.home._parameters[param_group.form.name]
        for index, parameter in enumerate(param_group.parameters):
            leaf = param_group.as_it_was(index, self._buffer.leaves[index])
            unsharded = nn.Parameter(leaf, requires_grad=parameter.sharded.requires_grad)
            if self._gradients is not None:
                unsharded.grad = self._gradients[index]
            for module, attribute in parameter.owners:
                module.__dict__.pop(attribute, None)
                module._parameters[attribute] = unsharded
        for module, keys in param_group.keys.items():
            given = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({key: given.pop(key) for key in keys if key in given} | given)

    def hide(self) -> None:
        """Puts the sharded parameters back; keeps values that a user has put into the modules."""
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
            if self._gradients is not None:
                self._gradients[index] = current.grad
        if not param_group.form.use_orig_params:
            param_group.form.home.register_parameter(param_group.form.name, param_group.flat)
            for module, attribute in (place for p in param_group.parameters for place in p.owners):
                module._parameters.pop(attribute, None)
        param_group.place_sharded()

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
                shard.reshape(-1).copy_(unsharded.reshape(-1)[lo:hi])


def is_first(param_group: FlatParamGroup) -> bool:
    """Returns True on the first of all ranks that share and replicate."""
    return param_group.groups.shard.rank == 0 and param_group.groups.replicate.rank == 0


def _unsharded_gradients(param_group: FlatParamGroup) -> list[torch.Tensor | None]:
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
