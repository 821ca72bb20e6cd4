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
3. Memory is what a rank has read of the lots of one exchange, once more as messages, and as much of
   what it receives.
4. A read that fails lets the exchanges go on, for the others wait for them, and is raised after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ckpt.reading.bites import Fits, Request, requests_for
from ckpt.states.memory import memory_of
from formats.catalog import TensorRecord
from formats.storage import REMOTE_READ_BYTES
from sharding.layout import Layout, Mesh
from sharding.states.redistribute import Move

Wanted = tuple[str, list[Request], torch.Tensor]
"""The name of a tensor, what is to be read of it, and what that fills."""
Read = Callable[[Sequence[Wanted]], None]


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


class Lots:
    """The tensors of one load that are read so."""

    def __init__(self, world: Mesh, here: int) -> None:
        self._world = world
        self._here = here
        self._entries: list[_Entry] = []
        self._lots: list[list[_Dealt]] = []

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
            or not 0 < record.nbytes <= REMOTE_READ_BYTES * stored.mesh.size
            or sorted(stored.mesh.ranks()) != list(range(stored.mesh.size))
            or any(self._world.coordinate(rank) is None for rank in want.mesh.ranks())
        ):
            return False
        self._entries.append(_Entry(name, record, stored, local, want))
        return True

    def plan(self, lot_bytes: int, fits: Fits) -> None:
        """Divide what was taken into lots, and open the files that this rank reads.

        A lot has at most `lot_bytes` of a file, and less where some rank would have none to read.
        """
        lot: list[_Entry] = []
        nbytes = 0
        every = sum(entry.record.nbytes for entry in self._entries)
        lot_bytes = min(lot_bytes, -(-every // self._world.size))
        # As they lie in the files, where the target has them in the order of the state.
        for entry in sorted(self._entries, key=lambda one: -one.record.dtype.itemsize):
            part = -(-entry.record.nbytes // entry.stored.mesh.size)
            if lot and nbytes + part > lot_bytes:
                self._deal(lot, fits)
                lot, nbytes = [], 0
            lot.append(entry)
            nbytes += part
        if lot:
            self._deal(lot, fits)

    def mark(self) -> tuple[str, ...]:
        """The same on ranks that deal out the same."""
        return tuple(
            repr((dealt.entry.name, str(dealt.entry.local.dtype), dealt.have, dealt.entry.want))
            for lot in self._lots
            for dealt in lot
        )

    def moves(self, read: Read, failed: list[Exception]) -> Iterator[Move]:
        """The tensors on their way: a lot is read when its first one is asked for (rule 4)."""
        for lot in self._lots:
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
                yield Move(entry.name, source, dealt.have, entry.local, entry.want)

    def _deal(self, entries: Sequence[_Entry], fits: Fits) -> None:
        lot = []
        for entry in entries:
            have = self._read_as(entry.stored, len(self._lots))
            requests: list[Request] = []
            if have.mesh.coordinate(self._here) is not None:
                pieces = fits.pieces(have, self._here)
                requests = requests_for(entry.record, pieces, memoryview(b""), fits)
            lot.append(_Dealt(entry, have, requests))
        self._lots.append(lot)

    def _read_as(self, stored: Layout, number: int) -> Layout:
        """A stored layout with the readers of a lot in the place of those that saved (rule 2)."""
        each = self._world.size // stored.mesh.size
        readers = [self._world.rank((rank * each + number % each,)) for rank in stored.mesh.ranks()]
        mesh = Mesh.of_ranks(stored.mesh.names, stored.mesh.sizes, readers)
        return Layout(stored.shape, mesh, stored.placements)

    def _source(self, dealt: _Dealt) -> torch.Tensor:
        """Memory for this rank's part of a tensor as it is read; empty where others read."""
        lo, hi = 0, 0
        if dealt.requests:
            lo, hi = dealt.have.span(self._here)
        return torch.empty(hi - lo, dtype=dealt.entry.local.dtype)
