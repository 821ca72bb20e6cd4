"""The kind of a module's state dicts: full by default.

Torch's own enums and configurations count as ours of the same name: users import them from either
package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from enum import Enum
from typing import TypeVar

from sharding.errors import ArgumentTypeError, MisuseError
from sharding.kind import Kind
from sharding.policies import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

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
_is_local: ContextVar[bool] = ContextVar("_is_local", default=False)


@contextmanager
def local_state_dicts() -> Iterator[None]:
    """Makes state dicts in the block have this rank's own tensors, of whatever kind is set."""
    before = _is_local.set(True)
    try:
        yield
    finally:
        _is_local.reset(before)


def is_local_forced() -> bool:
    """Returns True inside `local_state_dicts`."""
    return _is_local.get()


def in_force(chosen: StateDictSettings) -> StateDictSettings:
    """Returns the settings that apply now; `chosen` are the user's."""
    if is_local_forced():
        return check_settings(StateDictType.LOCAL_STATE_DICT, None, None)
    return chosen


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


def member_of(kind: type[EnumT], given: object) -> EnumT:
    """Returns a member of our enum, for itself or for torch's member of the same name."""
    if isinstance(given, kind):
        return given
    if isinstance(given, Enum) and type(given).__name__ == kind.__name__:
        return kind[given.name]
    raise ArgumentTypeError(f"expected a {kind.__name__}, but got {given!r} of {type(given)}")


def _take_over(what: str, wanted: type[ConfigT], given: object) -> ConfigT:
    """Returns our configuration: the given one, torch's values in ours, or the default for None."""
    if given is None:
        return wanted()
    if type(given) is wanted:
        return given
    if type(given).__name__ != wanted.__name__:
        raise MisuseError(f"Expected {what} of type {wanted} but got {type(given)}")
    names = [field.name for field in fields(wanted) if hasattr(given, field.name)]
    return wanted(**{name: getattr(given, name) for name in names})
