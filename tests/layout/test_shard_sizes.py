"""What all ranks hold of a tensor at once, against what the layout says of each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.plan.scatter_plan import elements_held, positions
from sharding.layout import FlatShard, Layout, Mesh, Only, Replicate, Shape
from tests.selection import examples

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
EXACT = (FlatShard, Only, Replicate)

seeded = settings(derandomize=True, deadline=None, max_examples=examples(300))


@seeded
@given(data=st.data())
def test_no_rank_holds_more_and_the_one_that_holds_most_as_much(
    shapes: st.SearchStrategy[Shape], layouts_of: LayoutsOf, data: st.DataObject
) -> None:
    layout = data.draw(shapes.flatmap(layouts_of))
    spans = np.array([layout.span(rank) for rank in layout.mesh.ranks()])
    right = spans[:, 1] - spans[:, 0]
    found = elements_held(layout)
    assert (found >= right).all()
    assert found.max() == right.max()
    if all(isinstance(placement, EXACT) for placement in layout.placements):
        assert found.tolist() == right.tolist()


def test_ranks_are_found_in_a_world_that_has_them_in_another_order() -> None:
    world = Mesh.of_ranks(("world",), (3,), (5, 2, 7))
    found = positions(Mesh.of_ranks(("tp",), (2,), (7, 5)), world)
    assert found is not None
    assert found.tolist() == [2, 0]
    assert positions(Mesh.of_ranks(("tp",), (2,), (7, 6)), world) is None
