"""Makes torch's helpers for state dicts work on modules with this runtime's flat parameters.

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

from sharding.describe.describing import clean_name
from sharding.engine.flat_param_group import FlatParameter
from sharding.fsdp1.entry_point import HYBRID, EntryPoint, entry_points
from sharding.fsdp1.optim_methods import OptimStateDicts
from sharding.fsdp1.state_dicts import state_dict_type

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
        return _entry_point_of(module) or state_of(module)

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


def _entry_point_of(module: nn.Module) -> EntryPoint | None:
    return next(
        (entry_point for entry_point in entry_points(module) if entry_point.owner is module), None
    )


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
