"""Turns values of a state dict into this rank's shard of a flat parameter, without an all-gather.

`load_state_dict` copies values into the tensors of modules: a flat parameter, or this rank's
elements of the original ones. This module first brings values into that form:

    plain tensors                        this rank's elements are copied, without communication
    DTensors and torch's ShardedTensors  sent among the ranks that share the flat parameter if they
                                         have all elements, as in sharded state dicts; otherwise
                                         among all ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sharding.agreement.ranks import Ranks
from sharding.describe.describing import describe
from sharding.describe.dtensor import cut
from sharding.describe.flat_layouts import slices_of
from sharding.describe.local_part import check_holds
from sharding.describe.local_state_dicts import OwnKeys
from sharding.describe.members import state_key
from sharding.describe.sharded_tensor import is_sharded
from sharding.engine.dtensors import local_of
from sharding.engine.flat_param_group import FlatParamGroup
from sharding.engine.parameter import Parameter
from sharding.errors import ShardingError
from sharding.fsdp1.flat_states import (
    FlatPart,
    Held,
    fill_parts,
    group_of_flat,
    held_in_shard_group,
    unsharded_shape,
)
from sharding.reshard.kinds import group_of, group_over
from sharding.reshard.redistribute import Move, redistribute


@dataclass(slots=True)
class _Given:
    """The values of a state dict for a group's parameters, by the ranks that exchange them."""

    near: list[tuple[FlatPart, Held]] = field(default_factory=list)
    spread: list[tuple[FlatPart, torch.Tensor]] = field(default_factory=list)
    full: list[tuple[FlatPart, torch.Tensor]] = field(default_factory=list)

    @property
    def parts(self) -> Iterator[FlatPart]:
        """All parts that are filled."""
        for pairs in (self.near, self.spread, self.full):
            yield from (part for part, _ in pairs)

    def fingerprint(self) -> int:
        """Returns a hash that is equal on ranks that agree."""
        seen = [
            [(part.name, str(part.local.dtype)) for part, _ in pairs]
            for pairs in (self.near, self.spread, self.full)
        ]
        lying = [held.layout for _, held in self.near]
        return crc32(repr((seen, lying)).encode())


@dataclass(frozen=True, slots=True)
class RowLoading:
    """One parameter group's values in a state dict, whose keys begin with `inside`."""

    own: OwnKeys
    mesh: DeviceMesh | None
    state: dict[str, Any]
    inside: str

    def load(self, strict: bool, missing: list[str], errors: list[str]) -> None:
        """Fills the flat parameter; or puts this rank's elements of original ones in a state dict.

        All ranks call this. Parameters without a value keep their elements; with `strict` they are
        noted as missing if the modules would not note this. Raises ShardingError, on all ranks, if
        ranks load different names.
        """
        param_group, keys = self.own.param_group, self.own.keys
        flat = param_group.flat.detach().clone()

        def reading() -> _Given:
            return self._given(flat, strict, missing, errors)

        if param_group.groups.shard.group is None:
            given = reading()
        else:
            ranks = Ranks(param_group.groups.shard.group)
            given, agreement = ranks.run_and_compare(
                "reading a sharded state dict", reading, lambda found: (found.fingerprint(),), 1
            )
            if not agreement.same[0]:
                path = state_key(self.inside).rstrip(".") or "the root"
                raise ShardingError(
                    f"{path}: the ranks load sharded state dicts with other names, dtypes "
                    "or placements; all of them load the same, each its own part"
                )
        self._fill(given)
        for part in given.parts:
            view = param_group.shard_view(part.index, flat).reshape(-1)
            if view.data_ptr() != part.local.data_ptr():  # a copy, of another dtype
                view.copy_(part.local)
        if param_group.form.use_orig_params:
            for index, names in enumerate(keys):
                for key in names:
                    if self.inside + key in self.state:
                        self.state[self.inside + key] = param_group.shard_view(index, flat)
            return
        for names in keys:
            for key in names:
                self.state.pop(self.inside + key, None)
        with torch.no_grad():
            param_group.flat.copy_(flat)

    def _given(
        self, flat: torch.Tensor, strict: bool, missing: list[str], errors: list[str]
    ) -> _Given:
        param_group, given = self.own.param_group, _Given()
        for index, names in enumerate(self.own.keys):
            there = [key for key in names if self.inside + key in self.state]
            if strict and not param_group.form.use_orig_params:
                missing += [self.inside + key for key in names if key not in there]
            if not there:
                continue
            key = self.inside + there[-1]
            value, wanted = self.state[key], torch.Size(unsharded_shape(param_group, index))
            if isinstance(value, torch.Tensor) and value.shape == (1,) and not wanted:
                value = value[0]
            found = value.shape if isinstance(value, torch.Tensor) else type(value).__name__
            if found != wanted:
                errors.append(
                    f"size mismatch for {key}: copying a param with shape {found} from checkpoint, "
                    f"the shape in current model is {wanted}."
                )
                continue
            local = param_group.shard_view(index, flat).reshape(-1)
            if value.dtype != local.dtype:
                local = torch.empty_like(local, dtype=value.dtype)
            part = FlatPart(key, index, local)
            before = param_group.parameters[index].distributed
            is_spread = isinstance(value, DTensor) or is_sharded(value)
            if not is_spread or (before is not None and value.device_mesh == before.mesh):
                given.full.append((part, value))
                continue
            held = held_in_shard_group(param_group, index, value, key, self.mesh)
            if held is None:
                given.spread.append((part, value))
            else:
                given.near.append((part, held))
        return given

    def _fill(self, given: _Given) -> None:
        """Fills every part. All ranks that share the parameter group call this alike."""
        param_group = self.own.param_group
        fill_parts(param_group, given.near)
        if given.spread:
            _fill_spread(param_group, given.spread)
        for part, value in given.full:
            _, lo, hi = param_group.piece(part.index)
            parameter = param_group.parameters[part.index]
            if not isinstance(value, DTensor):
                value = unsharded_as_used(value, parameter)
            value = local_of(value, parameter.distributed)
            part.local.copy_(value.reshape(-1)[lo:hi])


def _fill_spread(param_group: FlatParamGroup, pairs: list[tuple[FlatPart, torch.Tensor]]) -> None:
    """Fills parts from tensors with any layout over all ranks, which all call this.

    If no tensor has more ranks than the parameter group, only its ranks call this.
    """
    own = group_over([group_of_flat(param_group), *(group_of(value) for _, value in pairs)])
    ranks, slices = Ranks(own), slices_of(param_group)

    def moves() -> list[Move]:
        found = []
        for part, value in pairs:
            local, have = describe(value, part.name, ranks.mesh)
            check_holds(part.name, local, have, ranks.global_rank)
            found.append(Move(part.name, local, have, part.local, slices[part.index].layout))
        return found

    redistribute(ranks.run_on_all("loading a sharded state dict", moves), group=own)


def unsharded_as_used(value: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Returns a loaded value in the form of the unsharded parameter."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    spec = parameter.distributed
    if spec is None:
        return value
    return cut(value, spec)
