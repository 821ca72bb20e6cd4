"""Modules, optimizers and other objects with a state dict, seen as nests of names and tensors.

Rules:

1. A module's entries have the names of its own `state_dict()`, without what wrappers add: DDP's
   `module.`, torch.compile's `_orig_mod.`.
2. An optimizer's entries are keyed by its parameters' names in the modules of the same state, never
   by position, so that they fit any world size, grouping and wrapper:
   `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`. Parameters of several
   modules have their module's key in front. Without the modules in the state, positions are all
   there is.
3. Anything else with `state_dict()` and `load_state_dict()` is its state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import StateError
from ckpt.saved import join

MAX_DEPTH = 100
"""How deep a state may nest; deeper is taken for one that holds itself."""


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and loaded by its own two methods."""

    def state_dict(self) -> dict[str, object]:
        """The state, as a nest of what can be stored."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take over a state that `state_dict` gave."""
        ...


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        data_parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        inner = getattr(module, "module" if data_parallel else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def module_entries(module: nn.Module) -> dict[str, object]:
    """The state dict under clean names; parameters themselves, so that ties are seen (rule 1)."""
    return {clean_name(k): v for k, v in unwrapped(module).state_dict(keep_vars=True).items()}


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The names of parameters, by identity, for the optimizers of one state."""

    names: Mapping[int, tuple[str, str]]
    """id(parameter) -> (key path of its module, its name there)."""

    def of(self, optimizer: Optimizer) -> list[str]:
        """A name for each of the optimizer's parameters, in the order of its groups (rule 2)."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [self.names.get(id(p)) for p in parameters]
        known = [entry for entry in found if entry is not None]
        if not known:
            return [str(index) for index in range(len(parameters))]
        if len(known) < len(found):
            at = found.index(None)
            raise StateError(
                f"the optimizer's parameter {at} of shape {tuple(parameters[at].shape)} belongs to "
                "no module of the state, others do: put all of its modules into the state"
            )
        if len({module for module, _ in known}) > 1:
            return [join(module, name) for module, name in known]
        return [name for _, name in known]


def parameter_names(state: object) -> ParameterNames:
    """The names of all parameters of the modules in a state."""
    names: dict[int, tuple[str, str]] = {}
    for path, module in modules(state):
        for name, parameter in unwrapped(module).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), (path, clean_name(name)))
    return ParameterNames(names)


def modules(state: object, path: tuple[object, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a nest, down to `MAX_DEPTH`, with their names."""
    if isinstance(state, nn.Module):
        yield reduce(join, path, ""), state
    elif len(path) > MAX_DEPTH:
        return
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from modules(item, (*path, key))
    elif isinstance(state, list | tuple):
        for index, item in enumerate(state):
            yield from modules(item, (*path, index))


def optimizer_entries(optimizer: Optimizer, names: list[str], path: str) -> dict[str, object]:
    """The optimizer's state dict with names for its parameters (rule 2)."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise StateError(f"{path}: two parameters of the optimizer have the name {twice}")
    packed = optimizer.state_dict()
    state = {
        (names[key] if isinstance(key, int) and key < len(names) else key): value
        for key, value in packed["state"].items()
    }
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in packed["param_groups"]
    ]
    others = {k: v for k, v in packed.items() if k not in ("state", "param_groups")}
    return {"state": state, "param_groups": groups, **others}


def identity(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are one: the same object, or the same view of the same memory.

    A shard may be empty and then has no memory to compare, so DTensors are tied by identity alone:
    all ranks must see the same ties.
    """
    if hasattr(tensor, "_local_tensor") or tensor.numel() == 0:
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
