"""One load as a value: the reads, stages, exchanges and scatter rounds of one rank.

`plan_load` turns load items into a `LoadPlan`. The plan is printable and holds no memory: targets
are numbers, and `ckpt.transfer.run` knows the tensor of each number. The catalog says where each
tensor lies: in extents of files, or in the memory of ranks (`PeerPieces`).

Rules:

1. An item is one direct read if its bytes can be read into the target's memory as it lies. Any
   other item is *staged*: it is read into memory of its own and copied. A large item is staged a
   number of rows at a time.
2. Ranks that want the same elements may each read a share and exchange it: a replicated tensor is
   divided evenly (`Split`), as a save divides it, and a small one is read by one rank, each rank in
   its turn (`Only`). A rank reads its share directly into its target. Staged items take no part.
3. If more ranks load than saved, they may scatter their reads from a server
   (`ckpt.plan.scatter_plan`).
4. Exchanges and scatter rounds follow from names, layouts and sizes alone, so ranks that want the
   same plan the same. `LoadPlan.fingerprint` tells whether they did.

Ranks on the host of a live state map its memory. Where each of them reads every chunk of a tensor,
as for columns of a matrix or for replicas, they divide the comparison of its checksums: no rank
returns from a load before all ranks have compared their shares.

5. A comparison is divided if the target cuts none of the tensor's first dimensions, the checkpoint
   cuts none of the others, and all ranks hold elements of it. A *period* is the bytes of all
   elements with the same first indices. As many bytes of the checkpoint hold elements of each rank,
   so each rank reads each chunk that is as long.
6. A rank has neighbouring chunks of each extent, about as many as any other. The last chunk, which
   may be shorter, belongs to all.
7. The division follows from names, layouts and shapes alone. `CheckShare.fingerprint` tells whether
   the ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple

import xxhash

from ckpt.plan.read_plan import (
    BoxCopies,
    Limits,
    ReadRequest,
    byte_ranges_of,
    groups_of,
    requests_for,
)
from ckpt.plan.scatter_plan import Scatter, ScatterRound, TensorMove, positions
from formats.catalog import Catalog, Chunks, Extent, StoredPiece, TensorRecord
from formats.dtypes import DType
from sharding.layout import (
    Box,
    Layout,
    Mesh,
    Only,
    Piece,
    Placement,
    Replicate,
    Shape,
    Shard,
    Split,
    StridedShard,
)
from sharding.layout.copies import exchange

SMALL_BYTES = 1 << 20
"""A part of a replicated tensor of at most so many bytes is not divided."""


class LoadItem(NamedTuple):
    """One tensor of the target, and the record of the catalog that fills it."""

    name: str
    """The tensor's name in the target."""
    source: str
    """The record's name in the catalog."""
    target: int
    """The number of the target, or `NOWHERE` if only other ranks want the tensor."""
    layout: Layout
    """The target's layout."""
    shape: tuple[int, ...]
    """The shape of this rank's local tensor."""
    is_direct: bool
    """Whether bytes of the record can be read into the target's memory as it lies."""


class Stage(NamedTuple):
    """Memory into which a tensor, or a part of its rows, is read before it is copied."""

    dtype: DType
    """The record's dtype."""
    shape: tuple[int, ...]
    lo: int
    """The first row in the target; 0 for a tensor without dimensions."""

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.shape)


class TensorRead(NamedTuple):
    """The reads of one tensor, or of a part of its rows."""

    name: str
    target: int
    requests: Sequence[ReadRequest]
    stage: Stage | None
    """None for a direct read."""


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """The options of a plan, and its limits of memory."""

    stage_bytes: int
    """The most bytes staged at once."""
    exchange: bool = False
    """Whether replicas exchange the elements that they read."""
    scatter_bytes: int = 0
    """The most bytes read for other ranks at once, and received from them; 0: no scatter reads."""
    move_bytes: int = 0
    """The most bytes moved at once between the memory of ranks."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One rank's part in a load."""

    reads: tuple[TensorRead, ...]
    """The reads from files, in the order of the items."""
    exchanges: tuple[TensorMove, ...] = ()
    """Moves between replicas, after all reads. A source is a range of its own target's elements."""
    scatter_rounds: tuple[ScatterRound, ...] = ()
    """The scatter rounds, after the exchanges."""
    peer_moves: tuple[tuple[TensorMove, ...], ...] = ()
    """Moves from the memory of ranks, in batches. A source is a rank's part of a tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the targets that the plan fills on this rank, each once."""
        found = dict.fromkeys(read.name for read in self.reads)
        found.update((move.name, None) for round_ in self.scatter_rounds for move in round_.moves)
        return tuple(found)

    @property
    def requests(self) -> Iterator[ReadRequest]:
        return (request for read in self.reads for request in read.requests)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank reads from files, before they are rounded out to chunks."""
        scattered = (request for round_ in self.scatter_rounds for request in round_.requests)
        wanted = chain(self.requests, scattered)
        return sum(request.box_copy.numel * request.itemsize for request in wanted)

    @property
    def fingerprint(self) -> int:
        """64 bits, equal on ranks with equal exchanges and scatter rounds; 0 without any."""
        if not self.exchanges and not self.scatter_rounds:
            return 0
        hasher = xxhash.xxh3_64()
        for move in self.exchanges:
            hasher.update(repr((move.name, move.itemsize, move.have, move.want)).encode())
        for number, round_ in enumerate(self.scatter_rounds):
            hasher.update(repr(round_.sends).encode())
            for move in round_.moves:
                move_text = (number, move.name, move.itemsize, move.have, move.want)
                hasher.update(repr(move_text).encode())
        return hasher.intdigest()


@dataclass(frozen=True, slots=True)
class PeerPieces:
    """The pieces of a tensor that the ranks hold in memory."""

    layout: Layout

    def __iter__(self) -> Iterator[StoredPiece]:
        return self.locate(Box.whole(self.layout.shape))

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the pieces of ranks that hold elements of `box`; the extents have no file."""
        for rank in self.layout.holders(box):
            for piece in self.layout.pieces(rank):
                if piece.box & box:
                    yield StoredPiece(piece, Extent(f"rank {rank}", 0, 0))


def plan_load(
    items: Iterable[LoadItem],
    catalog: Catalog,
    world: Mesh,
    rank: int,
    policy: LoadPolicy,
    copies: BoxCopies | None = None,
) -> LoadPlan:
    """Returns the plan by which `rank` fills its items. Pure, but for headers of files it looks up.

    `world` has all ranks along one axis. `copies` may be shared by several plans.

    Raises:
        HoleError: elements of an item are stored nowhere, or twice.
    """
    copies = BoxCopies() if copies is None else copies
    planner = _Planner(
        catalog.tensors,
        world,
        rank,
        policy,
        copies,
        Scatter(world, rank, policy.scatter_bytes, copies) if policy.scatter_bytes else None,
        [],
        [],
        {},
    )
    peers = [item for item in items if planner.add(item)]
    return LoadPlan(
        tuple(planner.reads),
        tuple(planner.exchanges),
        () if planner.scatter is None else planner.scatter.rounds(),
        tuple(planner.batches(peers)),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    records: Mapping[str, TensorRecord]
    world: Mesh
    rank: int
    policy: LoadPolicy
    copies: BoxCopies
    scatter: Scatter | None
    """None: no tensor is scattered."""
    reads: list[TensorRead]
    exchanges: list[TensorMove]
    shares: dict[tuple[Layout, int | None], Layout]

    def add(self, item: LoadItem) -> bool:
        """Plans one item; returns True for an item in the ranks' memory, which is planned later."""
        name, source, target, layout, _, is_direct = item
        record = self.records[source]
        if isinstance(record.pieces, PeerPieces):
            return True
        if not is_direct:
            self.reads.extend(self._read_staged(item, record))
            return False
        pieces: Sequence[Piece] = self.copies.pieces(layout, self.rank)
        if self.policy.exchange:
            if self.scatter is not None and self.scatter.takes(name, record, target, layout):
                return False
            pieces = self._share_of(item, record.dtype.itemsize, pieces)
        requests = requests_for(record, pieces, target, self.copies, name)
        self.reads.append(TensorRead(name, target, requests, None))
        return False

    def _read_staged(self, item: LoadItem, record: TensorRecord) -> Iterator[TensorRead]:
        """Yields the reads of a staged item: one read, or one for each run of rows (rule 1)."""
        name, _, target, layout, shape, _ = item
        pieces, dtype = self.copies.pieces(layout, self.rank), record.dtype
        if not shape or dtype.nbytes(shape) <= self.policy.stage_bytes:
            requests = requests_for(record, pieces, target, self.copies, name)
            yield TensorRead(name, target, requests, Stage(dtype, shape, 0))
            return
        row = prod(shape[1:])
        step = max(1, self.policy.stage_bytes // dtype.nbytes(shape[1:]))
        for first in range(0, shape[0], step):
            rows = min(step, shape[0] - first)
            lo, hi = first * row, (first + rows) * row
            some = [part for piece in pieces for part in piece.within(lo, hi)]
            moved = [Piece(part.box, part.at - lo, part.strides) for part in some]
            requests = requests_for(record, moved, target, name=name)
            yield TensorRead(name, target, requests, Stage(dtype, (rows, *shape[1:]), first))

    def _share_of(self, item: LoadItem, itemsize: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Returns the pieces of a direct item that this rank reads (rule 2)."""
        layout = item.layout
        have = self._share(layout, itemsize)
        if have is None:
            return pieces
        begin, _ = layout.span(self.rank)
        lo, hi = have.span(self.rank)
        source = lo - begin, hi - begin
        self.exchanges.append(TensorMove(item.name, itemsize, source, have, item.target, layout))
        return [
            Piece(piece.box, piece.at + lo - begin, piece.strides)
            for piece in have.pieces(self.rank)
        ]

    def _share(self, layout: Layout, itemsize: int) -> Layout | None:
        """Returns the layout of the reads; None without replicas, or with ranks elsewhere."""
        if layout.replicas == 1 or layout.numel == 0:
            return None
        turn = None
        if layout.numel * layout.replicas * itemsize <= SMALL_BYTES * layout.mesh.size:
            turn = (len(self.exchanges) + 1) % layout.replicas
        if positions(layout.mesh, self.world) is None:
            return None
        key = layout, turn
        if key not in self.shares:
            self.shares[key] = divide_replicas(layout, turn)
        return self.shares[key]

    def batches(self, items: Sequence[LoadItem]) -> Iterator[tuple[TensorMove, ...]]:
        """Yields the moves from the ranks' memory in batches: `move_bytes`, or one larger tensor.

        Raises HoleError for elements that no rank has.
        """
        batch: list[TensorMove] = []
        nbytes = 0
        for name, source, target, layout, _, _ in items:
            record = self.records[source]
            have = record.pieces
            assert isinstance(have, PeerPieces)
            exchange(have.layout, layout, self.rank)  # finds holes
            if batch and nbytes + record.nbytes > self.policy.move_bytes:
                yield tuple(batch)
                batch, nbytes = [], 0
            lo, hi = have.layout.span(self.rank)
            size = record.dtype.itemsize
            batch.append(TensorMove(name, size, (0, hi - lo), have.layout, target, layout))
            nbytes += record.nbytes
        if batch:
            yield tuple(batch)


def divide_replicas(layout: Layout, turn: int | None) -> Layout:
    """Returns the layout that holds each element once: evenly, or by replica `turn` alone.

    >>> mesh = Mesh.grid(("dp",), (2,))
    >>> replicated = Layout((4,), mesh, (Replicate(),))
    >>> str(divide_replicas(replicated, None)), str(divide_replicas(replicated, 1))
    ('dp:2=split', 'dp:2=only(1)')
    """
    placements: list[Placement] = []
    for placement, size in zip(layout.placements, layout.mesh.sizes, strict=True):
        if not isinstance(placement, Replicate):
            placements.append(placement)
        elif turn is None:
            placements.append(Split())
        else:
            turn, index = divmod(turn, size)
            placements.append(Only(index))
    return Layout(layout.shape, layout.mesh, tuple(placements))


@dataclass(frozen=True, slots=True)
class RankReads:
    """The reads of one rank in one load."""

    rank: int
    tensors: int
    """Tensors of which the rank holds elements."""
    wanted_bytes: int
    """Bytes of the checkpoint that the rank's elements take."""
    read_bytes: int
    """Bytes that the rank reads from files: rounded out to checksummed chunks, and less for a rank
    whose replicas send it elements."""
    requests: int
    """Reads of ranges. Each is one request to a server."""
    files: int


def rank_reads(
    catalog: Catalog,
    layout_of: Callable[[str, Shape], Layout],
    world: Mesh,
    rank: int,
    policy: LoadPolicy,
    limits: Limits,
    copies: BoxCopies,
) -> RankReads:
    """Returns the reads of a rank whose tensors have the checkpoint's names, shapes and dtypes.

    `layout_of` has the layout of each tensor on the ranks of `world`. The targets are contiguous,
    so their bytes are read directly into them. Raises as `plan_load` does.
    """
    items: list[LoadItem] = []
    wanted = 0
    for name, record in catalog.tensors.items():
        layout = layout_of(name, record.shape)
        items.append(LoadItem(name, name, len(items), layout, layout.local_shape(rank), True))
        wanted += sum(map(copies.numel, copies.pieces(layout, rank))) * record.dtype.itemsize
    plan = plan_load(items, catalog, world, rank, policy, copies)
    ranges = byte_ranges_of(_requests(plan), True, limits)
    groups = list(groups_of(ranges, limits))
    return RankReads(
        rank,
        sum(any(map(copies.numel, copies.pieces(item.layout, rank))) for item in items),
        wanted,
        sum(max(span.hi for span in group) - group[0].lo for group in groups),
        len(groups),
        len({span.file for span in ranges}),
    )


def _requests(plan: LoadPlan) -> Iterator[ReadRequest]:
    yield from plan.requests
    for round_ in plan.scatter_rounds:
        yield from round_.requests


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
    cuts = [
        placement for placement in layout.placements if isinstance(placement, Shard | StridedShard)
    ]
    return all(cut.dim < dims for cut in cuts)
