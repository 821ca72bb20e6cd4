"""A tensor that is spread over ranks, as one rank has it: some of its elements, and the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sharding.errors import LocalShapeError
from sharding.layout import Layout

FLAT_PARAMETERS = "flat_parameters"
"""The key in the metadata of a local state dict for the records of its flat parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """This rank's part of a tensor; it stands for the tensor in a module's state."""

    local: torch.Tensor
    """The local storage, in the tensor's row-major order; it shares its memory."""
    layout: Layout
    key: object = None
    """Equal for two parts that are one tensor; None for a part that has one name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's."""
        return self.local.dtype

    @property
    def is_meta(self) -> bool:
        """Whether there is no memory yet."""
        return self.local.is_meta


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Elements `[lo, hi)` of a tensor that an optimizer sees: this rank's part of one parameter."""

    lo: int
    hi: int
    layout: Layout
    key: object

    def of(self, tensor: torch.Tensor, key: object = None) -> LocalPart:
        """The part of a tensor that is laid out as the parameter is, such as its moments."""
        local = tensor.detach()
        if (self.lo, self.hi) != (0, local.numel()):
            local = local[self.lo : self.hi]
        return LocalPart(local, self.layout, key)


def check_holds(name: str, local: torch.Tensor, layout: Layout, rank: int) -> None:
    """Raise LocalShapeError where a local tensor has not the elements its layout gives a rank."""
    lo, hi = layout.span(rank)
    if local.numel() != hi - lo:
        raise LocalShapeError(
            f"{name}: rank {rank} has a local tensor of {local.numel()} elements, but of "
            f"{layout.shape} as {layout} it holds {hi - lo}; it was truncated, or belongs to "
            "another rank or world size"
        )
