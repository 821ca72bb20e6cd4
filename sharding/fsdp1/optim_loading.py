"""Makes an optimizer's state by parameter names into a state dict that an optimizer can load.

The inverse of `sharding.fsdp1.optim_state_dicts`: full tensors, rows or parts of each name fill
slices of zeros like the optimizer's parameters. `sharding.fsdp1.optim_keys` matches the groups.

Rules:

1. A parameter in a flat parameter may lack state while others in it have state. It gets zeros and
   the others' numbers, as before its first step. The others must have the same entries, with equal
   numbers.
2. All misfits are one error, on all ranks, before any tensor moves or changes. The result shares no
   memory with the caller's state, which does not change.
3. If only the first rank has the state, it first sends names, shapes and values to the others; then
   each rank gets the elements that it needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.agreement.ranks import Ranks
from sharding.describe.describing import describe
from sharding.describe.dtensor import is_sharded, zeros_placed_like
from sharding.describe.members import FlatSlice, LocalPart, NamedParameter, check_source
from sharding.errors import ArgumentError, OptimizerMismatchError
from sharding.fsdp1.optim_keys import (
    ModelNames,
    OptimInput,
    OptimState,
    SavedGroups,
    find_parameters,
    group_of_module,
)
from sharding.fsdp1.optim_state_dicts import NUMBERS, Entries
from sharding.layout import Layout, Replicate
from sharding.reshard.redistribute import Move, redistribute

STAGE = "matching an optimizer's state"


@torch.no_grad()
def state_to_load(
    module: nn.Module,
    optim: Optimizer | None,
    saved: OptimState | None,
    *,
    rank0_only: bool = False,
    by_name: bool = False,
    group: ProcessGroup | None = None,
    optim_input: OptimInput | None = None,
) -> OptimState:
    """Returns a state dict for `optim.load_state_dict` (see the rules above).

    All ranks of `group` call this; by default those of `group_of_module`.

    Args:
        saved: the result of `optim_state_of`; with `rank0_only`, on the first rank of the group.
        by_name: whether the keys of the result are the names of the module's parameters.

    Raises:
        OptimizerMismatchError: the state does not fit this optimizer. RankError: it does not on
            another rank.
        ArgumentError: `saved` is not an optimizer's state.
    """
    group = group or group_of_module(module)
    ranks = Ranks(group)
    if rank0_only:
        saved = _from_first(saved, ranks, group)

    def planning() -> _Loading:
        loading = _Loading(ModelNames.of(module), optim, _check(saved), ranks, rank0_only)
        loading.plan(optim_input, by_name)
        return loading

    loading, agreement = ranks.run_and_compare(
        STAGE, planning, lambda loading: {"moves": loading.fingerprint()}
    )
    if not agreement.same["moves"]:
        raise OptimizerMismatchError(
            "the ranks load optimizers' states with other names, dtypes or layouts; give all of "
            "them the same, each its own part"
        )
    redistribute(loading.moves, group=group, stage=STAGE)
    return loading.result


def _check(saved: object) -> OptimState:
    if not isinstance(saved, dict) or "state" not in saved:
        keys = f" with the keys {list(saved)}" if isinstance(saved, Mapping) else ""
        raise ArgumentError(
            '`optim_state_dict` must have the key "state" to be a valid optimizer state dict, and '
            f"is {type(saved).__name__}{keys}"
        )
    return saved


def _from_first(saved: OptimState | None, ranks: Ranks, group: ProcessGroup | None) -> OptimState:
    """Returns the first rank's state; other ranks get tensors without memory (rule 3)."""

    def outline() -> list[Any]:
        if ranks.rank:
            return [None]
        state = {
            key: {entry: _without_memory(value) for entry, value in entries.items()}
            if isinstance(entries, dict)
            else entries
            for key, entries in _check(saved)["state"].items()
        }
        outlined = [{**(saved or {}), "state": state}]
        pickle.dumps(outlined)  # raises for a value that cannot be sent, on all ranks
        return outlined

    objects = ranks.run_on_all(STAGE, outline)
    dist.broadcast_object_list(objects, src=ranks.mesh.rank((0,)), group=group)
    found: OptimState = saved if ranks.rank == 0 and saved is not None else objects[0]
    return found


def _without_memory(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or is_sharded(value):
        raise OptimizerMismatchError(
            f"a {type(value).__name__} is divided among ranks, and with rank0_only the first "
            "rank alone has the state: load it without rank0_only"
        )
    return value.cpu() if value.numel() == 1 else torch.empty_like(value, device="meta")


@dataclass(slots=True)
class _Loading:
    """A state dict to load, and the moves that fill it."""

    names: ModelNames
    optim: Optimizer | None
    saved: OptimState
    ranks: Ranks
    from_first: bool
    moves: list[Move] = field(default_factory=list)
    result: OptimState = field(default_factory=dict)

    def plan(self, optim_input: OptimInput | None, by_name: bool) -> None:
        """Makes the result, except for the elements. Raises OptimizerMismatchError."""
        known = find_parameters(self.names, self.optim, optim_input, by_name)
        first = self.names.first
        entries = {first.get(name, name): value for name, value in self.saved["state"].items()}
        groups = SavedGroups.of(self.saved, first)
        if groups is not None:
            groups.check_names(known, first)
        state: dict[Any, Any] = {}
        taken: set[str] = set()
        for key, named in known.parameters.items():
            taken.update(named.names)
            own_entries = {name: entries[name] for name in named.names if entries.get(name)}
            if not own_entries:
                continue
            if groups is not None:
                self._check_complete(named, own_entries, entries, groups)
            state[key] = (
                self._slice(named, own_entries) if named.slices else self._own(named, own_entries)
            )
        known_names = taken | set(first) | set({} if groups is None else groups.group_of)
        others = {name: value for name, value in entries.items() if name not in known_names}
        state |= deepcopy(others)
        self.moves.sort(key=lambda move: move.name)  # optimizers of ranks may have other orders
        self.result = {"state": state}
        if groups is not None:
            self.result["param_groups"] = groups.match(known, self.optim)

    def fingerprint(self) -> int:
        """Returns a hash that is equal on ranks that agree."""
        seen = [(m.name, m.source.dtype, str(m.have), str(m.want)) for m in self.moves]
        return crc32(repr(seen).encode())

    def _check_complete(
        self,
        named: NamedParameter,
        loaded: Mapping[str, Entries],
        every: Mapping[str, Entries],
        groups: SavedGroups,
    ) -> None:
        """Raises if an entry is missing that the optimizer and others in the group have."""
        if self.optim is None:
            return
        mine = self.optim.state.get(named.parameter, {})
        for name, entries in loaded.items():
            for entry in [entry for entry in mine if entry not in entries]:
                if any(entry in every.get(other, {}) for other in groups.beside(name)):
                    raise OptimizerMismatchError(
                        f"{name}: the optimizer's state has no {entry!r}, which other parameters "
                        f"of its group have; it has {list(entries)}"
                    )

    # State of a part of one parameter, or of several parameters end to end.

    def _slice(self, named: NamedParameter, loaded: Mapping[str, Entries]) -> Entries:
        (first, entries), *others = loaded.items()
        for name, each in others:
            if each.keys() != entries.keys():
                raise OptimizerMismatchError(
                    f"{name} has the optimizer state {sorted(map(str, each))} and {first} has "
                    f"{sorted(map(str, entries))}; they are in one flat parameter, and have one "
                    "state: an entry is missing"
                )
        return {entry: self._slice_entry(named, loaded, entry) for entry in entries}

    def _slice_entry(
        self, named: NamedParameter, loaded: Mapping[str, Entries], entry: object
    ) -> object:
        slices = dict(zip(named.names, named.slices, strict=True))
        values = {name: each[entry] for name, each in loaded.items()}
        spread = {n: v for n, v in values.items() if isinstance(v, torch.Tensor | LocalPart)}
        if len(spread) == len(values):
            shapes = {name: tuple(value.shape) for name, value in spread.items()}
            if entry not in NUMBERS and all(
                shape == slices[name].layout.shape for name, shape in shapes.items()
            ):
                return self._fill(named, slices, spread, entry)
            numbers = {n: v for n, v in spread.items() if not isinstance(v, LocalPart)}
            if all(name in numbers and numbers[name].numel() == 1 for name in spread):
                _check_equal({name: number.item() for name, number in numbers.items()}, entry)
                return next(iter(numbers.values())).detach().clone()
            name = next(n for n, shape in shapes.items() if shape != slices[n].layout.shape)
            raise OptimizerMismatchError(
                f"{name}: the optimizer's {entry!r} has the shape {shapes[name]}, and the "
                f"parameter {slices[name].layout.shape}; it is the state of another module, or "
                "cannot be divided among ranks"
            )
        if spread:
            kinds = {name: type(value).__name__ for name, value in values.items()}
            raise OptimizerMismatchError(f"the optimizer's {entry!r} is of several types: {kinds}")
        _check_equal(values, entry)
        return deepcopy(next(iter(values.values())))

    def _fill(
        self,
        named: NamedParameter,
        slices: Mapping[str, FlatSlice],
        values: Mapping[str, torch.Tensor | LocalPart],
        entry: object,
    ) -> torch.Tensor:
        dtypes = {name: value.dtype for name, value in values.items()}
        if len(set(dtypes.values())) > 1:
            raise OptimizerMismatchError(f"the optimizer's {entry!r} has several dtypes: {dtypes}")
        target = zeros_placed_like(named.parameter, next(iter(dtypes.values())))
        for name, value in values.items():
            part = slices[name].of(target)
            self._move(f"{name}.{entry}", value, part.local, part.layout)
        return target

    # State of a parameter that is not divided by a flat parameter.

    def _own(self, named: NamedParameter, loaded: Mapping[str, Entries]) -> Entries:
        [(name, entries)] = loaded.items()
        return {
            entry: self._own_entry(named.parameter, f"{name}.{entry}", entry, value)
            for entry, value in entries.items()
        }

    def _own_entry(
        self, parameter: torch.Tensor, path: str, entry: object, value: object
    ) -> object:
        if not isinstance(value, torch.Tensor | LocalPart):
            return deepcopy(value)
        is_placed = isinstance(parameter, DTensor) and value.shape == parameter.shape
        if is_placed and entry not in NUMBERS:
            target = zeros_placed_like(parameter, value.dtype)
            local, want = describe(target, path, self.ranks.mesh)
            self._move(path, value, local, want)
            return target
        if not (isinstance(value, LocalPart | DTensor) or is_sharded(value)) and (
            not self.from_first or value.numel() == 1
        ):
            return value.detach().clone()
        shape = tuple(value.shape)
        device = parameter.device if shape == tuple(parameter.shape) else torch.device("cpu")
        full = torch.empty(shape, dtype=value.dtype, device=device)
        self._move(path, value, full, Layout(shape, self.ranks.mesh, (Replicate(),)))
        return full

    def _move(
        self, path: str, value: torch.Tensor | LocalPart, target: torch.Tensor, want: Layout
    ) -> None:
        if self.from_first and isinstance(value, torch.Tensor) and value.numel() != 1:
            have = Layout.single(tuple(value.shape), self.ranks.mesh.rank((0,)))
            local = value.detach() if self.ranks.rank == 0 else target.new_empty(0)
        else:
            local, have = describe(value, path, self.ranks.mesh)
            check_source(path, local, have, self.ranks.global_rank)
        self.moves.append(Move(path, local, have, target, want))


def _check_equal(values: Mapping[str, object], entry: object) -> None:
    """Raises if the parameters in one flat parameter have several values."""
    (first, wanted), *others = values.items()
    for name, value in others:
        if value != wanted:
            raise OptimizerMismatchError(
                f"the optimizer's {entry!r} is {wanted!r} for {first} and {value!r} for {name}; "
                "they are in one flat parameter, and have one: wrap with use_orig_params=True"
            )
