"""Layouts for the parts into which DCP's planners divide a tensor.

DCP lists a box for each part, and the native format has symbolic layouts. Parts have a layout if
they form a grid and torch.chunk's rule, applied once or repeatedly, cuts each dimension. All parts
of DTensors and of FSDP's sharded tensors do. Parts of other sizes are an error with the tensor's
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod

from formats.errors import UnsupportedError
from sharding.layout import Box, Layout, Mesh, Shape, Shard
from sharding.layout.segments import chunk


def layout_of(name: str, shape: Shape, ranks: Mapping[Box, int]) -> Layout:
    """Returns the layout in which each of these non-empty boxes lies at its rank.

    Raises UnsupportedError, with the tensor's name, if no layout has these boxes.

    >>> boxes = {Box((0, 0), (3, 2)): 1, Box((3, 0), (5, 2)): 0}
    >>> layout = layout_of("w", (5, 2), boxes)
    >>> str(layout), layout.holders(Box((4, 0), (5, 1)))
    ('cut0.0:2=S(0)', (0,))
    """
    if not prod(shape):
        return Layout.single(shape)
    cuts = [sorted({(box.lo[d], box.hi[d]) for box in ranks}) for d in range(len(shape))]
    grid = [
        Box(tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell)) for cell in product(*cuts)
    ]
    sizes = [_axes(cut, size) for cut, size in zip(cuts, shape, strict=True)]
    if len(grid) != len(ranks) or any(box not in ranks for box in grid) or None in sizes:
        raise UnsupportedError(
            f"{name}: it is divided into {len(ranks)} parts ({', '.join(map(str, [*ranks][:3]))}, "
            "...) that are not those of torch.chunk, and no layout describes them; cut it so, or "
            "give it as a DTensor"
        )
    axes = [(d, i, n) for d, found in enumerate(sizes) for i, n in enumerate(found or ())]
    names = [f"cut{d}.{i}" for d, i, _ in axes]
    mesh = Mesh.of_ranks(names, [n for *_, n in axes], [ranks[box] for box in grid])
    return Layout(shape, mesh, tuple(Shard(d) for d, *_ in axes))


def _axes(cut: Sequence[tuple[int, int]], size: int) -> tuple[int, ...] | None:
    """Returns the sizes of mesh axes that make this cut, the outermost first; None without any."""
    if cut[0][0] != 0 or cut[-1][1] != size or any(a[1] != b[0] for a, b in pairwise(cut)):
        return None
    return _nested(tuple(hi - lo for lo, hi in cut))


def _nested(lengths: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the numbers of nested chunks that give these lengths; None if none do.

    >>> _nested((3, 3, 3, 1)), _nested((3, 2, 3, 2)), _nested((1, 3))
    ((4,), (2, 2), None)
    """
    count = len(lengths)
    if count == 1:
        return ()
    if lengths == _chunks(sum(lengths), count):
        return (count,)
    for outer in range(2, count // 2 + 1):
        step = count // outer
        groups = [lengths[at : at + step] for at in range(0, count, step)]
        if tuple(map(sum, groups)) != _chunks(sum(lengths), outer):
            continue
        inner = {_nested(group) for group in groups}
        [found] = inner if len(inner) == 1 else [None]
        if found is not None:
            return (outer, *found)
    return None


def _chunks(size: int, count: int) -> tuple[int, ...]:
    """Returns the lengths of torch.chunk's chunks."""
    return tuple(hi - lo for lo, hi in (chunk(size, count, i) for i in range(count)))
