"""The parameters that an optimizer sees for flat ones, and one rank's part of a divided tensor.

Both runtimes that flatten parameters use these types: ours (`sharding.describe.own_members`) and
torch's FSDP1 (`sharding.describe.torch_fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sharding.errors import LocalShapeError, ShardingError
from sharding.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class FlatMember:
    """A parameter that an optimizer sees, and the slices of module parameters in it."""

    parameter: nn.Parameter
    names: tuple[tuple[str, ...], ...]
    """For each slice: the names of its parameter, in the order of the modules."""
    slices: tuple[FlatSlice, ...]
    is_original: bool
    """Whether it is in the modules, in the place of its one parameter."""
    is_idle: bool = False
    """Whether this rank has no element of it and gets no gradient, unlike other ranks."""

    def parts(self) -> Iterator[tuple[str, LocalPart]]:
        """Yields the parts in it, under all names."""
        for names, part in zip(self.names, self.slices, strict=True):
            found = part.of(self.parameter, part.key)
            for name in names:
                yield name, found


class NamedParameter(NamedTuple):
    """A parameter that an optimizer sees, with the names of its parameters in a module."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name, several for a flat parameter; the first name of a tied one."""
    slices: tuple[FlatSlice, ...] = ()
    """For each name: its part of the parameter; empty if the parameter is not a flat one."""
    is_idle: bool = False
    """Whether this rank has no element of it, so that its optimizer keeps no state for it."""

    @classmethod
    def of(cls, member: FlatMember) -> NamedParameter:
        """Returns a parameter with parts of the module's parameters."""
        names = tuple(tied[0] for tied in member.names)
        return cls(member.parameter, names, member.slices, member.is_idle)


def check_numel(parameter: nn.Parameter, name: str, numel: int) -> None:
    """Raises LocalShapeError unless a parameter has this rank's number of elements."""
    if parameter.numel() != numel:
        raise LocalShapeError(
            f"{name} has {parameter.numel()} elements, but this rank's shard of it has {numel}: "
            "its data was replaced by a tensor of another shape"
        )


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
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
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
