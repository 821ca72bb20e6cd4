"""The differences between versions of torch, and process groups that end when they are destroyed.

One function has each difference, and names the version. All other behaviour is the same from the
first version of the range to the newest one tested.

[Note: groups]
`destroy_process_group` ends a group. The group's threads end with the last reference to it. Threads
of gloo that still run when the interpreter ends abort the process (docs/sharding.md, "How a process
ends"), so a model that lives until then must not keep the group.

Rules:

1. No object in this package keeps a ProcessGroup after the call that used it. Lasting objects keep
   a weak reference; torch's own tables keep the group until it is destroyed.
2. A dictionary by group is a WeakKeyDictionary, and no value of it keeps its own key.
3. A DeviceMesh of later versions of torch keeps its groups for torch.compile, and DTensors keep the
   mesh, as do torch's caches, which no user can empty. `release_with_groups` makes the mesh drop
   the groups.

[Note: defaults of torch's functions]
`torch.distributed.nn.functional` and the scaler of `torch.distributed.fsdp` have the default group
as the default of an argument. Python evaluates a default once, at the import. If they are imported
after `init_process_group`, these functions keep the group as long as the process lives. torch
itself imports them with the first optimizer or DTensor. The runtime therefore imports them with its
own modules, which most programs import at their top, before a group exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from sharding.errors import DestroyedGroupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


def current_accelerator() -> torch.device | None:
    """Returns this machine's accelerator, without an index; None if it has none.

    Without one, torch's own function raises in 2.6, and in 2.7 and later names the accelerator that
    torch was built for: "cuda" on a machine that has no GPU.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the root mesh of a slice; the mesh itself if it is no slice.

    In torch 2.10 a mesh knows its root, in 2.8 a table beside the meshes has it.
    """
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    table: Any = device_mesh._mesh_resources
    root: DeviceMesh = table.get_root_mesh(mesh)
    return root


def side_by_side(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh | None:
    """Returns a mesh with the dimensions of both; None unless they are named slices of one mesh.

    torch 2.8 and earlier join slices in the order of their mesh only; otherwise this returns None.
    """
    try:
        if hasattr(DeviceMesh, "_concatenate"):
            return DeviceMesh._concatenate([first, second])
        root = root_mesh(first)
        if root != root_mesh(second):
            return None
        names = (*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ()))
        return root[names]
    except (KeyError, RuntimeError, TypeError):  # from torch, for slices that do not fit
        return None


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or its bytes if torch cannot copy its dtype: packed float4 in 2.8.

    The bytes have the tensor's shape and strides.
    """
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    return tensor.view(torch.uint8) if packed is not None and tensor.dtype is packed else tensor


GroupReference = ReferenceType["ProcessGroup"]

_meshes: WeakKeyDictionary[Store, list[ReferenceType[DeviceMesh]]] = WeakKeyDictionary()
"""The meshes that must drop a group, by the group's store. Only torch's table of groups refers to
this Python object of the store, which is freed when the group is destroyed, before the group."""


def dereference(reference: GroupReference) -> ProcessGroup:
    """Returns the group. Raises DestroyedGroupError if it has been destroyed."""
    group = reference()
    if group is None:
        raise DestroyedGroupError(
            "the process group that this was made for has been destroyed; call "
            "destroy_process_group only after all training, saves and loads, and after "
            "init_process_group shard the modules again"
        )
    return group


def release_with_groups(mesh: DeviceMesh) -> None:
    """Makes a mesh, and its root mesh, drop groups when they are destroyed."""
    from torch.distributed import distributed_c10d

    root: DeviceMesh | None = getattr(mesh, "_root_mesh", None)
    for each in (mesh,) if root is None else (mesh, root):
        for group in tuple((getattr(each, "_pg_registry", None) or {}).values()):
            store = distributed_c10d._world.pg_map.get(group, (None, None))[1]
            if store is not None:  # None for MPI, and for a group that has been destroyed
                _let_go_after(store, group.group_name, each)


def _let_go_after(store: Store, name: str, mesh: DeviceMesh) -> None:
    meshes = _meshes.get(store)
    if meshes is None:
        meshes = _meshes[store] = []
        finalize(store, _let_go, meshes, name).atexit = False
    meshes[:] = [other for other in meshes if other() is not None and other() is not mesh]
    meshes.append(ref(mesh))


def _let_go(meshes: list[ReferenceType[DeviceMesh]], name: str) -> None:
    for reference in meshes:
        mesh = reference()
        if mesh is not None:
            mesh._pg_registry.pop(name, None)
