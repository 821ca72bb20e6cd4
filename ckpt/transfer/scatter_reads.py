"""Loading by more ranks than saved, from a server: files are read from end to end, and dealt out.

Each of the ranks wants a part of every tensor, and between two parts of one rank lie those of the
others: to ask for each by itself is a request for every tensor and rank. So tensors that lie side
by side are a *lot*, which one rank reads, and gives the others their parts of.

Rules:

1. What is in which lot, and who reads it, follows from names, layouts and sizes alone: all ranks
   plan the same, and `mark` says whether they did.
2. The file of a saved rank is read by as many ranks as there are to each that saved, lot by lot in
   turn. A tensor is dealt out under its stored layout, with those readers in the place of the ranks
   that saved.
3. Lots are read and dealt out in *rounds*. A rank has at most `lot_bytes` of a round to read, held
   until the round is over; once more as messages, and as much of what it receives at a time. A
   tensor of which a rank would read more is not taken.
4. A read that fails lets the exchanges go on, for the others wait for them, and is raised after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.plan.read_plan import Fits, Request, requests_for
from ckpt.plan.shard_sizes import elements_held, positions
from ckpt.state.memory import memory_of
from formats.catalog import TensorRecord
from sharding.layout import Layout, Mesh
from sharding.reshard.redistribute import Move

Wanted = tuple[str, list[Request], torch.Tensor]
"""The name of a tensor, what is to be read of it, and what that fills."""
Read = Callable[[Sequence[Wanted]], None]
Send = Callable[[Sequence[Move], int], None]
"""Moves to make, and how many bytes of them travel together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One tensor that is dealt out."""

    name: str
    record: TensorRecord
    stored: Layout
    local: torch.Tensor
    want: Layout
    savers: np.ndarray
    """The ranks of the stored mesh, in row-major order."""
    wanting: np.ndarray
    """Those of the wanted one, by their positions in the world."""

    @property
    def part_bytes(self) -> int:
        """What each rank that saved has of it, on average."""
        return -(-self.record.nbytes // self.stored.mesh.size)

    @property
    def reads(self) -> np.ndarray:
        """Bytes to read, for each rank that saved."""
        found = np.empty(len(self.savers), np.int64)
        found[self.savers] = elements_held(self.stored) * self.local.itemsize
        return found

    @property
    def receives(self) -> np.ndarray:
        """Bytes that come to each rank that wants some, at the most; as in `wanting`."""
        return elements_held(self.want) * self.local.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """One tensor of a lot, and who reads it."""

    entry: _Entry
    have: Layout
    requests: list[Request]
    """This rank's part in that, without the memory yet; none where others read."""


_Lot = list[_Dealt]
"""Tensors that are read by the same ranks."""
_Moving = tuple[_Entry, Move]
"""A tensor on its way."""


class Lots:
    """The tensors of one load that are read so."""

    def __init__(self, world: Mesh, here: int, lot_bytes: int) -> None:
        """`lot_bytes` is what a rank may read for others at a time; with 0 nothing is taken."""
        self._world = world
        self._ranks = list(world.ranks())
        self._here = here
        self._lot_bytes = lot_bytes
        self._entries: list[_Entry] = []
        self._rounds: list[list[_Lot]] = []
        self._readers: dict[tuple[Mesh, int], Mesh] = {}

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return [entry.name for entry in self._entries]

    def take(self, name: str, record: TensorRecord, local: torch.Tensor, want: Layout) -> bool:
        """Whether a tensor, whose local part is contiguous in memory, is read in a lot."""
        stored, ranks = record.layout, self._world.size
        if (
            stored is None
            or 2 * stored.mesh.size > ranks
            or ranks % stored.mesh.size
            or stored.replicas > 1
            or not 0 < record.nbytes <= self._lot_bytes * stored.mesh.size
        ):
            return False
        savers = positions(stored.mesh, Mesh.grid(("saved",), (stored.mesh.size,)))
        wanting = positions(want.mesh, self._world)
        if savers is None or wanting is None:
            return False
        entry = _Entry(name, record, stored, local, want, savers, wanting)
        if entry.reads.max() > self._lot_bytes:
            return False
        self._entries.append(entry)
        return True

    def plan(self, fits: Fits) -> None:
        """Divide what was taken into lots and rounds, and open the files that this rank reads.

        A rank reads at most `lot_bytes` of a lot, and less where some would have none to read.
        """
        every = sum(entry.record.nbytes for entry in self._entries)
        most_parts = min(self._lot_bytes, -(-every // self._world.size))
        number, parts = -1, 0  # of the last lot
        reading = np.zeros(self._world.size, np.int64)  # by each rank, of the last lot
        before = np.zeros_like(reading)  # and of those before it in its round
        rounds: list[list[_Lot]] = []
        # As they lie in the files, where the target has them in the order of the state.
        for entry in sorted(self._entries, key=lambda one: -one.record.dtype.itemsize):
            reads = entry.reads
            if (
                not rounds
                or parts + entry.part_bytes > most_parts
                or (reading[self._reading(entry, number)] + reads).max() > self._lot_bytes
            ):
                number, parts = number + 1, 0
                before += reading
                reading[:] = 0
                rounds = rounds or [[]]
                rounds[-1].append([])
            readers = self._reading(entry, number)
            reading[readers] += reads
            parts += entry.part_bytes
            if (before[readers] + reading[readers]).max() > self._lot_bytes:
                rounds.append([rounds[-1].pop()])
                before[:] = 0
            rounds[-1][-1].append(self._dealt(entry, number, fits))
        self._rounds = rounds

    def mark(self) -> tuple[str, ...]:
        """The same on ranks that deal out the same."""
        return tuple(
            f"{number} {dealt.entry.name} {dealt.entry.local.dtype} "
            f"{dealt.have!r} {dealt.entry.want!r}"
            for number, lots in enumerate(self._rounds)
            for lot in lots
            for dealt in lot
        )

    def deal(self, read: Read, send: Send, most_bytes: int) -> None:
        """Read and deal out all lots; a rank receives at most `most_bytes` at a time.

        Called by all ranks, with the same `most_bytes`. Raises what `read` raises (rule 4).
        """
        failed: list[Exception] = []
        for lots in self._rounds:
            self._deal(lots, read, send, most_bytes, failed)
        if failed:
            raise failed[0]

    def _deal(
        self, lots: Sequence[_Lot], read: Read, send: Send, most_bytes: int, failed: list[Exception]
    ) -> None:
        """One round; what was read for it is let go of at the end."""
        # All ranks read before any is waited for.
        moves = [move for lot in lots for move in self._read(lot, read, failed)]
        for batch, nbytes in self._batches(moves, most_bytes):
            send(batch, nbytes)

    def _read(self, lot: _Lot, read: Read, failed: list[Exception]) -> Iterator[_Moving]:
        """The tensors of a lot on their way, once they are read."""
        sources = [self._source(dealt) for dealt in lot]
        wanted = [
            (
                dealt.entry.name,
                [request._replace(memory=memory_of(source)) for request in dealt.requests],
                source,
            )
            for dealt, source in zip(lot, sources, strict=True)
            if dealt.requests
        ]
        if wanted and not failed:
            try:
                read(wanted)
            except Exception as error:
                failed.append(error)
        for dealt, source in zip(lot, sources, strict=True):
            entry = dealt.entry
            yield entry, Move(entry.name, source, dealt.have, entry.local, entry.want)

    def _batches(
        self, moves: Iterable[_Moving], most_bytes: int
    ) -> Iterator[tuple[list[Move], int]]:
        """Moves of which no rank receives more than `most_bytes`, and the bytes of all of them.

        A tensor of which some rank receives more is by itself, with `most_bytes`.
        """
        batch: list[Move] = []
        received, every = np.zeros(self._world.size, np.int64), 0

        def limit() -> int:
            return every if received.max() <= most_bytes else most_bytes

        for entry, move in moves:
            more = entry.receives
            if batch and (received[entry.wanting] + more).max() > most_bytes:
                yield batch, limit()
                batch, received, every = [], np.zeros_like(received), 0
            batch.append(move)
            received[entry.wanting] += more
            every += move.have.numel * move.target.itemsize
        if batch:
            yield batch, limit()

    def _dealt(self, entry: _Entry, number: int, fits: Fits) -> _Dealt:
        have = self._read_as(entry.stored, number)
        requests: list[Request] = []
        if have.mesh.coordinate(self._here) is not None:
            pieces = fits.pieces(have, self._here)
            requests = requests_for(entry.record, pieces, memoryview(b""), fits)
        return _Dealt(entry, have, requests)

    def _read_as(self, stored: Layout, number: int) -> Layout:
        """A stored layout with the readers of a lot in the place of those that saved (rule 2)."""
        mesh, each = stored.mesh, self._world.size // stored.mesh.size
        readers = self._readers.get((mesh, number % each))
        if readers is None:
            ranks = [self._ranks[rank * each + number % each] for rank in mesh.ranks()]
            readers = Mesh.of_ranks(mesh.names, mesh.sizes, ranks)
            self._readers[mesh, number % each] = readers
        return Layout(stored.shape, readers, stored.placements)

    def _reading(self, entry: _Entry, number: int) -> slice:
        """Who reads a tensor in a lot, by the ranks that saved: positions in the world."""
        each = self._world.size // entry.stored.mesh.size
        return slice(number % each, None, each)

    def _source(self, dealt: _Dealt) -> torch.Tensor:
        """Memory for this rank's part of a tensor as it is read; empty where others read."""
        lo, hi = 0, 0
        if dealt.requests:
            lo, hi = dealt.have.span(self._here)
        return torch.empty(hi - lo, dtype=dealt.entry.local.dtype, device="cpu")
