"""Files that consist of ranges of shared memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ckpt.live.protocol import RefusedError, Segment


class MemoryFile:
    """A file of segments. Its descriptors close when it is forgotten and nobody sends it."""

    is_slow = False

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.parts = tuple(segments)
        self.nbytes = sum(one.nbytes for one in segments)
        self._users = 1

    def take(self) -> None:
        """Keeps the descriptors open."""
        self._users += 1

    def give(self) -> None:
        """Lets the descriptors be closed; the owner calls this once to forget the file."""
        self._users -= 1
        if self._users == 0:
            for descriptor in {one.descriptor for one in self.parts}:
                os.close(descriptor)

    def segments(self, lo: int, hi: int) -> Iterator[Segment]:
        """Yields the ranges of descriptors for bytes `lo` to `hi`."""
        at = 0
        for one in self.parts:
            first, last = max(lo, at), min(hi, at + one.nbytes)
            if first < last:
                yield Segment(one.descriptor, one.offset + first - at, last - first)
            at += one.nbytes


def memory_file(parts: Sequence[Segment], descriptors: Sequence[int]) -> MemoryFile:
    """Returns the file of segments whose descriptors are positions in a list.

    Raises RefusedError if a descriptor is missing, unused, not a file, or too short.
    """
    if {one.descriptor for one in parts} != set(range(len(descriptors))):
        used = sorted({one.descriptor for one in parts})
        raise RefusedError(
            "protocol", f"{len(descriptors)} descriptors came, and {used!r:.200} are used"
        )
    for one in parts:
        found = os.fstat(descriptors[one.descriptor])
        if not stat.S_ISREG(found.st_mode) or one.offset + one.nbytes > found.st_size:
            raise RefusedError(
                "protocol",
                f"bytes {one.offset} to {one.offset + one.nbytes} are not in descriptor "
                f"{one.descriptor} of {found.st_size} bytes",
            )
    return MemoryFile(
        [Segment(descriptors[one.descriptor], one.offset, one.nbytes) for one in parts]
    )
