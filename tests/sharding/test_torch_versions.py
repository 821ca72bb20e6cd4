"""What versions of torch do differently is the same through `sharding.torch_versions`."""

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import sharding
from sharding import fully_shard
from sharding.torch_versions import current_accelerator, root_mesh, side_by_side
from tests.old_torch import needs


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


def arguments(called: Any) -> list[tuple[str, object, str]]:
    """The names, kinds and defaults of a function or class."""
    return [
        (each.name, each.kind, getattr(each.default, "name", repr(each.default)).split(" at ")[0])
        for each in inspect.signature(called).parameters.values()
    ]


@needs((2, 13), "docs/sharding.md compares with torch 2.13")
def test_names_and_arguments_are_torch_s_but_for_those_that_the_page_lists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    [missing] = re.findall(r"^- Missing in `FSDPModule`: (.*?)^$", page, re.DOTALL | re.MULTILINE)
    listed, lacking = {*re.findall(r"`(\w+)`", missing)} - {"fully_shard"}, set[str]()
    for name in torch_fsdp.__all__:
        theirs, ours = getattr(torch_fsdp, name), getattr(sharding, name, None)
        if ours is None:
            lacking.add(name)
            continue
        methods = {each for each in vars(theirs) if not each.startswith("_")} & {*dir(ours)}
        if inspect.isclass(theirs):
            lacking |= {each for each in vars(theirs) if each[0] != "_"} - {*dir(ours)}
        pairs = [(getattr(theirs, each), getattr(ours, each)) for each in methods]
        for their, our in [(theirs, ours), *pairs]:
            is_class = is_dataclass(their) or their is torch_fsdp.FullyShardedDataParallel
            if not (inspect.isroutine(their) or is_class):
                continue
            wanted = arguments(their)
            found = {each[0] for each in wanted} - {each[0] for each in arguments(our)}
            lacking |= found
            assert arguments(our) == [each for each in wanted if each[0] not in found], their
    assert lacking == listed
