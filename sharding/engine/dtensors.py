"""DTensors and their local tensors, for parameters that tensor parallelism divides."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns the DTensor of this spec with this local tensor, which it shares."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Returns this rank's part of a tensor; a DTensor is first placed by the spec."""
    if spec is None or not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != spec.placements:
        tensor = tensor.redistribute(spec.mesh, spec.placements)
    local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def shard_in_front(dim: int, behind: DTensorSpec | None) -> Placement:
    """Returns the placement on a mesh dimension in front of those of tensor parallelism.

    [Note: which dimension comes first]
    If tensor parallelism and sharding cut the same dimension, tensor parallelism cuts first,
    although its mesh dimension comes after. torch expresses this order by `_StridedShard`.
    """
    cuts = 1
    if behind is not None:
        for axis, other in enumerate(behind.placements):
            if isinstance(other, Shard | _StridedShard) and other.dim == dim:
                cuts *= behind.mesh.size(axis)
    return _StridedShard(dim, split_factor=cuts) if cuts > 1 else Shard(dim)
