"""Meshes over four ranks, in every order and shape that torch can make, by name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.kept_groups import kept

AXES = ("a", "b", "c")


def listed(ranks: object) -> Callable[[], DeviceMesh]:
    """A mesh of these ranks."""

    def made() -> DeviceMesh:
        ndim = DeviceMesh("cpu", ranks, _init_backend=False).ndim
        return DeviceMesh("cpu", ranks, mesh_dim_names=AXES[:ndim])

    return made


def sliced(ranks: object, *names: str) -> Callable[[], DeviceMesh]:
    """A slice of a mesh."""
    return lambda: listed(ranks)()[names]


def flattened(ranks: object, *names: str) -> Callable[[], DeviceMesh]:
    """A mesh, or a slice of it, as one dimension."""
    return lambda: (listed(ranks)()[names] if names else listed(ranks)())._flatten("flat")


def of_group(ranks: list[int], **how: bool) -> Callable[[], DeviceMesh | None]:
    """The mesh of a process group; None on a rank outside, which can make none."""

    def made() -> DeviceMesh | None:
        group = dist.new_group(ranks, **how)
        return DeviceMesh.from_group(group, "cpu") if dist.get_rank() in ranks else None

    return made


MESHES: dict[str, Callable[[], DeviceMesh | None]] = {
    "0123": listed([0, 1, 2, 3]),
    "0213": listed([0, 2, 1, 3]),
    "3120": listed([3, 1, 2, 0]),
    "1302": listed([1, 3, 0, 2]),
    "01-23": listed([[0, 1], [2, 3]]),
    "02-13": listed([[0, 2], [1, 3]]),
    "32-10": listed([[3, 2], [1, 0]]),
    "10-32": listed([[1, 0], [3, 2]]),
    "23-01": listed([[2, 3], [0, 1]]),
    "03-12": listed([[0, 3], [1, 2]]),
    "01-32": listed([[0, 1], [3, 2]]),
    "03-21": listed([[0, 3], [2, 1]]),
    "column 3120": listed([[3], [1], [2], [0]]),
    "cube 32-10": listed([[[3], [2]], [[1], [0]]]),
    "ranks 31": listed([3, 1]),
    "ranks 201": listed([2, 0, 1]),
    "b of 32-10": sliced([[3, 2], [1, 0]], "b"),
    "a of 32-10": sliced([[3, 2], [1, 0]], "a"),
    "ab of cube": sliced([[[3, 2]], [[1, 0]]], "a", "c"),
    "flat 31-20": flattened([[3, 1], [2, 0]]),
    "flat slice": flattened([[[3, 1], [2, 0]]], "b", "c"),
    "group 20": of_group([2, 0]),
}
if "sort_ranks" in signature(dist.new_group).parameters:  # torch 2.13
    MESHES["group 3021, unsorted"] = of_group([3, 0, 2, 1], sort_ranks=False)


@kept
def mesh_named(name: str) -> DeviceMesh | None:
    """A mesh by its name, the same one for every test; all ranks call this."""
    return MESHES[name]()
