"""Boxes are sets of elements; pieces say where each of them lies."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.layout import Box, Piece, Shape, row_major, span_boxes

seeded = settings(derandomize=True, deadline=None)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """A box inside the shape, empty ones among them."""
    lo = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(lo, tuple(draw(st.integers(a, size)) for a, size in zip(lo, shape, strict=True)))


def elements(box: Box) -> set[Shape]:
    return set(product(*map(range, box.lo, box.hi)))


@seeded
@given(data=st.data(), shape=SHAPES)
def test_boxes_behave_as_the_sets_of_their_elements(data: st.DataObject, shape: Shape) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert elements(a & b) == elements(a) & elements(b)
    assert (b in a) == (elements(b) <= elements(a))
    assert bool(a) == bool(elements(a))
    assert a.numel == len(elements(a)) == prod(a.shape)
    assert elements(Box.whole(shape)) == set(np.ndindex(*shape))


def test_boxes_that_do_not_meet_have_an_empty_intersection_with_no_negative_extent() -> None:
    apart = Box((0, 5), (2, 9)) & Box((4, 0), (6, 2))
    assert not apart
    assert apart.shape == (0, 0)


def test_the_box_of_a_0d_tensor_has_one_element() -> None:
    assert Box((), ()).numel == 1
    assert Box((), ())
    assert Box((), ()) in Box.whole(())


def test_a_box_prints_as_a_slice() -> None:
    assert str(Box((0, 2), (4, 6))) == "[0:4, 2:6]"


@seeded
@given(data=st.data(), shape=SHAPES)
def test_a_part_of_a_piece_lies_where_the_piece_has_it(data: st.DataObject, shape: Shape) -> None:
    whole = data.draw(boxes(shape))
    at = data.draw(st.integers(0, 9))
    inner = whole & data.draw(boxes(shape))
    part = Piece.packed(whole, at).part(inner)
    storage = {
        index: at + place for place, index in enumerate(product(*map(range, whole.lo, whole.hi)))
    }
    for index in elements(inner):
        steps = zip(index, inner.lo, part.strides, strict=True)
        assert part.at + sum((i - lo) * stride for i, lo, stride in steps) == storage[index]
    places = [storage[index] for index in elements(inner)]
    assert part.hull_elements == (max(places) - min(places) + 1 if places else 0)
    if inner:
        # One run of storage in row-major order, exactly when the piece says it is packed.
        assert part.is_packed == (part.hull_elements == inner.numel)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (4, 1, 3)])
def test_a_packed_piece_says_that_it_is_packed(shape: Shape) -> None:
    assert Piece.packed(Box.whole(shape), at=7).is_packed


def test_a_transposed_piece_is_not_packed() -> None:
    assert not Piece(Box((0, 0), (2, 3)), 0, (1, 2)).is_packed
    assert Piece(Box((0, 0), (2, 1)), 0, (1, 999)).is_packed


def test_a_broadcast_piece_has_a_hull_of_one_element() -> None:
    assert Piece(Box((0, 0), (4, 3)), 5, (0, 0)).hull_elements == 1


@seeded
@given(data=st.data(), shape=SHAPES)
def test_a_span_is_few_boxes_in_storage_order(data: st.DataObject, shape: Shape) -> None:
    numel = prod(shape)
    lo = data.draw(st.integers(0, numel))
    hi = data.draw(st.integers(0, numel))
    found = list(span_boxes(shape, lo, hi))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    array = np.arange(numel).reshape(shape)
    covered: list[int] = []
    for box in found:
        assert box, "no box is empty"
        covered += array[tuple(map(slice, box.lo, box.hi))].reshape(-1).tolist()
    assert covered == list(range(lo, hi))


def test_row_major_strides_are_those_of_numpy() -> None:
    for shape in [(), (3,), (2, 3, 4), (5, 1, 2)]:
        array = np.zeros(shape, dtype=np.int8)
        assert row_major(shape) == array.strides


@seeded
@given(data=st.data(), shape=SHAPES)
def test_the_parts_within_a_storage_range_are_the_elements_that_lie_there(
    data: st.DataObject, shape: Shape
) -> None:
    box = data.draw(boxes(shape))
    at = data.draw(st.integers(0, 7))
    piece = Piece(box, at, row_major(shape))
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, 140), st.integers(0, 140))))
    found = list(piece.within(lo, hi))
    held = [(element, part) for part in found for element in elements(part.box)]
    assert len(held) == len({element for element, _ in held})
    inside = {element for element in elements(box) if lo <= piece.part(_one(element)).at < hi}
    assert {element for element, _ in held} == inside
    assert all(part.part(_one(e)).at == piece.part(_one(e)).at for e, part in held)


def _one(element: Shape) -> Box:
    return Box(element, tuple(index + 1 for index in element))
