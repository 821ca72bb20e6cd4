"""The check that boxes tile a tensor, against counting every element."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.catalog import check_tiling, overlapping
from formats.errors import FormatError, HostileError
from formats.limits import TANGLED
from sharding.layout import Box

spans = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda span: (span[0], sum(span)))
boxes = st.lists(spans, min_size=2, max_size=2).map(
    lambda pair: Box((pair[0][0], pair[1][0]), (pair[0][1], pair[1][1]))
)


@given(st.lists(boxes, max_size=8))
def test_an_overlap_is_found_exactly_when_two_boxes_share_an_element(found: list[Box]) -> None:
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if a & b]
    pair = overlapping(found)
    assert (pair is not None) == bool(pairs)
    assert pair is None or pair[0] & pair[1]


def test_a_pinwheel_that_no_straight_cut_takes_apart_is_a_tiling() -> None:
    wheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 3)),
        Box((2, 1), (3, 3)),
        Box((1, 0), (3, 1)),
        Box((1, 1), (2, 2)),
    ]
    check_tiling("w", (3, 3), wheel)
    with pytest.raises(FormatError, match="w: the pieces hold 8 of the 9 elements"):
        check_tiling("w", (3, 3), wheel[:-1])


@pytest.mark.thorough
def test_a_tensor_in_many_rows_and_columns_is_checked_quickly() -> None:
    grid = [Box((i, j), (i + 1, j + 1)) for i in range(200) for j in range(200)]
    check_tiling("w", (200, 200), grid)


def test_boxes_of_a_tensor_without_dimensions() -> None:
    check_tiling("w", (), [Box((), ())])
    with pytest.raises(FormatError, match="overlap"):
        check_tiling("w", (), [Box((), ()), Box((), ())])
    with pytest.raises(FormatError, match="hold 0 of the 1"):
        check_tiling("w", (), [])


def test_a_tangle_that_no_sharding_makes_is_refused() -> None:
    tangle = [Box((i,), (i + 2,)) for i in range(TANGLED + 1)]
    with pytest.raises(HostileError, match="entangled"):
        overlapping(tangle)
