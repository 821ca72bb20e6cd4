"""Chains of views have the elements that numpy's functions give, each once, in every box."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.mapping.views import (
    Flattened,
    Joined,
    Narrowed,
    Permuted,
    Stored,
    Unflattened,
    View,
)
from formats.catalog import TensorRecord
from sharding.layout import Box, Piece
from tests.mapping.catalogs import I64, Elements, boxes, numbered, read, stored
from tests.selection import examples


@st.composite
def leaves(draw: st.DrawFn, elements: Elements, shape: tuple[int, ...]) -> tuple[View, np.ndarray]:
    """A stored tensor of one shape, in up to three pieces."""
    array = numbered(*shape, start=1000 * len(elements))
    record = stored(f"t{len(elements)}", array, elements, draw(st.integers(1, 3)))
    return Stored(record), array


@st.composite
def steps(
    draw: st.DrawFn, elements: Elements, view: View, array: np.ndarray
) -> tuple[View, np.ndarray]:
    """One more view of a view, and numpy's of its array."""
    rank = array.ndim
    kinds = ["insert", *(["permute", "narrow", "unflatten", "join"] if rank else [])]
    kinds += ["flatten"] if rank > 1 else []
    kinds += ["drop"] if 1 in array.shape else []
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, max(0, rank - 1)))
    if kind == "insert":
        return Flattened(view, dim, 0), np.expand_dims(array, dim)
    if kind == "permute":
        order = tuple(draw(st.permutations(range(rank))))
        return Permuted(view, order), array.transpose(order)
    if kind == "narrow":
        lo = draw(st.integers(0, array.shape[dim]))
        hi = draw(st.integers(lo, array.shape[dim]))
        return Narrowed(view, dim, lo, hi), np.take(array, range(lo, hi), dim)
    if kind == "join":
        shape = (*array.shape[:dim], draw(st.integers(0, 3)), *array.shape[dim + 1 :])
        other, more = draw(leaves(elements, shape))
        return Joined((view, other, view), dim), np.concatenate([array, more, array], dim)
    if kind == "drop":
        dim = array.shape.index(1)
        return Unflattened(view, dim, ()), array.squeeze(dim)
    if kind == "flatten":
        dim = draw(st.integers(0, rank - 2))
        count = draw(st.integers(2, rank - dim))
        merged = prod(array.shape[dim : dim + count])
        shape = (*array.shape[:dim], merged, *array.shape[dim + count :])
        return Flattened(view, dim, count), array.reshape(shape)
    size = array.shape[dim]
    inner = draw(st.sampled_from([n for n in range(1, max(1, size) + 1) if size % n == 0]))
    sizes = (size // inner, inner)
    return Unflattened(view, dim, sizes), array.reshape(
        *array.shape[:dim], *sizes, *array.shape[dim + 1 :]
    )


@settings(max_examples=examples(150))
@given(st.data())
def test_a_chain_of_views_has_numpy_s_elements(data: st.DataObject) -> None:
    elements: Elements = {}
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=3)))
    view, array = data.draw(leaves(elements, shape))
    for _ in range(data.draw(st.integers(1, 5))):
        if array.size > 2000 or array.ndim > 6:
            break
        view, array = data.draw(steps(elements, view, array))
    assert view.shape == array.shape
    record = TensorRecord("v", view.shape, I64, view)
    assert np.array_equal(read(record, elements), array)
    box = data.draw(boxes(array.shape))
    inside = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
    assert np.array_equal(read(record, elements, box)[inside], array[inside])


def test_a_merge_in_order_is_one_piece() -> None:
    elements: Elements = {}
    record = stored("t", numbered(6, 4), elements)
    view = Flattened(Unflattened(Stored(record), 0, (2, 3)), 0, 2)
    [[piece, _]] = list(view)
    assert piece == record.pieces.__iter__().__next__().piece


def test_a_merge_with_dimensions_of_size_1_is_one_piece() -> None:
    record = stored("t", numbered(6, 4), {})
    column = Narrowed(Stored(record), 1, 2, 3)
    [[piece, _]] = list(Flattened(column, 0, 2))
    assert piece == Piece(Box((0,), (6,)), 2, (4,))


@pytest.mark.parametrize(
    ("columns", "pieces"), [(3, [(2, 3)] * 8), (128, [(1, 128)] * 16), (0, [])]
)
def test_rotary_halves_are_pairs_of_rows_or_long_rows_alone(
    columns: int, pieces: list[tuple[int, int]]
) -> None:
    elements: Elements = {}
    record = stored("t", numbered(16, columns), elements)
    apart = Unflattened(Stored(record), 0, (2, 2, 4))
    view = Flattened(Permuted(apart, (0, 2, 1, 3)), 0, 3)
    found = TensorRecord("v", view.shape, I64, view)
    assert [piece.box.shape for piece, _ in found.pieces] == pieces
    halves = numbered(16, columns).reshape(2, 2, 4, columns).swapaxes(1, 2)
    assert np.array_equal(read(found, elements), halves.reshape(16, columns))
