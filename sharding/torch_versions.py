"""The differences between versions of torch: one function for each, which names the version.

All other behaviour is the same from the first version of the range to the newest one tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh


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
