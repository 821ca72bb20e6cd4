"""Tensors of a live state on the ranks that publish or read it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.kept_groups import kept


@kept
def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def spread(state: dict[str, torch.Tensor], dim: int | None) -> dict[str, Any]:
    """The tensors on this rank, divided along a dimension; along none they are replicas."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        is_cut = dim is not None and tensor.ndim > 0
        placement = Shard(min(dim or 0, tensor.ndim - 1)) if is_cut else Replicate()
        found[name] = distribute_tensor(tensor.clone(), mesh(), [placement], src_data_rank=None)
    return found
