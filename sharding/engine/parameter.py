"""One parameter of a group, and the dtypes of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

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
