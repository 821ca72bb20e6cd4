"""Resharding at 8 and 16 ranks in one process: every layout into every layout.

Plays all ranks of a world one after the other: each writes its shard file from its local storage,
as a save does, and reads its own part, as a load does.
"""

from pathlib import Path

import numpy as np
import pytest

from ckpt.opening.sources import open_source
from ckpt.plan.read_plan import ReadRequest, requests_for
from ckpt.plan.save_plan import choose_layouts
from ckpt.stores.store import open_store
from ckpt.transfer.read import Array, bytes_of, read_requests
from formats.catalog import OutgoingTensor, TensorRef
from formats.dtypes import BY_NAME
from formats.native.manifest import MANIFEST, Manifest, StoredTensor, dump
from formats.native.shard_writer import write_shard
from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    copies_to,
)

I32 = BY_NAME["I32"]
SHAPES = ((37, 6), (16, 32), (5,), (3, 4, 10))


def placements(world_size: int, numel: int) -> dict[str, tuple[Mesh, tuple[Placement, ...]]]:
    """Ways to place a tensor of two or more dimensions; those of one fit where they can."""
    half = world_size // 2
    line = Mesh.grid(("dp",), (world_size,))
    grid = Mesh.grid(("dp", "tp"), (half, 2))
    stride = -(-(numel + 3) // world_size)
    return {
        "replicated": (line, (Replicate(),)),
        "rows": (line, (Shard(0),)),
        "columns": (line, (Shard(1),)),
        "flat": (line, (FlatShard(3, stride),)),
        "rows and columns": (grid, (Shard(0), Shard(1))),
        "hybrid": (grid, (Replicate(), Shard(0))),
        "fsdp over tp": (grid, (StridedShard(0, 2), Shard(0))),
        "flat hybrid": (grid, (FlatShard(0, -(-numel // half)), Replicate())),
    }


def layouts(world_size: int) -> dict[str, Layout]:
    """Every shape with every placement that its dimensions allow."""
    found = {}
    for shape in SHAPES:
        for name, (mesh, how) in placements(world_size, int(np.prod(shape))).items():
            if all(getattr(p, "dim", 0) < len(shape) for p in how):
                found[f"{shape} {name}"] = Layout(shape, mesh, how)
    return found


def whole(layout: Layout) -> Array:
    """The tensor of a layout: every element different."""
    return np.arange(layout.numel, dtype=np.uint32) + 1


def local_storage(layout: Layout, rank: int) -> Array:
    """What a rank holds of it."""
    lo, hi = layout.span(rank)
    local = np.zeros(hi - lo, dtype=np.uint32)
    for copy in copies_to(Layout.single(layout.shape, 0), layout, rank):
        _view(local, copy.target)[...] = _view(whole(layout), copy.source)
    return local


def _view(storage: Array, piece) -> np.ndarray:
    return np.ndarray(
        piece.box.shape,
        storage.dtype,
        storage,
        piece.at * storage.itemsize,
        tuple(step * storage.itemsize for step in piece.strides),
    )


def save(folder: Path, world_size: int, named: dict[str, Layout]) -> None:
    """A checkpoint of tensors of these layouts, written rank by rank."""
    state = {name: StoredTensor(layout.shape, I32, layout) for name, layout in named.items()}
    stored = choose_layouts(state)
    files = []
    with open_store(str(folder)) as store:
        for rank in range(world_size):
            parts = []
            for name, tensor in stored.items():
                data = local_storage(tensor.layout, rank)
                if len(data):
                    lo, hi = tensor.layout.span(rank)
                    shape = tensor.layout.local_shape(rank)
                    shape = shape if hi - lo == int(np.prod(shape)) else (hi - lo,)
                    block = memoryview(data.view(np.uint8).data)
                    parts.append(
                        OutgoingTensor(name, shape, I32, lambda block=block: iter([block]), True)
                    )
            if parts:
                file_name = f"{7:016x}-{rank:05d}.safetensors"
                with store.create(file_name) as file:
                    files.append(write_shard(file, parts).to_file(file_name, rank))
        tree = {name: TensorRef(name) for name in stored}
        store.commit(MANIFEST, dump(Manifest(stored, {}, tree, files)), replace=False)


@pytest.mark.thorough
@pytest.mark.wide
@pytest.mark.costly
@pytest.mark.parametrize("loading", [1, 8, 12, 16])
@pytest.mark.parametrize("saving", [8, 16])
def test_every_layout_loads_into_every_layout_at_eight_and_sixteen_ranks(
    tmp_path: Path, saving: int, loading: int
) -> None:
    save(tmp_path, saving, layouts(saving))
    wanted = layouts(loading) if loading > 1 else {str(s): Layout.single(s) for s in SHAPES}
    with open_source(str(tmp_path)) as source:
        for rank in range(loading):
            requests: list[ReadRequest] = []
            expected: list[tuple[np.ndarray, np.ndarray]] = []
            for record in source.catalog.tensors.values():
                for layout in wanted.values():
                    if layout.shape == record.shape:
                        lo, hi = layout.span(rank)
                        array = np.zeros(hi - lo, dtype=np.uint32)
                        requests += requests_for(record, layout.pieces(rank), len(expected))
                        expected.append((array, local_storage(layout, rank)))
            read_requests(source.store, requests, [bytes_of(array) for array, _ in expected])
            for array, values in expected:
                assert np.array_equal(array, values)
