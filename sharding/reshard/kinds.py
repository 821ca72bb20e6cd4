"""Converts tensors of any kind of state dict into those of another kind.

    full      full plain tensors
    sharded   DTensors: this rank's rows, or the part that its placements give it
    local     `LocalPart`s: this rank's elements, flat or a box, with the layout

Rules:

1. A tensor that already has the wanted layout is not copied: the result shares its memory.
2. Tensors without dimensions are full in every kind, on every rank.
3. The ranks compare their plans before any tensor moves. An error of one rank, or a difference
   between ranks, is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from sharding.agreement.ranks import HASH_BITS, Ranks
from sharding.describe.describing import TensorLike, describe
from sharding.describe.dtensor import dtensor_like, mesh_of
from sharding.describe.members import LocalPart
from sharding.errors import ShardingError
from sharding.kind import Kind
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate, Shard, row_major
from sharding.layout.copies import exchange
from sharding.reshard.redistribute import BUDGET_BYTES, Move, redistribute
from sharding.torch_versions import release_with_groups, root_mesh

_meshes: WeakKeyDictionary[ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def convert_kind(
    tensors: Mapping[str, TensorLike],
    kind: Kind,
    *,
    mesh: DeviceMesh | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    group: ProcessGroup | None = None,
    budget: int = BUDGET_BYTES,
) -> dict[str, TensorLike]:
    """Returns the tensors under the same names, in another kind.

    All ranks of `group` call this, with the same names in the same order. A plain tensor is assumed
    to be equal on all of them. Elements that are in place do not travel. At most `budget` bytes
    travel at once.

    Args:
        mesh: for sharded and local results. Tensors are divided over its last dimension, by rows or
            by elements, and are replicas along the others. Without a mesh, divided tensors stay
            divided as they are, and the others are divided over the group.
        rank0_only: only the first rank of the group gets full tensors; the others get no names.
        offload_to_cpu: whether results are in host memory.

    Raises:
        ShardingError: a tensor does not fit its layout, or ranks give different tensors. On all
            ranks (RankError if another rank fails), before any tensor moves.

    >>> convert_kind({"w": torch.ones(3)}, Kind.LOCAL)["w"].layout.shape
    (3,)
    """
    ranks = Ranks(group)

    def planning() -> list[_Item]:
        targets = _Targets(kind, ranks, group, mesh, rank0_only)
        return [_item(name, tensor, targets) for name, tensor in tensors.items()]

    items, agreement = ranks.run_and_compare(
        f"planning {kind.value} tensors", planning, lambda items: {"tensors": _mark(items)}
    )
    if not agreement.same["tensors"]:
        raise ShardingError(
            f"the ranks give different tensors to be made {kind.value}: names, order, dtypes and "
            "layouts must be the same on all of them"
        )
    results: dict[str, TensorLike] = {}

    def moves() -> Iterator[Move]:
        for item in items:
            device = torch.device("cpu") if offload_to_cpu else item.local.device
            if item.have == item.want and device == item.local.device:
                results[item.name] = item.wrap(item.local)
                continue
            shape = storage_shape(item.want, ranks.global_rank)
            target = partial(new, item, shape, device)
            yield Move(item.name, item.local, item.have, target, item.want)

    def new(item: _Item, shape: tuple[int, ...] | None, device: torch.device) -> torch.Tensor:
        here = 0 if shape is None else shape
        target = torch.empty(here, dtype=item.local.dtype, device=device)
        if shape is not None:
            results[item.name] = item.wrap(target)
        return target

    redistribute(moves(), group=group, budget=budget, stage="moving tensors")
    return results


def storage_shape(layout: Layout, rank: int) -> tuple[int, ...] | None:
    """Returns the shape of a rank's local storage: one-dimensional for a range of elements.

    None for a rank outside the layout's mesh.
    """
    if layout.mesh.coordinate(rank) is None:
        return None
    lo, hi = layout.span(rank)
    if any(isinstance(placement, FlatShard) for placement in layout.placements):
        return (hi - lo,)
    return layout.local_shape(rank)


def mesh_over(group: ProcessGroup | None, device_type: str) -> DeviceMesh:
    """Returns the mesh of one dimension over a group's ranks: one object for each group.

    Raises ShardingError without a process group.
    """
    if not dist.is_initialized():
        raise ShardingError(
            "sharded tensors are DTensors, which need a process group: call init_process_group "
            "first, or take full or local tensors"
        )
    over = group or dist.distributed_c10d._get_default_group()
    if over not in _meshes:
        _meshes[over] = DeviceMesh.from_group(over, device_type)
        release_with_groups(_meshes[over])
    return _meshes[over]


def group_over(groups: Iterable[ProcessGroup | None]) -> ProcessGroup | None:
    """Returns the group whose ranks share all of several tensors, from the group of each tensor.

    None, the default group, if there are several groups or none, or if the group has all ranks.
    """
    found = {id(group): group for group in groups}
    [group] = found.values() if len(found) == 1 else [None]
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return None
    return group


def group_of(tensor: torch.Tensor) -> ProcessGroup | None:
    """Returns the group of a DTensor over a mesh of one dimension; else None, the default group."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1:
        return tensor.device_mesh.get_group()
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One tensor: this rank's part of it, and the wanted layout."""

    name: str
    local: torch.Tensor
    have: Layout
    want: Layout
    wrap: Callable[[torch.Tensor], TensorLike]
    """Makes the state dict's value from the local storage under `want`."""


@dataclass(frozen=True, slots=True)
class _Targets:
    """Finds the layouts of tensors of the wanted kind."""

    kind: Kind
    ranks: Ranks
    group: ProcessGroup | None
    mesh: DeviceMesh | None
    rank0_only: bool

    def layout(self, have: Layout) -> Layout:
        """Returns the wanted layout of a tensor that has this layout."""
        shape, world = have.shape, self.ranks.mesh
        if self.kind is Kind.FULL and self.rank0_only:
            return Layout.single(shape, world.rank((0,)))
        if self.kind is Kind.FULL or not shape:
            return Layout(shape, world, (Replicate(),))
        is_divided = any(
            size > 1 and not isinstance(placement, Replicate)
            for size, placement in zip(have.mesh.sizes, have.placements, strict=True)
        )
        if self.kind is Kind.LOCAL and self.mesh is None and is_divided:
            return have
        over, axis = (world, 0) if self.mesh is None else _mesh_and_axis(self.mesh)
        placements: list[Placement] = [Replicate()] * len(over.sizes)
        placements[axis] = Shard(0)
        if self.kind is Kind.LOCAL:
            placements[axis] = FlatShard(0, max(1, -(-prod(shape) // over.sizes[axis])))
        return Layout(shape, over, tuple(placements))


def _mesh_and_axis(mesh: DeviceMesh) -> tuple[Mesh, int]:
    """Returns the root mesh of a slice, and the slice's last axis in it.

    Ranks of other slices do the same, so all ranks describe the mesh of all slices.
    """
    root = root_mesh(mesh)
    names = root.mesh_dim_names or ()
    if mesh.mesh_dim_names and root.ndim > mesh.ndim and set(mesh.mesh_dim_names) <= set(names):
        axis = names.index(mesh.mesh_dim_names[-1])
        return mesh_of(root, [axis]), axis
    return mesh_of(mesh, [mesh.ndim - 1]), mesh.ndim - 1


def _item(name: str, tensor: TensorLike, targets: _Targets) -> _Item:
    local, have = describe(tensor, name, targets.ranks.mesh)
    here = targets.ranks.global_rank
    if targets.kind is Kind.SHARDED and targets.mesh is None and isinstance(tensor, DTensor):
        return _Item(name, local, have, have, lambda part: dtensor_like(tensor, part))
    want = targets.layout(have)
    exchange(have, want, here)  # raises for a hole while other ranks can still hear of it
    if targets.kind is Kind.LOCAL:
        if targets.mesh is None and have.replicas == targets.ranks.world_size:  # on all ranks
            lo, hi = want.span(here)
            local, have = local.reshape(-1)[lo:hi] if have != want else local, want
        return _Item(name, local, have, want, partial(LocalPart, layout=want))
    if targets.kind is Kind.SHARDED and have.shape:
        mesh = targets.mesh or mesh_over(targets.group, local.device.type)
        return _Item(name, local, have, want, partial(_dtensor, want, mesh))
    return _Item(name, local, have, want, partial(torch.reshape, shape=have.shape))


def _dtensor(layout: Layout, mesh: DeviceMesh, local: torch.Tensor) -> DTensor:
    """Returns a DTensor that the last dimension of its mesh cuts by rows."""
    rows = [*[TorchReplicate()] * (mesh.ndim - 1), TorchShard(0)]
    return DTensor.from_local(
        local,
        mesh,
        rows,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=row_major(layout.shape),
    )


def _mark(items: list[_Item]) -> int:
    """Returns a hash of the items, equal on ranks that agree."""
    hasher = blake2b(digest_size=8)
    for item in items:
        hasher.update(repr((item.name, item.local.dtype, item.have, item.want)).encode())
    return int.from_bytes(hasher.digest(), "little") >> (64 - HASH_BITS)
