"""What ranks send and receive, each by itself: it fits together, and with the copies there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.layout import Box, Copy, Layout, Replicate, Shape, copies_to
from sharding.layout.copies import everyone_with, exchange, windows

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
Pairs = st.SearchStrategy[tuple[Layout, Layout]]


@pytest.fixture(scope="module")
def pairs(shapes: st.SearchStrategy[Shape], layouts_of: LayoutsOf) -> Pairs:
    """Two layouts of one shape: what ranks have, and what they want."""
    return shapes.flatmap(lambda shape: st.tuples(layouts_of(shape), layouts_of(shape)))


def _key(copy: Copy) -> tuple[object, ...]:
    return (copy.source_rank, copy.target_rank, copy.source, copy.target)


def test_what_a_rank_sends_another_is_what_that_one_receives_in_the_same_order(
    pairs: Pairs,
) -> None:
    @given(pairs)
    def check(pair: tuple[Layout, Layout]) -> None:
        have, want = pair
        ranks = sorted({*have.mesh.ranks(), *want.mesh.ranks()})
        parts = {rank: exchange(have, want, rank) for rank in ranks}
        for source in ranks:
            for target in ranks:
                received = [c for c in parts[target].receives if c.source_rank == source]
                if source == target:
                    assert not [c for c in parts[source].sends if c.target_rank == target]
                    continue
                sent = [c for c in parts[source].sends if c.target_rank == target]
                assert list(map(_key, sent)) == list(map(_key, received))

    check()


def test_a_rank_takes_from_itself_whatever_it_has(pairs: Pairs) -> None:
    @given(pairs)
    def check(pair: tuple[Layout, Layout]) -> None:
        have, want = pair
        for rank in want.mesh.ranks():
            held = [piece.box for piece in have.pieces(rank)]
            for copy in exchange(have, want, rank).receives:
                if any(copy.box in box for box in held):
                    assert copy.source_rank == rank

    check()


def test_windows_cover_a_tensor_once_and_an_exchange_within_them_is_the_exchange(
    pairs: Pairs,
) -> None:
    @given(pairs, st.integers(1, 20))
    def check(pair: tuple[Layout, Layout], most: int) -> None:
        have, want = pair
        seen = np.zeros(have.shape, dtype=int)
        boxes = list(windows(have.shape, most))
        for box in boxes:
            assert box.numel <= most
            seen[_slices(box)] += 1
        assert (seen == 1).all()
        for rank in want.mesh.ranks():
            whole = exchange(have, want, rank)
            parts = [whole.within(box) for box in boxes]
            for one, many in (
                (whole.receives, [c for p in parts for c in p.receives]),
                (whole.sends, [c for p in parts for c in p.sends]),
            ):
                assert sum(c.box.numel for c in one) == sum(c.box.numel for c in many)

    check()


@pytest.mark.thorough
def test_everyone_with_a_box_is_whoever_has_a_piece_in_it(
    shapes: st.SearchStrategy[Shape], layouts_of: LayoutsOf
) -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        shape = data.draw(shapes)
        layout = data.draw(layouts_of(shape))
        lo = tuple(data.draw(st.integers(0, size)) for size in shape)
        hi = tuple(data.draw(st.integers(a, size)) for a, size in zip(lo, shape, strict=True))
        box = Box(lo, hi)
        found = list(everyone_with(layout, box))
        having = {r for r in layout.mesh.ranks() if any(p.box & box for p in layout.pieces(r))}
        assert set(found) == having
        assert len(found) == len(having)

    check()


def test_gathering_to_one_rank_moves_nothing_to_the_others() -> None:
    layout = Layout.replicated((4, 3), 3)
    assert layout.placements == (Replicate(),)
    want = Layout.single((4, 3), 1)
    assert [len(exchange(layout, want, rank).receives) for rank in range(3)] == [0, 1, 0]
    assert sum(c.box.numel for c in copies_to(layout, want, 1)) == prod((4, 3))


def _slices(box: Box) -> tuple[slice, ...] | Sequence[slice]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
