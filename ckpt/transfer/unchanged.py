"""Leaves out chunks that the target has already, by their checksums.

A live state of which little has changed since the last load need not travel whole. The bytes in
the target's memory are hashed, and a chunk with the checksum of the table is not read.

Rules:

1. Only whole, uncompressed chunks count that would be read directly into the target: its elements
   are contiguous there and have the stored dtype.
2. A hash costs less than a transfer, but not nothing. `Unchanged.PROBE` hashes the rest of a range
   only while at most `MISSES` of its chunks have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from ckpt.plan.read_plan import ByteRange

MISSES = 2
"""The changed chunks of a range after which a probe takes the rest for changed."""


class Unchanged(Enum):
    """The treatment of chunks that the target may have already."""

    READ = "read"
    """They are read."""
    SKIP = "skip"
    """Each is hashed, and is read if it differs."""
    PROBE = "probe"
    """As SKIP, until a range shows that it has changed (rule 2)."""

    @classmethod
    def of(cls, word: str, is_far_live: bool) -> Unchanged:
        """Returns the treatment for a word of a user: "auto" probes live states elsewhere."""
        if word == "auto":
            return cls.PROBE if is_far_live else cls.READ
        return cls(word)


def changed_ranges(
    ranges: Iterable[ByteRange], targets: Sequence[memoryview], rule: Unchanged
) -> Iterator[ByteRange]:
    """Yields the ranges, without the chunks that their targets have already."""
    for one in ranges:
        chunks = one.request.extent.chunks
        if rule is Unchanged.READ or not one.direct or one.chunk < 0 or chunks is None:
            yield one
        else:
            yield from _changed(one, targets[one.request.target], chunks.chunk_bytes, rule)


def _changed(
    one: ByteRange, target: memoryview, chunk_bytes: int, rule: Unchanged
) -> Iterator[ByteRange]:
    """Yields the runs of chunks of one range that the target does not have."""
    chunks = one.request.extent.chunks
    assert chunks is not None
    nbytes, begin, misses = one.hi - one.lo, 0, 0
    for at in range(0, nbytes, chunk_bytes):
        end = min(at + chunk_bytes, nbytes)
        if rule is Unchanged.PROBE and misses >= MISSES:
            break
        stored = target[one.at + at : one.at + end]
        if chunks.wrong(one.chunk + at // chunk_bytes, stored) is not None:
            misses += 1
            continue
        if begin < at:
            yield _part(one, begin, at, chunk_bytes)
        begin = end
    if begin < nbytes:
        yield _part(one, begin, nbytes, chunk_bytes)


def _part(one: ByteRange, lo: int, hi: int, chunk_bytes: int) -> ByteRange:
    """Returns bytes `[lo, hi)` of a range; `lo` is the start of a chunk."""
    return one._replace(
        lo=one.lo + lo, hi=one.lo + hi, at=one.at + lo, chunk=one.chunk + lo // chunk_bytes
    )
