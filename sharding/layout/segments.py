"""One dimension, cut repeatedly: the indices that a coordinate keeps, as ranges.

Rules that hold here:

1. `Segments` are disjoint ranges `[lo, hi)` of one dimension, held end to end in this order. They
   do not touch: neighbours that continue each other are one range.
2. A cut counts positions in the end-to-end concatenation, as torch.chunk counts in a local tensor.
3. A whole dimension is one segment, also when it is empty. A cut leaves no empty segments.
"""

from __future__ import annotations

from collections.abc import Iterator

Segments = tuple[tuple[int, int], ...]
"""Ranges `[lo, hi)` of one dimension, held end to end."""


def length(segments: Segments) -> int:
    """Returns the number of indices in the segments.

    >>> length(((0, 2), (5, 6)))
    3
    """
    return sum(hi - lo for lo, hi in segments)


def chunk(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range of chunk `index` of `parts` of `numel` positions, as torch.chunk has it.

    >>> [chunk(5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-numel // parts)
    return min(numel, index * step), min(numel, (index + 1) * step)


def cut(segments: Segments, size: int, index: int, split: int = 1) -> Segments:
    """Returns the indices of coordinate `index` of `size`: its part of each of `split` chunks.

    >>> cut(((0, 8),), 2, 1), cut(((0, 8),), 2, 1, split=2)
    (((4, 8),), ((2, 4), (6, 8)))
    """
    if split == 1 and len(segments) == 1:  # nearly all cuts
        ((start, stop),) = segments
        lo, hi = chunk(stop - start, size, index)
        return ((start + lo, start + hi),) if lo < hi else ()
    kept: list[tuple[int, int]] = []
    for first, last in _chunks(length(segments), split):
        lo, hi = chunk(last - first, size, index)
        for start, stop in _between(segments, first + lo, first + hi):
            if kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            else:
                kept.append((start, stop))
    return tuple(kept)


def touching(segments: Segments, size: int, lo: int, hi: int, split: int = 1) -> list[int]:
    """Returns the coordinates whose cut keeps an index in `[lo, hi)` of the dimension, ascending.

    >>> touching(((0, 8),), 4, 3, 5)
    [1, 2]
    """
    found: set[int] = set()
    for a, b in inside(segments, lo, hi):
        for first, last in _chunks(length(segments), split):
            low, high = max(a, first) - first, min(b, last) - first
            if low < high:
                step = -(-(last - first) // size)
                found.update(range(low // step, (high - 1) // step + 1))
    return sorted(found)


def inside(segments: Segments, lo: int, hi: int) -> tuple[tuple[int, int], ...]:
    """Returns the positions at which the segments hold indices in `[lo, hi)`, as ascending ranges.

    >>> inside(((0, 2), (5, 9)), 1, 7)
    ((1, 2), (2, 4))
    """
    found, at = [], 0
    for start, stop in segments:
        a, b = max(lo, start), min(hi, stop)
        if a < b:
            found.append((at + a - start, at + b - start))
        at += stop - start
    return tuple(found)


def placed(segments: Segments, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Returns indices at positions `[lo, hi)`, as (first index, one past it, first position).

    >>> placed(((0, 2), (5, 9)), 1, 4)
    [(1, 2, 1), (5, 7, 2)]
    """
    found, at = [], 0
    for start, stop in segments:
        a, b = max(lo, at), min(hi, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at, a))
        at += stop - start
    return found


def _between(segments: Segments, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    for start, stop, _ in placed(segments, lo, hi):
        yield start, stop


def _chunks(numel: int, split: int) -> list[tuple[int, int]]:
    """Returns the chunks of torch.chunk that are not empty: at most one for each position."""
    if split == 1 or numel == 0:
        return [(0, numel)]
    step = -(-numel // split)
    return [(first, min(numel, first + step)) for first in range(0, numel, step)]
