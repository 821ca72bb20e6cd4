"""Ranks that want the same elements of a tensor: each reads a share, and they exchange.

Rules:

1. A replicated tensor is shared evenly, as a save divides it (`Split`). A small one is read by one
   rank, each in its turn (`Only`).
2. A rank reads its share where it belongs in its own target, so that an exchange needs no memory
   but messages, which keep to the budget.
3. A target that bytes cannot be read into as it lies takes no part: its rank reads all of it. All
   ranks read everything when some would exchange what others do not.
4. Bytes are verified by the rank that reads them, before any of them travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import xxhash

from ckpt.plan.shard_sizes import positions
from ckpt.transfer.scatter_reads import Lots, Read
from formats.catalog import TensorRecord
from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES, Reader
from sharding.agreement.ranks import HASH_BITS
from sharding.layout import Layout, Mesh, Only, Piece, Placement, Replicate, Split
from sharding.reshard.redistribute import Move, redistribute

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SMALL_BYTES = 1 << 20
"""A part of a tensor of at most so many bytes is not divided."""


def exchanged(replicas: str, reader: Reader) -> bool:
    """Whether replicas exchange what they read from here.

    A page of a local file is in memory once for all ranks of a machine, and copying it from there
    is several times as fast as a message. From a server every byte is sent, and often paid, again.
    """
    if replicas == "auto":
        return reader.read_bytes > LOCAL_READ_BYTES
    return replicas == "exchange"


def bytes_of_lots(budget: int) -> int:
    """How much a rank reads for the others at a time: it is held three times."""
    return min(REMOTE_READ_BYTES, budget // 3)


class Shares:
    """What this rank reads for others, and others for it."""

    def __init__(self, world: Mesh, here: int, lot_bytes: int = 0) -> None:
        """`lot_bytes` is not 0 where a server is read from, to which every request matters."""
        self._world = world
        self._here = here
        self._moves: list[Move] = []
        self._turn = 0
        self._divided: dict[tuple[Layout, int | None], Layout] = {}
        self.lots = Lots(world, here, lot_bytes)
        """What one rank reads for all."""

    def of(
        self, name: str, local: torch.Tensor, layout: Layout, pieces: Sequence[Piece]
    ) -> Sequence[Piece]:
        """Of the pieces of a contiguous local tensor, those that this rank is to read."""
        have = self._share(layout, local.itemsize)
        if have is None:
            return pieces
        begin, _ = layout.span(self._here)
        lo, hi = have.span(self._here)
        source = local.reshape(-1)[lo - begin : hi - begin]
        self._moves.append(Move(name, source, have, local, layout))
        return [
            Piece(piece.box, piece.at + lo - begin, piece.strides)
            for piece in have.pieces(self._here)
        ]

    def takes(self, name: str, record: TensorRecord, local: torch.Tensor, layout: Layout) -> bool:
        """Whether a tensor is read in a lot, so that nothing else of it is to be read."""
        return self.lots.take(name, record, local, layout)

    def mark(self) -> int:
        """A hash of all that is exchanged, in order."""
        hasher = xxhash.xxh3_64()
        for move in self._moves:
            hasher.update(repr((move.name, str(move.target.dtype), move.have, move.want)).encode())
        for text in self.lots.mark():
            hasher.update(text.encode())
        return hasher.intdigest() >> (64 - HASH_BITS)

    def exchange(self, group: ProcessGroup | None, budget: int, read: Read) -> None:
        """All targets are whole. Called by all ranks, once all have read their shares.

        Raises what `read` raises, and after the exchange.
        """
        redistribute(self._moves, group=group, budget=budget // 2)

        def send(moves: Sequence[Move], nbytes: int) -> None:
            redistribute(moves, group=group, budget=nbytes)

        self.lots.deal(read, send, bytes_of_lots(budget))

    def _share(self, layout: Layout, itemsize: int) -> Layout | None:
        """Who reads what of a tensor; None where it is not replicated, or beyond these ranks."""
        if layout.replicas == 1 or layout.numel == 0:
            return None
        turn = None
        if layout.numel * layout.replicas * itemsize <= SMALL_BYTES * layout.mesh.size:
            self._turn += 1
            turn = self._turn % layout.replicas
        if positions(layout.mesh, self._world) is None:
            return None
        key = layout, turn
        if key not in self._divided:
            self._divided[key] = divided(layout, turn)
        return self._divided[key]


def divided(layout: Layout, turn: int | None) -> Layout:
    """The layout in which each element is held once: shared evenly, or by replica `turn` alone.

    >>> mesh = Mesh.grid(("dp",), (2,))
    >>> replicated = Layout((4,), mesh, (Replicate(),))
    >>> str(divided(replicated, None)), str(divided(replicated, 1))
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
