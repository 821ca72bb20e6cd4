"""A sharding runtime with torch's two entry points, and the algebra of layouts.

`sharding.layout`, the algebra, knows no torch; `sharding.describe.dtensor` gives torch's tensors
layouts. The runtime's names are those of `torch.distributed.fsdp`, and are imported on first use,
so that a program that needs only the algebra does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sharding.supported import check_versions

check_versions()

from sharding import errors  # noqa: E402 - after the check
from sharding.errors import *  # noqa: E402, F403 - `sharding.errors` has the one list of errors

if TYPE_CHECKING:
    from sharding.describe.members import LocalPart
    from sharding.engine.flat_param_group import FlatParameter
    from sharding.fsdp1.wrapper import FullyShardedDataParallel
    from sharding.fsdp2 import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
    from sharding.policies import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
        TrainingState,
    )

_FROM = {
    "FlatParameter": "engine.flat_param_group",
    "FullyShardedDataParallel": "fsdp1.wrapper",
    "FSDPModule": "fsdp2",
    "LocalPart": "describe.members",
    "UnshardHandle": "fsdp2",
    "fully_shard": "fsdp2",
    "register_fsdp_forward_method": "fsdp2",
}

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalPart",
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
    "TrainingState",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
__all__ += errors.__all__


_MODULES = ("comm_hooks", "composable", "sharded_grad_scaler", "wrap")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FROM.get(name, 'policies')}"), name)
    globals()[name] = value
    return value
