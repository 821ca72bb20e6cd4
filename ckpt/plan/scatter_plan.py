"""Scatter reads from a server: each rank reads large ranges for others.

More ranks load than saved, or each rank wants short runs of a tensor, such as columns of a matrix.

Each rank wants a part of every tensor, and between two parts of one rank lie the parts of others.
Reads of single parts would need a request for each tensor and rank. Neighbouring tensors therefore
form a *read batch*, which one rank of several reads and scatters to the others.

Rules:

1. The batches and their readers follow from names, layouts and sizes alone: all ranks plan alike.
2. If more ranks load than saved, they take turns, batch by batch, so that each reads as much as the
   others. A tensor is scattered from its stored layout, with the readers of its batch in the place
   of the saving ranks. A tensor that lies whole in a file of another format counts as one that a
   single rank saved.
3. Any other tensor of which a rank wants runs of less than `SHORT_BYTES` is read evenly by all
   ranks: each rank would read most of it, whole chunks and gaps.
4. Batches are read and scattered in *rounds*. Per round, a rank reads at most `most_bytes`, holds
   them until the round is over, and receives at most half as many at a time. A tensor is not
   scattered if one rank would read more of it.

The sizes of a tensor's shards for all ranks together, by arithmetic on arrays.

A plan that divides work needs the sizes of shards of thousands of tensors. Calls of `Layout.span`
for each rank would take longer than the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from ckpt.plan.read_plan import BoxCopies, ReadRequest, requests_for
from formats.catalog import PieceTable, TensorRecord
from sharding.layout import FlatShard, Layout, Mesh, Only, Replicate, Shard, Split, StridedShard

if TYPE_CHECKING:
    import numpy as np  # opening and verifying a checkpoint start without it

SHORT_BYTES = 64 << 10
"""A chunk of a shard file. A run that is shorter is read with more bytes around it than in it."""


class TensorMove(NamedTuple):
    """One rank's part in the move of a tensor from one layout into another."""

    name: str
    itemsize: int
    source: tuple[int, int]
    """The elements of the source that this rank holds under `have`; `LoadPlan` names the source."""
    have: Layout
    target: int
    want: Layout


@dataclass(frozen=True, slots=True)
class ScatterRound:
    """Tensors that are read, held and scattered together."""

    moves: tuple[TensorMove, ...]
    """The moves. A source is memory of its own, which this rank allocates and fills before."""
    requests: tuple[ReadRequest, ...]
    """The reads that fill the sources; their target is the position of the move in `moves`."""
    sends: tuple[tuple[int, int], ...]
    """For each message, in order: the number of its moves, and the bytes of all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One tensor that is scattered."""

    name: str
    record: TensorRecord
    stored: Layout
    target: int
    want: Layout
    savers: np.ndarray
    """The ranks of the stored mesh, in row-major order."""
    wanting: np.ndarray
    """The ranks of the wanted mesh, by their positions in the world."""

    @property
    def part_bytes(self) -> int:
        """The average bytes of a saving rank."""
        return -(-self.record.nbytes // self.stored.mesh.size)

    @property
    def reads(self) -> np.ndarray:
        """The bytes to read, for each saving rank."""
        import numpy as np

        found = np.empty(len(self.savers), np.int64)
        found[self.savers] = elements_held(self.stored) * self.record.dtype.itemsize
        return found

    @property
    def receives(self) -> np.ndarray:
        """The most bytes that each wanting rank receives, in the order of `wanting`."""
        return elements_held(self.want) * self.record.dtype.itemsize


_Batch = tuple[int, list[_Entry]]
"""The number of a read batch, which chooses its readers, and its tensors."""


class Scatter:
    """Collects the tensors of one load that are scattered."""

    def __init__(self, world: Mesh, rank: int, most_bytes: int, copies: BoxCopies) -> None:
        self._world = world
        self._ranks = list(world.ranks())
        self._rank = rank
        self._most_bytes = most_bytes
        self._copies = copies
        self._entries: list[_Entry] = []
        self._readers: dict[tuple[Mesh, int], Mesh] = {}

    def takes(self, name: str, record: TensorRecord, target: int, want: Layout) -> bool:
        """Takes a tensor with a direct target if it is to be scattered; returns whether it is."""
        stored = self._reading_layout(record, want)
        if stored is None or not 0 < record.nbytes <= self._most_bytes * stored.mesh.size:
            return False
        savers = positions(stored.mesh, Mesh.grid(("saved",), (stored.mesh.size,)))
        wanting = positions(want.mesh, self._world)
        if savers is None or wanting is None:
            return False
        entry = _Entry(name, record, stored, target, want, savers, wanting)
        if entry.reads.max() > self._most_bytes:
            return False
        self._entries.append(entry)
        return True

    def _reading_layout(self, record: TensorRecord, want: Layout) -> Layout | None:
        """Returns the layout, over ranks that saved or over all, by which a tensor is read."""
        stored, ranks = _layout_of_record(record), self._world.size
        savers = ranks if stored is None or stored.replicas > 1 else stored.mesh.size
        if savers < ranks:
            return stored
        if not _has_short_runs(want, record.dtype.itemsize):
            return None
        return Layout(record.shape, Mesh.grid(("saved",), (ranks,)), (Split(),))

    def rounds(self) -> tuple[ScatterRound, ...]:
        """Returns the rounds. Opens the files that this rank reads."""
        return tuple(self._round(batches) for batches in self._divide())

    def _divide(self) -> list[list[_Batch]]:
        """Returns the rounds of batches of tensors (rules 2 and 3).

        A batch has less than `most_bytes` if a rank would have no batch to read otherwise.
        """
        import numpy as np

        every = sum(entry.part_bytes for entry in self._entries)
        turns = max((self._turns(entry.stored.mesh.size) for entry in self._entries), default=1)
        most_parts = min(self._most_bytes, -(-every // turns))
        number, parts = -1, 0  # of the current batch
        reading = np.zeros(self._world.size, np.int64)  # by each rank, in the current batch
        before = np.zeros_like(reading)  # by each rank, in earlier batches of its round
        rounds: list[list[_Batch]] = []
        # Sorted into the order of the files; the target has the order of the state.
        for entry in sorted(self._entries, key=_place_in_file):
            reads = entry.reads
            if (
                not rounds
                or parts + entry.part_bytes > most_parts
                or (reading[self._reading(entry, number)] + reads).max() > self._most_bytes
            ):
                number, parts = number + 1, 0
                before += reading
                reading[:] = 0
                rounds = rounds or [[]]
                rounds[-1].append((number, []))
            readers = self._reading(entry, number)
            reading[readers] += reads
            parts += entry.part_bytes
            if (before[readers] + reading[readers]).max() > self._most_bytes:
                rounds.append([rounds[-1].pop()])
                before[:] = 0
            rounds[-1][-1][1].append(entry)
        return rounds

    def _round(self, batches: Sequence[_Batch]) -> ScatterRound:
        moves: list[TensorMove] = []
        requests: list[ReadRequest] = []
        entries = [(number, entry) for number, found in batches for entry in found]
        for number, entry in entries:
            have, lo, hi = self._read_as(entry.stored, number), 0, 0
            if have.mesh.coordinate(self._rank) is not None:
                pieces = self._copies.pieces(have, self._rank)
                requests += requests_for(entry.record, pieces, len(moves), self._copies, entry.name)
                lo, hi = have.span(self._rank) if pieces else (0, 0)
            size = entry.record.dtype.itemsize
            moves.append(TensorMove(entry.name, size, (0, hi - lo), have, entry.target, entry.want))
        sends = tuple(self._sends([entry for _, entry in entries]))
        return ScatterRound(tuple(moves), tuple(requests), sends)

    def _sends(self, entries: Sequence[_Entry]) -> Iterator[tuple[int, int]]:
        """Yields, for each message in order, the number of its tensors and their bytes.

        No rank receives more than half of `most_bytes` at once: ranks of one host see the messages
        of all. A tensor of which one rank receives more travels alone, with that bound in the place
        of its bytes.
        """
        import numpy as np

        count, nbytes, most = 0, 0, self._most_bytes // 2
        received = np.zeros(self._world.size, np.int64)
        for entry in entries:
            more = entry.receives
            if count and (received[entry.wanting] + more).max() > most:
                yield count, nbytes if received.max() <= most else most
                count, nbytes, received = 0, 0, np.zeros_like(received)
            received[entry.wanting] += more
            count, nbytes = count + 1, nbytes + entry.record.nbytes
        if count:
            yield count, nbytes if received.max() <= most else most

    def _read_as(self, stored: Layout, number: int) -> Layout:
        """Returns a stored layout with a batch's readers in the place of the ranks that saved."""
        mesh, turn = stored.mesh, number % self._turns(stored.mesh.size)
        readers = self._readers.get((mesh, turn))
        if readers is None:
            order = self._readers_of(mesh.size, turn)
            ranks = [self._ranks[order[rank]] for rank in mesh.ranks()]
            readers = Mesh.of_ranks(mesh.names, mesh.sizes, ranks)
            self._readers[mesh, turn] = readers
        return Layout(stored.shape, readers, stored.placements)

    def _reading(self, entry: _Entry, number: int) -> list[int]:
        """Returns the positions in the world of the ranks that read a tensor in a batch."""
        savers = entry.stored.mesh.size
        return self._readers_of(savers, number % self._turns(savers))

    def _turns(self, savers: int) -> int:
        """Returns the number of batches after which all ranks have read equally often."""
        return self._world.size // gcd(self._world.size, savers)

    def _readers_of(self, savers: int, turn: int) -> list[int]:
        """Returns the positions of the readers, one for each saving rank, in the order of these."""
        ranks = range(savers)
        return [(rank * self._world.size // savers + turn) % self._world.size for rank in ranks]


def _layout_of_record(record: TensorRecord) -> Layout | None:
    """Returns the layout of a stored tensor; None if it lies in several pieces without a layout."""
    if record.layout is None and isinstance(record.pieces, PieceTable) and len(record.pieces) == 1:
        return Layout.single(record.shape, 0)
    return record.layout


def _has_short_runs(want: Layout, itemsize: int) -> bool:
    """Whether a rank's elements lie in runs of less than `SHORT_BYTES`, with others between."""
    cut = 0
    for placement, size in zip(want.placements, want.mesh.sizes, strict=True):
        if isinstance(placement, Shard | StridedShard) and size > 1:
            cut = max(cut, placement.dim)
        elif not isinstance(placement, Shard | StridedShard | Replicate):
            return False
    most = want.local_shape(want.mesh.rank((0,) * len(want.mesh.sizes)))  # the first has the most
    return cut > 0 and prod(most[:cut]) > 1 and prod(most[cut:]) * itemsize < SHORT_BYTES


def _place_in_file(entry: _Entry) -> tuple[int, str, int]:
    """Returns a key that sorts tensors into the order of the files, without opening any."""
    pieces = entry.record.pieces
    if entry.record.layout is None:
        stored = next(iter(pieces))
        return 0, stored.extent.file, stored.extent.offset
    return -entry.record.dtype.itemsize, "", 0


def elements_held(layout: Layout) -> np.ndarray:
    """Returns the largest number of elements of each mesh coordinate, in row-major order.

    The numbers are exact along `FlatShard` and `Only` axes. Along other axes that cut unevenly, all
    coordinates count like the one with the most elements.

    >>> from sharding.layout import Shard
    >>> mesh = Mesh.grid(("dp",), (3,))
    >>> elements_held(Layout((10,), mesh, (FlatShard(1, 5),))).tolist()
    [4, 5, 1]
    >>> elements_held(Layout((7,), mesh, (Shard(0),))).tolist()  # 3, 3 and 1
    [3, 3, 3]
    """
    import numpy as np

    sizes = layout.mesh.sizes
    axes = list(zip(layout.placements, sizes, np.indices(sizes, sparse=True), strict=True))
    # Coordinate 0 of an axis that cuts dimensions has the most.
    most = prod(layout.local_shape(layout.mesh.rank((0,) * len(sizes))))
    lo = np.zeros((1,) * len(sizes), np.int64)
    hi = lo + most
    for placement, _, index in axes:
        if isinstance(placement, FlatShard):
            start = index * placement.stride - placement.offset
            end = np.minimum(hi, lo + start + placement.stride)
            lo = lo + np.maximum(start, 0)
            hi = np.maximum(lo, end)
    elements, parts = hi - lo, 1
    for placement, size, index in axes:
        if isinstance(placement, Only):
            elements = elements * (index == placement.index)
        elif isinstance(placement, Split):
            parts *= size
    return np.broadcast_to(-(-elements // parts), sizes).reshape(-1)


@lru_cache(maxsize=64)
def positions(mesh: Mesh, world: Mesh) -> np.ndarray | None:
    """Returns the positions of a mesh's ranks in a world of one axis; None if one is not in it.

    The result is cached, because a model has thousands of tensors and few meshes, and is read-only.

    >>> positions(Mesh.grid(("tp",), (2,), 1), Mesh.grid(("world",), (4,)))
    array([1, 2])
    """
    import numpy as np

    found = [at[0] for at in map(world.coordinate, mesh.ranks()) if at is not None]
    if len(found) < mesh.size:
        return None
    array = np.array(found, np.int64)
    array.setflags(write=False)
    return array
