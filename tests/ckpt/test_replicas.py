"""Replicas that read a share each and exchange it: the same bits, each byte read once."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.arguments import VARIABLE
from ckpt.plan.load_plan import divide_replicas
from sharding import layout as algebra
from sharding.layout import FlatShard, Layout, Mesh

SHAPES = ((7, 5), (3,), (1, 3), (0, 4), (), (16, 8), (700, 1031))
PLACED: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]] | None] = {
    "plain": None,
    "R": ((4,), (Replicate(),)),
    "S0": ((4,), (Shard(0),)),
    "R,S0": ((2, 2), (Replicate(), Shard(0))),
    "S0,R": ((2, 2), (Shard(0), Replicate())),
    "R,R": ((2, 2), (Replicate(), Replicate())),
}


def value(shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of a shape: every element different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


def placed(whole: torch.Tensor, how: str) -> torch.Tensor:
    """The tensor over this process group, without communication."""
    found = PLACED[how]
    if found is None or whole.ndim == 0:
        return whole
    mesh = init_device_mesh("cpu", found[0], mesh_dim_names=("a", "b")[: len(found[0])])
    return distribute_tensor(whole, mesh, list(found[1]), src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def budget(nbytes: int) -> Iterator[None]:
    os.environ[VARIABLE] = str(nbytes)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def exchange_every_layout(folder: str) -> list[tuple[str, int, int]]:
    """How many bytes this rank read of each layout, exchanging and reading."""
    counts = []
    for how in PLACED:
        found = []
        for replicas in ("exchange", "read"):
            target = {str(s): placed(torch.full(s, -1.0), how) for s in SHAPES}
            read: list[int] = []
            with budget(8 << 20):
                ckpt.load(folder, target, replicas=replicas, progress=read.append)
            for shape in SHAPES:
                expected = local(placed(value(shape), how))
                assert torch.equal(local(target[str(shape)]), expected), (how, shape, replicas)
            found.append(sum(read))
        counts.append((how, *found))
    return counts


@pytest.mark.thorough
def test_an_exchange_gives_the_same_bits_and_reads_every_byte_once(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path / "c", {str(shape): value(shape) for shape in SHAPES})
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
    for ranks in zip(*clusters(4).run(exchange_every_layout, str(tmp_path / "c")), strict=True):
        how = ranks[0][0]
        assert sum(exchanged for _, exchanged, _ in ranks) == nbytes, how
        replicas = {"S0": 1, "R,S0": 2, "S0,R": 2}.get(how, 4)
        at_least = nbytes * replicas
        assert sum(read for _, _, read in ranks) >= at_least, how
        if replicas == 4:  # large and small tensors are divided, each in its own way
            assert max(exchanged for _, exchanged, _ in ranks) < 0.27 * nbytes, how


def load_into_other_memory(folder: str) -> None:
    """Rank 0's target has steps between its elements, rank 1's is of another type."""
    shape = (64, 48)
    target = torch.zeros(shape, dtype=torch.float64 if dist.get_rank() == 1 else torch.float32)
    if dist.get_rank() == 0:
        target = torch.zeros(shape[::-1]).T
    other = torch.zeros(5)
    ckpt.load(folder, {"w": target, "v": other}, replicas="exchange", dtype="target")
    assert torch.equal(target.float(), value(shape))
    assert torch.equal(other, value((5,)))


def test_ranks_that_cannot_exchange_the_same_read_everything(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path / "c", {"w": value((64, 48)), "v": value((5,))})
    clusters(3).run(load_into_other_memory, str(tmp_path / "c"))


def load_what_is_damaged(folder: str) -> str:
    try:
        ckpt.load(folder, {"w": torch.zeros(1 << 20)}, replicas="exchange")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_one_rank_finds_damaged_reaches_all_before_anything_is_exchanged(
    clusters: Callable, tmp_path: Path
) -> None:
    ckpt.save(tmp_path / "c", {"w": value((1 << 20,))})
    (shard,) = tmp_path.glob("c/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) * 5 // 8] ^= 1  # in the third quarter: rank 2's share
    shard.write_bytes(data)
    errors = clusters(4).run(load_what_is_damaged, str(tmp_path / "c"))
    assert errors[2].startswith("DamagedLoadError")
    assert "w: bytes" in errors[2]
    assert all(error.startswith("RankError") and "rank 2" in error for error in errors[:2])


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="replicas is 'both'; it can be 'auto', 'read' or 'exchange'"
    ):
        ckpt.load(tmp_path, {}, replicas="both")


@st.composite
def replicated(draw: st.DrawFn) -> Layout:
    """A layout in which every element is held by several ranks."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    numel = torch.Size(shape).numel()
    cuts = st.integers(0, len(shape) - 1).map(algebra.Shard)
    placements: list[algebra.Placement] = [
        draw(st.one_of(st.just(algebra.Replicate()), cuts)) for _ in sizes
    ]
    if draw(st.booleans()):
        placements[-1] = FlatShard(0, -(-numel // sizes[-1]))
    return Layout(shape, Mesh.grid(tuple("abc"[: len(sizes)]), sizes), tuple(placements))


@given(layout=replicated(), data=st.data())
def test_shares_are_parts_of_what_a_rank_has_and_hold_every_element_once(
    layout: Layout, data: st.DataObject
) -> None:
    turn = data.draw(st.none() | st.integers(0, layout.replicas - 1))
    shares = divide_replicas(layout, turn)
    held = 0
    for rank in layout.mesh.ranks():
        begin, end = layout.span(rank)
        lo, hi = shares.span(rank)
        assert lo == hi or begin <= lo < hi <= end
        assert shares.local_shape(rank) == layout.local_shape(rank)
        held += hi - lo
    assert held == layout.numel
