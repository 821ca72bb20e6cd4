"""The forms and kinds that state dicts of models and of optimizers are tested in."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

import sharding
from sharding import FullyShardedDataParallel, StateDictType
from sharding.wrap import ModuleWrapPolicy
from tests.networks import Block

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
FLAT_FORMS = ("flat", "original", "composable")
WIDTH = 5


def in_form(form: str, model: Any, **arguments: Any) -> Any:
    """A network in a form of the runtime; each block a unit, and `outside` ignored."""
    ignored = list(model.outside.parameters())
    if form == "fully_shard":
        for block in model.blocks:
            sharding.fully_shard(block)
        return sharding.fully_shard(model, ignored_params=set(ignored))
    arguments.setdefault("ignored_states", ignored)
    policy = ModuleWrapPolicy({Block})
    if form == "composable":
        return sharding.composable.fully_shard(model, policy=policy, **arguments)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=form == "original", **arguments
    )


def whole(value: Any) -> Any:
    """A value that every rank has: a DTensor whole, anything else as it is."""
    if isinstance(value, DTensor) and not value.numel():  # torch 2.6 fails to gather nothing
        return value.to_local().new_empty(value.shape)
    return value.full_tensor() if isinstance(value, DTensor) else value
