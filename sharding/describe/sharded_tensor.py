"""Layouts of torch's ShardedTensor, as FSDP1's sharded and local state dicts have it.

A ShardedTensor lists the box of every shard, and any list is allowed. This module describes the two
forms that torch makes: rows cut by torch.chunk's rule over the ranks of the process group, in
order; and a one-dimensional tensor cut into runs of one length, of which the last may be shorter,
with no run on the ranks behind it. No function communicates: every rank has the list.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist

from sharding.errors import LocalShapeError, UnknownPlacementError
from sharding.layout import FlatShard, Layout, Mesh, Placement, Shard

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

Cut = list[tuple[list[int], list[int]]]
"""The offsets and sizes of each shard, in the order of their ranks."""
SHOWN = 4
"""The most shards that a message names."""


def is_sharded(tensor: torch.Tensor) -> TypeGuard[ShardedTensor]:
    """Whether a tensor is a ShardedTensor; imports nothing."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def describe(tensor: ShardedTensor, name: str) -> tuple[torch.Tensor, Layout]:
    """Returns this rank's shard, detached and sharing memory, and the tensor's layout.

    Raises UnknownPlacementError for another cut than the two above, and LocalShapeError if the
    shard differs from the cut's shard of this rank.
    """
    layout = _layout(tensor, name)
    rank = dist.get_rank()
    shape = layout.local_shape(rank)
    if isinstance(layout.placements[0], FlatShard):
        lo, hi = layout.span(rank)
        shape = (hi - lo,)
    shards = tensor.local_shards()
    local = shards[0].tensor.detach() if shards else _nothing(tensor, shape)
    if len(shards) > 1 or tuple(local.shape) != shape:
        raise LocalShapeError(
            f"{name}: rank {rank} has {len(shards)} shards of this ShardedTensor, of the shapes "
            f"{[tuple(shard.tensor.shape) for shard in shards]}, but its metadata gives the rank "
            f"one of {shape}; make it from the rank's own shard"
        )
    return local, layout


def has_layout(tensor: ShardedTensor) -> bool:
    """Whether `describe` knows the cut of a ShardedTensor; equal on all ranks."""
    try:
        _layout(tensor, "")
    except UnknownPlacementError:
        return False
    return True


def _layout(tensor: ShardedTensor, name: str) -> Layout:
    """Returns the layout of a ShardedTensor. Raises UnknownPlacementError as `describe` does."""
    ranks = dist.get_process_group_ranks(tensor._process_group)
    shape = tuple(tensor.size())
    metadata = tensor.metadata().shards_metadata
    cut = [
        (list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in sorted(metadata, key=lambda shard: shard.shard_offsets)
    ]
    placed = [
        None if shard.placement is None else shard.placement.rank()
        for shard in sorted(metadata, key=lambda shard: shard.shard_offsets)
    ]
    mesh = Mesh.of_ranks(("shard",), (len(ranks),), ranks)
    # Torch names ranks either in the default group or in the tensor's own group.
    in_order = placed in (ranks[: len(cut)], list(range(len(cut))))
    if in_order and shape:
        stride = cut[0][1][0] if cut else 0
        if cut == _runs(shape, -(-shape[0] // len(ranks))):
            return Layout(shape, mesh, (Shard(0),))
        if len(shape) == 1 and stride and len(cut) <= len(ranks) and cut == _runs(shape, stride):
            own: Placement = FlatShard(0, stride)
            return Layout(shape, mesh, (own,))
    shown = ", ".join(f"{offsets} of {sizes}" for offsets, sizes in cut[:SHOWN])
    more = f" and {len(cut) - SHOWN} more" if len(cut) > SHOWN else ""
    raise UnknownPlacementError(
        f"{name}: this ShardedTensor of shape {shape} has shards at {shown}{more} on the ranks "
        f"{placed[:SHOWN]}; only rows cut evenly over the ranks {ranks[:SHOWN]} in order have a "
        "layout: reshard it so, or give its local shards different names"
    )


def _runs(shape: tuple[int, ...], stride: int) -> Cut:
    """Returns the first dimension in runs of one length, of which the last may be shorter."""
    rest, zeros = list(shape[1:]), [0] * (len(shape) - 1)
    return [
        ([lo, *zeros], [min(stride, shape[0] - lo), *rest])
        for lo in range(0, shape[0], max(stride, 1))
    ]


def _nothing(tensor: ShardedTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the local tensor of a rank without a shard."""
    return torch.empty((0, *shape[1:]), dtype=tensor.dtype, device="cpu")
