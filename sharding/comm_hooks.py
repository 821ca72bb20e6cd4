"""Communication hooks: ready-made replacements for the runtime's average of gradients.

A hook is registered with `register_comm_hook(state, hook)` and is called once per gradient, on all
ranks, in the same order:

* `hook(state, grad)` without sharding: `grad` is averaged in place;
* `hook(state, grad, output)` with sharding: `grad` is the flat gradient of a whole unit, padded so
  that the ranks divide it evenly, and `output` receives this rank's part of the average.

Rules:

1. The order is: cast, divide by `gradient_predivide_factor`, sum over the ranks, divide by
   `gradient_postdivide_factor`, cast back. The runtime itself does the same under
   `MixedPrecision(reduce_dtype=...)`, so the results are equal bit for bit.
2. The library's collective makes the sum, and decides the order of the summands. With more than two
   ranks the sum may differ in the last bit from a sum in rank order.
3. Every backend has the used collectives for these dtypes; no accelerator is needed.

Names and signatures are those of `torch.distributed.algorithms._comm_hooks.default_hooks`.
"""

from __future__ import annotations

from weakref import ref

import torch
import torch.distributed as dist

from sharding.engine.reduction import predivide_factor
from sharding.errors import ArgumentError
from sharding.torch_versions import dereference

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

# The newer of two names for one collective: torch versions that have it warn of the older one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DefaultState:
    """The ranks that average with each other, and the two factors of the division.

    A division before the sum prevents overflow, a division after the sum prevents underflow; each
    divides by about the square root of the number of ranks. Keeps no reference to the group.

    Raises ValueError without a process group.
    """

    __slots__ = (
        "_reference",
        "gradient_postdivide_factor",
        "gradient_predivide_factor",
        "world_size",
    )

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ArgumentError(
                f"Expected to pass in an explicit ProcessGroup to {type(self).__name__}."
            )
        self._reference = ref(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = predivide_factor(self.world_size)
        """The divisor of each summand."""
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor
        """The divisor of the sum; the product of the two factors is `world_size`."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group with the summands. Raises DestroyedGroupError."""
        return dereference(self._reference)


class LowPrecisionState(DefaultState):
    """The state of a hook that sends gradients in another dtype than the parameters'."""

    __slots__ = ("parameter_type",)

    def __init__(
        self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32
    ) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type
        """The dtype of the averaged gradients."""


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Replaces `grad` by its average over the ranks, in place. A collective of `state`'s group."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fills `output` with this rank's part of the average of `grad`, whose values are lost.

    `grad` has `world_size` times the elements of `output` and the same dtype. A collective of
    `state`'s group.
    """
    _divide(grad, state.gradient_predivide_factor)
    _reduce_scatter(output, grad, group=state.process_group)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Averages in float16; the result is in `state.parameter_type`."""
    _compress(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Averages in bfloat16; the result is in `state.parameter_type`."""
    _compress(torch.bfloat16, state, grad, output)


def _compress(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    _cast(grad, dtype)
    if output is None:
        allreduce_hook(state, grad)
        _cast(grad, state.parameter_type)
    else:
        _cast(output, dtype)
        reduce_scatter_hook(state, grad, output)
        _cast(output, state.parameter_type)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Changes the dtype of a tensor object in place: all references see the new dtype."""
    if tensor.dtype == dtype:
        return
    values = tensor.data
    tensor.data = values.to(dtype)
    if values.device.type != "cpu":
        # Another stream than the one that still reads the memory has allocated it.
        values.record_stream(torch.accelerator.current_stream(values.device))
