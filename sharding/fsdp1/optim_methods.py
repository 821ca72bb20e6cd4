"""The methods of `FullyShardedDataParallel` for optimizers' state, with torch's names.

They take any module that contains units of this runtime: a wrapped one, one of either
`fully_shard`, or a module around these. `sharding.fsdp1.optim_state_dicts` and
`sharding.fsdp1.optim_loading` do the work.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from sharding.fsdp1.optim_keys import OptimInput, OptimState, change_keys
from sharding.fsdp1.optim_loading import state_to_load
from sharding.fsdp1.optim_state_dicts import OptimRequest, optim_state_of
from sharding.fsdp1.state_dicts import get_state_dict_type
from sharding.kind import Kind
from sharding.policies import FullOptimStateDictConfig, OptimStateKeyType, StateDictSettings
from sharding.state_dict_settings import KIND_OF, member_of


class OptimStateDicts:
    """The methods for optimizers' state. See the top of this file."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: OptimState | None = None,
        group: ProcessGroup | None = None,
    ) -> OptimState:
        """Returns the optimizer's state by the names of parameters, of the kind set for the model.

        Full: full tensors; with `rank0_only` on the first rank, and an empty dict on the others.
        Sharded: DTensors by rows. Local: `LocalPart`s on the optimizer's memory, not collective.
        All ranks of `group` call this. `optim_state_dict` replaces `optim.state_dict()`.

        Raises OptimizerMismatchError, on all ranks, before any tensor moves, if the state is not
        that of the model's parameters or cannot be divided.
        """
        settings = get_state_dict_type(model)
        config = settings.optim_state_dict_config
        wanted = OptimRequest(
            KIND_OF[settings.state_dict_type],
            _is_rank0_only(settings),
            config.offload_to_cpu,
            group,
        )
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return optim_state_of(model, optim, state, wanted)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: OptimState,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> OptimState:
        """Returns a result of `optim_state_dict` of any kind as a state dict that `optim` loads.

        Wrapping, ranks and kind may differ from those of the save. With `rank0_only` in the model's
        settings, the first rank's state is used. All ranks of `group` call this. `load_directly`
        makes the optimizer load the result; `is_named_optimizer` is for an optimizer whose keys are
        names.

        Raises OptimizerMismatchError, on all ranks, before any change, if the state is not that of
        this optimizer.
        """
        result = state_to_load(
            model,
            optim,
            optim_state_dict,
            rank0_only=_is_rank0_only(get_state_dict_type(model)),
            by_name=is_named_optimizer,
            group=group,
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> OptimState:
        """Returns the optimizer's state with full tensors on the CPU, under any settings."""
        wanted = OptimRequest(Kind.FULL, rank0_only, to_cpu=True, group=group)
        return optim_state_of(model, optim, optim.state_dict(), wanted, optim_input)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None
    ) -> OptimState:
        """Returns the optimizer's state as DTensors on the CPU, whatever the model's settings."""
        wanted = OptimRequest(Kind.SHARDED, to_cpu=True, group=group)
        return optim_state_of(model, optim, optim.state_dict(), wanted)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: OptimState,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> OptimState:
        """Returns a state dict that an optimizer can load, from full tensors that every rank has.

        Without `optim` and `optim_input`, the optimizer has all of the model's parameters.
        """
        return state_to_load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: OptimState | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> OptimState:
        """Returns a state dict to load, from full tensors that the first rank of `group` has."""
        return state_to_load(
            model,
            optim,
            full_optim_state_dict,
            rank0_only=True,
            group=group,
            optim_input=optim_input,
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: OptimState, model: nn.Module, optim: Optimizer
    ) -> OptimState:
        """Returns a state dict that an optimizer can load, from DTensors."""
        return state_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: OptimState,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> OptimState:
        """Returns the state dict of an optimizer of an unwrapped module, with other keys.

        The keys are names, like those of `full_optim_state_dict`, or positions, like the
        optimizer's own. Does not communicate.
        """
        kind: Any = member_of(OptimStateKeyType, optim_state_key_type)
        return change_keys(optim_state_dict, kind, model, optim_input, optim)


def _is_rank0_only(settings: StateDictSettings) -> bool:
    config = settings.optim_state_dict_config
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only
