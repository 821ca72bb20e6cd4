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
from dataclasses import dataclass, field

import numpy as np
import torch

from ckpt.reading.bites import Fits, Request, requests_for
from ckpt.states.memory import memory_of
from formats.catalog import TensorRecord
from sharding.layout import Layout, Mesh
from sharding.states.redistribute import Move

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


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """One tensor of a lot, and who reads it."""

    entry: _Entry
    have: Layout
    requests: list[Request]
    """This rank's part in that, without the memory yet; none where others read."""


@dataclass(slots=True, eq=False)
class _Lot:
    """Tensors that are read by the same ranks."""

    number: int
    reads: np.ndarray
    """Bytes that each rank reads, by its position in the world."""
    part_bytes: int = 0
    """Of the file of each rank that saved, on average."""
    dealt: list[_Dealt] = field(default_factory=list)


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
        self._stored: dict[Layout, np.ndarray] = {}
        self._wanted: dict[Layout, np.ndarray] = {}

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
            or not 0 < record.nbytes <= self._lot_bytes * stored.mesh.size
            or sorted(stored.mesh.ranks()) != list(range(stored.mesh.size))
            or any(self._world.coordinate(rank) is None for rank in want.mesh.ranks())
        ):
            return False
        entry = _Entry(name, record, stored, local, want)
        if self._reads(entry).max() > self._lot_bytes:
            return False
        self._entries.append(entry)
        return True

    def plan(self, fits: Fits) -> None:
        """Divide what was taken into lots and rounds, and open the files that this rank reads.

        A rank reads at most `lot_bytes` of a lot, and less where some would have none to read.
        """
        lots: list[_Lot] = []
        every = sum(entry.record.nbytes for entry in self._entries)
        part_bytes = min(self._lot_bytes, -(-every // self._world.size))
        # As they lie in the files, where the target has them in the order of the state.
        for entry in sorted(self._entries, key=lambda one: -one.record.dtype.itemsize):
            part = -(-entry.record.nbytes // entry.stored.mesh.size)
            reads = self._reads(entry)
            if (
                not lots
                or lots[-1].part_bytes + part > part_bytes
                or (self._readers(lots[-1], entry) + reads).max() > self._lot_bytes
            ):
                lots.append(_Lot(len(lots), np.zeros(self._world.size, np.int64)))
            lot = lots[-1]
            lot.part_bytes += part
            self._readers(lot, entry)[:] += reads
            lot.dealt.append(self._dealt(entry, lot.number, fits))
        self._rounds = _rounds(lots, self._lot_bytes)

    def mark(self) -> tuple[str, ...]:
        """The same on ranks that deal out the same."""
        return tuple(
            f"{number} {dealt.entry.name} {dealt.entry.local.dtype} "
            f"{dealt.have!r} {dealt.entry.want!r}"
            for number, lots in enumerate(self._rounds)
            for lot in lots
            for dealt in lot.dealt
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

    def _read(self, lot: _Lot, read: Read, failed: list[Exception]) -> Iterator[Move]:
        """The tensors of a lot on their way, once they are read."""
        sources = [self._source(dealt) for dealt in lot.dealt]
        wanted = [
            (
                dealt.entry.name,
                [request._replace(memory=memory_of(source)) for request in dealt.requests],
                source,
            )
            for dealt, source in zip(lot.dealt, sources, strict=True)
            if dealt.requests
        ]
        if wanted and not failed:
            try:
                read(wanted)
            except Exception as error:
                failed.append(error)
        for dealt, source in zip(lot.dealt, sources, strict=True):
            entry = dealt.entry
            yield Move(entry.name, source, dealt.have, entry.local, entry.want)

    def _batches(self, moves: Iterable[Move], most_bytes: int) -> Iterator[tuple[list[Move], int]]:
        """Moves of which no rank receives more than `most_bytes`, and the bytes of all of them.

        A tensor of which some rank receives more is by itself, with `most_bytes`.
        """
        batch: list[Move] = []
        received, every = np.zeros(self._world.size, np.int64), 0

        def limit() -> int:
            return every if received.max() <= most_bytes else most_bytes

        for move in moves:
            more = self._parts(move.want, self._wanted, self._ranks) * move.target.itemsize
            if batch and (received + more).max() > most_bytes:
                yield batch, limit()
                batch, received, every = [], np.zeros_like(received), 0
            batch.append(move)
            received += more
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
        each = self._world.size // stored.mesh.size
        readers = [self._ranks[rank * each + number % each] for rank in stored.mesh.ranks()]
        mesh = Mesh.of_ranks(stored.mesh.names, stored.mesh.sizes, readers)
        return Layout(stored.shape, mesh, stored.placements)

    def _readers(self, lot: _Lot, entry: _Entry) -> np.ndarray:
        """What those read of a lot who read this tensor, by the ranks that saved: a view."""
        each = self._world.size // entry.stored.mesh.size
        return lot.reads[lot.number % each :: each]

    def _reads(self, entry: _Entry) -> np.ndarray:
        """The bytes of a tensor that are read for each rank that saved."""
        ranks = range(entry.stored.mesh.size)
        return self._parts(entry.stored, self._stored, ranks) * entry.local.itemsize

    def _parts(
        self, layout: Layout, known: dict[Layout, np.ndarray], ranks: Iterable[int]
    ) -> np.ndarray:
        """The elements that each of the ranks has of a tensor."""
        found = known.get(layout)
        if found is None:
            spans = [layout.span(rank) for rank in ranks]
            found = known[layout] = np.array([hi - lo for lo, hi in spans], np.int64)
        return found

    def _source(self, dealt: _Dealt) -> torch.Tensor:
        """Memory for this rank's part of a tensor as it is read; empty where others read."""
        lo, hi = 0, 0
        if dealt.requests:
            lo, hi = dealt.have.span(self._here)
        return torch.empty(hi - lo, dtype=dealt.entry.local.dtype)


def _rounds(lots: Iterable[_Lot], most_bytes: int) -> list[list[_Lot]]:
    """Lots that lie side by side, of which together no rank reads more than that."""
    rounds: list[list[_Lot]] = []
    reads: np.ndarray | None = None
    for lot in lots:
        if reads is None or (reads + lot.reads).max() > most_bytes:
            rounds.append([])
            reads = np.zeros_like(lot.reads)
        rounds[-1].append(lot)
        reads += lot.reads
    return rounds
