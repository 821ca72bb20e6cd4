"""Layouts of every kind, and a second opinion on what they mean, written with numpy slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shape,
    Shard,
    Split,
    StridedShard,
)

Storage = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A rank's local storage, each element being its own number in the global tensor."""


def _chunk(array: np.ndarray, parts: int, index: int, dim: int = 0) -> np.ndarray:
    """What torch.chunk gives part `index`, an empty array where it gives none."""
    step = -(-array.shape[dim] // parts)
    return np.take(array, np.arange(array.shape[dim])[index * step :][:step], axis=dim)


def _local_array(layout: Layout, coordinate: Sequence[int]) -> np.ndarray:
    array = np.arange(layout.numel).reshape(layout.shape)
    for placement, size, index in zip(
        layout.placements, layout.mesh.sizes, coordinate, strict=True
    ):
        if isinstance(placement, Shard):
            array = _chunk(array, size, index, placement.dim)
        elif isinstance(placement, StridedShard):
            chunks = [
                _chunk(array, placement.split, part, placement.dim)
                for part in range(placement.split)
            ]
            parts = [_chunk(chunk, size, index, placement.dim) for chunk in chunks]
            array = np.concatenate(parts, axis=placement.dim)
    return array


def _storage(layout: Layout, coordinate: Sequence[int]) -> Storage:
    elements = _local_array(layout, coordinate).reshape(-1)
    axes = list(zip(layout.placements, layout.mesh.sizes, coordinate, strict=True))
    for placement, size, index in axes:
        if isinstance(placement, FlatShard):
            nobody = -1
            buffer = np.full(size * placement.stride, nobody)
            buffer[placement.offset : placement.offset + len(elements)] = elements
            shard = buffer[index * placement.stride : (index + 1) * placement.stride]
            elements = shard[shard != nobody]
        elif isinstance(placement, Only) and placement.index != index:
            return elements[:0]
    part, parts = 0, 1
    for placement, size, index in axes:
        if isinstance(placement, Split):
            part, parts = part * size + index, parts * size
    return _chunk(elements, parts, part)


@st.composite
def _meshes(draw: st.DrawFn, max_size: int = 4) -> Mesh:
    sizes = draw(st.lists(st.integers(1, max_size), min_size=0, max_size=3).map(tuple))
    names = tuple(f"axis{axis}" for axis in range(len(sizes)))
    offset = draw(st.integers(0, 5))
    kind = draw(st.sampled_from(("grid", "transposed", "mirrored", "scattered")))
    if kind == "scattered":
        population = st.permutations(range(2 * int(np.prod(sizes, dtype=int))))
        return Mesh.of_ranks(names, sizes, draw(population)[: int(np.prod(sizes, dtype=int))])
    grid = Mesh.grid(names, sizes, offset)
    if kind == "transposed":
        return grid.transposed(draw(st.permutations(range(len(sizes)))))
    if kind == "mirrored":
        ranks = np.array(list(grid.ranks())).reshape(sizes)
        flipped = draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else ()
        return Mesh.of_ranks(names, sizes, np.flip(ranks, tuple(flipped)).reshape(-1).tolist())
    return grid


@st.composite
def _layouts(draw: st.DrawFn, shape: Shape) -> Layout:
    mesh = draw(_meshes())
    dims = st.integers(0, len(shape) - 1)
    kinds = ["replicate", "flat", "split", "only"]
    if shape:
        kinds += ["shard", "shard", "strided"]
    placements: list[Placement] = []
    flats: list[int] = []
    for axis, size in enumerate(mesh.sizes):
        match draw(st.sampled_from(kinds)):
            case "shard":
                placements.append(Shard(draw(dims)))
            case "strided":
                placements.append(StridedShard(draw(dims), draw(st.integers(1, 5))))
            case "split":
                placements.append(Split())
            case "only":
                placements.append(Only(draw(st.integers(0, size - 1))))
            case "flat":
                flats.append(axis)
                placements.append(Replicate())  # until the others are known
            case _:
                placements.append(Replicate())
    # A flat buffer has to hold what is there to be cut, in the order in which axes cut.
    cuts = [p if isinstance(p, (Shard, StridedShard)) else Replicate() for p in placements]
    for axis in flats:
        so_far = Layout(shape, mesh, tuple(cuts))
        coordinates = np.ndindex(*mesh.sizes)
        most = max(len(_storage(so_far, coordinate)) for coordinate in coordinates)
        offset = draw(st.integers(0, 7))
        least = max(1, -(-(offset + most) // mesh.sizes[axis]))
        flat = FlatShard(offset, least + draw(st.integers(0, 3)))
        cuts[axis] = placements[axis] = flat
    return Layout(shape, mesh, tuple(placements))


@pytest.fixture(scope="session")
def meshes() -> st.SearchStrategy[Mesh]:
    """Meshes of up to three axes: in order, transposed, mirrored, away from 0, and irregular."""
    return _meshes()


@pytest.fixture(scope="session")
def shapes() -> st.SearchStrategy[Shape]:
    """Shapes of up to four dimensions, empty ones among them but not as often as by chance."""
    sizes = st.sampled_from((3, 1, 2, 3, 4, 5, 5, 2, 4, 7, 0))
    return st.lists(sizes, max_size=4).map(tuple)


@pytest.fixture(scope="session")
def layouts_of() -> Callable[[Shape], st.SearchStrategy[Layout]]:
    """The layouts of a shape, all six placements mixed."""
    return _layouts


@pytest.fixture(scope="session")
def local_array_of() -> Callable[[Layout, Sequence[int]], np.ndarray]:
    """What the cutting axes leave at a coordinate, as an array of global element numbers."""
    return _local_array


@pytest.fixture(scope="session")
def storage_of() -> Callable[[Layout, Sequence[int]], Storage]:
    """A coordinate's local storage by the rules of layout.py, cut with numpy."""
    return _storage


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def as_rank() -> Callable[[int, int], AbstractContextManager[None]]:
    """Be one rank of a world whose collectives move nothing: enough to place and cut tensors."""
    return _as_rank
