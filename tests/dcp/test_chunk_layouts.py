"""Layouts of the parts in which planners divide tensors."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dcp.storage_writer import layout_of
from ckpt.errors import UnsupportedError
from sharding.layout import Box, Layout, Mesh, Shard


@st.composite
def divided(draw: st.DrawFn) -> Layout:
    """A tensor whose dimensions are cut by torch.chunk's rule, some of them twice."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), max_size=2))
    sizes = [draw(st.integers(1, 4)) for _ in dims]
    mesh = Mesh.grid([f"axis{i}" for i in range(len(dims))], sizes, draw(st.integers(0, 3)))
    return Layout(shape, mesh, tuple(map(Shard, dims)))


@given(divided())
def test_the_parts_of_dtensors_have_a_layout_with_the_same_holders(layout: Layout) -> None:
    parts = {piece.box: rank for rank in layout.mesh.ranks() for piece in layout.pieces(rank)}
    try:
        found = layout_of("w", layout.shape, parts)
    except UnsupportedError:
        # Cut twice, with empty parts between others: the axes cannot be told apart.
        dims = [placement.dim for placement in layout.placements]
        assert len(set(dims)) < len(dims)
        return
    assert {p.box: r for r in found.mesh.ranks() for p in found.pieces(r)} == parts


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_parts_of_any_lengths_have_the_right_layout_or_none(lengths: list[int], width: int) -> None:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    parts = {Box((lo, 0), (hi, width)): i for i, (lo, hi) in enumerate(pairwise(ends))}
    try:
        found = layout_of("w", (ends[-1], width), parts)
    except UnsupportedError:
        return
    assert {p.box: r for r in found.mesh.ranks() for p in found.pieces(r)} == parts


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 2))],  # a hole
        [Box((0, 0), (2, 4)), Box((2, 0), (4, 2)), Box((2, 2), (4, 4))],  # no grid
        [Box((0, 0), (3, 4)), Box((1, 0), (4, 4))],  # an overlap
    ],
)
def test_parts_that_are_no_grid_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(UnsupportedError, match=r"not those of torch\.chunk"):
        layout_of("w", (4, 4), {box: rank for rank, box in enumerate(boxes)})


def test_every_rank_may_hold_every_part_of_a_grid() -> None:
    cuts = [(0, 2), (2, 4)]
    grid = [Box((a, c), (b, d)) for (a, b), (c, d) in product(cuts, cuts)]
    parts = dict(zip(grid, (3, 0, 2, 5), strict=True))
    found = layout_of("w", (4, 4), parts)
    assert prod(found.mesh.sizes) == 4
    assert {box: found.holders(box)[0] for box in grid} == parts
