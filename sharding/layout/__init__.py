"""The layout algebra: the piece of a tensor that each rank holds. Pure integers, no torch."""

from sharding.errors import HoleError
from sharding.layout.box import Box, Piece, Shape, is_dense, row_major, span_boxes
from sharding.layout.copies import Copy, copies_to
from sharding.layout.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    Split,
    StridedShard,
)

__all__ = [
    "Box",
    "Copy",
    "FlatShard",
    "HoleError",
    "Layout",
    "Mesh",
    "Only",
    "Piece",
    "Placement",
    "Replicate",
    "Shape",
    "Shard",
    "Split",
    "StridedShard",
    "copies_to",
    "is_dense",
    "row_major",
    "span_boxes",
]
