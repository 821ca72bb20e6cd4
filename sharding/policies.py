"""A user's choices for sharding, precision, placement and state dicts, as plain values.

Rules that hold in this file:

1. Names, fields, defaults and the numbering of enums are those of `torch.distributed.fsdp`, so
   that a program moves here by changing its import line.
2. The values do not act. The runtime reads them when a module is wrapped or a state dict is made.
3. A class is frozen where torch's is. The others can be changed field by field, as programs
   written for torch do, but have slots: a misspelt field is an error, not a silent new attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


# --- What is sharded, when it is gathered ---------------------------------------------------------


class ShardingStrategy(Enum):
    """The state that is sharded, and the time that unsharded parameters live."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; unsharded parameters only while a unit runs."""
    SHARD_GRAD_OP = auto()
    """The same shards, but unsharded parameters live from a unit's forward to its backward."""
    NO_SHARD = auto()
    """Nothing: every rank holds everything, and gradients are averaged by an all-reduce."""
    HYBRID_SHARD = auto()
    """FULL_SHARD within a group of ranks (a node), copies of it across the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP within a group of ranks (a node), copies of it across the groups."""


class BackwardPrefetch(Enum):
    """When backward gathers the parameters of the unit that it will need next.

    Where None is accepted, it means: no prefetch.
    """

    BACKWARD_PRE = auto()
    """Before the current unit's gradients are computed: the most overlap, the most memory."""
    BACKWARD_POST = auto()
    """After they are computed and before they are reduced: one unit fewer in memory."""


# --- In which dtype ------------------------------------------------------------------------------


@dataclass(slots=True)
class MixedPrecision:
    """The dtypes in which a wrapped module computes, reduces and keeps buffers.

    Only floating-point tensors are cast; None leaves them alone. The shards that the optimizer
    steps, and their values in a state dict, keep their own dtype.
    """

    param_dtype: torch.dtype | None = None
    """Parameters are gathered and used in it."""
    reduce_dtype: torch.dtype | None = None
    """Gradients are sent and summed in it; None stands for `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """Buffers, which are never sharded, are cast to it by the first forward and stay so."""
    keep_low_precision_grads: bool = False
    """Gradients stay in the dtype they were reduced in, rather than take the parameter's."""
    cast_forward_inputs: bool = False
    """Inputs of this module's forward are cast to `param_dtype`; not read on the root."""
    cast_root_forward_inputs: bool = True
    """Inputs of the root's forward are cast to `param_dtype`; read on the root only."""
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    """With a wrapping policy, modules of these classes are wrapped alone, without casts."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit's parameters, reductions, inputs and outputs; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    """Parameters are gathered and used in it; the shards, which the optimizer sees, keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """Gradients are sent and summed in it; by default in the dtype they are computed in."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of forward are cast to it."""
    cast_forward_inputs: bool = True
    """Floating-point inputs of forward are cast to `param_dtype`."""


# --- Where the shards lie ------------------------------------------------------------------------


@dataclass(slots=True)
class CPUOffload:
    """The place of a wrapped module's shards between uses."""

    offload_params: bool = False
    """Shards and their gradients lie in host memory, so that the optimizer steps there."""


@dataclass(slots=True)
class OffloadPolicy:
    """No offload: shards are on the device that computes."""


@dataclass(slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state lie in host memory; whole parameters on the device."""

    pin_memory: bool = True
    """The host memory is page-locked, for copies that overlap with compute; without an accelerator
    there is nothing to copy to, and this is not read."""


# --- What a state dict holds ---------------------------------------------------------------------


class StateDictType(Enum):
    """The kind of a wrapped module's `state_dict()` and `load_state_dict()`."""

    FULL_STATE_DICT = auto()
    """Whole tensors under the names of the module as it was before wrapping."""
    LOCAL_STATE_DICT = auto()
    """This rank's flat shards, with metadata that describes them; only the same rank under the same
    wrapping can load them, unless they are converted."""
    SHARDED_STATE_DICT = auto()
    """The same names as FULL_STATE_DICT, each tensor sharded over the ranks."""


class OptimStateKeyType(Enum):
    """The kind of keys in an optimizer's state dict."""

    PARAM_NAME = auto()
    """A parameter's name in the module."""
    PARAM_ID = auto()
    """A parameter's position in the optimizer's groups."""


@dataclass(slots=True)
class StateDictConfig:
    """The options of model state dicts of every type; made as one of its subclasses."""

    offload_to_cpu: bool = False
    """Tensors are copied to host memory."""


@dataclass(slots=True)
class FullStateDictConfig(StateDictConfig):
    """The options of FULL_STATE_DICT."""

    rank0_only: bool = False
    """Only rank 0 gets the tensors; on the other ranks the state dict is empty."""


@dataclass(slots=True)
class LocalStateDictConfig(StateDictConfig):
    """The options of LOCAL_STATE_DICT."""


@dataclass(slots=True)
class ShardedStateDictConfig(StateDictConfig):
    """The options of SHARDED_STATE_DICT."""

    _use_dtensor: bool = False
    """Accepted, and without effect: values are DTensors, over the mesh where one was given."""


@dataclass(slots=True)
class OptimStateDictConfig:
    """The options of optimizer state dicts of every type; made as one of its subclasses."""

    offload_to_cpu: bool = True
    """Tensors are copied to host memory."""


@dataclass(slots=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of FULL_STATE_DICT."""

    rank0_only: bool = False
    """Only rank 0 gets the tensors, and has them to load; the others' state dicts are empty."""


@dataclass(slots=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False
    """Whether tensors are copied to host memory; by default they share the runtime's memory."""


@dataclass(slots=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of SHARDED_STATE_DICT."""

    _use_dtensor: bool = False
    """Accepted, and without effect: values are DTensors, over the mesh where one was given."""


@dataclass(slots=True)
class StateDictSettings:
    """The kind of state dict a module gives at present, and how it is built."""

    state_dict_type: StateDictType
    """The kind of `state_dict()`."""
    state_dict_config: StateDictConfig
    """The options for the model, of the subclass of that kind."""
    optim_state_dict_config: OptimStateDictConfig
    """The options for the optimizer, of the subclass of that kind."""
