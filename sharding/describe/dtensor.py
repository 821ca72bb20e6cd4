"""Describes torch's plain tensors, DTensors and ShardedTensors: local tensors and layouts.

Rules:

1. No function communicates. Every rank describes its own tensors. Ranks that run the same program
   get equal layouts, because a layout follows from the tensor's shape, mesh and placements alone.
2. A DTensor's placements are checked against its local tensor: a layout is returned only if the
   two agree.
3. `torch.distributed.tensor` is imported only once a DTensor is seen. It takes a second to import,
   and a torch built without torch.distributed does not have it.

[Note: FSDP over tensor parallelism]
FSDP2 cuts the local tensor of tensor parallelism. Along a dimension that both cut, the axis on the
right therefore cuts first. Torch expresses this by `_StridedShard(dim, split_factor)` on the left
axis. Its placements, read from left to right, give every rank its elements if the dimension divides
evenly. Otherwise the two can differ: of 9 rows over 4 × 2 ranks, FSDP2 has the last row at (3, 1),
and torch's placements at (3, 0). The layout of such a tensor has the transposed mesh with plain
shards, in the order of the cuts.

[Note: order of ranks]
A DeviceMesh may list its ranks in any order, but its process groups sort theirs, and a collective
moves chunk i from or to the i-th rank of the group. So `fully_shard` and `distribute_tensor` place
chunks by the order of the group, and `full_tensor()` and every operation gather them so. A layout
follows the groups: its mesh is sorted along the axes that cut. Torch itself goes by the coordinate
in the mesh where it communicates nothing, as in `distribute_tensor(src_data_rank=None)`; the order
of the chunks is then another one also for `full_tensor()`. It cuts off padding by the coordinate
too, and loses rows that do not divide evenly: the local shape shows it.

[Note: ShardedTensor]
A ShardedTensor, of FSDP1's sharded and local state dicts, lists the box of every shard, and any
list is allowed. Two forms that torch makes are described: rows cut by torch.chunk's rule over the
ranks of the process group, in order; and a one-dimensional tensor cut into runs of one length, of
which the last may be shorter, with no run on the ranks behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from sharding.errors import ArgumentError, LocalShapeError, PartialError, UnknownPlacementError
from sharding.layout import FlatShard, Layout, Mesh, Placement, Replicate, Shard, StridedShard
from sharding.torch_versions import release_with_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

MAX_KNOWN = 1 << 14
"""The most layouts that are kept: models have many tensors and few shapes."""

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of nearly all tensors: of neither a wrapper, nor a DTensor, nor a ShardedTensor."""
_REPLICATED = (Replicate(),)
_NOWHERE = Mesh.grid((), ())
_known: dict[tuple[int, tuple[int, ...], tuple[Placement, ...]], Layout] = {}
"""Layouts by the identity of the mesh (which the layout keeps alive), shape and placements."""
_replicas: dict[tuple[int, torch.Size], Layout] = {}
"""Layouts of plain tensors, by mesh and shape alone: the hash of placements takes longer."""
_meshes: WeakKeyDictionary[DeviceMesh, _Meshes] = WeakKeyDictionary()
_sorted: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()
"""Whether a group's ranks ascend."""
_specs: dict[int, _Known] = {}
"""The layout and rank of each DTensorSpec, by its id."""


@dataclass(frozen=True, slots=True)
class _Meshes:
    """The ranks of a DeviceMesh in the orders that were asked for."""

    own: Mesh
    """In the order of the DeviceMesh."""
    by_axes: dict[tuple[int, ...], Mesh | None]
    """Sorted along the axes, the first cut first; None if that is impossible."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A DTensorSpec, with the layout, the local shape and the rank that follow from it."""

    spec: ReferenceType[object]
    """The spec itself: another spec may get its id, so both are compared."""
    placements: object
    layout: Layout
    rank: int
    local_shape: tuple[int, ...]
    is_outside: bool
    """Whether the rank is not in the mesh."""

    def fits(self, local: torch.Tensor) -> bool:
        """Whether a local tensor has the right shape; any without elements if the rank has none.

        The local tensor of a DTensor without elements has any shape: FSDP cuts it by its elements.
        """
        if local.shape == self.local_shape:
            return True
        return local.numel() == 0 and (self.is_outside or self.layout.numel == 0)


def describe(tensor: torch.Tensor, name: str, world: Mesh) -> tuple[torch.Tensor, Layout]:
    """Returns this rank's part of a tensor, detached and sharing memory, and the tensor's layout.

    A plain tensor counts as a replica on each rank of `world`, a mesh of one axis. A DTensor's
    layout has the DTensor's own mesh. The layout's pieces count the local tensor's elements in
    row-major order, independent of its strides. `name` is for messages.

    Raises `PartialError`, `UnknownPlacementError` or `LocalShapeError`.

    >>> local, layout = describe(torch.zeros(2, 3), "bias", Mesh.grid(("world",), (4,)))
    >>> tuple(local.shape), str(layout)
    ((2, 3), 'world:4=R')
    """
    if type(tensor) in ORDINARY or not _is_dtensor(tensor):
        return tensor.detach(), get_replicated(tensor.shape, world)
    known = _of_spec(tensor, name)
    local = tensor._local_tensor
    if type(local) is not torch.Tensor:
        wait = getattr(local, "wait", None)  # torch may not have awaited a redistribution yet
        local = local if wait is None else wait()
    if not known.fits(local):
        _specs.pop(id(tensor._spec), None)  # this process may have become another rank
        known = _of_spec(tensor, name)
    if not known.fits(local):
        advice = "make it with distribute_tensor, or pass the right shape= to DTensor.from_local"
        own = mesh_of(tensor.device_mesh)
        if own.ascending(range(len(own.sizes))) is not own:
            advice = (
                "torch gives chunks to ranks by their order in the process group, but cuts off "
                "padding by their order in the mesh, which loses rows: make a mesh of ascending "
                "ranks, or a size that divides evenly"
            )
        raise LocalShapeError(
            f"{name}: rank {known.rank} has a local tensor of shape {tuple(local.shape)}, but "
            f"{tuple(tensor.placements)} over {_format_mesh(tensor.device_mesh)} give it "
            f"{known.local_shape} of {known.layout.shape}; {advice}"
        )
    return local.detach(), known.layout


def describe_known(tensor: Any) -> tuple[torch.Tensor, Layout] | None:
    """Returns the result of `describe` for a DTensor with a known spec; None for other tensors.

    Only for torch's own class with a plain local tensor of the right shape. Keeps no weak reference
    to a tensor: `torch.utils.swap_tensors`, and thus `module.to()`, refuses tensors with one.
    """
    if not _is_torchs(type(tensor)):  # type: ignore[arg-type]
        return None
    spec: Any = getattr(tensor, "_spec", None)
    known = _specs.get(id(spec))
    if known is None or known.placements is not spec.placements or known.spec() is not spec:
        return None
    local = tensor._local_tensor
    if (
        type(local) is not torch.Tensor
        or local.shape != known.local_shape
        or tensor.shape != known.layout.shape
        or "_fsdp_flattened" in vars(tensor)  # a part of another tensor, by torch's wrapper
    ):
        return None
    return local.detach() if local.requires_grad else local, known.layout


@lru_cache(maxsize=1024)
def _is_torchs(kind: type) -> bool:
    """Whether a class is torch's own DTensor."""
    return kind.__module__.startswith("torch.distributed")


def _of_spec(tensor: DTensor, name: str) -> _Known:
    spec = tensor._spec
    known = _specs.get(id(spec))
    if (
        known is not None
        and known.spec() is spec
        and known.placements is spec.placements
        and known.layout.shape == tensor.shape
    ):
        return known
    layout = _layout(tensor, name)
    rank = tensor.device_mesh.get_rank()
    outside = layout.mesh.coordinate(rank) is None
    shape = layout.local_shape(rank)
    if len(_specs) >= MAX_KNOWN:
        _specs.clear()
    known = _Known(ref(spec), spec.placements, layout, rank, shape, outside)
    _specs[id(spec)] = known
    return known


def take_local(whole: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns this rank's part of a tensor that all ranks have, without communication.

    The parts are those that `full_tensor()` gathers; see [Note: order of ranks].
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    layout, rank = _layout(spec, "a full tensor"), dist.get_rank()
    local = torch.empty(layout.local_shape(rank), dtype=whole.dtype, device=whole.device)
    for piece in layout.pieces(rank):
        box = tuple(map(slice, piece.box.lo, piece.box.hi))
        local.as_strided(piece.box.shape, piece.strides, piece.at).copy_(whole[box])
    meta = TensorMeta(spec.shape, spec.stride, whole.dtype)
    placed = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, placed, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor with the placements of another."""
    return tensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def check_gathers(device_mesh: DeviceMesh, *orders: Sequence[int]) -> None:
    """Raises ArgumentError if collectives over a mesh would mix different parts of a tensor.

    Each of `orders` has axes in the order in which they cut; those that replicate come last.
    """
    for cuts in orders:
        try:
            mesh_of(device_mesh, cuts)
        except UnknownPlacementError as error:
            raise ArgumentError(
                f"{_format_mesh(device_mesh)} has ranks in an order in which collectives "
                "mix different "
                "parts of a tensor, because each process group sorts its ranks; make a mesh whose "
                "ranks ascend along each axis"
            ) from error


def zeros_placed_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros of `dtype` like `param`: shape, device, strides, placements of a DTensor.

    They require no gradient. Does not communicate. Optimizer state is loaded into them.

    >>> zeros_placed_like(torch.ones(2, 3, dtype=torch.bfloat16), torch.float32).sum()
    tensor(0.)
    """
    return torch.zeros_like(param.detach(), dtype=dtype)


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def get_replicated(shape: torch.Size, world: Mesh) -> Layout:
    """Returns the layout of a tensor that all ranks of `world` have: always the same object."""
    layout = _replicas.get((id(world), shape))
    if layout is None:
        if len(_replicas) >= MAX_KNOWN:
            _replicas.clear()
        layout = _get_layout(tuple(shape), world, _REPLICATED)
        _replicas[id(world), shape] = layout
    return layout


def _get_layout(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Layout:
    """Returns the layout of these parts: always the same object."""
    key = id(mesh), shape, placements
    layout = _known.get(key)
    if layout is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        layout = _known[key] = Layout(shape, mesh, placements)
    return layout


def _layout(tensor: DTensor | DTensorSpec, name: str) -> Layout:
    """Returns the layout for a DTensor's mesh and placements."""
    shape = tuple(tensor.shape)
    placements = tuple(_placement(p, shape, name) for p in tensor.placements)
    mesh = _sort_mesh(tensor.device_mesh, placements)
    last = _find_strided(shape, mesh, placements)
    if not last:
        return _get_layout(shape, mesh, placements)
    order = [axis for axis in range(len(placements)) if axis not in last] + sorted(last)
    plain = tuple(last.get(axis, placements[axis]) for axis in order)
    return Layout(shape, mesh.transposed(order), plain)


def _sort_mesh(device_mesh: DeviceMesh, placements: Sequence[Placement]) -> Mesh:
    """Returns the ranks in the order of a DTensor's chunks; see [Note: order of ranks]."""
    cut = [axis for axis, placement in enumerate(placements) if placement != Replicate()]
    if any(isinstance(placement, StridedShard) for placement in placements):
        mesh_of(device_mesh, cut[::-1])  # either axis may have cut first
    return mesh_of(device_mesh, cut)


def mesh_of(device_mesh: DeviceMesh, cut: Sequence[int] = ()) -> Mesh:
    """Returns the ranks of a DeviceMesh, converted once. The mesh drops groups that are destroyed.

    Along the axes in `cut`, which cut a tensor one after the other, a coordinate is a place in the
    axis' process group. Raises UnknownPlacementError if the groups contradict each other.
    """
    known = _meshes.get(device_mesh)
    if known is None:
        release_with_groups(device_mesh)
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
        own = Mesh.of_ranks(names, tuple(ranks.shape), ranks.flatten().tolist())
        known = _meshes[device_mesh] = _Meshes(own, {})
    axes = tuple(axis for axis in cut if _is_sorted(device_mesh, axis))
    if axes not in known.by_axes:
        known.by_axes[axes] = known.own.ascending(axes)
    mesh = known.by_axes[axes]
    if mesh is None:
        raise UnknownPlacementError(
            f"{_format_mesh(device_mesh)} cuts tensors along its axes {axes}, and each "
            "process group sorts its ranks: with these ranks the parts of one rank do not fit "
            "together, nor does full_tensor(); make a mesh whose ranks ascend along each axis"
        )
    return mesh


def _is_sorted(device_mesh: DeviceMesh, axis: int) -> bool:
    """Whether the group of an axis sorts its ranks; False if it has them in the mesh's order.

    A mesh sorts the groups that it makes. A user can give it one with another order, and the mesh
    has to have this order, too, because a rank knows no groups of others.
    """
    if device_mesh.get_coordinate() is None:
        return True
    try:
        group = device_mesh.get_group(axis)
    except RuntimeError:  # a mesh that was made without groups
        return True
    is_sorted = _sorted.get(group)
    if is_sorted is None:
        ranks = dist.get_process_group_ranks(group)
        is_sorted = _sorted[group] = ranks == sorted(ranks)
    if not is_sorted:
        _check_order(device_mesh, axis, dist.get_process_group_ranks(group))
    return is_sorted


def _check_order(device_mesh: DeviceMesh, axis: int, ranks: list[int]) -> None:
    """Raises UnknownPlacementError if a group has its ranks in neither order."""
    index: list[int | slice] = list(device_mesh.get_coordinate() or ())
    index[axis] = slice(None)
    line = device_mesh.mesh[tuple(index)].tolist()
    if line != ranks:
        raise UnknownPlacementError(
            f"axis {axis} of {_format_mesh(device_mesh)} has the ranks {line!s:.80}, and "
            "its process "
            f"group has them in the order {ranks!s:.80}; make the mesh in the group's order"
        )


def _format_mesh(device_mesh: DeviceMesh) -> str:
    return f"the mesh {device_mesh.mesh.tolist()!s:.200}"


def _placement(placement: TorchPlacement, shape: tuple[int, ...], name: str) -> Placement:
    # Imported here because of rule 3. A program with a DTensor has imported it already.
    from torch.distributed.tensor import placement_types as torch_placements

    if isinstance(placement, torch_placements.Replicate):
        return Replicate()
    if isinstance(placement, torch_placements.Partial):
        raise PartialError(
            f"{name}: the ranks hold summands of this DTensor ({placement}), which have no place "
            "in a checkpoint; store tensor.redistribute(placements=...) with Replicate() or "
            "Shard(dim) in place of Partial(), or tensor.full_tensor()"
        )
    if isinstance(placement, (torch_placements._StridedShard, torch_placements.Shard)):
        dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
        if 0 <= dim < len(shape):
            if isinstance(placement, torch_placements._StridedShard):
                return StridedShard(dim, int(placement.split_factor))
            return Shard(dim)
    raise UnknownPlacementError(
        f"{name}: no layout describes the placement {placement!r} of this DTensor of shape "
        f"{shape}; redistribute it to Replicate() or Shard(dim)"
    )


def _find_strided(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> dict[int, Shard]:
    """Returns the strided axes whose `split` means the shards to their right, if the order matters.

    Each has its placement as the last cut. See [Note: FSDP over tensor parallelism].
    """
    strided: dict[int, Shard] = {}
    for axis, placement in enumerate(placements):
        if not isinstance(placement, StridedShard):
            continue
        right = [
            (size, other)
            for size, other in zip(mesh.sizes[axis + 1 :], placements[axis + 1 :], strict=True)
            if isinstance(other, (Shard, StridedShard)) and other.dim == placement.dim
        ]
        parts = prod(size for size, _ in right)
        uneven = shape[placement.dim] % (parts * mesh.sizes[axis]) != 0
        if uneven and parts == placement.split and all(isinstance(p, Shard) for _, p in right):
            strided[axis] = Shard(placement.dim)
    return strided


class Grids:
    """The grids for the parameters in a flat one: one for each mesh of tensor parallelism."""

    def __init__(
        self, me: int, axes: Mapping[str, Sequence[int]], grid: Mesh | None = None
    ) -> None:
        """`axes` are those of `grid_around`; `grid` has the ranks of all rows, where known."""
        self._me, self._axes = me, axes
        self._known: dict[Mesh | None, tuple[Mesh, int]] = {}
        if grid is not None and all(len(ranks) > 1 for ranks in axes.values()):
            named = Mesh.of_ranks(tuple(axes), grid.sizes, list(grid.ranks()))
            self._known[None] = named, len(axes)

    def layout(
        self, shape: tuple[int, ...], before: Layout | None, cut: FlatShard | None
    ) -> Layout:
        """Returns the layout of a parameter; `before` is that of tensor parallelism, or None.

        `cut` divides the parameter along the last of the named axes; None: all ranks along these
        axes have all of it.
        """
        key = None if before is None else before.mesh
        if key not in self._known:
            self._known[key] = grid_around(self._me, self._axes, key)
        mesh, count = self._known[key]
        own: list[Placement] = [Replicate()] * count
        if cut is not None:
            own[-1] = cut
        if before is None:
            return Layout(shape, mesh, tuple(own))
        return Layout(before.shape, mesh, (*own, *before.placements))


def grid_around(
    me: int, axes: Mapping[str, Sequence[int]], before: Mesh | None = None
) -> tuple[Mesh, int]:
    """Returns the mesh of named axes and those of another mesh, and the number of the named ones.

    `axes` has, for each axis, the ranks of the row with the rank `me`. Axes of one rank are left
    out, except the first if there is no other. A rank knows no other rows: it assumes that the rest
    of the grid is regular. If the grid is irregular, ranks find different grids, and a save reports
    the difference.

    >>> mesh, axes = grid_around(2, {"replicate": [0, 2], "shard": [2, 3]})
    >>> mesh.names, list(mesh.ranks()), axes
    (('replicate', 'shard'), [0, 1, 2, 3], 2)
    """
    several = {name: ranks for name, ranks in axes.items() if len(ranks) > 1}
    kept = several or dict(list(axes.items())[:1])
    names, sizes, rows = list(kept), [len(row) for row in kept.values()], list(kept.values())
    if before is not None:
        names += before.names
        sizes += before.sizes
        rows.append(list(before.ranks()))
    ranks = [me]
    for row in rows:
        ranks = [rank + other - me for rank in ranks for other in row]
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise UnknownPlacementError(
            f"the ranks {kept}, of which this is {me}, are not a grid in which every row continues "
            "like this rank's; make the groups from one device mesh"
        )
    return Mesh.of_ranks(names, sizes, ranks), len(kept)


def describe_parallel(local_shape: tuple[int, ...], spec: DTensorSpec, name: str) -> Layout:
    """Returns a parameter's layout under tensor parallelism, by its local shape on this rank.

    Raises UnknownPlacementError if it divides the parameter unevenly: the flat parameters of its
    ranks are then cut at different places, which no single layout describes.
    """
    from torch.distributed.tensor import DTensor

    local = torch.empty(local_shape, device="meta")
    like = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    _, layout = describe(like, name, _NOWHERE)
    if len({layout.local_shape(rank) for rank in layout.mesh.ranks()}) > 1:
        raise UnknownPlacementError(
            f"{name}: tensor parallelism divides its shape {layout.shape} unevenly, and flat "
            "parameters over that have no layout; use ckpt.sharding.fully_shard, or a size that "
            "divides evenly"
        )
    return layout


Cut = list[tuple[list[int], list[int]]]
"""The offsets and sizes of each shard, in the order of their ranks."""
SHOWN = 4
"""The most shards that a message names."""


def is_sharded(tensor: torch.Tensor) -> TypeGuard[ShardedTensor]:
    """Whether a tensor is a ShardedTensor; imports nothing."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def describe_sharded_tensor(tensor: ShardedTensor, name: str) -> tuple[torch.Tensor, Layout]:
    """Returns this rank's shard, detached and sharing memory, and the tensor's layout.

    Raises UnknownPlacementError for another cut than the two above, and LocalShapeError if the
    shard differs from the cut's shard of this rank.
    """
    layout = _layout_of_sharded(tensor, name)
    rank = dist.get_rank()
    shape = layout.local_shape(rank)
    if isinstance(layout.placements[0], FlatShard):
        lo, hi = layout.span(rank)
        shape = (hi - lo,)
    shards = tensor.local_shards()
    local = shards[0].tensor.detach() if shards else _nothing(tensor, shape)
    if len(shards) > 1 or tuple(local.shape) != shape:
        raise LocalShapeError(
            f"{name}: rank {rank} has {len(shards)} shards of this ShardedTensor, of the shapes "
            f"{[tuple(shard.tensor.shape) for shard in shards]}, but its metadata gives the rank "
            f"one of {shape}; make it from the rank's own shard"
        )
    return local, layout


def has_layout(tensor: ShardedTensor) -> bool:
    """Whether `describe_sharded_tensor` knows the cut of a ShardedTensor; equal on all ranks."""
    try:
        _layout_of_sharded(tensor, "")
    except UnknownPlacementError:
        return False
    return True


def _layout_of_sharded(tensor: ShardedTensor, name: str) -> Layout:
    """Returns a ShardedTensor's layout. Raises as `describe_sharded_tensor` does."""
    ranks = dist.get_process_group_ranks(tensor._process_group)
    shape = tuple(tensor.size())
    metadata = tensor.metadata().shards_metadata
    cut = [
        (list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in sorted(metadata, key=lambda shard: shard.shard_offsets)
    ]
    placed = [
        None if shard.placement is None else shard.placement.rank()
        for shard in sorted(metadata, key=lambda shard: shard.shard_offsets)
    ]
    mesh = Mesh.of_ranks(("shard",), (len(ranks),), ranks)
    # Torch names ranks either in the default group or in the tensor's own group.
    in_order = placed in (ranks[: len(cut)], list(range(len(cut))))
    if in_order and shape:
        stride = cut[0][1][0] if cut else 0
        if cut == _runs(shape, -(-shape[0] // len(ranks))):
            return Layout(shape, mesh, (Shard(0),))
        if len(shape) == 1 and stride and len(cut) <= len(ranks) and cut == _runs(shape, stride):
            own: Placement = FlatShard(0, stride)
            return Layout(shape, mesh, (own,))
    shown = ", ".join(f"{offsets} of {sizes}" for offsets, sizes in cut[:SHOWN])
    more = f" and {len(cut) - SHOWN} more" if len(cut) > SHOWN else ""
    raise UnknownPlacementError(
        f"{name}: this ShardedTensor of shape {shape} has shards at {shown}{more} on the ranks "
        f"{placed[:SHOWN]}; only rows cut evenly over the ranks {ranks[:SHOWN]} in order have a "
        "layout: reshard it so, or give its local shards different names"
    )


def _runs(shape: tuple[int, ...], stride: int) -> Cut:
    """Returns the first dimension in runs of one length, of which the last may be shorter."""
    rest, zeros = list(shape[1:]), [0] * (len(shape) - 1)
    return [
        ([lo, *zeros], [min(stride, shape[0] - lo), *rest])
        for lo in range(0, shape[0], max(stride, 1))
    ]


def _nothing(tensor: ShardedTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the local tensor of a rank without a shard."""
    return torch.empty((0, *shape[1:]), dtype=tensor.dtype, device="cpu")
