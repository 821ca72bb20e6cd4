"""Weak references to process groups, so that `destroy_process_group` ends a group.

A group's threads end with the last reference to the group. Threads of gloo that still run when the
interpreter ends abort the process (docs/sharding.md, "How a process ends"), so a model that lives
until then must not keep the group.

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

from typing import TYPE_CHECKING, cast
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

from sharding.errors import DestroyedGroupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
            store = cast("Store | None", distributed_c10d._get_process_group_store(group))
            if store is not None:  # None for MPI
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
