"""Real DTensors, placed by torch on every rank of a world, described without communication."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from sharding.describe.dtensor import describe, zeros_placed_like
from sharding.errors import LocalShapeError, PartialError, ShardingError, UnknownPlacementError
from sharding.layout import Layout, Mesh, Shape
from sharding.layout import Replicate as OurReplicate
from sharding.layout import Shard as OurShard
from sharding.layout import StridedShard as OurStridedShard
from tests.old_torch import FSDP2_RUNS_ON_CPU, torch_cuts

AsRank = Callable[[int, int], AbstractContextManager[None]]


def numbers(shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose every element is its own number."""
    return torch.arange(prod(shape), dtype=torch.float64).reshape(tuple(shape))


def world(size: int) -> Mesh:
    """The mesh that plain tensors are replicated over."""
    return Mesh.grid(("world",), (size,))


def check(tensor: DTensor, full: torch.Tensor, rank: int) -> Layout:
    """The layout of a tensor whose local part has to be what the layout's pieces say."""
    local, layout = describe(tensor, "weight", world(8))
    assert type(local) is torch.Tensor
    assert not local.requires_grad
    assert local.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    assert layout.shape == tuple(full.shape)
    elements = local.reshape(-1)
    seen = 0
    for piece in layout.pieces(rank):
        inside = full[tuple(map(slice, piece.box.lo, piece.box.hi))]
        held = elements.as_strided(
            piece.box.shape, piece.strides, elements.storage_offset() + piece.at
        )
        assert torch.equal(held, inside)
        seen += piece.box.numel
    assert seen == local.numel()
    return layout


def test_a_plain_tensor_is_a_replica_on_every_rank() -> None:
    tensor = torch.nn.Parameter(torch.ones(2, 3))
    local, layout = describe(tensor, "weight", world(16))
    assert layout == Layout.replicated((2, 3), 16)
    assert local.data_ptr() == tensor.data_ptr()
    assert not local.requires_grad
    assert describe(torch.tensor(1.0), "step", world(2))[1].pieces(1)[0].box.shape == ()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(8, 8), (9, 5), (3, 7), (1, 1), (0, 4), (6, 4, 5)])
@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(-1), Shard(-2)),
        (Shard(0), _StridedShard(0, split_factor=3)),
        (_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=2)),
    ],
    ids=str,
)
def test_a_distributed_tensor_is_described_as_torch_placed_it(
    as_rank: AsRank, placements: tuple[Placement, ...], shape: Shape
) -> None:
    if not torch_cuts(placements, shape, (4, 2)):
        pytest.skip("this torch refuses uneven strided shards or cuts them in another way")
    full = numbers(shape)
    layouts = set()
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            layouts.add(
                check(distribute_tensor(full, mesh, placements, src_data_rank=None), full, rank)
            )
    (layout,) = layouts
    assert layout.mesh == Mesh.grid(("dp", "tp"), (4, 2))


@pytest.mark.parametrize(
    ("rows", "columns"), [(8, 8), (9, 4), (10, 3), (11, 7), (5, 4), (57, 2), (1, 1)]
)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=str)
def test_fsdp2_over_tensor_parallelism_is_exact_also_where_it_is_uneven(
    as_rank: AsRank, sizes: tuple[int, int], rows: int, columns: int
) -> None:
    skip_uneven_rows(rows, 8)
    full = numbers((rows, columns))
    layouts = set()
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            layouts.add(check(fsdp_over_tp(full, mesh, "dp"), full, rank))
    (layout,) = layouts
    if rows % 8 == 0:
        assert layout.placements == (OurStridedShard(0, sizes[1]), OurShard(0))
    else:
        assert layout.mesh.names == ("tp", "dp")
        assert layout.placements == (OurShard(0), OurShard(0))


def skip_uneven_rows(rows: int, ranks: int) -> None:
    if rows % ranks and not FSDP2_RUNS_ON_CPU:
        pytest.skip("the FSDP2 of torch 2.6 refuses uneven rows over tensor parallelism")


def fsdp_over_tp(full: torch.Tensor, mesh: DeviceMesh, *data_axes: str) -> DTensor:
    """A weight cut by rows over the `tp` axis, then by FSDP2 over the others."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(full.clone())

    def cut(_: str, module: torch.nn.Module, tp: DeviceMesh) -> None:
        weight = distribute_tensor(module.weight.detach(), tp, [Shard(0)], src_data_rank=None)
        module.weight = torch.nn.Parameter(weight)

    module = distribute_module(Rows(), mesh["tp"], cut)
    fully_shard(module, mesh=mesh[data_axes])
    weight = module.weight
    assert isinstance(weight, DTensor)
    return weight


@pytest.mark.parametrize("rows", [8, 9])
def test_hybrid_fsdp2_over_tensor_parallelism_has_replicas(as_rank: AsRank, rows: int) -> None:
    skip_uneven_rows(rows, 8)
    full = numbers((rows, 3))
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "shard", "tp"))
            layout = check(fsdp_over_tp(full, mesh, "replica", "shard"), full, rank)
        assert layout.replicas == 2
        assert isinstance(layout.placements[0], OurReplicate)


@pytest.mark.parametrize(
    ("ranks", "placements", "expected"),
    [
        ([[0, 4], [1, 5], [2, 6]], (Shard(0), Shard(1)), [0, 4, 1, 5, 2, 6]),
        ([[6, 5], [3, 2]], (Shard(0), Shard(1)), [2, 3, 5, 6]),
        ([[6, 5], [3, 2]], (Replicate(), Shard(1)), [5, 6, 2, 3]),
        ([[6, 5], [3, 2]], (Shard(1), Replicate()), [3, 2, 6, 5]),
        ([[6, 5], [3, 2]], (Replicate(), Replicate()), [6, 5, 3, 2]),
        ([[0, 7, 3], [5, 1, 2]], (Replicate(), Shard(0)), [0, 3, 7, 1, 2, 5]),
        ([[0, 1], [3, 2]], (Shard(0), Shard(0)), [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_a_layout_has_the_ranks_sorted_along_the_axes_that_cut(
    as_rank: AsRank,
    ranks: list[list[int]],
    placements: tuple[Placement, Placement],
    expected: list[int],
) -> None:
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = DeviceMesh("cpu", ranks)
            full = numbers((12, 12))
            _, layout = describe(
                distribute_tensor(full, mesh, placements, src_data_rank=None), "weight", world(8)
            )
        assert layout.mesh.names == ("dim_0", "dim_1")
        assert list(layout.mesh.ranks()) == expected


@pytest.mark.parametrize(
    ("ranks", "placements"),
    [
        ([[0, 7, 3], [5, 1, 2]], (Shard(0), Shard(1))),
        ([[0, 3], [2, 1]], (Shard(0), Shard(0))),
        ([[0, 1], [3, 2]], (_StridedShard(0, split_factor=2), Shard(0))),
    ],
    ids=str,
)
def test_a_mesh_whose_groups_contradict_each_other_is_an_error_that_shows_it(
    as_rank: AsRank, ranks: list[list[int]], placements: tuple[Placement, Placement]
) -> None:
    with as_rank(1, 8):
        mesh = DeviceMesh("cpu", ranks)
        tensor = distribute_tensor(numbers((12, 12)), mesh, placements, src_data_rank=None)
        with pytest.raises(UnknownPlacementError) as caught:
            describe(tensor, "w", world(8))
    assert str(ranks) in str(caught.value)


def test_rows_that_torch_loses_are_an_error_that_says_why(as_rank: AsRank) -> None:
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", [1, 0])
        tensor = distribute_tensor(numbers((5,)), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(LocalShapeError) as caught:
            describe(tensor, "w", world(2))
    message = str(caught.value)
    assert "w: rank 0 has a local tensor of shape (2,)" in message
    assert "over the mesh [1, 0] give it (3,) of (5,)" in message
    assert "make a mesh of ascending ranks" in message


def test_a_submesh_is_described_by_its_own_ranks(as_rank: AsRank) -> None:
    full = numbers((6, 2))
    with as_rank(5, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        for axis, ranks in (("dp", [1, 3, 5, 7]), ("tp", [4, 5])):
            tensor = distribute_tensor(full, mesh[axis], [Shard(0)], src_data_rank=None)
            layout = check(tensor, full, 5)
            assert layout.mesh.names == (axis,)
            assert list(layout.mesh.ranks()) == ranks
            assert layout.mesh.table == ()


def test_a_device_mesh_is_converted_once(as_rank: AsRank) -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensors = [
            distribute_tensor(numbers((n,)), mesh, [Shard(0)], src_data_rank=None) for n in (2, 4)
        ]
        first, second = (describe(tensor, "weight", world(2))[1] for tensor in tensors)
        assert first.mesh is second.mesh


def test_a_partial_tensor_is_an_error_that_names_it_and_the_remedy(as_rank: AsRank) -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(PartialError) as caught:
            describe(tensor, "grads.w", world(2))
    assert str(caught.value).startswith("grads.w: ")
    assert "tensor.redistribute(" in str(caught.value)
    assert "tensor.full_tensor()" in str(caught.value)
    assert (caught.value.kind, isinstance(caught.value, ShardingError)) == ("partial", True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_without_elements_has_any_local_shape(as_rank: AsRank, rank: int) -> None:
    with as_rank(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.ones(0, 0),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((10, 0)),
            stride=(1, 1),
        )
        local, layout = describe(tensor, "w", world(2))
    assert (local.numel(), layout.shape) == (0, (10, 0))


def test_a_local_tensor_of_another_shape_is_an_error_that_names_both(as_rank: AsRank) -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.ones(3, 4),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((5, 4)),
            stride=(4, 1),
        )
        with pytest.raises(LocalShapeError) as caught:
            describe(tensor, "w", world(2))
    message = str(caught.value)
    assert "w: rank 1 has a local tensor of shape (3, 4)" in message
    assert "give it (2, 4) of (5, 4)" in message


def test_a_placement_of_somebody_else_is_an_error_that_names_it(as_rank: AsRank) -> None:
    class Spiral(Placement):
        def __repr__(self) -> str:
            return "Spiral()"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Spiral)

        def __hash__(self) -> int:
            return 1

    with as_rank(0, 2):
        tensor = distribute_tensor(
            torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()], src_data_rank=None
        )
        object.__setattr__(tensor._spec, "placements", (Spiral(),))
        with pytest.raises(UnknownPlacementError, match=r"w: no layout describes .* Spiral\(\)"):
            describe(tensor, "w", world(2))


@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(1)), (_StridedShard(0, split_factor=2), Shard(0))], ids=str
)
def test_zeros_are_placed_like_the_parameter(
    as_rank: AsRank, placements: tuple[Placement, ...]
) -> None:
    if not torch_cuts(placements, (9, 5), (4, 2)):
        pytest.skip("this torch refuses uneven strided shards or cuts them in another way")
    with as_rank(5, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(numbers((9, 5)).bfloat16(), mesh, placements, src_data_rank=None)
        zeros = zeros_placed_like(torch.nn.Parameter(tensor), torch.float32)
        assert isinstance(zeros, DTensor)
        assert zeros.placements == tensor.placements
        assert zeros.device_mesh == tensor.device_mesh
        assert zeros.shape == tensor.shape
        local = zeros.to_local()
        assert local.shape == tensor.to_local().shape
        assert (local.dtype, zeros.requires_grad, local.any().item()) == (
            torch.float32,
            False,
            False,
        )


def test_plain_zeros_keep_shape_and_strides() -> None:
    param = torch.nn.Parameter(torch.ones(4, 3).t())
    zeros = zeros_placed_like(param, torch.float64)
    assert (zeros.shape, zeros.stride(), zeros.dtype) == (
        param.shape,
        param.stride(),
        torch.float64,
    )
    assert not zeros.requires_grad
    assert not zeros.any()


@pytest.mark.parametrize(
    ("statements", "absent"),
    [
        ("import sharding, sharding.layout, sharding.errors", "torch"),
        pytest.param(
            (
                "import torch, sharding.describe.dtensor as d, sharding.layout as l; "
                "d.describe(torch.ones(2), 'w', l.Mesh.grid(('world',), (2,)))"
            ),
            "torch.distributed.tensor",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_nothing_is_imported_before_it_is_needed(statements: str, absent: str) -> None:
    check_absent = f"{statements}; import sys; sys.exit({absent!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check_absent], timeout=120, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def described_fsdp_over_tp(rows: int) -> tuple[list[float], list[float], Layout]:
    """What torch gathers of a weight after a training step, this rank's part, and its layout."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = fsdp_over_tp(numbers((rows, 3)), mesh, "dp")
    with torch.no_grad():
        weight.mul_(weight + 1)
    local, layout = describe(weight, "weight", world(4))
    return weight.full_tensor().reshape(-1).tolist(), local.reshape(-1).tolist(), layout


@pytest.mark.parametrize("rows", [8, 5])
def test_on_real_ranks_the_layout_names_what_torch_gathers(
    clusters: Callable[[int], Any], rows: int
) -> None:
    skip_uneven_rows(rows, 4)
    for rank, (full, held, layout) in enumerate(clusters(4).run(described_fsdp_over_tp, rows)):
        whole = torch.tensor(full, dtype=torch.float64).reshape(rows, 3)
        assert whole.equal(numbers((rows, 3)) * (numbers((rows, 3)) + 1))
        placed = {}
        for piece in layout.pieces(rank):
            inside = whole[tuple(map(slice, piece.box.lo, piece.box.hi))]
            for index in np.ndindex(*inside.shape):
                steps = zip(index, piece.strides, strict=True)
                placed[piece.at + sum(i * s for i, s in steps)] = inside[index].item()
        assert [placed[at] for at in range(len(held))] == held
