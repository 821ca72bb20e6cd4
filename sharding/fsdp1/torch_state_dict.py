"""State dicts of flat parameters by torch's names: the methods for optimizers, and torch's helpers.

`OptimStateDicts` has the methods of `FullyShardedDataParallel` for optimizers' state. They take any
module that contains units of this runtime: a wrapped one, one of either `fully_shard`, or a module
around these. `sharding.fsdp1.optim_state_dicts` and `sharding.fsdp1.optim_loading` do the work.

`torch.distributed.checkpoint.state_dict` (`get_model_state_dict`, `set_optimizer_state_dict` and
others) knows one class of wrapper, torch's, by an imported name. With another wrapper it takes a
rank's part of a parameter for the whole, without an error. It has no hook. `connect` therefore
replaces the four names by which it finds wrappers. For a module without our flat parameters, each
replacement answers as torch does.

Modules of `sharding.fully_shard` do not need these replacements: their parameters are DTensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from sharding.describe.wrappers import clean_name
from sharding.engine.flat_param_group import FlatParameter
from sharding.fsdp1.entry_point import HYBRID, EntryPoint, entry_points
from sharding.fsdp1.optim_keys import OptimInput, OptimState, change_keys
from sharding.fsdp1.optim_loading import state_to_load
from sharding.fsdp1.optim_state_dicts import OptimRequest, optim_state_of
from sharding.fsdp1.state_dicts import get_state_dict_type, state_dict_type
from sharding.kind import Kind
from sharding.policies import (
    KIND_OF,
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictSettings,
    member_of,
)


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


Context = AbstractContextManager[Any]

STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"
NAMES_OF = "_get_fqns"
GROUP_OF = "_get_fsdp_process_group"
"""Functions that torch's helpers call; older versions do not call the last."""


def connect() -> None:
    """Makes torch's helpers know this runtime's modules. Further calls have no effect."""
    from torch.distributed.checkpoint import state_dict as helpers

    names = vars(helpers)
    if isinstance(names["FSDP"], _KnowsBoth):
        return
    _Either.theirs = names["FSDP"]
    state_of, names_of = names[STATE_OF], names[NAMES_OF]
    group_of = names.get(GROUP_OF, lambda model, info: None)

    def either_state(module: nn.Module) -> object:
        """Returns the object that shards a module; None if the module is not sharded."""
        own = (unit for unit in entry_points(module) if unit.owner is module)
        return next(own, None) or state_of(module)

    def either_names(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        """Returns the names of a parameter, or of all in a flat one, without wrappers' parts."""
        return _names_in_flat(model, name) or names_of(model, name, *args, **kwargs)

    def either_group(model: nn.Module, info: Any) -> ProcessGroup | None:
        """Returns the ranks that share a module's shards; None for all ranks."""
        entry_point = next(entry_points(model), None)
        return group_of(model, info) if entry_point is None else _group_of(entry_point)

    answers = {STATE_OF: either_state, NAMES_OF: either_names, GROUP_OF: either_group}
    names |= {name: answer for name, answer in answers.items() if name in names}
    names["FSDP"] = _Either


class _KnowsBoth(type):
    """The metaclass of a class that has the instances of torch's wrapper and of ours."""

    theirs: Any = None
    """Torch's wrapper class, once it is known."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.theirs, OptimStateDicts))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)


class _Either(metaclass=_KnowsBoth):
    """Replaces torch's wrapper class in its helpers; calls for our modules use our class."""

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """Returns the modules in a module with flat parameters of torch's or ours."""
        instances = [d for d in entry_points(module) if not root_only or d.check_is_root()]
        found: list[nn.Module] = _Either.theirs.fsdp_modules(module, root_only)
        return found + [entry_point.owner for entry_point in instances]

    @staticmethod
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Context:
        """Sets the kind of state dicts of a module inside the block."""
        made = state_dict_type if _is_ours(module) else _Either.theirs.state_dict_type
        inside: Context = made(module, *args, **kwargs)
        return inside

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Returns the optimizer's state by parameter names."""
        answers = OptimStateDicts if _is_ours(model) else _Either.theirs
        return answers.optim_state_dict(model, optim, *args, **kwargs)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns the state by parameter names as a state dict that the optimizer can load."""
        answers = OptimStateDicts if _is_ours(model) else _Either.theirs
        return answers.optim_state_dict_to_load(model, optim, *args, **kwargs)


def _is_ours(module: nn.Module) -> bool:
    """Whether a module has flat parameters of this runtime."""
    return next(entry_points(module), None) is not None


def _group_of(entry_point: EntryPoint) -> ProcessGroup | None:
    if entry_point.settings.strategy in HYBRID or not entry_point.unit.param_groups:
        return None
    return entry_point.unit.param_groups[0].groups.group


def _names_in_flat(model: nn.Module, name: str) -> set[str] | None:
    """Returns the names of the parameters in a flat one of ours; None for any other parameter."""
    path, _, attribute = name.rpartition(".")
    try:
        home = model.get_submodule(path)
    except AttributeError:
        return None
    flat = home._parameters.get(attribute)
    if not isinstance(flat, FlatParameter):
        return None
    prefix = clean_name(f"{path}.") if path else ""
    return {clean_name(f"{prefix}{inside}") for inside in flat._fqns}
