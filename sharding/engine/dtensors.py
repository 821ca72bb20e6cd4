"""DTensors and their local tensors, where tensor parallelism divides parameters."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of this spec with this local tensor, which it shares."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """This rank's part of a tensor that may be a DTensor, placed as a spec says."""
    if spec is None or not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != spec.placements:
        tensor = tensor.redistribute(spec.mesh, spec.placements)
    local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()
