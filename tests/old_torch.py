"""What tests use of torch and torch 2.6 has not; imported before any test.

`distribute_tensor(..., src_data_rank=None)` takes no rank's word for the others'; 2.6 gets it here.
"""

from inspect import signature
from typing import Any

import torch
import torch.distributed.tensor as tensors

from sharding.torch_versions import cut

TORCH_TRAINS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""Whether torch's FSDP2 does, to compare with: that of torch 2.6 does not."""

_distribute = tensors.distribute_tensor


def distribute_tensor(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
) -> tensors.DTensor:
    """Torch's, with the argument that it lacks."""
    if src_data_rank is None:
        return cut(tensor, device_mesh, placements)
    return _distribute(tensor, device_mesh, placements)


if "src_data_rank" not in signature(_distribute).parameters:
    tensors.distribute_tensor = distribute_tensor  # type: ignore[assignment]
