"""Copies move any layout into any other: every wanted element once, and only what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharding.layout import (
    Box,
    Copy,
    FlatShard,
    HoleError,
    Layout,
    Mesh,
    Piece,
    Replicate,
    Shape,
    Shard,
    StridedShard,
    copies_to,
)
from tests.selection import examples

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
ArrayOf = Callable[[Layout, Sequence[int]], np.ndarray]


def copies(have: Layout, want: Layout) -> Iterator[Copy]:
    """The copies that fill every rank of `want`."""
    for rank in sorted(want.mesh.ranks()):
        yield from copies_to(have, want, rank)


def window(storage: np.ndarray, piece: Piece) -> np.ndarray:
    """The piece's elements as a view of the storage; slices check that it lies inside."""
    hull = storage[piece.at : piece.at + piece.hull_elements]
    assert len(hull) == piece.hull_elements
    steps = tuple(stride * storage.itemsize for stride in piece.strides)
    return np.lib.stride_tricks.as_strided(hull, piece.box.shape, steps)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_layout_fills_any_other_with_every_element_once(
    shapes: st.SearchStrategy[Shape],
    layouts_of: LayoutsOf,
    storage_of: ArrayOf,
    data: st.DataObject,
) -> None:
    shape = data.draw(shapes)
    have, want = data.draw(layouts_of(shape)), data.draw(layouts_of(shape))
    sources = {
        have.mesh.rank(coordinate): storage_of(have, coordinate)
        for coordinate in np.ndindex(*have.mesh.sizes)
    }
    wanted = {
        want.mesh.rank(coordinate): storage_of(want, coordinate)
        for coordinate in np.ndindex(*want.mesh.sizes)
    }
    filled = {rank: np.full(len(storage), -1) for rank, storage in wanted.items()}
    for copy in copies(have, want):
        assert copy.box
        assert copy.source.box == copy.target.box == copy.box
        target = window(filled[copy.target_rank], copy.target)
        assert (target == -1).all(), "an element is filled twice"
        target[...] = window(sources[copy.source_rank], copy.source)
    for rank, storage in wanted.items():
        assert filled[rank].tolist() == storage.tolist()


def test_copies_of_a_large_world_cost_what_one_rank_wants() -> None:
    world = 16384
    have = Layout((world, 4), Mesh.grid(("dp",), (world,)), (Shard(0),))
    want = Layout((world, 4), Mesh.grid(("dp", "tp"), (world // 2, 4)), (Shard(0), Replicate()))
    found = list(copies_to(have, want, rank=4001))
    assert [(copy.source_rank, str(copy.box)) for copy in found] == [
        (2000, "[2000:2001, 0:4]"),
        (2001, "[2001:2002, 0:4]"),
    ]


def test_the_replica_on_the_rank_itself_is_the_source() -> None:
    have = Layout.replicated((6,), 4)
    want = Layout((6,), Mesh.grid(("dp",), (4,)), (Shard(0),))
    assert all(copy.source_rank == copy.target_rank for copy in copies(have, want))


def test_fsdp_over_tensor_parallelism_reads_its_own_rows() -> None:
    have = Layout((8,), Mesh.grid(("dp", "tp"), (2, 2)), (StridedShard(0, 2), Shard(0)))
    found = [(copy.source_rank, str(copy.box)) for copy in copies(have, Layout.single((8,)))]
    assert sorted(found) == [(0, "[0:2]"), (1, "[4:6]"), (2, "[2:4]"), (3, "[6:8]")]


def test_layouts_of_different_shapes_have_no_copies() -> None:
    with pytest.raises(ValueError, match=r"both the shapes \(4,\) and \(5,\)"):
        next(copies(Layout.single((4,)), Layout.single((5,))))


def test_a_hole_is_an_error_that_names_the_box() -> None:
    have = Layout((4, 2), Mesh.grid(("dp",), (2,)), (FlatShard(0, 4),))
    # No layout that can be built has a hole. This one is broken by force: what a layout promises
    # is counted all the same before anything moves.
    object.__setattr__(have, "placements", (FlatShard(0, 3),))
    with pytest.raises(HoleError) as caught:
        list(copies_to(have, Layout.single((4, 2)), rank=0))
    assert "2 elements of box [0:4, 0:2] are held by no rank of dp:2=F(0,3)" in str(caught.value)
    assert caught.value.kind == "hole"
    assert Box((3, 0), (4, 2)).numel == 2
