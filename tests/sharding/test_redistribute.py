"""Tensors move from any layout into any other, by shared memory on one host and by gloo."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    Split,
    StridedShard,
)
from sharding.reshard.host_memory import VARIABLE, HostMemory, shares_memory
from sharding.reshard.redistribute import Move, redistribute
from tests.kept_groups import kept

WORLD = 4
LINE = Mesh.grid(("dp",), (WORLD,))
GRID = Mesh.grid(("dp", "tp"), (2, 2))
SHAPES = ((7, 6), (3, 4, 5), (1,), (4, 4))
WAYS: dict[str, tuple[Mesh, tuple[Placement, ...]]] = {
    "replicas": (LINE, (Replicate(),)),
    "rows": (LINE, (Shard(0),)),
    "columns": (LINE, (Shard(1),)),
    "split": (LINE, (Split(),)),
    "one rank": (LINE, (Only(2),)),
    "flat": (LINE, (FlatShard(3, 12),)),
    "rows and columns": (GRID, (Shard(0), Shard(1))),
    "strided": (GRID, (StridedShard(0, 2), Shard(0))),
}
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool)


def layouts(shape: tuple[int, ...]) -> dict[str, Layout]:
    """The layouts that a shape allows; a flat buffer of 48 elements has at most 45 of it."""
    is_small = torch.Size(shape).numel() <= 45
    return {
        name: Layout(shape, mesh, how)
        for name, (mesh, how) in WAYS.items()
        if max(getattr(one, "dim", 0) for one in how) < len(shape)
        and (name != "flat" or is_small)
        and (name != "strided" or shape[0] % 4 == 0)
    }


def local_storage(layout: Layout, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The elements that a rank holds of a tensor."""
    lo, hi = layout.span(rank)
    found = torch.zeros(hi - lo, dtype=whole.dtype)
    for piece in layout.pieces(rank):
        box = tuple(slice(lo, hi) for lo, hi in zip(piece.box.lo, piece.box.hi, strict=True))
        found.as_strided(piece.box.shape, piece.strides, piece.at).copy_(whole[box])
    return found


@contextmanager
def asked(value: str) -> Iterator[None]:
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]


@kept
def group_of(way: str) -> Any:
    """A group whose ranks exchange messages in this way: `memory` or `gloo`."""
    group = dist.new_group()
    with asked("1" if way == "memory" else "0"):
        assert shares_memory(group) is (way == "memory")
    return group


def moves_everything(way: str, budget: int) -> int:
    """On each rank: the number of moves, of which each has given what it should."""
    rank, group = dist.get_rank(), group_of(way)
    moves, expected = [], []
    for number, shape in enumerate(SHAPES):
        dtype = DTYPES[number]
        whole = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 120 + 1).to(dtype)
        known = layouts(shape)
        for have in known:
            for want in known:
                source = local_storage(known[have], whole, rank)
                expected.append(local_storage(known[want], whole, rank))
                target = torch.zeros_like(expected[-1])
                name = f"{shape} {have} {want}"
                moves.append(Move(name, source, known[have], target, known[want]))
    redistribute(moves, group=group, budget=budget)
    for move, right in zip(moves, expected, strict=True):
        assert torch.equal(move.target, right), move.name
    return len(moves)


@pytest.mark.parametrize("budget", [40, 1000, 1 << 20])
@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_every_layout_moves_into_every_layout(
    clusters: Callable[[int], Any], way: str, budget: int
) -> None:
    assert min(clusters(WORLD).run(moves_everything, way, budget)) > 120


def keeps_nothing() -> list[bool]:
    """On each rank: whether exchanges leave no descriptor and no memory."""
    group, layout = group_of("memory"), Layout((1 << 18,), LINE, (Shard(0),))
    replicas, rank = Layout((1 << 18,), LINE, (Replicate(),)), dist.get_rank()
    descriptors = len(os.listdir("/proc/self/fd"))
    for value in range(3):
        source = local_storage(layout, torch.full((1 << 18,), float(value)), rank)
        target = torch.zeros(1 << 18)
        redistribute([Move("w", source, layout, target, replicas)], group=group)
        assert bool((target == value).all())
    gc.collect()
    is_left = "ckpt-messages" in Path("/proc/self/maps").read_text()
    return [len(os.listdir("/proc/self/fd")) == descriptors, not is_left]


def test_memory_ends_with_the_call(clusters: Callable[[int], Any]) -> None:
    assert clusters(WORLD).run(keeps_nothing) == [[True, True]] * WORLD


def one_rank_wants_gloo() -> bool:
    group = dist.new_group()
    with asked("0" if dist.get_rank() == 1 else "1"):
        return shares_memory(group)


def test_one_rank_that_wants_gloo_makes_all_use_it(clusters: Callable[[int], Any]) -> None:
    assert clusters(3).run(one_rank_wants_gloo) == [False] * 3


def test_a_process_alone_needs_no_memory() -> None:
    with HostMemory(None) as memory:
        assert not memory.is_shared
