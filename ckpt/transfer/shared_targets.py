"""Compares the records of targets that share memory, before the load changes any of them.

Rules:

1. Records that lie in the same bytes are equal. Records with checksums of 128 bits are equal if all
   checksums are, and differ otherwise. These comparisons read no data.
2. Other records have no checksums, compressed chunks, or chunks of other sizes. The rank then reads
   its part of both records: in blocks of `BLOCK_BYTES` for two names of one tensor, as a whole and
   within the budget for views of different shapes.
3. Each rank compares its own parts. A difference on one rank ends the load on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from ckpt.errors import Difference
from ckpt.match.match_builder import Target
from ckpt.match.overlaps import Placed, conflict, differing, group_bytes, is_same_view
from ckpt.plan.load_plan import LoadItem
from ckpt.plan.read_plan import requests_for
from ckpt.state.memory import empty_for, memory_of
from ckpt.transfer.read import read_requests
from ckpt.transfer.record_sums import Verify
from formats.catalog import Catalog, StoredPiece, TensorRecord
from formats.storage import Reader
from sharding.layout import Box, Piece

BLOCK_BYTES = 16 << 20
"""Bytes of each of two records that are in memory at the same time."""
DIGEST_BYTES = 16
"""Bytes of a checksum by which equal chunks are known: 128 bits."""


@dataclass(frozen=True, slots=True)
class SharedTargets:
    """Compares the records of items whose targets share memory."""

    reader: Reader
    catalog: Catalog
    targets: Sequence[Target]
    rank: int
    budget: int
    """Bytes of host memory that a comparison may take."""
    verify: Verify

    def differences(self, groups: Sequence[tuple[LoadItem, ...]]) -> Iterator[Difference]:
        """Yields a difference, with two names, for each group that would get different values."""
        for group in groups:
            parts = [part for part in map(self._part, group) if part.local.numel()]
            if len(parts) < 2:
                continue
            if all(parts[0].is_like(other) for other in parts[1:]):
                first, *others = parts
                unlike = (other for other in others if not self._are_equal(first, other))
                found = (differing(first.name, other.name, other.nbytes) for other in unlike)
                yield from found
            else:
                yield from self._as_placed(parts)

    def _part(self, item: LoadItem) -> _Part:
        record, local = self.catalog.tensors[item.source], self.targets[item.target].local
        return _Part(item.name, record, local, tuple(item.layout.pieces(self.rank)))

    def _are_equal(self, one: _Part, other: _Part) -> bool:
        """Whether both records have equal elements in the boxes of this rank."""
        a, b = one.record, other.record
        for piece in one.pieces:
            if a.dtype == b.dtype:
                found = [list(record.pieces.locate(piece.box)) for record in (a, b)]
                same = same_bytes(*found)
                if same is not None:
                    if not same:
                        return False
                    continue
            most = BLOCK_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)
            for box in blocks(piece.box, most):
                first, second = (self._read(record, box, one.local.dtype) for record in (a, b))
                if not np.array_equal(memory_of(first), memory_of(second)):
                    return False
        return True

    def _read(self, record: TensorRecord, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Reads a box as a packed tensor of a target's dtype."""
        tensor = empty_for(record, box.shape)
        requests = requests_for(record, [Piece.packed(box)])
        read_requests(self.reader, requests, [memory_of(tensor)], self.verify)
        return tensor.to(dtype)

    def _as_placed(self, parts: Sequence[_Part]) -> Iterator[Difference]:
        """Yields the difference of views with different shapes, by values placed as the targets."""
        needed = group_bytes([part.local for part in parts])
        if needed > self.budget:
            first, other = parts[0].name, parts[1].name
            yield Difference(
                other,
                "structure",
                f"shares memory with {first} in the target as a view of another shape; to compare "
                f"their saved values takes {needed} bytes of memory, and the budget is "
                f"{self.budget} bytes; leave one out with exclude=, or raise CKPT_MEMORY_BUDGET",
            )
            return
        found = conflict([self._placed(part) for part in parts])
        if found is not None:
            yield found

    def _placed(self, part: _Part) -> Placed:
        values = empty_for(part.record, part.local.shape)
        requests = requests_for(part.record, part.pieces)
        read_requests(self.reader, requests, [memory_of(values)], self.verify)
        return Placed(part.name, part.local, values.to(part.local.dtype))


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of an item."""

    name: str
    record: TensorRecord
    local: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.itemsize

    def is_like(self, other: _Part) -> bool:
        """Whether the two targets are equal views with equal pieces."""
        here, there = self.local, other.local
        is_one = here.data_ptr() == there.data_ptr() and is_same_view(here, there)
        return is_one and self.pieces == other.pieces


def same_bytes(a: Sequence[StoredPiece], b: Sequence[StoredPiece]) -> bool | None:
    """Whether stored pieces hold equal bits, by place and checksums; None if these cannot tell.

    Only checksums of uncompressed chunks count. Compressed chunks may have different bytes for
    equal elements, or equal bytes relative to different bases.
    """
    for one, other in zip_longest(a, b):
        if one is None or other is None or one.piece != other.piece:
            return None
        here, there = one.extent, other.extent
        if here.chunks is None or there.chunks is None:
            if (here.file, here.offset, here.nbytes) != (there.file, there.offset, there.nbytes):
                return None
            continue
        if here.nbytes != there.nbytes or here.chunks.chunk_bytes != there.chunks.chunk_bytes:
            return None
        for index in range(len(here.chunks)):
            first, second = here.chunks[index], there.chunks[index]
            if first.compressed or second.compressed or len(first.digest) < DIGEST_BYTES:
                return None
            if first.digest != second.digest:
                return False
    return True


def blocks(box: Box, most: int) -> Iterator[Box]:
    """Yields the parts of a box with at most so many elements: halves along the first dimension.

    >>> [(one.lo, one.hi) for one in blocks(Box((0, 0), (4, 2)), 4)]
    [((0, 0), (2, 2)), ((2, 0), (4, 2))]
    """
    if box.numel <= most:
        if box:
            yield box
        return
    dim = next(at for at, size in enumerate(box.shape) if size > 1)
    middle = (box.lo[dim] + box.hi[dim]) // 2
    yield from blocks(Box(box.lo, (*box.hi[:dim], middle, *box.hi[dim + 1 :])), most)
    yield from blocks(Box((*box.lo[:dim], middle, *box.lo[dim + 1 :]), box.hi), most)
