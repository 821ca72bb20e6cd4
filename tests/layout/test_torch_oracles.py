"""Torch cuts real tensors; our placements have to name the same elements in the same order.

`Shard` and `StridedShard` against torch's placements, `FlatShard` against FSDP1's flat parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import _utils
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Piece,
    Placement,
    Replicate,
    Shape,
    Shard,
    StridedShard,
)
from tests.old_torch import CUTS_UNEVEN_STRIDES, torch_cuts
from tests.selection import examples

AsRank = Callable[[int, int], AbstractContextManager[None]]

compute_local = (
    getattr(_utils, "_compute_local_shape_and_global_offset", None) if CUTS_UNEVEN_STRIDES else None
)
"""Torch's arithmetic without a process group; not in 2.6, and wrong for strided shards in 2.8."""

seeded = settings(derandomize=True, deadline=None, max_examples=examples(300))


def taken(numbers: torch.Tensor, pieces: Sequence[Piece]) -> list[int]:
    """The elements of `numbers` that the pieces hold, in storage order."""
    storage = torch.full((sum(piece.box.numel for piece in pieces),), -1, dtype=numbers.dtype)
    for piece in pieces:
        inside = numbers[tuple(map(slice, piece.box.lo, piece.box.hi))]
        storage.as_strided(piece.box.shape, piece.strides, piece.at).copy_(inside)
    return storage.tolist()


@st.composite
def torch_placements(draw: st.DrawFn, ndim: int) -> tuple[Placement, TorchPlacement]:
    dim = draw(st.integers(0, ndim - 1))
    split = draw(st.integers(1, 5))
    return draw(
        st.sampled_from(
            [
                (Replicate(), TorchReplicate()),
                (Shard(dim), TorchShard(dim)),
                (StridedShard(dim, split), TorchStridedShard(dim, split_factor=split)),
            ]
        )
    )


@seeded
@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
)
def test_dimensions_are_cut_as_torch_cuts_them(
    data: st.DataObject, shape: Shape, sizes: Shape
) -> None:
    pairs = [data.draw(torch_placements(len(shape))) for _ in sizes]
    assume(torch_cuts([theirs for _, theirs in pairs], shape, sizes))
    mesh = Mesh.grid(tuple(f"axis{axis}" for axis in range(len(sizes))), sizes)
    layout = Layout(shape, mesh, tuple(ours for ours, _ in pairs))
    numbers = torch.arange(prod(shape)).reshape(shape)
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        local = numbers
        for (_, placement), size, index in zip(pairs, sizes, coordinate, strict=True):
            if not isinstance(placement, TorchReplicate):
                parts, _ = placement._split_tensor(local, size, with_padding=False)
                local = parts[index]
        assert layout.local_shape(rank) == tuple(local.shape)
        assert taken(numbers, layout.pieces(rank)) == local.reshape(-1).tolist()
        if compute_local is None:
            continue
        said, first = compute_local(
            shape, sizes, list(coordinate), [placement for _, placement in pairs]
        )
        assert layout.local_shape(rank) == said
        if local.numel():
            assert layout.pieces(rank)[0].box.lo == first


class Net(torch.nn.Module):
    """Parameters of awkward sizes, a 0-d one among them, each element its own number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes: tuple[Shape, ...] = ((3, 5), (5,), (2, 1, 7), (1,), (11, 2), (6, 4))
        for index, shape in enumerate(shapes):
            numbers = torch.arange(prod(shape), dtype=dtype).reshape(shape)
            self.register_parameter(f"p{index}", torch.nn.Parameter(numbers))


def flat_offsets(parameters: Sequence[torch.Tensor], alignment: int) -> tuple[list[int], int]:
    """Where each parameter begins in FSDP1's flat parameter, and where the last one ends."""
    offsets, at = [], 0
    for parameter in parameters:
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at += parameter.numel()
    return offsets, at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 40])
def test_flat_shards_are_those_of_fsdp1_with_original_parameters(
    as_rank: AsRank, world_size: int, dtype: torch.dtype
) -> None:
    whole = dict(Net(dtype).named_parameters())
    # FSDP1 aligns every parameter to 16 bytes, then pads the end to a multiple of the world.
    offsets, end = flat_offsets(list(whole.values()), alignment=16 // dtype.itemsize)
    stride = -(-end // world_size)
    mesh = Mesh.grid(("fsdp",), (world_size,))
    for rank in range(world_size):
        with as_rank(rank, world_size):
            module = FullyShardedDataParallel(
                Net(dtype),
                use_orig_params=True,
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy.FULL_SHARD,
            )
            flat = module._flat_param
            assert flat.shape == (stride,)
            local = {name: p.detach() for name, p in module._fsdp_wrapped_module.named_parameters()}
        assert list(local) == list(whole)
        for (name, full), offset in zip(whole.items(), offsets, strict=True):
            layout = Layout(tuple(full.shape), mesh, (FlatShard(offset, stride),))
            pieces = layout.pieces(rank)
            assert taken(full.detach(), pieces) == local[name].reshape(-1).tolist()
            # Our storage is the parameter's part of the shard: it begins where FSDP1 says.
            info = flat._shard_param_infos[list(whole).index(name)]
            assert info.in_shard == bool(pieces)
            if info.in_shard:
                assert layout.span(rank) == (
                    info.intra_param_start_idx,
                    info.intra_param_end_idx + 1,
                )


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_flat_shards_are_those_of_fsdp1_with_flat_parameters_only(
    as_rank: AsRank, world_size: int
) -> None:
    whole = dict(Net(torch.float32).named_parameters())
    offsets, end = flat_offsets(list(whole.values()), alignment=1)
    stride = -(-end // world_size)
    mesh = Mesh.grid(("fsdp",), (world_size,))
    for rank in range(world_size):
        with as_rank(rank, world_size):
            module = FullyShardedDataParallel(Net(torch.float32), device_id=torch.device("cpu"))
            (flat,) = (parameter.detach() for parameter in module.parameters())
        for full, offset in zip(whole.values(), offsets, strict=True):
            layout = Layout(tuple(full.shape), mesh, (FlatShard(offset, stride),))
            lo, hi = layout.span(rank)
            start = max(0, offset - rank * stride)
            held = flat[start : start + hi - lo]
            assert taken(full.detach(), layout.pieces(rank)) == held.tolist()


def test_hybrid_shards_are_flat_shards_with_replicas(as_rank: AsRank) -> None:
    whole = dict(Net(torch.float32).named_parameters())
    offsets, end = flat_offsets(list(whole.values()), alignment=4)
    placements = tuple((Replicate(), FlatShard(offset, -(-end // 3))) for offset in offsets)
    mesh = Mesh.grid(("replica", "shard"), (2, 3))
    for rank in range(6):
        with as_rank(rank, 6):
            module = FullyShardedDataParallel(
                Net(torch.float32),
                use_orig_params=True,
                device_id=torch.device("cpu"),
                device_mesh=init_device_mesh("cpu", (2, 3), mesh_dim_names=("replica", "shard")),
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            )
            local = [p.detach() for p in module.parameters()]
        for full, part, placement in zip(whole.values(), local, placements, strict=True):
            layout = Layout(tuple(full.shape), mesh, placement)
            assert taken(full.detach(), layout.pieces(rank)) == part.reshape(-1).tolist()


def trained_by_fsdp1() -> list[tuple[list[float], list[int], list[float]]]:
    """Per parameter: all its values after a step, its shape, and this rank's part of it."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False)]
    module = FullyShardedDataParallel(
        torch.nn.Sequential(*layers), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.linspace(0, 1, 6).reshape(2, 3)).square().sum().backward()
    optimizer.step()
    parts = [p.detach().reshape(-1).tolist() for p in module.parameters()]
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        full = [(p.detach().reshape(-1).tolist(), list(p.shape)) for p in module.parameters()]
    return [(*whole, part) for whole, part in zip(full, parts, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_flat_shards_are_those_of_fsdp1_after_a_real_training_step(
    clusters: Callable[[int], Any], world_size: int
) -> None:
    mesh = Mesh.grid(("fsdp",), (world_size,))
    for rank, parameters in enumerate(clusters(world_size).run(trained_by_fsdp1)):
        whole = [torch.tensor(values).reshape(shape) for values, shape, _ in parameters]
        offsets, end = flat_offsets(whole, alignment=4)
        for full, offset, (_, shape, part) in zip(whole, offsets, parameters, strict=True):
            layout = Layout(tuple(shape), mesh, (FlatShard(offset, -(-end // world_size)),))
            assert taken(full, layout.pieces(rank)) == part
