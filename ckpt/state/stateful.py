"""Turns modules, optimizers and other objects with a state dict into nests of names and tensors.

Rules:

1. A module's entries have the names of its own `state_dict()`, without the parts that wrappers of
   torch and of this project add (`sharding.describe.members.WRAPPED`): DDP's `module.`,
   torch.compile's `_orig_mod.`. Entries of a wrapper itself stay. Each parameter in a flat
   parameter has an entry.
2. An optimizer's entries are keyed by its parameters' names in the modules of the same state, never
   by position, so that they fit any world size, grouping and wrapper:
   `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`. If there are several
   modules, the key of its module precedes a parameter's name. If the state has no modules, the keys
   are positions.
3. State with the shape of a flat parameter is divided among the names like the parameter; a single
   number (`step`) belongs to each name. A parameter has no entry on a rank that holds none of its
   elements, if the optimizer keeps no state for it there.
4. A tensor of the state that wraps other tensors is a dict of them (`ckpt.state.subclass_state`).
5. Any other object with `state_dict()` and `load_state_dict()` is its state dict;
   `ckpt.match.match_stateful` loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.state.refusals import shown
from ckpt.state.subclass_state import inner_of, plain, taken_apart
from formats.catalog import join
from sharding.describe.describing import (
    CleanNames,
    TensorLike,
    flat_members,
    is_divided,
)
from sharding.describe.local_part import LocalPart
from sharding.describe.members import NamedParameter
from sharding.describe.sharded_tensor import is_sharded

STEP = "step"
"""The one entry of an optimizer's state that is never placed like its parameter."""
SINGLE = (torch.Tensor, nn.Parameter, str, int, float, bool, type(None))
"""Types that hold no module."""
MAX_DEPTH = 100
"""The deepest nest; a deeper one probably contains itself."""


@runtime_checkable
class Stateful(Protocol):
    """An object that is saved and loaded by its own two methods."""

    def state_dict(self) -> dict[str, object]:
        """Returns the state: a nest of values that can be stored."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Takes over a state that `state_dict` returned."""
        ...


@contextmanager
def call_of(method: str, entry: str) -> Iterator[None]:
    """Encloses a call of a user's method: its exception gets a note that names the entry."""
    try:
        yield
    except Exception as error:
        notes = vars(error).setdefault("__notes__", [])  # `add_note` of Python 3.11
        notes.append(f"raised by {method}() of {entry or 'the target'}")
        raise


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The names of parameters, by identity, for the optimizers of one state."""

    found: Mapping[int, tuple[str, NamedParameter]]
    """id(parameter) -> (key path of its module, its names in the module)."""

    def of(self, optimizer: Optimizer) -> list[NamedParameter]:
        """Returns the names of the optimizer's parameters, in the order of its groups (rule 2)."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [self.found.get(id(p)) for p in parameters]
        known = [entry for entry in found if entry is not None]
        if not known:
            _check_undivided(parameters)
            return [NamedParameter(p, (str(index),)) for index, p in enumerate(parameters)]
        if len(known) < len(found):
            at = found.index(None)
            raise StateError(
                f"the optimizer's parameter {at} of shape {tuple(parameters[at].shape)} belongs to "
                "no module of the state, others do: put all of its modules into the state"
            )
        if len({module for module, _ in known}) > 1:
            return [
                named._replace(names=tuple(join(module, one) for one in named.names))
                for module, named in known
            ]
        return [named for _, named in known]


def parameter_names(state: object) -> ParameterNames:
    """Returns the names of all parameters of the modules in a state."""
    found: dict[int, tuple[str, NamedParameter]] = {}
    for path, module in modules(state):
        for member in flat_members(module):
            found.setdefault(id(member.parameter), (path, NamedParameter.of(member)))
        clean = CleanNames(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            named = NamedParameter(parameter, (clean.of(name),))
            found.setdefault(id(parameter), (path, named))
    return ParameterNames(found)


def _check_undivided(parameters: list[torch.Tensor]) -> None:
    """Raises StateError if a parameter is a part of others: its position does not name them."""
    for index, parameter in enumerate(parameters):
        if is_divided(parameter):
            raise StateError(
                f"the optimizer's parameter {index} of shape {tuple(parameter.shape)} is this "
                "rank's part of several parameters, and their module, which knows their names, is "
                "not in the state: put the module into the state"
            )


def modules(state: object, path: tuple[object, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in a nest, with their names. Raises StateError if it is too deep.

    A nest that contains itself would otherwise never end.
    """
    if type(state) in SINGLE:
        return
    if len(path) > MAX_DEPTH:
        raise StateError(f"{shown(path[:8])}...: nests deeper than {MAX_DEPTH}: a cycle?")
    if isinstance(state, nn.Module):
        yield reduce(join, path, ""), state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            if type(item) not in SINGLE:
                yield from modules(item, (*path, key))
    elif isinstance(state, list | tuple):
        for index, item in enumerate(state):
            yield from modules(item, (*path, index))


def optimizer_entries(
    optimizer: Optimizer, named: list[NamedParameter], path: str
) -> dict[str, object]:
    """Returns the optimizer's state dict with names for its parameters (rules 2 and 3)."""
    every = list(chain.from_iterable(entry.names for entry in named))
    if len(set(every)) != len(every):
        twice = next(name for name in every if every.count(name) > 1)
        raise StateError(f"{path}: two parameters of the optimizer have the name {twice}")
    with call_of("state_dict", path):
        packed = optimizer.state_dict()
    state: dict[object, object] = {}
    for key, value in packed["state"].items():
        if isinstance(key, int) and key < len(named):
            entry = named[key]
            if entry.is_idle:
                continue
            where = f"{path}['state'][{entry.names[0]!r}]"
            if entry.slices or len(entry.names) != 1:
                state |= _divided(entry, _by_its_tensors(value, plain, where), path)
            else:
                state[entry.names[0]] = _by_its_tensors(value, taken_apart, where)
        else:
            state[key] = value
    groups = [
        {**group, "params": [name for index in group["params"] for name in named[index].names]}
        for group in packed["param_groups"]
    ]
    others = {k: v for k, v in packed.items() if k not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **others}


def _by_its_tensors(state: object, instead: Callable[[Any, str], Any], where: str) -> object:
    """Returns the state of one parameter, with `instead` of tensors that wrap others (rule 4)."""
    if not isinstance(state, Mapping):
        return state
    if type(state) is dict and all(inner_of(value) is None for value in state.values()):
        return state
    return {key: instead(value, f"{where}[{key!r}]") for key, value in state.items()}


def _divided(named: NamedParameter, state: object, path: str) -> dict[object, object]:
    """Returns the state of one parameter under each of its names (rule 3)."""
    if not named.slices or not isinstance(state, Mapping):
        return dict.fromkeys(named.names, state)
    shape = named.parameter.shape
    for key, value in state.items():
        loose = [] if _is_placed(key, value, shape) else _tensors(value)
        for tensor in loose:
            if tensor.numel() != 1:
                raise StateError(
                    f"{path}: the optimizer's {key!r} of {named.names[0]} has the shape "
                    f"{tuple(tensor.shape)}, the rank's part of the parameter {tuple(shape)}; only "
                    "numbers and tensors of the parameter's shape can be divided among ranks"
                )
    return {
        name: {
            key: part.of(value) if _is_placed(key, value, shape) else value
            for key, value in state.items()
        }
        for name, part in zip(named.names, named.slices, strict=True)
    }


def _tensors(nest: object) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        yield from chain.from_iterable(map(_tensors, nest.values()))
    elif isinstance(nest, list | tuple):
        yield from chain.from_iterable(map(_tensors, nest))


def _is_placed(key: object, value: object, shape: torch.Size) -> bool:
    """Whether an entry of an optimizer's state has an element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == shape and key != STEP


def has_address(tensor: TensorLike) -> TypeGuard[torch.Tensor]:
    """Whether a tensor's memory tells it apart from other tensors (see `identity`)."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and (
        isinstance(tensor, LocalPart) or hasattr(tensor, "_local_tensor") or is_sharded(tensor)
    ):
        return False
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 0


def identity(tensor: TensorLike) -> object:
    """Returns a value that is equal for tied tensors: one object, or one view of the same memory.

    All ranks must see the same ties, and an empty shard has no memory to compare. DTensors and
    ShardedTensors are therefore tied only as one object, and parts by their flat parameter. So are
    tensors without memory of their own: sparse ones, wrappers of other tensors, lazy ones.
    """
    if isinstance(tensor, LocalPart):
        return id(tensor) if tensor.key is None else tensor.key
    try:
        if not has_address(tensor):
            return id(tensor)
        return (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )
    except (RuntimeError, ValueError):  # torch's, for a tensor without memory of its own
        return id(tensor)
