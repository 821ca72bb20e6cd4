"""Tensors move from any layout into any other, by shared memory on one host and by gloo."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding.agreement.ranks import Ranks
from sharding.errors import ArgumentError, ShardingError, TransferError
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
from sharding.reshard.redistribute import VARIABLE, HostMemory, Move, redistribute, shares_memory
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


@pytest.mark.thorough
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


def full() -> torch.Tensor:
    raise MemoryError("no memory for the target")


def fails_on_one_rank(way: str, stage: str | None, budget: int) -> tuple[str, str, bool]:
    """The error on each rank if rank 1 has no memory for a target, and whether the group lives."""
    rank, group = dist.get_rank(), group_of(way)
    mesh = Mesh.grid(("dp",), (dist.get_world_size(),))
    have, want = Layout((6,), mesh, (Shard(0),)), Layout((6,), mesh, (Only(0),))
    targets = [torch.zeros(6 if rank == 0 else 0) for _ in range(3)]
    moves = [
        Move(f"{number}", torch.ones(2), have, full if (rank, number) == (1, 1) else target, want)
        for number, target in enumerate(targets)
    ]
    try:
        redistribute(moves, group=group, stage=stage, budget=budget)
        said = ("", "")
    except Exception as error:
        said = (type(error).__name__, str(error))
    dist.all_reduce(total := torch.ones(()), group=group)
    return *said, total.item() == dist.get_world_size()


@pytest.mark.parametrize("budget", [24, 1 << 20])
@pytest.mark.parametrize("way", ["memory", "gloo"])
def test_a_rank_that_fails_lets_no_other_wait_and_all_that_agree_hear_its_number(
    clusters: Callable[[int], Any], way: str, budget: int
) -> None:
    first, second, third = clusters(3).run(fails_on_one_rank, way, "moving", budget)
    assert second == ("MemoryError", "no memory for the target", True)
    for one in (first, third):
        assert one[0] == "RankError"
        assert one[1].startswith("moving failed on rank 1 with MemoryError")
        assert one[2]
    first, second, _ = clusters(3).run(fails_on_one_rank, way, None, budget)
    assert first[0] == "TransferError"
    assert first[1].startswith("rank 1 failed")
    assert second == ("MemoryError", "no memory for the target", True)


def keeps_nothing_of_a_failed_call() -> bool:
    """On each rank: whether no memory is left while the error is at hand."""
    group, have = group_of("memory"), Layout((8,), LINE, (Shard(0),))
    want, source = Layout((8,), LINE, (Replicate(),)), torch.zeros(2)
    good = Move("a", source, have, torch.zeros(8), want)
    bad = Move("b", source, have, torch.zeros(16)[::2], want)
    with pytest.raises(ArgumentError, match="not contiguous") as error:
        redistribute([good, bad], group=group, budget=32)
    is_left = "ckpt-messages" in Path("/proc/self/maps").read_text()
    return error.value is not None and not is_left


def test_memory_ends_with_a_failed_call(clusters: Callable[[int], Any]) -> None:
    assert clusters(WORLD).run(keeps_nothing_of_a_failed_call) == [True] * WORLD


def test_memory_ends_with_the_call(clusters: Callable[[int], Any]) -> None:
    assert clusters(WORLD).run(keeps_nothing) == [[True, True]] * WORLD


def one_rank_wants_gloo() -> bool:
    group = dist.new_group()
    with asked("0" if dist.get_rank() == 1 else "1"):
        return shares_memory(group)


def test_one_rank_that_wants_gloo_makes_all_use_it(clusters: Callable[[int], Any]) -> None:
    assert clusters(3).run(one_rank_wants_gloo) == [False] * 3


@contextmanager
def hidden(is_hidden: bool) -> Iterator[None]:
    """Meanwhile this process looks into no other of its user, or is hidden from such ones."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)  # this thread
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert libc.capget(header, rights) == 0
    before = rights[0]
    rights[0] &= ~(1 << 19)  # CAP_SYS_PTRACE, which sees what is hidden
    assert libc.capset(header, rights) == 0
    try:
        assert libc.prctl(PR_SET_DUMPABLE, not is_hidden, 0, 0, 0) == 0
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0
        assert libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


PR_SET_DUMPABLE = 4


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Meanwhile no file of this process, and no memory, grows above so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_rank_is_closed(how: str) -> bool:
    group, is_it = dist.new_group(), dist.get_rank() == 1
    Ranks(group).agree("meeting")  # by a file
    with hidden(is_it) if how == "hidden" else largest_file(0 if is_it else 1 << 30):
        return shares_memory(group)


@pytest.mark.parametrize("how", ["hidden", "without memory"])
def test_all_ranks_use_gloo_if_one_cannot_map_the_memory_of_another(
    clusters: Callable[[int], Any], how: str
) -> None:
    assert clusters(3).run(one_rank_is_closed, how) == [False] * 3


def test_no_other_file_is_read_in_the_place_of_memory() -> None:
    theirs, ours = os.pipe()
    os.write(ours, b"bytes")
    with HostMemory(None) as memory, HostMemory(None) as another:
        memory.reserve(100)[:] = 7
        note = memory.note(40)
        for place, other in ((1, theirs), (2, 3)):  # another descriptor, another number
            wrong = note.clone()
            wrong[place] = other
            with pytest.raises(TransferError, match="another file than the memory of a rank"):
                another.bytes_of(wrong, 3)
        assert another.bytes_of(note, 3).tolist() == [7, 7, 7]
    assert os.read(theirs, 10) == b"bytes"
    os.close(theirs)
    os.close(ours)


def test_a_host_without_memory_for_messages_is_named() -> None:
    with HostMemory(None) as memory, largest_file(4096):
        with pytest.raises(
            ShardingError, match=r"no 5,000 bytes of .*; set SHARDING_HOST_MEMORY=0"
        ):
            memory.reserve(5000)
        assert len(memory.reserve(4096)) == 4096


def test_a_process_alone_needs_no_memory() -> None:
    with HostMemory(None) as memory:
        assert not memory.is_shared
