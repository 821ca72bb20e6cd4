"""One parameter of a group, and the dtypes of a group.

DTensors and their local tensors, for parameters that tensor parallelism divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(eq=False)
class Parameter:
    """One parameter of a unit, and every place in the modules that has it."""

    name: str
    owners: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    dim: int
    """The dimension that is divided; 0 in a flat parameter."""
    shape: tuple[int, ...]
    """The unsharded shape on this rank; tensor parallelism may have divided the parameter."""
    param_group: object = None
    """The parameter's `ParamGroup`, None before; its type here would make an import circle."""
    distributed: DTensorSpec | None = None
    """The spec of the unsharded parameter if tensor parallelism divides it; else None."""

    def place(self, tensor: torch.Tensor) -> None:
        """Puts the sharded or the unsharded parameter into its modules."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:  # nn.LSTM, for example, keeps a list of its parameters
                setattr(module, attribute, tensor)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a group's all-gathers and reductions; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether accumulated gradients keep the dtype of the reduction."""


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns the DTensor of this spec with this local tensor, which it shares."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Returns this rank's part of a tensor; a DTensor is first placed by the spec."""
    if spec is None or not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != spec.placements:
        tensor = tensor.redistribute(spec.mesh, spec.placements)
    local = tensor.to_local()
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def shard_in_front(dim: int, behind: DTensorSpec | None) -> Placement:
    """Returns the placement on a mesh dimension in front of those of tensor parallelism.

    [Note: which dimension comes first]
    If tensor parallelism and sharding cut the same dimension, tensor parallelism cuts first,
    although its mesh dimension comes after. torch expresses this order by `_StridedShard`.
    """
    cuts = 1
    if behind is not None:
        for axis, other in enumerate(behind.placements):
            if isinstance(other, Shard | _StridedShard) and other.dim == dim:
                cuts *= behind.mesh.size(axis)
    return _StridedShard(dim, split_factor=cuts) if cuts > 1 else Shard(dim)
