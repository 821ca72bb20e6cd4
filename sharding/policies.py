"""A user's choices for sharding, precision, placement and state dicts, as plain values.

Rules:

1. Names, fields, defaults and the numbering of enums are those of `torch.distributed.fsdp`, so
   that a program moves here by changing its import line.
2. The values do not act. The runtime reads them when a module is wrapped or a state dict is made.
3. A class is frozen if torch's is. Programs written for torch change fields of the other classes.
   These have slots: a misspelt field is an error, not a silent new attribute.
4. Torch's own enums and configurations count as ours of the same name: users import them from
   either package. State dicts are full by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sharding.errors import ArgumentTypeError, MisuseError
from sharding.kind import Kind

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


# --- Sharding and gathering ----------------------------------------------------------------------


class ShardingStrategy(Enum):
    """The state that is sharded, and the time that unsharded parameters live."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; unsharded parameters only while a unit runs."""
    SHARD_GRAD_OP = auto()
    """The same shards, but unsharded parameters live from a unit's forward to its backward."""
    NO_SHARD = auto()
    """No sharding: every rank has all parameters, and an all-reduce averages gradients."""
    HYBRID_SHARD = auto()
    """FULL_SHARD within a group of ranks (a node), copies of it across the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP within a group of ranks (a node), copies of it across the groups."""


class BackwardPrefetch(Enum):
    """The time at which backward gathers the parameters of the next unit.

    Arguments that also accept None take it for no prefetch.
    """

    BACKWARD_PRE = auto()
    """Before the current unit's gradients are computed: the most overlap, the most memory."""
    BACKWARD_POST = auto()
    """After they are computed and before they are reduced: one unit fewer in memory."""


class TrainingState(Enum):
    """The state of an instance, as its attribute `training_state` gives it."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    """Its forward runs, or a backward of its root."""
    SUMMON_FULL_PARAMS = auto()
    """Inside `summon_full_params`."""


# --- Precision -----------------------------------------------------------------------------------


@dataclass(slots=True)
class MixedPrecision:
    """The dtypes in which a wrapped module computes, reduces and keeps buffers.

    Only floating-point tensors are cast; None leaves them alone. The shards that the optimizer
    steps, and their values in a state dict, keep their own dtype.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of gathered parameters."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are sent and summed; None means `param_dtype`."""
    buffer_dtype: torch.dtype | None = None
    """The dtype to which the first forward casts buffers, which are never sharded."""
    keep_low_precision_grads: bool = False
    """Whether gradients keep the dtype of the reduction, and not the parameter's."""
    cast_forward_inputs: bool = False
    """Whether inputs of this module's forward are cast to `param_dtype`; ignored on the root."""
    cast_root_forward_inputs: bool = True
    """Whether inputs of the root's forward are cast to `param_dtype`; for the root only."""
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    """The classes of modules that a wrapping policy wraps alone, without casts."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit's parameters, reductions, inputs and outputs; None leaves them alone."""

    param_dtype: torch.dtype | None = None
    """The dtype of gathered parameters; the optimizer's shards keep their own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are sent and summed; by default that of the computation."""
    output_dtype: torch.dtype | None = None
    """The dtype of forward's floating-point outputs."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of forward are cast to `param_dtype`."""


# --- Offload -------------------------------------------------------------------------------------


@dataclass(slots=True)
class CPUOffload:
    """The place of a wrapped module's shards between uses."""

    offload_params: bool = False
    """Whether shards and their gradients are in host memory, so that the optimizer runs there."""


@dataclass(slots=True)
class OffloadPolicy:
    """No offload: shards are on the compute device."""


@dataclass(slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state are in host memory, whole parameters on the device."""

    pin_memory: bool = True
    """Whether the host memory is page-locked, for copies that overlap with computation; ignored
    without an accelerator."""


# --- State dicts ---------------------------------------------------------------------------------


class StateDictType(Enum):
    """The kind of a wrapped module's `state_dict()` and `load_state_dict()`."""

    FULL_STATE_DICT = auto()
    """Whole tensors under the names of the module before wrapping."""
    LOCAL_STATE_DICT = auto()
    """This rank's flat shards, with metadata that describes them; without conversion, only the same
    rank with the same wrapping can load them."""
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
    """The options of model state dicts of every type; users make one of the subclasses."""

    offload_to_cpu: bool = False
    """Whether tensors are copied to host memory."""


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
    """Accepted, and without effect: values are DTensors, over the mesh if one was given."""


@dataclass(slots=True)
class OptimStateDictConfig:
    """The options of optimizer state dicts of every type; users make one of the subclasses."""

    offload_to_cpu: bool = True
    """Whether tensors are copied to host memory."""


@dataclass(slots=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of FULL_STATE_DICT."""

    rank0_only: bool = False
    """Only rank 0 gets the tensors, and loads them; the other ranks' state dicts are empty."""


@dataclass(slots=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False
    """Whether tensors are copied to host memory; by default they share the runtime's memory."""


@dataclass(slots=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The options of the optimizer's part of SHARDED_STATE_DICT."""

    _use_dtensor: bool = False
    """Accepted, and without effect: values are DTensors, over the mesh if one was given."""


@dataclass(slots=True)
class StateDictSettings:
    """The present kind of a module's state dicts, with its options."""

    state_dict_type: StateDictType
    """The kind of `state_dict()`."""
    state_dict_config: StateDictConfig
    """The options for the model, of the subclass of that kind."""
    optim_state_dict_config: OptimStateDictConfig
    """The options for the optimizer, of the subclass of that kind."""


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
KIND_OF = {
    StateDictType.FULL_STATE_DICT: Kind.FULL,
    StateDictType.SHARDED_STATE_DICT: Kind.SHARDED,
    StateDictType.LOCAL_STATE_DICT: Kind.LOCAL,
}
EnumT = TypeVar("EnumT", bound=Enum)
ConfigT = TypeVar("ConfigT", StateDictConfig, OptimStateDictConfig)


def default_settings() -> StateDictSettings:
    """Returns the settings for full state dicts, with the defaults of their configuration."""
    return check_settings(StateDictType.FULL_STATE_DICT, None, None)


def check_settings(kind: object, config: object, optim_config: object) -> StateDictSettings:
    """Returns the settings. Raises RuntimeError if a configuration is of another kind.

    >>> from torch.distributed import fsdp
    >>> check_settings(
    ...     fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(rank0_only=True), None
    ... ).state_dict_config
    FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    """
    ours = member_of(StateDictType, kind)
    model_type, optim_type = _CONFIGS[ours]
    return StateDictSettings(
        ours,
        _take_over("state_dict_config", model_type, config),
        _take_over("optim_state_dict_config", optim_type, optim_config),
    )


def member_of(kind: type[EnumT], value: object) -> EnumT:
    """Returns a member of our enum, for itself or for torch's member of the same name."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__:
        return kind[value.name]
    raise ArgumentTypeError(f"expected a {kind.__name__}, but got {value!r} of {type(value)}")


def _take_over(what: str, wanted: type[ConfigT], config: object) -> ConfigT:
    """Returns our configuration: the given one, torch's values in ours, or the default for None."""
    if config is None:
        return wanted()
    if type(config) is wanted:
        return config
    if type(config).__name__ != wanted.__name__:
        raise MisuseError(f"Expected {what} of type {wanted} but got {type(config)}")
    names = [field.name for field in fields(wanted) if hasattr(config, field.name)]
    return wanted(**{name: getattr(config, name) for name in names})
