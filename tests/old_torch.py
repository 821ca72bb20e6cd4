"""What tests use of torch and old versions lack; imported before any test.

`distribute_tensor(..., src_data_rank=None)` takes no rank's word for the others'; 2.6 gets it here.
"""

from inspect import signature
from typing import Any

import torch
import torch.distributed.tensor as tensors

from sharding import supported
from sharding.torch_versions import cut

TORCH_TRAINS_ON_CPU = not supported.is_below(torch.__version__, (2, 10))
"""Whether torch's FSDP2 trains right there, to compare with.

That of torch 2.6 fails, and that of 2.8 sums gradients over gloo where it has to average them.
"""

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
