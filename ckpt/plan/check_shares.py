"""Divides the comparison of checksums among ranks that read the same memory.

Ranks on the host of a live state map its memory. Where each of them reads every chunk of a tensor,
as for columns of a matrix or for replicas, one comparison of a chunk serves all: no rank returns
from a load before all ranks have compared their shares.

Rules:

1. A tensor is divided if the target cuts none of its first dimensions, the checkpoint cuts none of
   the others, and all ranks hold elements of it. A *period* is the bytes of all elements with the
   same first indices. Any so many bytes of the checkpoint hold elements of each rank, so each rank
   reads each chunk that is as long.
2. A rank has neighbouring chunks of each extent, about as many as any other. The last chunk, which
   may be shorter, belongs to all.
3. The division follows from names, layouts and shapes alone. `CheckShare.fingerprint` tells whether
   the ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import xxhash

from ckpt.plan.read_plan import BoxCopies
from formats.catalog import Catalog, Chunks
from sharding.layout import Layout, Mesh, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from ckpt.plan.load_plan import LoadItem  # which imports numpy


@dataclass(frozen=True, slots=True)
class CheckShare:
    """The chunks whose checksums one rank compares, of the tensors that several ranks divide."""

    index: int = 0
    count: int = 1
    """The number of ranks; `index` is that of this rank."""
    periods: Mapping[str, int] = field(default_factory=dict)
    """By the target's names: the period in bytes (rule 1)."""
    fingerprint: int = 0
    """64 bits, equal on ranks that divide the same tensors alike; 0 without any."""

    def runs(self, name: str, chunks: Chunks, first: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges that this rank compares of the stored chunks from `first` on.

        They are bytes from 0 to `nbytes`, the first one that of chunk `first`.
        """
        size, last = chunks.chunk_bytes, len(chunks) - 1
        if chunks.compressed or not 0 < self.periods.get(name, 0) <= size:
            yield 0, nbytes
            return
        mine = last * self.index // self.count, last * (self.index + 1) // self.count
        for lo, hi in (mine, (last, last + 1)):
            begin, end = max(0, (lo - first) * size), min((hi - first) * size, nbytes)
            if begin < end:
                yield begin, end


NOTHING_SHARED = CheckShare()
"""Each rank compares every chunk that it reads."""


def check_share(
    memory: str, items: Sequence[LoadItem], catalog: Catalog, world: Mesh, rank: int
) -> CheckShare:
    """Returns the share of a rank that reads these items from memory of this name.

    `world` has all ranks along one axis. The share counts only if all ranks have one fingerprint.
    """
    everyone, copies = tuple(world.ranks()), BoxCopies()
    known: dict[Layout, tuple[int, str]] = {}
    periods: dict[str, int] = {}
    hasher = xxhash.xxh3_64(memory.encode())
    for item in items:
        record, layout = catalog.tensors[item.source], item.layout
        if layout not in known:
            known[layout] = _whole_dims(layout, everyone, copies), f"{layout.mesh!r} {layout}"
        dims, text = known[layout]
        if dims and record.layout is not None and _has_whole_slices(record.layout, dims):
            periods[item.name] = prod(record.shape[dims:]) * record.dtype.itemsize
            hasher.update(f"{item.name}\n{item.source}\n{text}\n".encode())
    if not periods:
        return NOTHING_SHARED
    return CheckShare(everyone.index(rank), len(everyone), periods, hasher.intdigest())


def _whole_dims(layout: Layout, ranks: Sequence[int], copies: BoxCopies) -> int:
    """Returns the number of leading dimensions that a target does not cut; 0 if rule 1 fails."""
    if not all(any(map(copies.numel, copies.pieces(layout, rank))) for rank in ranks):
        return 0
    dims = [len(layout.shape)]
    for placement in layout.placements:
        if isinstance(placement, Shard | StridedShard):
            dims.append(placement.dim)
        elif not isinstance(placement, Replicate):
            return 0
    return min(dims)


def _has_whole_slices(layout: Layout, dims: int) -> bool:
    """Whether the stored parts of a tensor have all elements of the dimensions from `dims` on."""
    cuts = [one for one in layout.placements if isinstance(one, Shard | StridedShard)]
    return all(one.dim < dims for one in cuts)
