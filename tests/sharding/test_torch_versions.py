"""What versions of torch do differently is the same through `sharding.torch_versions`."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from sharding import fully_shard
from sharding.torch_versions import current_accelerator, root_mesh, side_by_side


def test_a_machine_without_an_accelerator_has_none_whatever_torch_was_built_for() -> None:
    accelerator = current_accelerator()
    assert (accelerator is None) == (not torch.accelerator.is_available())


def slices_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    assert root_mesh(mesh) == mesh
    assert root_mesh(mesh["b"]) == mesh
    joined = side_by_side(mesh["a"], mesh["c"])
    assert joined is not None
    assert joined.mesh_dim_names == ("a", "c")
    assert torch.equal(joined.mesh, torch.arange(4).reshape(2, 2))
    other = DeviceMesh.from_group(
        dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu"
    )
    assert side_by_side(mesh["a"], other) is None


def test_slices_are_joined_where_they_are_of_one_mesh(clusters: Callable) -> None:
    clusters(4).run(slices_of_a_mesh)


def strange_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = DeviceMesh.from_group(
        dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu"
    )
    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), own, [Replicate()]))
    with pytest.raises(ValueError, match=r"(?s)cannot be sharded over .*with named dimensions"):
        fully_shard(layer, mesh=mesh)


def test_a_parameter_over_an_unrelated_mesh_is_refused_with_what_to_do(clusters: Callable) -> None:
    clusters(2).run(strange_mesh)
