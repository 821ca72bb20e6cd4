"""The keys of parameters in an optimizer's state dict: positions or names.

Rules:

1. A parameter's name is its first name in the module, without the parts that wrappers add. A flat
   parameter has the names of all parameters in it, in order.
2. A position counts the parameters in the optimizer's groups, end to end.
3. An optimizer that keys its state by names uses the present names of the module's parameters, with
   the parts that wrappers add: a flat parameter's name ends with `_flat_param`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.describe.describing import clean_name, flat_members
from sharding.describe.members import NamedParameter
from sharding.discovery import entry_of
from sharding.engine.flat_param_group import flat_param_groups
from sharding.engine.unit import units_of
from sharding.errors import ArgumentError, ArgumentTypeError, OptimizerMismatchError, listed
from sharding.fsdp1.flat_states import group_of_flat
from sharding.policies import OptimStateKeyType
from sharding.reshard.kinds import group_of, group_over

K = TypeVar("K")
V = TypeVar("V")

Key = int | str
"""The key of a parameter in an optimizer's state dict."""
OptimState = dict[str, Any]
"""An optimizer's state dict: `state`, by key, and `param_groups`."""
OptimInput = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
"""The parameters or groups in the call that made an optimizer."""
SHOWN = 5
"""The most names in a message."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of a module's parameters."""

    by_identity: Mapping[int, NamedParameter]
    first: Mapping[str, str]
    """For every name of a parameter, also of tied ones: its first name."""
    current: Mapping[str, torch.Tensor]
    """The parameters by their present names (rule 3)."""

    @classmethod
    def of(cls, module: nn.Module) -> ModelNames:
        """Returns the names of a module's parameters; reshards the module."""
        by_identity: dict[int, NamedParameter] = {}
        first: dict[str, str] = {}
        for member in flat_members(module):
            by_identity[id(member.parameter)] = NamedParameter.of(member)
            first |= {name: tied[0] for tied in member.names for name in tied}
        current = dict(module.named_parameters(remove_duplicate=False))
        for path, parameter in current.items():
            name = clean_name(path)
            own = NamedParameter(parameter, (name,))
            found = by_identity.setdefault(id(parameter), own)
            if not found.slices:
                first.setdefault(name, found.names[0])
        return cls(by_identity, first, current)

    def of_parameter(self, parameter: torch.Tensor, position: int) -> NamedParameter:
        """Returns the names of an optimizer's parameter, or raises OptimizerMismatchError."""
        found = self.by_identity.get(id(parameter))
        if found is None:
            raise OptimizerMismatchError(
                f"parameter {position} of the optimizer, of shape {tuple(parameter.shape)}, is not "
                "a parameter of the module: make the optimizer after the module is wrapped, and "
                "pass the module that has all of its parameters"
            )
        return found


@dataclass(frozen=True, slots=True)
class Keyed:
    """An optimizer's parameters: their keys and their groups."""

    parameters: Mapping[Key, NamedParameter]
    """The parameters by key, in the order of the groups."""
    groups: Sequence[Sequence[Key]] | None
    """The keys of each group; None if the groups are not known."""

    def is_unmanaged(self, key: Key) -> bool:
        """Whether no unit has the parameter: it is the same as before wrapping."""
        named = self.parameters[key]
        found = named.parameter
        if named.slices or isinstance(found, DTensor) or not isinstance(found, nn.Parameter):
            return False
        return entry_of(found) is None

    def key_of(self) -> dict[str, Key]:
        """Returns the key of each name."""
        return {name: key for key, found in self.parameters.items() for name in found.names}


def keyed(
    names: ModelNames, optim: Optimizer | None, optim_input: OptimInput | None, by_name: bool
) -> Keyed:
    """Returns the parameters of an optimizer, or of the call that made it.

    Without either, those of the module. A list of parameters does not show groups.
    """
    groups: list[list[torch.Tensor]]
    if optim_input is None and optim is not None:
        groups, known = [list(group["params"]) for group in optim.param_groups], True
    else:
        groups, known = _groups_of(names, optim_input)
    current: dict[int, str] = {}
    for name, parameter in names.current.items():
        current.setdefault(id(parameter), name)
    parameters: dict[Key, NamedParameter] = {}
    keys: list[list[Key]] = []
    for group in groups:
        keys.append([])
        for parameter in group:
            position = len(parameters)
            found = names.of_parameter(parameter, position)
            key: Key = current[id(parameter)] if by_name else position
            parameters[key] = found
            keys[-1].append(key)
    return Keyed(parameters, keys if known else None)


def _groups_of(
    names: ModelNames, optim_input: OptimInput | None
) -> tuple[list[list[torch.Tensor]], bool]:
    if optim_input is None:
        every = {id(parameter): parameter for parameter in names.current.values()}
        return [list(every.values())], False
    try:
        given: list[Any] = list(optim_input)
    except TypeError as error:
        raise ArgumentTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not given:
        raise ArgumentError("Optimizer input should not be empty")
    if all(isinstance(entry, torch.Tensor) for entry in given):
        return [given], False
    if not all(isinstance(entry, dict) for entry in given):
        raise ArgumentTypeError("Optimizer input should be an iterable of Tensors or dicts")
    return [list(group["params"]) for group in given], True


def is_keyed_by_name(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's own state dict has names for keys (rule 3)."""
    return isinstance(next(iter(state.get("state") or ()), None), str)


def rekeyed(
    state: OptimState,
    to: OptimStateKeyType,
    module: nn.Module,
    optim_input: OptimInput | None,
    optim: Optimizer | None,
) -> OptimState:
    """Returns an optimizer's state dict with names as its keys, or with positions.

    Groups list their keys sorted. The result is the state dict itself if its keys are of that kind.
    Raises ValueError for keys of mixed kinds, and OptimizerMismatchError for keys that are not
    those of the module's parameters.
    """
    kinds = {type(key) for key in state["state"]}
    if not kinds <= {int, str} or len(kinds) > 1:
        raise ArgumentError(f"Invalid parameter keys: {state['state'].keys()}")
    if kinds <= {str if to is OptimStateKeyType.PARAM_NAME else int}:
        return state
    found = keyed(ModelNames.of(module), optim, optim_input, by_name=False)
    table: dict[Any, Any] = {}
    for position, each in found.parameters.items():
        for name in each.names:
            table[position], table[name] = name, position
    lacking = [key for key in state["state"] if key not in table]
    for group in state["param_groups"]:
        lacking += [key for key in group["params"] if key not in table and key not in lacking]
    if lacking:
        raise OptimizerMismatchError(
            f"the optimizer's state has {listed(lacking, SHOWN)}, which the module and its "
            "optimizer do not have: pass the module and the optimizer of this state",
            names=map(str, lacking),
        )
    return {
        "state": {table[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**deepcopy(options_of(group)), "params": sorted(table[key] for key in group["params"])}
            for group in state["param_groups"]
        ],
    }


def by_name(entries: Mapping[K, V]) -> list[tuple[K, V]]:
    """Returns the entries in the order of their names, the same on all ranks."""
    return sorted(entries.items(), key=lambda entry: str(entry[0]))


def group_of_module(module: nn.Module) -> ProcessGroup | None:
    """Returns the group whose ranks share all of a module.

    None, the default group, if there are several groups or none.
    """
    flat = [p for unit in units_of((module,)) for p in flat_param_groups(unit.used)]
    dtensors = [p for p in module.parameters() if isinstance(p, DTensor)]
    return group_over([*map(group_of_flat, flat), *map(group_of, dtensors)])


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
