"""What tests use of torch and old versions lack; imported before any test.

`distribute_tensor(..., src_data_rank=None)` takes no rank's word for the others'; 2.6 gets it here.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed.tensor as tensors

from sharding import supported

TORCH_TRAINS_ON_CPU = not supported.is_below(torch.__version__, (2, 10))
"""Whether torch's FSDP2 trains right there, to compare with.

That of torch 2.6 fails, and that of 2.8 sums gradients over gloo where it has to average them.
"""

FSDP2_RUNS_ON_CPU = not supported.is_below(torch.__version__, (2, 8))
"""Whether a model under torch's FSDP2 can be called there: enough where its state is saved."""


def needs(version: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Leave a test out with a torch below this version; the reason says how that one differs."""
    return pytest.mark.skipif(supported.is_below(torch.__version__, version), reason=reason)


runs_fsdp2 = needs((2, 8), "the FSDP2 of torch 2.6 does not run on a CPU")
"""For tests that train a model under torch's FSDP2, right or wrong."""

CUTS_UNEVEN_STRIDES = not supported.is_below(torch.__version__, (2, 10))
"""Whether `_StridedShard` cuts sizes that do not divide as FSDP2 over tensor parallelism does.

That of torch 2.6 refuses them, and that of 2.8 gives the ranks other elements.
"""

COPIES_FLOAT4 = not supported.is_below(torch.__version__, (2, 10))
"""Whether `copy_` takes `float4_e2m1fn_x2`, as DCP needs to load it: that of torch 2.8 does not."""

_distribute = tensors.distribute_tensor


def torch_cuts(placements: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether this torch cuts a tensor so: each `_StridedShard` evenly, or a torch that may."""
    lengths = [{length} for length in shape]
    for placement, size in zip(placements, sizes, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        split = getattr(placement, "split_factor", None)
        if split and not CUTS_UNEVEN_STRIDES and any(n % (size * split) for n in lengths[dim]):
            return False
        lengths[dim] = {
            len(range(n)[-(-n // size) * part :][: -(-n // size)])
            for n in lengths[dim]
            for part in range(size)
        }
    return True


def distribute_tensor(
    tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
) -> tensors.DTensor:
    """Torch's, with the argument that it lacks."""
    if src_data_rank is None:
        everywhere = [tensors.Replicate()] * device_mesh.ndim
        whole = tensors.DTensor.from_local(tensor, device_mesh, everywhere, run_check=False)
        return whole.redistribute(device_mesh, placements)
    return _distribute(tensor, device_mesh, placements)


if "src_data_rank" not in signature(_distribute).parameters:
    tensors.distribute_tensor = distribute_tensor  # type: ignore[assignment]


def reset_default_device() -> None:
    """Take back `torch.set_default_device`; torch 2.6's `get_default_device()` fails after None."""
    torch.set_default_device(None)
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", True) is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor; torch 2.6 takes one tensor, later ones take several."""
    if FSDP2_RUNS_ON_CPU:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
    else:
        torch._C._autograd._unsafe_set_version_counter(tensor, version)  # type: ignore[arg-type]
