"""Every placement at every world size, loaded into every placement at every world size."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
from tests.kept_groups import kept

SHAPES = ((7, 5), (8, 4), (3,), (1, 3), (0, 4), (5, 2, 3), (16, 8))
WORLDS = (1, 2, 3, 4)


def placements(world_size: int) -> dict[str, tuple[tuple[int, ...], tuple[Placement, ...]] | None]:
    """The ways to place a tensor at a world size: mesh sizes and a placement per axis."""
    found: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]] | None] = {"plain": None}
    for name, placement in (("R", Replicate()), ("S0", Shard(0)), ("S1", Shard(1))):
        found[name] = ((world_size,), (placement,))
    if world_size == 4:
        for name, pair in {
            "R,S0": (Replicate(), Shard(0)),
            "S0,R": (Shard(0), Replicate()),
            "S0,S1": (Shard(0), Shard(1)),
            "S0,S0": (Shard(0), Shard(0)),
            "SS0,S0": (_StridedShard(0, split_factor=2), Shard(0)),
            "R,R": (Replicate(), Replicate()),
        }.items():
            found[name] = ((2, 2), pair)
    return found


def value(shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of a shape: every element different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


def fits(
    shape: tuple[int, ...], placed: tuple[tuple[int, ...], tuple[Placement, ...]] | None
) -> bool:
    """Whether torch can place the shape so: enough dimensions, strided shards without remainder."""
    if placed is None:
        return True
    dims = [p.dim for p in placed[1] if isinstance(p, Shard | _StridedShard)]
    strided = any(isinstance(p, _StridedShard) for p in placed[1])
    return all(dim < len(shape) for dim in dims) and not (strided and shape[0] % 4)


@kept
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """All ranks as a grid of these sizes."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


def place(
    whole: torch.Tensor, placed: tuple[tuple[int, ...], tuple[Placement, ...]] | None
) -> torch.Tensor:
    """The tensor placed over this process group, without communication."""
    if placed is None:
        return whole
    sizes, how = placed
    return distribute_tensor(whole, mesh_of(sizes), list(how), src_data_rank=None)


def state(how: str | None, fill: bool, world_size: int, names: list[str] | None = None) -> dict:
    """Tensors of every shape, named by shape and the placement they are saved with.

    With `how`, all are placed that way instead; `names` restricts them.
    """
    result = {}
    saved = placements(world_size) if names is None else dict.fromkeys(names)
    for shape, name in product(SHAPES, saved):
        placed = placements(world_size)[how if how is not None else name]
        key = f"{'x'.join(map(str, shape))}/{name}"
        if names is None and not fits(shape, placed):
            continue
        whole = value(shape) if fill else torch.full(shape, -1.0)
        result[key] = place(whole, placed if fits(shape, placed) else None)
    return result


def save(folder: str, compress: bool) -> None:
    ckpt.save(folder, {"t": state(None, True, dist.get_world_size())}, compress=compress)


def load_every_way(folder: str, names: list[str]) -> int:
    """Load into every placement of this world; returns how many tensors were compared."""
    world_size, count = dist.get_world_size(), 0
    with ckpt.open(folder) as checkpoint:
        saved = {name.removeprefix("t.") for name in checkpoint}
    for how in placements(world_size):
        target = {k: v for k, v in state(how, False, world_size, names).items() if k in saved}
        ckpt.load(folder, {"t": target})
        for key, tensor in target.items():
            shape = tuple(int(size) for size in key.split("/")[0].split("x"))
            placed = placements(world_size)[how]
            expected = place(value(shape), placed if fits(shape, placed) else None)
            mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            theirs = expected.to_local() if isinstance(expected, DTensor) else expected
            assert torch.equal(mine, theirs), (key, how, mine, theirs)
            count += 1
    return count


RUNS = {(1, True), (2, False), (3, False), (4, True)}
"""The world sizes that save, and whether compressed: in CI. `make test` has the third."""


def case(saving: int, compress: bool) -> Any:
    run, how = (saving, compress), "zstd" if compress else "raw"
    mark = pytest.mark.thorough if run in RUNS else pytest.mark.slow
    marks = () if run == (3, False) else mark
    return pytest.param(saving, compress, id=f"{saving}-{how}", marks=marks)


@pytest.mark.parametrize(
    ("saving", "compress"), [case(*run) for run in product(WORLDS, (False, True))]
)
def test_every_layout_loads_into_every_layout_at_every_world_size(
    clusters: Callable, tmp_path: Path, saving: int, compress: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    clusters(saving).run(save, folder, compress)
    names = list(placements(saving))
    for loading in WORLDS:
        counts = clusters(loading).run(load_every_way, folder, names)
        assert min(counts) > 20
    whole = ckpt.read(folder)["t"]  # and with no process group at all
    for key, tensor in whole.items():
        assert torch.equal(tensor, value(tensor.shape)), key
