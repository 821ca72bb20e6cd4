"""Catalogs in memory: tensors that are stored in pieces of a flat array, and their elements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from formats.catalog import Catalog, Extent, PieceTable, StoredPiece, TensorRecord, TensorRef, Tree
from formats.dtypes import BY_NAME
from sharding.layout import Box, Piece

I64 = BY_NAME["I64"]
Elements = dict[str, np.ndarray]
"""The elements of each extent, by its file."""


def catalog_of(
    arrays: Mapping[str, np.ndarray], tree: Tree = None, cut: int = 1
) -> tuple[Catalog, Elements]:
    """A catalog of arrays of int64, each stored in at most `cut` row blocks."""
    elements: Elements = {}
    tensors = {name: stored(name, array, elements, cut) for name, array in arrays.items()}
    nest: Tree = {name: TensorRef(name) for name in arrays} if tree is None else tree
    return Catalog("safetensors", tensors, nest, ()), elements


def stored(name: str, array: np.ndarray, elements: Elements, cut: int = 1) -> TensorRecord:
    """One array as a record; its elements are added to `elements`."""
    rows = array.shape[0] if array.ndim else 1
    edges = sorted({round(rows * part / cut) for part in range(cut + 1)})
    pieces = []
    for lo, hi in pairwise(edges) if array.ndim else [(0, 1)]:
        file = f"{name}-{lo}"
        part = array[lo:hi] if array.ndim else array
        elements[file] = np.ascontiguousarray(part).reshape(-1)
        box = (
            Box((lo, *[0] * (array.ndim - 1)), (hi, *array.shape[1:]))
            if array.ndim
            else Box((), ())
        )
        pieces.append(StoredPiece(Piece.packed(box), Extent(file, 0, part.nbytes, itemsize=8)))
    return TensorRecord(name, array.shape, I64, PieceTable(pieces))


def read(record: TensorRecord, elements: Elements, box: Box | None = None) -> np.ndarray:
    """The elements of a box of a tensor, which come once each; -1 outside of the box."""
    box = Box.whole(record.shape) if box is None else box
    found = np.full(record.shape, -1, np.int64)
    count = 0
    for piece, extent in record.pieces.locate(box):
        part = piece.part(piece.box & box)
        if not part.box:
            continue
        data = elements[extent.file]
        steps = tuple(stride * 8 for stride in part.strides)
        assert part.at >= 0
        assert part.at + part.hull_elements <= data.size
        view = np.ndarray(part.box.shape, np.int64, data, part.at * 8, steps)
        found[tuple(slice(lo, hi) for lo, hi in zip(part.box.lo, part.box.hi, strict=True))] = view
        count += part.box.numel
    assert count == box.numel
    return found


def numbered(*shape: int, start: int = 0) -> np.ndarray:
    """An array of consecutive numbers."""
    return np.arange(start, start + prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box of a tensor of this shape."""
    lo = [draw(st.integers(0, size)) for size in shape]
    hi = [draw(st.integers(start, size)) for start, size in zip(lo, shape, strict=True)]
    return Box(tuple(lo), tuple(hi))
