"""Borrowed chunks: chunks that a checkpoint does not store again, but reads in its base.

Rules (docs/format.md, section 8, is normative):

1. A borrowed chunk has a record in the chunk table like any other chunk: its checksum covers the
   bytes in the base. A *run* has the place of adjacent chunks of one tensor that lie end to end in
   one file of a base.
2. Borrowing is flat. A chunk that the base itself borrows is borrowed from its own place. A read
   thus takes one step, and a base in the middle can be deleted.
3. A delta chunk is stored as the XOR of its bytes and those of a base's chunk. That chunk is its
   *root*, and is never a delta itself: decoding takes one step too. A delta chunk is not lent.
4. A chunk is borrowed only from the same tensor with the same dtype, stored layout, chunk size and
   codec, and only if the checksums are equal. The 128 bits of xxh3 exclude an accident, but not an
   attacker who makes two chunks with one checksum.
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
"""The entry of a shard file with its runs, just before the chunk table."""
DELTAS = "__deltas__"
"""The entry with the roots of delta chunks, just before `BORROWED`."""
COUNTS_KEY = "ckpt.chunk_counts"
"""Metadata of such a file: the number of chunks of each entry, in order, joined by commas."""
RUN = struct.Struct("<IIIIQ")
DELTA = struct.Struct("<I16sIIIQ")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a chunk in a base: the stored bytes from `offset` on in the file of `rank`."""

    base: int
    """The index of the base in the manifest's list of bases."""
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks `[first, first + count)` of a chunk table, which lie end to end from a place on."""

    first: int
    count: int
    place: Place

    @property
    def end(self) -> int:
        """The index behind the last chunk."""
        return self.first + self.count


@dataclass
class Runs:
    """Collects runs. Chunks are added in ascending order."""

    found: list[Run] = field(default_factory=list)
    _end: int = 0
    """The end of the last run in the base's file."""

    def add(self, chunk: int, place: Place, stored_bytes: int, starts: bool) -> None:
        """Adds a chunk. `starts` if it is the first of its tensor, where a new run begins."""
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
        return b"".join(
            RUN.pack(run.first, run.count, run.place.base, run.place.rank, run.place.offset)
            for run in self.found
        )


def unpack_runs(data: bytes, records: int, where: str) -> tuple[Run, ...]:
    """Returns the runs of a file whose chunk table has so many records.

    Raises FormatError unless the runs are in order, without overlaps, and inside the table.
    """
    if len(data) % RUN.size:
        raise FormatError(
            f"{where}: {BORROWED} has {len(data)} bytes, not a multiple of {RUN.size}"
        )
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
    """The chunk of a base on which a delta chunk is based."""

    place: Place
    digest: bytes
    """xxh3_128 of its stored bytes."""
    stored_bytes: int


def pack_deltas(roots: Mapping[int, Root]) -> bytes:
    """Returns the content of the entry: the roots, by the indices of their delta chunks."""
    return b"".join(
        DELTA.pack(at, root.digest, root.stored_bytes, p.base, p.rank, p.offset)
        for at, root in roots.items()
        for p in (root.place,)
    )


def unpack_deltas(data: bytes, records: int, where: str) -> dict[int, Root]:
    """Returns the roots of a file whose chunk table has so many records.

    Raises FormatError unless they are in order and belong to chunks in the table.
    """
    if len(data) % DELTA.size:
        raise FormatError(
            f"{where}: {DELTAS} has {len(data)} bytes, not a multiple of {DELTA.size}"
        )
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
    """The chunks of one rank's part of a tensor in a base."""

    records: Sequence[bytes]
    """Checksum and stored bytes, as in the chunk table; empty if the chunk cannot be borrowed."""
    places: Sequence[Place]
    roots: Sequence[Root | None]
    """The possible root of a delta of each chunk."""


@dataclass(frozen=True, slots=True)
class Lent:
    """The chunks that a base lends to one rank's file."""

    chunk_bytes: int
    codec: str
    tensors: Mapping[str, LentChunks]
    manifest_digest: str
    """The digest of the base's manifest."""
    fetch: Callable[[Root, int, memoryview], None]
    """Fills memory with the raw bytes of a root; the second argument is the shuffle's width."""


def bases_of(folder: str, manifest: Manifest) -> tuple[Base, ...]:
    """Returns the checkpoints from which a save with this base may borrow: it, then its bases."""
    files = tuple(BaseFile(file.name, file.rank, file.size) for file in manifest.files)
    own = [base for base in manifest.bases if base is not None]
    return (Base(folder, files), *own)[:BASES]


def keep_used(bases: Sequence[Base], used: int) -> tuple[Base | None, ...]:
    """Returns the manifest's list of bases, with None for a base that `used` lacks the bit of."""
    return tuple(
        base if used >> number & 1 else None
        for number, base in enumerate(bases[: used.bit_length()])
    )


def beside(folder: str, name: str) -> str:
    """Returns a reader's name of a file in a folder beside its own."""
    return f"{BESIDE}{folder}/{name}"
