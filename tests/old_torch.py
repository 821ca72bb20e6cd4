"""What tests use of torch and an old torch has not; imported before any test.

torch 2.6: `distribute_tensor(..., src_data_rank=None)`, which takes no rank's word for the others'.
"""

from inspect import signature
from typing import Any

import torch.distributed.tensor as tensors

from sharding.torch_versions import cut

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
