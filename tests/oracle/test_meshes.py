"""A DTensor over any mesh is saved, loaded and converted as `full_tensor()` gathers it.

`full_tensor()` on every rank is the oracle. Where it contradicts itself, because the ranks get
different tensors or rows are lost, a named error takes the place of a guess.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
import ckpt.sharding
from sharding.describe.dtensor import describe
from sharding.errors import ArgumentError, LocalShapeError, UnknownPlacementError
from sharding.layout import Mesh
from tests.old_torch import FSDP2_RUNS_ON_CPU
from tests.oracle.meshes import MESHES, mesh_named
from tests.selection import slow, thorough

EVEN, UNEVEN = (24, 8), (7, 5)
QUICK = {"0213", "32-10", "03-21", "ranks 31", "b of 32-10", "flat 31-20"}
"""The meshes of `make test`; the slow tests have the others."""
NAMES = [name if name in QUICK else slow(name) for name in MESHES]


def gathered(value: object) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose every element is different, and none is zero."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def placements(ndim: int) -> Iterator[tuple[Placement, ...]]:
    """Every way to cut a matrix over so many axes."""
    yield from product((Replicate(), Shard(0), Shard(1)), repeat=ndim)
    if ndim == 2:
        yield _StridedShard(0, split_factor=2), Shard(0)


def made(mesh: DeviceMesh | None) -> dict[str, DTensor]:
    """Tensors of every placement over a mesh, by name; none without a mesh."""
    found = {}
    for shape, way in product((EVEN, UNEVEN), ("sent", "cut")):
        for placed in () if mesh is None else placements(mesh.ndim):
            strided = any(isinstance(placement, _StridedShard) for placement in placed)
            if strided and shape == UNEVEN:
                continue  # torch refuses to scatter it
            name = f"{way} {shape} {placed}".replace(".", "")
            source = None if way == "cut" else 0
            found[name] = distribute_tensor(
                numbers(shape), mesh, list(placed), src_data_rank=source
            )
    return found


def refused(tensors: dict[str, DTensor]) -> list[str]:
    """The names of the tensors that this rank cannot describe."""
    found = []
    for name, tensor in tensors.items():
        try:
            describe(tensor, name, Mesh.grid(("world",), (4,)))
        except (LocalShapeError, UnknownPlacementError):
            found.append(name)
    return found


def check_tensors(name: str, folder: str) -> tuple[list[str], int]:
    """The misfits of all tensors over a mesh, and how many were saved."""
    mesh = mesh_named(name)
    tensors = made(mesh)
    whole = {key: tensor.full_tensor() for key, tensor in tensors.items()}
    inside = mesh is not None and mesh.get_coordinate() is not None
    views = [held for held in gathered(whole if inside else None) if held is not None]
    wrong = {key for held in gathered(refused(tensors)) for key in held}
    misfits = []
    for key in views[0]:
        agree = all(torch.equal(view[key], views[0][key]) for view in views)
        is_whole = views[0][key].unique().numel() == views[0][key].numel()
        right = agree and torch.equal(views[0][key], numbers(tuple(views[0][key].shape)))
        if key in wrong and right:
            misfits.append(f"{key}: refused, though full_tensor() is right")
        elif key in wrong and agree and is_whole and str(EVEN) in key and "Strided" not in key:
            misfits.append(f"{key}: refused, though full_tensor() has all elements on all ranks")
    chosen = {key: tensor for key, tensor in tensors.items() if key not in wrong}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckpt.ReplicasWarning)
        ckpt.save(f"{folder}/saved", chosen)
        full = ckpt.state_dict.convert(chosen, to="full")
    saved = ckpt.read(f"{folder}/saved")
    agreed = [
        key
        for key in views[0]
        if key not in wrong and all(torch.equal(view[key], views[0][key]) for view in views)
    ]
    for key in agreed:
        if not torch.equal(saved[key], views[0][key]):
            misfits.append(f"{key}: read differs")
        if not torch.equal(full[key], views[0][key]):
            misfits.append(f"{key}: convert differs")
    plain = {key: -numbers(EVEN if str(EVEN) in key else UNEVEN) for key in agreed}
    if dist.get_rank() == 0:
        ckpt.save(f"{folder}/plain", plain, group="self")
    dist.barrier()
    for way in ("load", "state_dict.load"):
        targets = {key: torch.zeros_like(chosen[key]) for key in agreed if mesh is not None}
        if way == "load":
            ckpt.load(f"{folder}/plain", targets)
        elif not name.startswith("group 20"):  # an empty target takes all of the state
            ckpt.state_dict.load({key: plain[key] for key in targets}, targets)
        else:
            continue
        for key, target in targets.items():
            if inside and not torch.equal(target.full_tensor(), plain[key]):
                misfits.append(f"{key}: {way} differs")
    return misfits, len(agreed)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_over_any_mesh_is_stored_and_filled_as_full_tensor_gathers_it(
    clusters: Callable[[int], Any], tmp_path: Path, name: str
) -> None:
    for misfits, count in clusters(4).run(check_tensors, name, str(tmp_path)):
        assert not misfits
        assert count


def sharded(how: str, mesh: DeviceMesh, true: nn.Module) -> nn.Module:
    """A copy of a module, sharded over a mesh."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    model.load_state_dict(true.state_dict())
    strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    if how == "torch FSDP2":
        return fully_shard(model, mesh=mesh)
    if how == "FSDP2":
        return ckpt.sharding.fully_shard(model, mesh=mesh)
    if how == "torch FSDP1":
        return TorchFSDP(
            model,
            device_mesh=mesh,
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    return ckpt.sharding.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ckpt.sharding.ShardingStrategy[strategy.name],
        use_orig_params=True,
    )


def check_module(how: str, name: str, folder: str) -> list[str]:
    """The misfits of a sharded module's state, of the kinds that hold all ranks' weights."""
    mesh = mesh_named(name)
    torch.manual_seed(0)
    true, inputs = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), torch.randn(2, 6)
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    if dist.get_rank() == 0:
        ckpt.save(f"{folder}/plain", {"model": other}, group="self")
    dist.barrier()
    assert mesh is not None
    model = sharded(how, mesh, true)
    assert torch.allclose(model(inputs), true(inputs), atol=1e-6)
    misfits = []
    ckpt.save(f"{folder}/saved", {"model": model})
    saved = ckpt.read(f"{folder}/saved")["model"]
    full = ckpt.state_dict.convert(model, to="full")
    for key, weight in true.state_dict().items():
        if not torch.equal(saved[key], weight):
            misfits.append(f"{key}: read differs")
        if not torch.equal(full[key], weight):
            misfits.append(f"{key}: convert differs")
    ckpt.load(f"{folder}/plain", {"model": model})
    if not torch.allclose(model(inputs), other(inputs), atol=1e-6):
        misfits.append("after a load the outputs differ")
    ckpt.state_dict.load(true.state_dict(), model)
    if not torch.allclose(model(inputs), true(inputs), atol=1e-6):
        misfits.append("after state_dict.load the outputs differ")
    return misfits


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.parametrize("how", ["FSDP1", "FSDP2", "torch FSDP1", "torch FSDP2"])
@pytest.mark.parametrize(
    "name", ["0213", "3120", "02-13", "32-10", "03-12", thorough("10-32"), thorough("23-01")]
)
def test_a_module_sharded_over_any_mesh_has_the_weights_that_it_computes_with(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, name: str
) -> None:
    if how == "torch FSDP2" and not FSDP2_RUNS_ON_CPU:
        pytest.skip("the FSDP2 of torch 2.6 does not run on a CPU")
    for misfits in clusters(4).run(check_module, how, name, str(tmp_path)):
        assert not misfits


class Times(nn.Module):
    """A matrix, of which tensor parallelism may have cut a dimension."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return inputs @ (weight.full_tensor() if isinstance(weight, DTensor) else weight)


def over_tensor_parallelism(how: str, mesh: DeviceMesh, whole: torch.Tensor, dim: int) -> nn.Module:
    """A matrix that the last axis cuts along a dimension, sharded over the first axis."""
    model = Times(distribute_tensor(whole, mesh["b"], [Shard(dim)]))
    if how == "torch FSDP2":
        return fully_shard(model, mesh=mesh["a"])
    if how == "FSDP2":
        return ckpt.sharding.fully_shard(model, mesh=mesh["a"])
    return ckpt.sharding.FullyShardedDataParallel(
        model, device_mesh=mesh["a"], use_orig_params=True
    )


def check_tensor_parallel(how: str, name: str, folder: str) -> None:
    mesh = mesh_named(name)
    assert mesh is not None
    whole, eye = numbers((8, 8)), torch.eye(8)
    if dist.get_rank() == 0:
        ckpt.save(f"{folder}/plain", {"weight": -whole}, group="self")
    dist.barrier()
    for dim in (0, 1):
        model = over_tensor_parallelism(how, mesh, whole, dim)
        ckpt.save(f"{folder}/saved-{dim}", model)
        assert torch.equal(ckpt.read(f"{folder}/saved-{dim}")["weight"], whole)
        ckpt.load(f"{folder}/plain", model)
        assert torch.equal(model(eye), -whole)
        if how == "FSDP1":
            model.load_state_dict({"weight": whole})
            assert torch.equal(model(eye), whole)
            model.set_state_dict_type(model, ckpt.sharding.StateDictType.SHARDED_STATE_DICT)
            assert torch.equal(model.state_dict()["weight"].full_tensor(), whole)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2", "torch FSDP2"])
@pytest.mark.parametrize("name", ["32-10", thorough("10-32"), thorough("02-13")])
def test_shards_over_tensor_parallelism_in_any_order_are_those_that_torch_gathers(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, name: str
) -> None:
    if how == "torch FSDP2" and not FSDP2_RUNS_ON_CPU:
        pytest.skip("the FSDP2 of torch 2.6 does not run on a CPU")
    clusters(4).run(check_tensor_parallel, how, name, str(tmp_path))


def check_refused(how: str, name: str, is_parallel: bool) -> None:
    mesh = mesh_named(name)
    assert mesh is not None
    true = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    make = partial(sharded, how, mesh, true)
    if is_parallel:
        make = partial(over_tensor_parallelism, how, mesh, numbers((8, 8)), 0)
    with pytest.raises(ArgumentError, match="collectives mix different parts of a tensor"):
        make()


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize(
    ("name", "is_parallel"), [("01-32", False), ("03-21", False), ("01-32", True), ("03-12", True)]
)
def test_a_mesh_over_which_collectives_mix_parts_is_refused(
    clusters: Callable[[int], Any], how: str, name: str, is_parallel: bool
) -> None:
    clusters(4).run(check_refused, how, name, is_parallel)
