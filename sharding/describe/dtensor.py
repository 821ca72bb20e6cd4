"""Describes torch's plain tensors and DTensors: local tensors and layouts.

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
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from sharding.errors import LocalShapeError, PartialError, UnknownPlacementError
from sharding.layout import Layout, Mesh, Placement, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

MAX_KNOWN = 1 << 14
"""The most layouts that are kept: models have many tensors and few shapes."""

_REPLICATED = (Replicate(),)
_known: dict[tuple[int, tuple[int, ...], tuple[Placement, ...]], Layout] = {}
"""Layouts by the identity of the mesh (which the layout keeps alive), shape and placements."""
_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
_specs: dict[int, _Known] = {}
"""The layout and rank of each DTensorSpec, by its id."""


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
        """Whether a local tensor has the right shape."""
        return local.shape == self.local_shape or (self.is_outside and local.numel() == 0)


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
    if not _is_dtensor(tensor):
        return tensor.detach(), _known_layout(tuple(tensor.shape), world, _REPLICATED)
    known = _of_spec(tensor, name)
    local = tensor._local_tensor
    if type(local) is not torch.Tensor:
        wait = getattr(local, "wait", None)  # torch may not have awaited a redistribution yet
        local = local if wait is None else wait()
    if not known.fits(local):
        _specs.pop(id(tensor._spec), None)  # this process may have become another rank
        known = _of_spec(tensor, name)
    if not known.fits(local):
        said = known.local_shape
        raise LocalShapeError(
            f"{name}: rank {known.rank} has a local tensor of shape {tuple(local.shape)}, but "
            f"{tuple(tensor.placements)} over a mesh of {known.layout.mesh.sizes} give it {said} "
            f"of {known.layout.shape}; make it with distribute_tensor, or pass the right shape= to "
            "DTensor.from_local"
        )
    return local.detach(), known.layout


def described_before(tensor: Any) -> tuple[torch.Tensor, Layout] | None:
    """Returns the result of `describe` for a DTensor with a known spec; None for other tensors.

    Only for torch's own class with a dense local tensor of the right shape. Keeps no weak reference
    to a tensor: `torch.utils.swap_tensors`, and thus `module.to()`, refuses tensors with one.
    """
    spec: Any = getattr(tensor, "_spec", None)
    known = _specs.get(id(spec))
    if known is None or known.placements is not spec.placements or known.spec() is not spec:
        return None
    local = tensor._local_tensor
    if (
        type(local) is not torch.Tensor
        or local.shape != known.local_shape
        or tensor.shape != known.layout.shape
        or not type(tensor).__module__.startswith("torch.distributed")
        or local.layout is not torch.strided
        or local.is_meta
        or local.is_nested
        or local.is_quantized
        or "_fsdp_flattened" in vars(tensor)  # a part of another tensor, by torch's wrapper
    ):
        return None
    return local.detach(), known.layout


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


def _known_layout(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Layout:
    """Returns the layout of these parts: always the same object."""
    key = id(mesh), shape, placements
    layout = _known.get(key)
    if layout is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        layout = _known[key] = Layout(shape, mesh, placements)
    return layout


def _layout(tensor: DTensor, name: str) -> Layout:
    """Returns the layout for a DTensor's mesh and placements."""
    shape, mesh = tuple(tensor.shape), mesh_of(tensor.device_mesh)
    placements = tuple(_placement(p, shape, name) for p in tensor.placements)
    last = _cut_last(shape, mesh, placements)
    if not last:
        return _known_layout(shape, mesh, placements)
    order = [axis for axis in range(len(placements)) if axis not in last] + sorted(last)
    plain = tuple(last.get(axis, placements[axis]) for axis in order)
    return Layout(shape, mesh.transposed(order), plain)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Returns the ranks of a DeviceMesh, converted once."""
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
        mesh = Mesh.of_ranks(names, tuple(ranks.shape), ranks.flatten().tolist())
        _meshes[device_mesh] = mesh
    return mesh


def _placement(placement: TorchPlacement, shape: tuple[int, ...], name: str) -> Placement:
    # Imported here because of rule 3. A program with a DTensor has imported it already.
    from torch.distributed.tensor import placement_types as torch_placements

    if isinstance(placement, torch_placements.Replicate):
        return Replicate()
    if isinstance(placement, torch_placements.Partial):
        raise PartialError(
            f"{name}: the ranks hold summands of this DTensor ({placement}), which have no place "
            "in a checkpoint; store tensor.redistribute(placements=...) with Replicate() or "
            "Shard(dim) in the place of Partial(), or tensor.full_tensor()"
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


def _cut_last(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> dict[int, Shard]:
    """Returns the strided axes whose `split` means the shards to their right, if the order matters.

    Each has its placement as the last cut. See [Note: FSDP over tensor parallelism].
    """
    found: dict[int, Shard] = {}
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
            found[axis] = Shard(placement.dim)
    return found
