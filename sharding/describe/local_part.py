"""One rank's part of a tensor that is spread over ranks: its elements, and the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sharding.errors import LocalShapeError, ShardingError
from sharding.layout import Layout

FLAT_PARAMETERS = "flat_parameters"
"""The key in the metadata of a local state dict for the records of its flat parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """This rank's part of a tensor, in the place of the tensor in a module's state."""

    local: torch.Tensor
    """The local storage, in the tensor's row-major order; it shares the tensor's memory."""
    layout: Layout
    key: object = None
    """A key that is equal for the parts of one tensor; None for a part with only one name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.local.dtype

    @property
    def is_meta(self) -> bool:
        """Whether the part has no memory yet."""
        return self.local.is_meta


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """This rank's part of one parameter: elements `[lo, hi)` of a tensor that an optimizer sees."""

    lo: int
    hi: int
    layout: Layout
    key: object

    def of(self, tensor: torch.Tensor, key: object = None) -> LocalPart:
        """Returns the part of a tensor with the parameter's layout, such as its moments."""
        local = tensor.detach()
        if (self.lo, self.hi) != (0, local.numel()):
            local = local[self.lo : self.hi]
        return LocalPart(local, self.layout, key)


def check_holds(name: str, local: torch.Tensor, layout: Layout, rank: int) -> None:
    """Raises LocalShapeError unless a local tensor has the elements that a rank's layout gives."""
    lo, hi = layout.span(rank)
    if local.numel() != hi - lo:
        raise LocalShapeError(
            f"{name}: rank {rank} has a local tensor of {local.numel()} elements, but of "
            f"{layout.shape} as {layout} it holds {hi - lo}; it was truncated, or belongs to "
            "another rank or world size"
        )


def check_source(name: str, local: torch.Tensor, layout: Layout, rank: int) -> None:
    """As `check_holds`, for a tensor whose elements travel to other ranks, which wait for them.

    Raises ShardingError if the tensor has no values.
    """
    check_holds(name, local, layout, rank)
    if local.is_meta and local.numel():
        raise ShardingError(
            f"{name}: rank {rank} has its {local.numel()} elements on the meta device, without "
            "values; give a tensor with values"
        )
