"""Checks that boxes tile a tensor: each lies inside, no two overlap, no element is left out.

A format with explicit tables of boxes makes this check before it trusts them. Straight cuts
separate the boxes that sharding makes, so overlaps are found in O(n log n).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

from formats.errors import FormatError, HostileError
from formats.limits import CUTS, TANGLED
from sharding.layout import Box


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises FormatError, with the tensor and the boxes, unless the (non-empty) boxes tile it.

    >>> check_tiling("w", (4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (4, 2))])
    """
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.lo) != len(shape) or box not in whole:
            raise FormatError(f"{name}: the piece {box} is not inside the tensor {whole}")
    try:
        pair = overlapping(boxes)
    except HostileError as error:
        raise HostileError(f"{name}: {error}") from None
    if pair is not None:
        raise FormatError(f"{name}: the pieces {pair[0]} and {pair[1]} overlap")
    held = sum(box.numel for box in boxes)
    if held != prod(shape):
        raise FormatError(
            f"{name}: the pieces hold {held} of the {prod(shape)} elements of {whole}; the "
            "checkpoint is incomplete"
        )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two of the boxes that share an element, or None.

    >>> overlapping([Box((0,), (2,)), Box((4,), (6,)), Box((5,), (7,))])
    (Box(lo=(4,), hi=(6,)), Box(lo=(5,), hi=(7,)))
    """
    groups = [(0, list(boxes))]
    while groups:
        cuts, group = groups.pop()
        if cuts > CUTS and len(group) > CUTS:
            raise tangled(len(group))
        for dim in range(len(group[0].lo) if group else 0):
            parts = _cut(group, dim)
            if len(parts) > 1:
                groups += [(cuts + 1, part) for part in parts if len(part) > 1]
                break
        else:
            if len(group) > TANGLED:
                raise tangled(len(group))
            for one, other in combinations(group, 2):
                if one & other:
                    return one, other
    return None


def tangled(pieces: int) -> HostileError:
    """Returns the error for pieces that take too long to separate."""
    return HostileError(f"{pieces} pieces of a tensor are entangled, which no sharding makes")


def _cut(group: list[Box], dim: int) -> list[list[Box]]:
    """Returns the group in parts that are separate along a dimension."""
    parts: list[list[Box]] = []
    reach = 0
    for box in sorted(group, key=lambda box: box.lo[dim]):
        if not parts or box.lo[dim] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box.hi[dim])
    return parts
