"""The keys and groups of parameters in an optimizer's state dict: by position or by name.

Rules:

1. A parameter's name is its first name in the module, without the parts that wrappers add. A flat
   parameter has the names of all parameters in it, in order.
2. A position counts the parameters in the optimizer's groups, end to end.
3. An optimizer that keys its state by names uses the present names of the module's parameters, with
   the parts that wrappers add: a flat parameter's name ends with `_flat_param`.

[Note: groups]
Saved parameter groups are matched with an optimizer's groups by their parameters:

1. The result has the optimizer's own groups, in its order, each with the saved options of its
   parameters, which must have been in one group. If the optimizer is not known, the result has the
   saved groups.
2. The optimizer has exactly the parameters that were saved. A parameter without state is also in a
   group. Only a parameter that no unit divides may be lacking, as in torch: the result lacks it
   too, and a caller who keeps its state elsewhere adds its key.
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

from sharding.describe.describing import flat_members
from sharding.describe.members import NamedParameter
from sharding.describe.wrappers import clean_name
from sharding.engine.flat_param_group import flat_param_groups
from sharding.engine.unit import entry_of, units_of
from sharding.errors import ArgumentError, ArgumentTypeError, OptimizerMismatchError, format_names
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
        named = self.by_identity.get(id(parameter))
        if named is None:
            raise OptimizerMismatchError(
                f"parameter {position} of the optimizer, of shape {tuple(parameter.shape)}, is not "
                "a parameter of the module: make the optimizer after the module is wrapped, and "
                "pass the module that has all of its parameters"
            )
        return named


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
        return {name: key for key, found in self.parameters.items() for name in found.names}


def find_parameters(
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
        groups: list[Any] = list(optim_input)
    except TypeError as error:
        raise ArgumentTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not groups:
        raise ArgumentError("Optimizer input should not be empty")
    if all(isinstance(entry, torch.Tensor) for entry in groups):
        return [groups], False
    if not all(isinstance(entry, dict) for entry in groups):
        raise ArgumentTypeError("Optimizer input should be an iterable of Tensors or dicts")
    return [list(group["params"]) for group in groups], True


def is_keyed_by_name(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's own state dict has names for keys (rule 3)."""
    return isinstance(next(iter(state.get("state") or ()), None), str)


def change_keys(
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
    found = find_parameters(ModelNames.of(module), optim, optim_input, by_name=False)
    table: dict[Any, Any] = {}
    for position, each in found.parameters.items():
        for name in each.names:
            table[position], table[name] = name, position
    lacking = [key for key in state["state"] if key not in table]
    for group in state["param_groups"]:
        lacking += [key for key in group["params"] if key not in table and key not in lacking]
    if lacking:
        raise OptimizerMismatchError(
            f"the optimizer's state has {format_names(lacking, SHOWN)}, which the module and its "
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


@dataclass(frozen=True, slots=True)
class SavedGroups:
    """The groups that were saved: their parameters by name, and their options."""

    names: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int]
    """The index of each parameter's group, by name."""

    @classmethod
    def of(cls, saved: OptimState, first: Mapping[str, str]) -> SavedGroups | None:
        """Returns a state dict's groups, with parameters by first names; None without groups."""
        if "param_groups" not in saved:
            return None
        groups = saved["param_groups"]
        names = [[first.get(name, name) for name in group["params"]] for group in groups]
        group_of = {name: index for index, each in enumerate(names) for name in each}
        return cls(names, [options_of(group) for group in groups], group_of)

    def beside(self, name: str) -> Sequence[str]:
        return self.names[self.group_of[name]] if name in self.group_of else ()

    def check_names(self, known: Keyed, first: Mapping[str, str]) -> None:
        """Raises if the groups have other parameters than the optimizer (rule 2)."""
        mine = known.key_of()
        strange = [name for name in self.group_of if name not in first]
        elsewhere = [name for name in self.group_of if name in first and name not in mine]
        lacking = [
            name
            for name, key in mine.items()
            if name not in self.group_of and not known.is_unmanaged(key)
        ]
        if known.groups is None:  # the optimizer may have fewer, but all or none of a flat one
            used = {mine[name] for name in self.group_of if name in mine}
            lacking = [name for name in lacking if mine[name] in used]
        complaints = [
            (strange, "are of parameters that the module does not have"),
            (elsewhere, "are of parameters that the optimizer does not have"),
            (lacking, "are lacking, which the optimizer has"),
        ]
        if any(names for names, _ in complaints):
            text = "; ".join(
                f"{format_names(names, SHOWN)} {what}" for names, what in complaints if names
            )
            hint = ""
            if any(isinstance(name, int) for name in strange):
                hint = "; these are positions: rekey_optim_state_dict makes names of them"
            raise OptimizerMismatchError(
                f"the groups of the optimizer's state are not those of this optimizer: {text}"
                f"{hint}",
                names=[str(name) for names, _ in complaints for name in names],
            )

    def match(self, known: Keyed, optim: Optimizer | None) -> list[dict[str, Any]]:
        """Returns the groups with keys for parameters. Raises if one group was several (rule 1)."""
        if known.groups is None:
            return self._as_saved(known)
        matched = []
        for position, members in enumerate(known.groups):
            own = {} if optim is None else optim.param_groups[position]
            index = self._one_of(members, known)
            saved = {} if index is None else self.options[index]
            options = {key: value for key, value in own.items() if key != "params"}
            there = [key for key in members if not self._is_left_out(key, known)]
            matched.append({**deepcopy({**options, **saved}), "params": there})
        return matched

    def _is_left_out(self, key: Key, known: Keyed) -> bool:
        """Whether a parameter that no unit divides was not saved (rule 2)."""
        names = known.parameters[key].names
        return known.is_unmanaged(key) and self.group_of.keys().isdisjoint(names)

    def _as_saved(self, known: Keyed) -> list[dict[str, Any]]:
        mine = known.key_of()
        order = {key: position for position, key in enumerate(known.parameters)}
        groups = []
        for names, options in zip(self.names, self.options, strict=True):
            keys = sorted({mine[name] for name in names}, key=order.__getitem__)
            for key in keys:
                self._one_of([key], known)
            groups.append({**deepcopy(dict(options)), "params": keys})
        return groups

    def _one_of(self, keys: Sequence[Key], known: Keyed) -> int | None:
        """Returns the one saved group of these parameters; None without parameters."""
        names = [name for key in keys for name in known.parameters[key].names]
        groups = {self.group_of[name]: name for name in names if name in self.group_of}
        if len(groups) > 1:
            raise OptimizerMismatchError(
                "parameters of one group of the optimizer, or of one flat parameter, were in "
                f"several groups when it was saved: {groups}; give the optimizer the same groups"
            )
        return next(iter(groups), None)
