"""Which kind of state dict a module makes: full by default."""

from __future__ import annotations

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


def default_settings() -> StateDictSettings:
    """Full state dicts, with the defaults of their configuration."""
    return checked_settings(StateDictType.FULL_STATE_DICT, None, None)


def checked_settings(
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """The settings; RuntimeError where a configuration is of another kind."""
    model_type, optim_type = _CONFIGS[kind]
    for given, wanted in ((config, model_type), (optim_config, optim_type)):
        if given is not None and type(given) is not wanted:
            raise RuntimeError(
                f"Expected state_dict_config of type {wanted} for {kind} but got {type(given)}"
            )
    return StateDictSettings(kind, config or model_type(), optim_config or optim_type())
