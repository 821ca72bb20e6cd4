"""A flat bucket's parameters, whole, in memory of their own: for users and state dicts to look at.

They are in the dtype that shards are kept in, and are shown to users as parameters, in the places
and in the order that the modules had them in before they were wrapped. Shards stay what they are
until something is written back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sharding.engine.dtensors import local_of
from sharding.engine.flat_bucket import FlatBucket
from sharding.engine.full_buffer import FullBuffer


class WholeParameters:
    """Gathered when made; all ranks make one. See the top of this file."""

    def __init__(self, bucket: FlatBucket, with_grads: bool, to_cpu: bool) -> None:
        self._bucket = bucket
        bucket.reshard()
        self._buffer = bucket.fetch()
        self._gradients = _whole_gradients(bucket) if with_grads else None
        if to_cpu:
            self._buffer = self._buffer.to(torch.device("cpu"))

    def show(self) -> None:
        """The modules have them."""
        bucket = self._bucket
        if not bucket.form.use_orig_params:
            del bucket.form.home._parameters[bucket.form.name]
        for index, parameter in enumerate(bucket.parameters):
            leaf = bucket.as_it_was(index, self._buffer.leaves[index])
            whole = nn.Parameter(leaf, requires_grad=parameter.sharded.requires_grad)
            if self._gradients is not None:
                whole.grad = self._gradients[index]
            for module, attribute in parameter.owners:
                module.__dict__.pop(attribute, None)
                module._parameters[attribute] = whole
        for module, keys in bucket.keys.items():
            given = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({key: given.pop(key) for key in keys if key in given} | given)

    def hide(self) -> None:
        """The modules have what they have when sharded; what a user put there instead is noted."""
        bucket = self._bucket
        for index, parameter in enumerate(bucket.parameters):
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
        if not bucket.form.use_orig_params:
            bucket.form.home.register_parameter(bucket.form.name, bucket.flat)
            for module, attribute in (place for p in bucket.parameters for place in p.owners):
                module._parameters.pop(attribute, None)
        bucket.place_sharded()

    def write_back(self, from_first: bool) -> None:
        """The shards, and gradients, are this rank's parts of these; or of the first rank's."""
        bucket, buffer = self._bucket, self._buffer
        if from_first:
            for peers in (bucket.sharing.peers, bucket.sharing.replicas):
                if peers.group is not None:
                    first = dist.get_global_rank(peers.group, 0)
                    dist.broadcast(buffer.raw, first, group=peers.group)
        [(lo, hi)] = bucket.packing.spans(bucket.sharing.peers.rank)
        with torch.no_grad():
            bucket.flat.data.copy_(buffer.raw[lo:hi])
        for index, whole in enumerate(self._gradients or ()):
            shard = bucket.gradient_part(index)
            if whole is not None and shard is not None:
                _, lo, hi = bucket.piece(index)
                shard.reshape(-1).copy_(whole.reshape(-1)[lo:hi])


def is_first(bucket: FlatBucket) -> bool:
    """True on the first of all ranks that share and replicate."""
    return bucket.sharing.peers.rank == 0 and bucket.sharing.replicas.rank == 0


def _whole_gradients(bucket: FlatBucket) -> list[torch.Tensor | None]:
    """The whole gradients, None for those that no rank has. Waits."""
    packing = bucket.packing
    parts = [bucket.gradient_part(index) for index in range(len(bucket.parameters))]
    dtype = next((part.dtype for part in parts if part is not None), bucket.flat.dtype)
    shard = torch.zeros(packing.shard_numel, dtype=dtype, device=bucket.flat.device)
    for index, part in enumerate(parts):
        if part is not None:
            bucket.shard_view(index, shard).copy_(part)
    flags = torch.tensor([float(part is not None) for part in parts], device=bucket.device)
    bucket.sum_now(flags)
    full = FullBuffer.of(packing.slots, packing.numel, dtype, bucket.device)
    bucket.gather_now([shard.to(bucket.device)], full)
    return [
        leaf if flag > 0 else None for leaf, flag in zip(full.leaves, flags.tolist(), strict=True)
    ]
