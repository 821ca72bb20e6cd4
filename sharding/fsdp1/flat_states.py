"""Converts state with the layout of a flat parameter into rows over its ranks, and back.

A flat parameter is cut evenly, regardless of the parameters in it. A sharded state dict has each
parameter by rows, a DTensor. Elements whose ranks differ between the two travel from rank to rank;
no tensor is gathered.

Rules:

1. Only the ranks that share a parameter group communicate. Its replicas, and the ranks of tensor
   parallelism, do the same among themselves.
2. These ranks call with the same parameters, names and dtypes, in the same order.
3. Undivided tensors, and tensors without dimensions, become plain tensors.

Turns values of a state dict into this rank's shard of a flat parameter, without an all-gather.

`load_state_dict` copies values into the tensors of modules: a flat parameter, or this rank's
elements of the original ones. This module first brings values into that form:

    plain tensors                        this rank's elements are copied, without communication
    DTensors and torch's ShardedTensors  sent among the ranks that share the flat parameter if they
                                         have all elements, as in sharded state dicts; otherwise
                                         among all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sharding.agreement.ranks import Ranks
from sharding.describe.describing import describe
from sharding.describe.dtensor import is_sharded, take_local
from sharding.describe.members import check_source
from sharding.describe.own_members import OwnKeys, slices_of
from sharding.describe.wrappers import state_key
from sharding.engine.flat_param_group import FlatParamGroup
from sharding.engine.parameter import Parameter, as_dtensor, local_of, shard_in_front
from sharding.errors import ShardingError
from sharding.layout import FlatShard, Layout, Mesh, Placement, row_major
from sharding.layout import Replicate as Everywhere
from sharding.layout import Shard as Rows
from sharding.reshard.kinds import group_of, group_over, mesh_over
from sharding.reshard.redistribute import Move, redistribute
from sharding.torch_versions import release_with_groups, root_mesh, side_by_side

LOADING = "loading a sharded state dict"
_grids: WeakKeyDictionary[ProcessGroup, WeakKeyDictionary[ProcessGroup, DeviceMesh]] = (
    WeakKeyDictionary()
)
"""By the ranks that share and those that replicate: one mesh each, so that meshes are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """This rank's elements of a state with the layout of parameter `index` of a group."""

    name: str
    index: int
    local: torch.Tensor
    """The elements, one-dimensional."""


def by_rows(
    param_group: FlatParamGroup,
    parts: Sequence[FlatPart],
    mesh: DeviceMesh | None = None,
    *,
    to_cpu: bool = False,
    error: Exception | None = None,
) -> list[torch.Tensor]:
    """Returns each part's tensor as a new DTensor, of which this rank has a chunk of rows.

    The DTensors are over `mesh`, the argument of the parameter group's wrapper, or over a mesh of
    the ranks that share the parameter group. A failure of one of these ranks is an error on all of
    them; `error` is one that this rank has had before, with all parts nevertheless.
    """
    results: list[torch.Tensor] = []

    def moves() -> Iterator[Move]:
        for part in parts:
            flat, rows = _layouts(param_group, part.index)
            yield Move(part.name, part.local, flat, partial(new, part, rows), rows)

    def new(part: FlatPart, rows: Layout) -> torch.Tensor:
        device = torch.device("cpu") if to_cpu else part.local.device
        shape = rows.local_shape(dist.get_rank())
        target = torch.empty(shape, dtype=part.local.dtype, device=device)
        results.append(_wrap(param_group, part.index, target, mesh))
        return target

    _redistribute(param_group, moves(), "making a sharded state dict", error)
    return results


def _redistribute(
    param_group: FlatParamGroup, moves: Iterable[Move], stage: str, error: Exception | None = None
) -> None:
    """As `redistribute` over the ranks that share the parameter group, which agree on success."""
    is_shared = param_group.groups.shard.group is not None
    redistribute(
        moves,
        group=param_group.groups.group,
        stage=stage if is_shared else None,
        failed=None if error is None else [error],
    )
    if error is not None:
        raise error


Held = tuple[torch.Tensor, Layout]
"""This rank's part of a tensor, and the tensor's layout over the ranks that share."""


def _find_in_shard_group(
    param_group: FlatParamGroup,
    index: int,
    tensor: torch.Tensor,
    name: str,
    mesh: DeviceMesh | None,
) -> Held | None:
    """Returns a tensor as the ranks of the group hold it; None if other ranks hold a part of it.

    `name` is for messages. Raises as `sharding.describe.describing.describe` does.
    """
    if isinstance(tensor, DTensor) and _is_by_rows(param_group, index, tensor, mesh):
        return tensor.to_local(), _layouts(param_group, index)[1]
    local, layout = describe(tensor, name, Ranks().mesh)
    among = set(_layouts(param_group, index)[0].mesh.ranks())
    if param_group.parameters[index].distributed is None and among.issuperset(layout.mesh.ranks()):
        check_source(name, local, layout, dist.get_rank())
        return local, layout
    return None


def _is_by_rows(
    param_group: FlatParamGroup, index: int, tensor: DTensor, mesh: DeviceMesh | None
) -> bool:
    """Whether a DTensor is placed like the results of `by_rows` for this parameter."""
    if not param_group.is_divided or not param_group.packing.slots[index].shape:
        return False
    spec = _spec(param_group, index, tensor.dtype, mesh)
    same_ranks = torch.equal(spec.mesh.mesh, tensor.device_mesh.mesh)
    return same_ranks and spec.placements == tensor.placements and spec.shape == tensor.shape


def group_of_flat(param_group: FlatParamGroup) -> ProcessGroup | None:
    """Returns the group whose ranks hold all of a flat parameter, if it is one group.

    None if one group shares it and another replicates it, or if tensor parallelism divides it too.
    """
    shard, replicas = param_group.groups.shard.group, param_group.groups.replicate.group
    is_grid = shard is not None and replicas is not None
    if is_grid or any(p.distributed is not None for p in param_group.parameters):
        return None
    return shard or replicas


def whole_shape(param_group: FlatParamGroup, index: int) -> tuple[int, ...]:
    """Returns a parameter's whole shape, also before tensor parallelism."""
    spec = param_group.parameters[index].distributed
    return param_group.packing.slots[index].shape if spec is None else tuple(spec.shape)


def _layouts(param_group: FlatParamGroup, index: int) -> tuple[Layout, Layout]:
    """Returns a parameter's two layouts over the ranks that share: cut flat, and by rows."""
    slot, shard_group = param_group.packing.slots[index], param_group.groups.shard
    if shard_group.group is None:
        alone = Mesh.grid((), (), dist.get_rank())
        return Layout(slot.shape, alone, ()), Layout(slot.shape, alone, ())
    mesh = _line(tuple(shard_group.ranks))
    divided = param_group.is_divided and slot.numel > 0
    flat: Placement = (
        FlatShard(slot.at, param_group.packing.shard_numel) if divided else Everywhere()
    )
    rows: Placement = Rows(0) if param_group.is_divided and slot.shape else Everywhere()
    return Layout(slot.shape, mesh, (flat,)), Layout(slot.shape, mesh, (rows,))


@lru_cache(16)
def _line(ranks: tuple[int, ...]) -> Mesh:
    """Returns the mesh of the ranks that share: one object for all parameters."""
    return Mesh.of_ranks(("shard",), (len(ranks),), ranks)


def _wrap(
    param_group: FlatParamGroup, index: int, local: torch.Tensor, mesh: DeviceMesh | None
) -> torch.Tensor:
    """Returns the value in a state dict for local rows (rule 3)."""
    before = param_group.parameters[index].distributed
    if param_group.is_divided and param_group.packing.slots[index].shape:
        return as_dtensor(local, _spec(param_group, index, local.dtype, mesh))
    if before is None:
        return local
    meta = TensorMeta(before.shape, before.stride, local.dtype)
    return as_dtensor(local, DTensorSpec(before.mesh, before.placements, tensor_meta=meta))


def _spec(
    param_group: FlatParamGroup, index: int, dtype: torch.dtype, given_mesh: DeviceMesh | None
) -> DTensorSpec:
    """Returns the placements of a parameter's rows; see [Note: which dimension comes first]."""
    before = param_group.parameters[index].distributed
    mesh = given_mesh or _mesh(param_group, before)
    rows = shard_in_front(0, before)
    behind = () if before is None else tuple(before.placements)
    replicated = [Replicate()] * (mesh.ndim - 1)
    if before is not None:
        mesh = _join_meshes(mesh, before.mesh)
    shape = whole_shape(param_group, index)
    meta = TensorMeta(torch.Size(shape), row_major(shape), dtype)
    return DTensorSpec(mesh, (*replicated, rows, *behind), tensor_meta=meta)


def _mesh(param_group: FlatParamGroup, before: DTensorSpec | None) -> DeviceMesh:
    """Returns a mesh over a group's ranks; the last of two dimensions for a replicated group.

    If those ranks are a dimension of tensor parallelism's mesh, the result is this dimension.
    """
    shard_group, replicas = param_group.groups.shard, param_group.groups.replicate
    if before is not None and replicas.group is None:
        root = root_mesh(before.mesh)
        for axis, name in enumerate(root.mesh_dim_names or ()):
            if root.get_group(axis) == shard_group.group:
                return root[name]
    if replicas.group is None or shard_group.group is None:
        return mesh_over(shard_group.group, param_group.device.type)
    meshes = _grids.setdefault(shard_group.group, WeakKeyDictionary())
    if replicas.group not in meshes:
        meshes[replicas.group] = _from_groups(
            [replicas.group, shard_group.group], param_group.device.type, ("replicate", "shard")
        )
    return meshes[replicas.group]


def _join_meshes(mesh: DeviceMesh, behind: DeviceMesh) -> DeviceMesh:
    found = side_by_side(mesh, behind) if root_mesh(mesh) == root_mesh(behind) else None
    if found is not None:
        return found
    groups = [*mesh.get_all_groups(), *behind.get_all_groups()]
    names = tuple(f"dim_{axis}" for axis in range(len(groups)))
    return _from_groups(groups, mesh.device_type, names)


def _from_groups(
    groups: list[ProcessGroup], device_type: str, names: tuple[str, ...]
) -> DeviceMesh:
    """Returns the mesh whose dimensions are these groups and their counterparts on other ranks."""
    me = dist.get_rank()
    ranks = torch.tensor(me, device="cpu")
    for group in groups:
        steps = torch.tensor(dist.get_process_group_ranks(group), device="cpu") - me
        ranks = ranks[..., None] + steps
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    release_with_groups(mesh)
    return mesh


@dataclass(slots=True)
class _Given:
    """The values of a state dict for a group's parameters, by the ranks that exchange them."""

    near: list[tuple[FlatPart, Held]] = field(default_factory=list)
    spread: list[tuple[FlatPart, torch.Tensor]] = field(default_factory=list)
    full: list[tuple[FlatPart, torch.Tensor]] = field(default_factory=list)

    @property
    def parts(self) -> Iterator[FlatPart]:
        for pairs in (self.near, self.spread, self.full):
            yield from (part for part, _ in pairs)

    def fingerprint(self) -> int:
        """Returns a hash that is equal on ranks that agree."""
        seen = [
            [(part.name, str(part.local.dtype)) for part, _ in pairs]
            for pairs in (self.near, self.spread, self.full)
        ]
        lying = [layout for _, (_, layout) in self.near]
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

        def reading() -> tuple[torch.Tensor, _Given]:
            flat = param_group.flat.detach().clone()
            return flat, self._take(flat, strict, missing, errors)

        if param_group.groups.shard.group is None:
            flat, values = reading()
        else:
            ranks = Ranks(param_group.groups.shard.group)
            (flat, values), agreement = ranks.run_and_compare(
                LOADING, reading, lambda found: {"parts": found[1].fingerprint()}
            )
            if not agreement.same["parts"]:
                path = state_key(self.inside).rstrip(".") or "the root"
                raise ShardingError(
                    f"{path}: the ranks load sharded state dicts with other names, dtypes "
                    "or placements; all of them load the same, each its own part"
                )
        self._fill(values)
        for part in values.parts:
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

    def _take(
        self, flat: torch.Tensor, strict: bool, missing: list[str], errors: list[str]
    ) -> _Given:
        param_group, values = self.own.param_group, _Given()
        for index, names in enumerate(self.own.keys):
            there = [key for key in names if self.inside + key in self.state]
            if strict and not param_group.form.use_orig_params:
                missing += [self.inside + key for key in names if key not in there]
            if not there:
                continue
            key = self.inside + there[-1]
            value, wanted = self.state[key], torch.Size(whole_shape(param_group, index))
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
                values.full.append((part, value))
                continue
            near = _find_in_shard_group(param_group, index, value, key, self.mesh)
            if near is None:
                values.spread.append((part, value))
            else:
                values.near.append((part, near))
        return values

    def _fill(self, values: _Given) -> None:
        """Fills every part. All ranks that share the parameter group call this alike."""
        param_group = self.own.param_group
        if values.near:
            moves = (
                Move(part.name, near, have, part.local, _layouts(param_group, part.index)[0])
                for part, (near, have) in values.near
            )
            _redistribute(param_group, moves, LOADING)
        if values.spread:
            _fill_spread(param_group, values.spread)
        for part, value in values.full:
            _, lo, hi = param_group.piece(part.index)
            parameter = param_group.parameters[part.index]
            if not isinstance(value, DTensor):
                value = use_unsharded(value, parameter)
            value = local_of(value, parameter.distributed)
            part.local.copy_(value.reshape(-1)[lo:hi])


def _fill_spread(param_group: FlatParamGroup, pairs: list[tuple[FlatPart, torch.Tensor]]) -> None:
    """Fills parts from tensors with any layout over all ranks, which all call this.

    If no tensor has more ranks than the parameter group, only its ranks call this.
    """
    own = group_over([group_of_flat(param_group), *(group_of(value) for _, value in pairs)])
    ranks, slices = Ranks(own), slices_of(param_group)

    def moves() -> list[Move]:
        moves = []
        for part, value in pairs:
            local, have = describe(value, part.name, ranks.mesh)
            check_source(part.name, local, have, ranks.global_rank)
            moves.append(Move(part.name, local, have, part.local, slices[part.index].layout))
        return moves

    redistribute(ranks.run_on_all(LOADING, moves), group=own, stage=LOADING)


def use_unsharded(value: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Returns a loaded value in the form of the unsharded parameter."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    spec = parameter.distributed
    if spec is None:
        return value
    return take_local(value, spec)
