"""Chunks that a checkpoint does not store again: they lie in an earlier one, its base.

Rules (docs/format.md, section 8, is normative):

1. A borrowed chunk has its record in the chunk table like any other: its checksum vouches for the
   bytes, wherever they lie. A *run* says where: neighbouring chunks of one tensor, end to end in
   one file of a base.
2. Borrowing is flat. A chunk that the base itself borrowed is borrowed from where it lies, so to
   read any checkpoint takes one step, and a base in the middle can go.
3. A delta chunk is stored here, as what its bytes and those of a base's chunk differ in (XOR). The
   chunk that it was taken from is its *root*, and never a delta itself: to decode one takes one
   step as well. A delta chunk is not lent.
4. Only a chunk of the same tensor, dtype and stored layout, cut and encoded alike, is borrowed, and
   only where its checksum is the same: 128 bits of xxh3, which nobody meets by accident, and which
   are no defence against somebody who makes two chunks alike on purpose.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from formats.errors import FormatError
from formats.limits import BASES
from formats.native.manifest import Base, BaseFile, Manifest
from formats.storage import BESIDE

BORROWED = "__borrowed__"
"""The entry of a shard file that holds its runs, just before the chunk table."""
DELTAS = "__deltas__"
"""The entry just before it, where there are delta chunks: their roots."""
COUNTS_KEY = "ckpt.chunk_counts"
"""Metadata of such a file: how many chunks each entry has, in order, joined by commas."""
RUN = struct.Struct("<IIIIQ")
DELTA = struct.Struct("<I16sIIIQ")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies in a base: the stored bytes from `offset` on in the file of `rank`."""

    base: int
    """Its number in the manifest's list of bases."""
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks `[first, first + count)` of a chunk table, end to end from a place on."""

    first: int
    count: int
    place: Place

    @property
    def end(self) -> int:
        """One past the last of its chunks."""
        return self.first + self.count


@dataclass
class Runs:
    """Runs in the making: chunks are added in ascending order."""

    found: list[Run] = field(default_factory=list)
    _end: int = 0
    """Where in the base's file the last run ends."""

    def add(self, chunk: int, place: Place, stored_bytes: int, starts: bool) -> None:
        """One more chunk; `starts` when it is the first of its tensor, where no run goes on."""
        last = self.found[-1] if self.found else None
        if (
            last is not None
            and not starts
            and last.end == chunk
            and (last.place.base, last.place.rank, self._end)
            == (place.base, place.rank, place.offset)
        ):
            self.found[-1] = Run(last.first, last.count + 1, last.place)
        else:
            self.found.append(Run(chunk, 1, place))
        self._end = place.offset + stored_bytes

    def pack(self) -> bytes:
        """The content of the entry."""
        return b"".join(
            RUN.pack(run.first, run.count, run.place.base, run.place.rank, run.place.offset)
            for run in self.found
        )


def unpack_runs(data: bytes, records: int, where: str) -> tuple[Run, ...]:
    """The runs of a file whose chunk table has so many records.

    Raises FormatError unless they are in order, apart and inside the table.
    """
    if len(data) % RUN.size:
        raise FormatError(f"{where}: {BORROWED} has {len(data)} bytes, no multiple of {RUN.size}")
    runs = tuple(
        Run(first, count, Place(base, rank, offset))
        for first, count, base, rank, offset in RUN.iter_unpack(data)
    )
    end = 0
    for run in runs:
        if run.first < end or not run.count or run.end > records:
            raise FormatError(
                f"{where}: {BORROWED} has chunks {run.first}:{run.end} after {end}, of {records}"
            )
        end = run.end
    return runs


@dataclass(frozen=True, slots=True)
class Root:
    """The chunk of a base that a delta chunk was taken from."""

    place: Place
    digest: bytes
    """xxh3_128 of its stored bytes."""
    stored_bytes: int


def pack_deltas(roots: Mapping[int, Root]) -> bytes:
    """The content of the entry: the roots, by the index of their delta chunks in the table."""
    return b"".join(
        DELTA.pack(at, root.digest, root.stored_bytes, p.base, p.rank, p.offset)
        for at, root in roots.items()
        for p in (root.place,)
    )


def unpack_deltas(data: bytes, records: int, where: str) -> dict[int, Root]:
    """The roots of a file whose chunk table has so many records.

    Raises FormatError unless they are in order and of chunks in the table.
    """
    if len(data) % DELTA.size:
        raise FormatError(f"{where}: {DELTAS} has {len(data)} bytes, no multiple of {DELTA.size}")
    roots: dict[int, Root] = {}
    before = -1
    for at, digest, stored, base, rank, offset in DELTA.iter_unpack(data):
        if not before < at < records:
            raise FormatError(f"{where}: {DELTAS} has chunk {at} after {before}, of {records}")
        roots[at] = Root(Place(base, rank, offset), digest, stored)
        before = at
    return roots


@dataclass(frozen=True, slots=True)
class LentChunks:
    """The chunks of one rank's part of a tensor, as a base has them."""

    records: Sequence[bytes]
    """Of the chunk table: checksum and stored bytes; empty where nobody may borrow the chunk."""
    places: Sequence[Place]
    roots: Sequence[Root | None]
    """What a delta of each may be taken from."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What a base has of what one rank is about to write."""

    chunk_bytes: int
    codec: str
    tensors: Mapping[str, LentChunks]
    mark: str
    """The digest of the base's manifest."""
    fetch: Callable[[Root, int, memoryview], None]
    """Fills memory with a root's raw bytes; the second argument is the width of the shuffle."""


def bases_of(folder: str, manifest: Manifest) -> tuple[Base, ...]:
    """The checkpoints a save with this base may borrow from: the base first, then its own."""
    files = tuple(BaseFile(file.name, file.rank, file.size) for file in manifest.files)
    own = [base for base in manifest.bases if base is not None]
    return (Base(folder, files), *own)[:BASES]


def kept(bases: Sequence[Base], used: int) -> tuple[Base | None, ...]:
    """The list for the manifest: None where the mask of used bases does not have the bit."""
    return tuple(
        base if used >> number & 1 else None
        for number, base in enumerate(bases[: used.bit_length()])
    )


def beside(folder: str, name: str) -> str:
    """What a reader calls a file of a base in the folder of this name beside its own."""
    return f"{BESIDE}{folder}/{name}"
