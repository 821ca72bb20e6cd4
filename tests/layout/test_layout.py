"""Every rank's pieces, and who holds a box, against the rules of layout.py cut with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.layout import (
    Box,
    FlatShard,
    Layout,
    Mesh,
    Only,
    Piece,
    Placement,
    Replicate,
    Shape,
    Shard,
    Split,
    StridedShard,
)
from tests.selection import examples

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
ArrayOf = Callable[[Layout, Sequence[int]], np.ndarray]

seeded = settings(derandomize=True, deadline=None, max_examples=examples(300))


def gathered(layout: Layout, pieces: Sequence[Piece]) -> list[int]:
    """The global element number at every position of the storage the pieces describe."""
    numbers = np.arange(layout.numel).reshape(layout.shape)
    storage = {}
    for piece in pieces:
        assert piece.box, "no piece is empty"
        assert piece.box in Box.whole(layout.shape)
        inside = numbers[tuple(map(slice, piece.box.lo, piece.box.hi))]
        for index in np.ndindex(*inside.shape):
            at = piece.at + sum(i * step for i, step in zip(index, piece.strides, strict=True))
            assert at not in storage, "no two elements lie at one place"
            storage[at] = int(inside[index])
    assert sorted(storage) == list(range(len(storage))), "storage has no gaps"
    return [storage[at] for at in range(len(storage))]


@seeded
@given(data=st.data())
def test_pieces_lie_where_the_placement_rules_put_them(
    shapes: st.SearchStrategy[Shape],
    layouts_of: LayoutsOf,
    local_array_of: ArrayOf,
    storage_of: ArrayOf,
    data: st.DataObject,
) -> None:
    layout = data.draw(shapes.flatmap(layouts_of))
    copies = np.zeros(layout.numel, dtype=int)
    for coordinate in np.ndindex(*layout.mesh.sizes):
        rank = layout.mesh.rank(coordinate)
        held = gathered(layout, layout.pieces(rank))
        assert held == storage_of(layout, coordinate).tolist()
        copies[held] += 1
        local = local_array_of(layout, coordinate)
        assert layout.local_shape(rank) == local.shape
        lo, hi = layout.span(rank)
        assert local.reshape(-1)[lo:hi].tolist() == held
    assert (copies == layout.replicas).all()


@seeded
@given(data=st.data())
def test_holders_are_exactly_the_ranks_that_hold_some_of_the_box(
    shapes: st.SearchStrategy[Shape],
    layouts_of: LayoutsOf,
    storage_of: ArrayOf,
    data: st.DataObject,
) -> None:
    layout = data.draw(shapes.flatmap(layouts_of))
    lo = tuple(data.draw(st.integers(0, size)) for size in layout.shape)
    box = Box(lo, tuple(data.draw(st.integers(a, 8)) for a in lo))
    near = data.draw(st.none() | st.sampled_from([*layout.mesh.ranks(), 999]))
    wish = None if near is None else layout.mesh.coordinate(near)
    numbers = np.arange(layout.numel).reshape(layout.shape)
    wanted = numbers[tuple(map(slice, box.lo, box.hi))]
    expected = set()
    for coordinate in np.ndindex(*layout.mesh.sizes):
        replica = [
            index
            for index, placement in zip(coordinate, layout.placements, strict=True)
            if isinstance(placement, Replicate)
        ]
        chosen = [
            index
            for index, placement in zip(wish or [0] * 9, layout.placements, strict=False)
            if isinstance(placement, Replicate)
        ]
        if replica == chosen and np.isin(storage_of(layout, coordinate), wanted).any():
            expected.add(layout.mesh.rank(coordinate))
    found = layout.holders(box, near)
    assert len(set(found)) == len(found)
    assert set(found) == expected


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    layout = Layout((4, 2), Mesh.grid(("dp",), (2,), offset=4), (Shard(0),))
    assert layout.pieces(0) == ()
    assert layout.local_shape(0) == (0, 0)
    assert layout.span(0) == (0, 0)
    assert Layout.single((), rank=2).local_shape(0) == (0,)


def test_a_box_outside_the_tensor_is_held_by_nobody() -> None:
    layout = Layout.replicated((4,), 2)
    assert layout.holders(Box((4,), (9,))) == ()
    assert layout.holders(Box((2,), (2,))) == ()


def test_of_replicas_the_nearest_is_named() -> None:
    mesh = Mesh.grid(("replica", "shard"), (3, 2))
    layout = Layout((4,), mesh, (Replicate(), Shard(0)))
    whole = Box((0,), (4,))
    assert layout.holders(whole) == (0, 1)
    assert layout.holders(whole, near=5) == (4, 5)


def test_axes_that_split_together_count_with_the_last_one_fastest() -> None:
    mesh = Mesh.grid(("dp", "tp"), (2, 3))
    layout = Layout((12,), mesh, (Split(), Split()))
    assert [layout.span(rank) for rank in range(6)] == [(2 * r, 2 * r + 2) for r in range(6)]
    assert [layout.holders(Box((i,), (i + 1,))) for i in range(12)] == [
        (i // 2,) for i in range(12)
    ]


def kinds(world: int) -> dict[str, tuple[Shape, Mesh, tuple[Placement, ...]]]:
    line = Mesh.grid(("dp",), (world,))
    grid = Mesh.grid(("dp", "tp"), (world // 4, 4))
    rows = 2 * world + 1
    return {
        "replicated": ((rows, 3), line, (Replicate(),)),
        "sharded": ((rows, 3), line, (Shard(0),)),
        "fsdp over tp": ((rows, 3), grid, (StridedShard(0, 4), Shard(0))),
        "flat": ((rows, 3), line, (FlatShard(5, 7),)),
        "split": ((rows, 3), line, (Split(),)),
        "only": ((rows, 3), line, (Only(0),)),
        "flat under tp": ((rows, 3), grid, (FlatShard(0, 9), Shard(1))),
    }


@pytest.mark.parametrize("kind", kinds(8))
def test_a_layout_and_its_pieces_do_not_grow_with_the_world(kind: str) -> None:
    small, large = (Layout(*kinds(world)[kind]) for world in (8, 16384))
    assert len(repr(large)) <= len(repr(small)) + 40
    most = max(len(small.pieces(rank)) for rank in range(8))
    assert all(len(large.pieces(rank)) <= most for rank in range(0, 16384, 97))


def test_a_box_of_a_large_flat_shard_names_only_those_who_hold_it() -> None:
    world = 16384
    layout = Layout((world // 4, 100), Mesh.grid(("dp",), (world,)), (FlatShard(0, 25),))
    column = Box((0, 60), (world // 4, 61))
    assert layout.holders(column) == tuple(range(2, world, 4))


def test_a_split_larger_than_the_dimension_costs_what_the_dimension_has() -> None:
    layout = Layout((3,), Mesh.grid(("dp",), (2,)), (StridedShard(0, 10**12),))
    assert layout.holders(Box((1,), (2,))) == (0,)
    assert [len(layout.pieces(rank)) for rank in (0, 1)] == [1, 0]


@pytest.mark.parametrize(
    ("shape", "placement", "message"),
    [
        ((4,), Shard(1), "S(1) cuts dimension 1 of a tensor of shape (4,)"),
        ((4,), Shard(-1), "S(-1) cuts dimension -1"),
        ((), StridedShard(0, 2), "SS(0,2) cuts dimension 0 of a tensor of shape ()"),
        ((4,), StridedShard(0, 0), "the split is at least 1"),
        ((4,), FlatShard(0, 0), "the stride is at least 1"),
        ((4,), FlatShard(-1, 9), "the offset not negative"),
        ((9,), FlatShard(2, 5), "9 elements from 2 do not fit into 2 shards of 5"),
        ((4,), Only(2), "only(2): the axis has 2 coordinates"),
        ((4, -1), Replicate(), "no tensor has the shape (4, -1)"),
    ],
)
def test_a_placement_that_cannot_divide_the_tensor_is_refused(
    shape: Shape, placement: Placement, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Layout(shape, Mesh.grid(("dp",), (2,)), (placement,))
    assert message in str(caught.value)


def test_one_placement_per_axis_is_demanded() -> None:
    with pytest.raises(ValueError, match="1 placements for a mesh of 2 axes"):
        Layout((4,), Mesh.grid(("a", "b"), (2, 2)), (Shard(0),))


def test_a_flat_buffer_needs_room_only_for_what_tensor_parallelism_leaves() -> None:
    mesh = Mesh.grid(("dp", "tp"), (2, 2))
    Layout((8,), mesh, (FlatShard(0, 2), Shard(0)))
    with pytest.raises(ValueError, match="4 elements from 1 do not fit into 2 shards of 2"):
        Layout((8,), mesh, (FlatShard(1, 2), Shard(0)))


def test_a_flat_shard_of_a_flat_shard_needs_room_only_for_the_longest() -> None:
    mesh = Mesh.grid(("outer", "inner"), (2, 3))
    # 4 elements from 3 in shards of 4: one in the first, three in the second.
    Layout((4,), mesh, (FlatShard(3, 4), FlatShard(0, 1)))
    with pytest.raises(ValueError, match="3 elements from 1"):
        Layout((4,), mesh, (FlatShard(3, 4), FlatShard(1, 1)))


def test_a_layout_prints_its_axes_with_their_placements() -> None:
    mesh = Mesh.grid(("dp", "tp", "pp"), (2, 4, 2))
    layout = Layout((8, 8), mesh, (StridedShard(0, 4), Shard(0), Only(1)))
    assert str(layout) == "dp:2=SS(0,4), tp:4=S(0), pp:2=only(1)"
    flat = Layout((8, 8), mesh, (FlatShard(3, 40), Split(), Replicate()))
    assert str(flat) == "dp:2=F(3,40), tp:4=split, pp:2=R"
