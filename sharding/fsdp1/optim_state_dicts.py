"""An optimizer's state by the names of the parameters: full, by rows, or local.

An optimizer's state for a flat parameter has the parameter's layout: its slices are the state of
the parameters in it. Numbers, such as steps, belong to each of them.

Rules:

1. The result is `{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}`, in the
   order of the module. Parameters without state are only in groups. State under other
   keys than parameters stays as it is.
2. Tensors are in new memory, except local state, which shares the optimizer's memory.
3. Every rank with elements of a divided parameter must have state for it, with the same entries and
   numbers. A rank without its elements may have no state, or other state.
4. An error of one rank is an error on all ranks, before any tensor moves. Local state does not
   communicate.
5. Ranks may have the parameters in another order in their optimizers: tensors travel in the order
   of their names, and the state is in the order of the module on all ranks, so that a caller may
   gather DTensors one by one.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.agreement.ranks import Ranks
from sharding.describe.members import LocalPart, NamedParameter
from sharding.engine.flat_param_group import FlatParamGroup, flat_param_groups
from sharding.engine.unit import tensors_in
from sharding.errors import OptimizerMismatchError
from sharding.fsdp1.entry_point import entry_points
from sharding.fsdp1.flat_states import FlatPart, by_rows
from sharding.fsdp1.optim_keys import (
    Key,
    Keyed,
    ModelNames,
    OptimInput,
    OptimState,
    by_name,
    find_parameters,
    group_of_module,
    is_keyed_by_name,
    options_of,
)
from sharding.fsdp1.state_dicts import mesh_given
from sharding.kind import Kind
from sharding.reshard.kinds import convert_kind

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries of torch's optimizers that are one number for any parameter."""

COMPARING = "comparing optimizers' states"
Entries = dict[Any, Any]
"""An optimizer's state for one parameter."""


@dataclass(frozen=True, slots=True)
class OptimRequest:
    """The optimizer state that a caller asks for."""

    kind: Kind
    rank0_only: bool = False
    """Whether the first rank alone gets full tensors, and the others an empty dict."""
    to_cpu: bool = False
    group: ProcessGroup | None = None
    """The ranks that call."""

    def fingerprint(self) -> int:
        """Returns a hash that is equal on ranks with the same request."""
        return crc32(repr((self.kind, self.rank0_only)).encode())


@torch.no_grad()
def optim_state_of(
    module: nn.Module,
    optim: Optimizer,
    state: OptimState,
    wanted: OptimRequest,
    optim_input: OptimInput | None = None,
) -> OptimState:
    """Returns an optimizer's state dict by names (see the rules above). All ranks call this.

    Without a group in `wanted`, those are the ranks of `group_of_module`.

    Raises OptimizerMismatchError if the optimizer is not the module's, state cannot be divided, or
    ranks have different states (rule 3); RankError if another rank fails.
    """
    local = wanted.kind is Kind.LOCAL

    def planning() -> _Plan:
        names = ModelNames.of(module)
        found = find_parameters(names, optim, optim_input, is_keyed_by_name(state))
        places = {name: place for place, name in enumerate(names.first)}
        in_order = sorted(found.parameters.items(), key=lambda item: places[item[1].names[0]])
        return _Plan.of(replace(found, parameters=dict(in_order)), state)

    if local:
        plan = planning()
        return {"state": {**plan.entries, **plan.others}, **_groups(plan.known, state)}
    wanted = replace(wanted, group=wanted.group or group_of_module(module))
    ranks = Ranks(wanted.group)
    plan, agreement = ranks.run_and_compare(
        "describing an optimizer's state",
        planning,
        lambda plan: {"plan": plan.fingerprint(), "request": wanted.fingerprint()},
    )
    if not agreement.same["request"]:
        raise OptimizerMismatchError(
            "the ranks ask for different state dicts of the optimizer: this one asks for a "
            f"{wanted.kind.value} one with rank0_only={wanted.rank0_only}; set the same on all"
        )
    if not agreement.same["plan"]:
        ranks.run_on_all(COMPARING, lambda: pickle.dumps(plan.described))  # fails on all ranks
        everyone: list[dict[str, _Described]] = [{} for _ in range(ranks.world_size)]
        dist.all_gather_object(everyone, plan.described, group=wanted.group)
        ranks.run_on_all(COMPARING, lambda: plan.complete(everyone))
    made: Made = {}
    if wanted.kind is Kind.SHARDED:
        made = ranks.run_on_all("moving rows", lambda: _rows(plan, wanted, module))
    made |= _convert(plan, wanted, made)
    if wanted.rank0_only and ranks.rank > 0:
        return {}
    entries = {
        name: {
            entry: made[name, entry] if (name, entry) in made else _copy(value, wanted.to_cpu)
            for entry, value in planned.items()
        }
        for name, planned in plan.entries.items()
    }
    return {"state": {**entries, **plan.others}, **_groups(plan.known, state)}


@dataclass(frozen=True, slots=True)
class _Described:
    """One rank's state of one divided parameter, without its tensors."""

    has_elements: bool
    entries: dict[Any, tuple[Any, ...]]
    """By entry: ("divided", dtype), ("number", dtype, shape, number) or ("value", value)."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """An optimizer's state under names; divided tensors are `LocalPart`s."""

    known: Keyed
    entries: dict[str, Entries] = field(default_factory=dict)
    described: dict[str, _Described] = field(default_factory=dict)
    """The state of divided parameters on this rank, by name."""
    others: dict[Any, Any] = field(default_factory=dict)
    """State under other keys than parameters."""

    @classmethod
    def of(cls, known: Keyed, state: OptimState) -> _Plan:
        plan = cls(known)
        for key, named in known.parameters.items():
            if key not in state["state"]:
                continue
            slots = state["state"][key]
            if not named.slices:
                plan.entries[named.names[0]] = dict(slots)
                continue
            for name, part in zip(named.names, named.slices, strict=True):
                entries = {
                    entry: part.of(value) if _is_divided(named, entry, value) else value
                    for entry, value in slots.items()
                }
                plan.entries[name] = entries
                plan.described[name] = _Described(
                    part.hi > part.lo, {e: _describe(name, e, v) for e, v in entries.items()}
                )
        keys = set(known.parameters)
        plan.others.update({k: v for k, v in state["state"].items() if k not in keys})
        return plan

    def fingerprint(self) -> int:
        """Returns a hash that is equal on ranks with the same entries."""
        seen = [(name, by_name(each.entries)) for name, each in by_name(self.described)]
        return crc32(repr(seen).encode())

    def complete(self, everyone: list[dict[str, _Described]]) -> None:
        """Adds the entries that other ranks have (rule 3)."""
        for named in self.known.parameters.values():
            for name, part in zip(named.names, named.slices, strict=bool(named.slices)):
                descriptions = {r: each[name] for r, each in enumerate(everyone) if name in each}
                if descriptions:
                    self._complete(name, named, part.hi > part.lo, descriptions)
        order = [name for named in self.known.parameters.values() for name in named.names]
        for name in order:
            if name in self.entries:
                self.entries[name] = self.entries.pop(name)

    def _complete(
        self,
        name: str,
        named: NamedParameter,
        has_elements: bool,
        descriptions: dict[int, _Described],
    ) -> None:
        holders = {rank: each for rank, each in descriptions.items() if each.has_elements}
        first, wanted = min((holders or descriptions).items())
        for rank, each in holders.items():
            if each.entries != wanted.entries:
                raise OptimizerMismatchError(
                    f"{name}: the optimizer of rank {first} has the state {wanted.entries}, that "
                    f"of rank {rank} {each.entries}; ranks take every step together"
                )
        mine = self.entries.get(name, {})
        if has_elements and name not in self.entries:
            raise OptimizerMismatchError(
                f"{name}: the optimizer of this rank has no state for its part of it, that of rank "
                f"{first} has; give all ranks' optimizers the same parameters and steps"
            )
        part = named.slices[named.names.index(name)]
        nothing = named.parameter.detach().reshape(-1)[:0]
        self.entries[name] = {
            entry: mine[entry] if has_elements else _make(said_of, LocalPart(nothing, part.layout))
            for entry, said_of in wanted.entries.items()
        }


def _is_divided(named: NamedParameter, entry: object, value: object) -> bool:
    """Whether an entry has an element for each element of its parameter."""
    if not isinstance(value, torch.Tensor) or entry in NUMBERS:
        return False
    return value.shape == named.parameter.shape


def _describe(name: str, entry: object, value: object) -> tuple[Any, ...]:
    if isinstance(value, LocalPart):
        return "divided", value.dtype
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return "number", value.dtype, tuple(value.shape), value.item()
    for tensor in tensors_in(value):
        raise OptimizerMismatchError(
            f"{name}: the optimizer's {entry!r} has a tensor of shape {tuple(tensor.shape)}, and "
            "only numbers and tensors of the parameter's shape can be divided among ranks; use "
            "ckpt.sharding.fully_shard, or an optimizer that works element by element"
        )
    return "value", value


def _make(description: tuple[Any, ...], part: LocalPart) -> object:
    """Returns another rank's entry, on a rank without elements of the parameter."""
    if description[0] == "divided":
        return LocalPart(part.local.to(description[1]), part.layout)
    if description[0] == "number":
        return torch.tensor(description[3], dtype=description[1], device="cpu").reshape(
            description[2]
        )
    return description[1]


Made = dict[tuple[str, Any], Any]
"""Values of the result, by name and entry."""


def _convert(plan: _Plan, wanted: OptimRequest, made: Made) -> Made:
    """Returns the divided tensors still to make, of the wanted kind. All ranks call this."""
    places = [
        (name, entry)
        for name, entries in by_name(plan.entries)
        for entry, value in by_name(entries)
        if isinstance(value, LocalPart | DTensor) and (name, entry) not in made
    ]
    converted = convert_kind(
        {f"{name}.{entry}": plan.entries[name][entry] for name, entry in places},
        wanted.kind,
        rank0_only=wanted.rank0_only,
        offload_to_cpu=wanted.to_cpu,
        group=wanted.group,
    )
    results = {}
    for name, entry in places:
        if f"{name}.{entry}" in converted:
            value = converted[f"{name}.{entry}"]
            shares = _memory(value) == _memory(plan.entries[name][entry])
            results[name, entry] = _copy(value, to_cpu=False) if shares else value
    return results


def _memory(value: torch.Tensor | LocalPart) -> int:
    """Returns the address of a tensor's storage."""
    if isinstance(value, DTensor):
        value = value.to_local()
    local = value.local if isinstance(value, LocalPart) else value
    return local.untyped_storage().data_ptr()


def _rows(plan: _Plan, wanted: OptimRequest, module: nn.Module) -> Made:
    """Returns state laid out as flat parameters, by rows. The ranks that share them call this."""
    param_groups: dict[int, tuple[FlatParamGroup, DeviceMesh | None]] = {}
    for entry_point in entry_points(module):
        for param_group in flat_param_groups(entry_point.unit.param_groups):
            param_groups[id(param_group)] = param_group, mesh_given(entry_point)
    parts: dict[int, list[FlatPart]] = {}
    places: dict[int, list[tuple[str, Any]]] = {}
    for named in plan.known.parameters.values():
        for name, own in zip(named.names, named.slices, strict=bool(named.slices)):
            at, index = own.key if isinstance(own.key, tuple) else (None, None)
            if at not in param_groups:
                continue
            for entry, value in by_name(plan.entries.get(name, {})):
                if isinstance(value, LocalPart):
                    local = value.local.reshape(-1)
                    parts.setdefault(at, []).append(FlatPart(f"{name}.{entry}", index, local))
                    places.setdefault(at, []).append((name, entry))
    made: Made = {}
    for at, found in parts.items():
        param_group, mesh = param_groups[at]
        values = by_rows(param_group, found, mesh, to_cpu=wanted.to_cpu)
        made |= dict(zip(places[at], values, strict=True))
    return made


def _copy(value: Any, to_cpu: bool) -> Any:
    """Returns a copy of a value, which shares no memory."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    value = value.detach().clone()
    return value.cpu() if to_cpu else value


def _groups(known: Keyed, state: OptimState) -> dict[str, list[dict[str, Any]]]:
    """Returns the groups with names for parameters; empty if the state dict has no groups."""
    if "param_groups" not in state:
        return {}

    def names(key: Key) -> tuple[str, ...]:
        return known.parameters[key].names

    groups = [
        {
            **deepcopy(options_of(group)),
            "params": [name for key in group["params"] for name in names(key)],
        }
        for group in state["param_groups"]
    ]
    return {"param_groups": groups}
