"""One parameter of a bucket, and in which dtypes a bucket works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from sharding.engine.bucket import Bucket


@dataclass(eq=False)
class Parameter:
    """One parameter of a unit, and every place in the modules that has it."""

    name: str
    owners: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    dim: int
    shape: tuple[int, ...]
    """Unsharded."""
    bucket: Bucket | None = None
    distributed: DTensorSpec | None = None
    """What the whole parameter is as a DTensor, where tensor parallelism divides it besides."""

    def place(self, tensor: torch.Tensor) -> None:
        """Put the sharded or the whole parameter into its modules."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = tensor  # type: ignore[assignment]
            else:  # it wants to know: nn.LSTM keeps a list of its own
                setattr(module, attribute, tensor)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a bucket's gathered parameters and reductions; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether shards get gradients in the dtype they were reduced in."""
