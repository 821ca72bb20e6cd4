"""Files that consist of ranges of memory in the processes of one host.

A server sends the descriptors of a file over its Unix socket. Memory that cannot become shorter is
mapped, because a copy from a mapping is faster, and other memory is read by `pread`: access to a
mapping of memory that has become shorter would end the process. A publisher may take the memory
away at any time: a read then gives fewer bytes than wanted, and never other ones.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from ckpt.live.http_server import Content
from ckpt.live.protocol import RefusedError, Segment
from ckpt.saving.arena import GENERATION, NO_DATA, is_sealed, map_memory, new_memory
from ckpt.stores.local_files import IO_VECTORS


class MemoryFile(Content):
    """A file of segments. Its descriptors close when it is forgotten and nobody sends it.

    The owner calls `give` once to forget it.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.parts = tuple(segments)
        super().__init__(sum(segment.nbytes for segment in segments))
        self.take()
        self._mapped: SharedFile | None = None

    def close(self) -> None:
        self._mapped = None
        for descriptor in {part.descriptor for part in self.parts}:
            os.close(descriptor)

    def mapped(self) -> SharedFile:
        """Returns the file as one that is read in this process; kept while the file is open."""
        if self._mapped is None:
            own = {part.descriptor: os.dup(part.descriptor) for part in self.parts}
            parts = [replace(part, descriptor=own[part.descriptor]) for part in self.parts]
            self._mapped = SharedFile(parts, None)
        return self._mapped

    def segments(self, lo: int, hi: int) -> Iterator[Segment]:
        at = 0
        for part in self.parts:
            first, last = max(lo, at), min(hi, at + part.nbytes)
            if first < last:
                yield Segment(part.descriptor, part.offset + first - at, last - first)
            at += part.nbytes


def in_memory(data: bytes) -> int:
    """Returns a descriptor of shared memory with these bytes."""
    descriptor = new_memory("ckpt-live")
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def memory_file(parts: Sequence[Segment], descriptors: Sequence[int]) -> MemoryFile:
    """Returns the file of segments whose descriptors are positions in a list.

    Raises RefusedError if a descriptor is missing, unused, not a file, or too short.
    """
    if {part.descriptor for part in parts} != set(range(len(descriptors))):
        used = sorted({part.descriptor for part in parts})
        raise RefusedError(
            "protocol", f"{len(descriptors)} descriptors came, and {used!r:.200} are used"
        )
    for part in parts:
        found = os.fstat(descriptors[part.descriptor])
        if not stat.S_ISREG(found.st_mode) or part.offset + part.nbytes > found.st_size:
            raise RefusedError(
                "protocol",
                f"bytes {part.offset} to {part.offset + part.nbytes} are not in descriptor "
                f"{part.descriptor} of {found.st_size} bytes",
            )
    return MemoryFile(
        [Segment(descriptors[part.descriptor], part.offset, part.nbytes) for part in parts]
    )


@dataclass(frozen=True, slots=True)
class _SealedMemory:
    """Memory that never becomes shorter, and its generation while the server had the file."""

    descriptor: int
    memory: memoryview | None
    """Its mapping; None if there is no room for one."""
    generation: bytes

    @property
    def is_intact(self) -> bool:
        """Whether the bytes that were read so far are those of the file."""
        now = _generation(self.descriptor) if self.memory is None else self.memory[GENERATION]
        return now == self.generation != NO_DATA


class SharedFile:
    """A file that consists of segments of open descriptors, which it owns.

    Threads share it. The last reference to it closes the descriptors, so no read loses its own.
    """

    def __init__(self, segments: Sequence[Segment], holder: object) -> None:
        """`holder` lives as long as this file: its end tells the owner that nobody reads it."""
        self._segments = segments
        self._holder = holder
        self._ends = list(accumulate(segment.nbytes for segment in segments))
        found = {at: _map_sealed(at) for at in {segment.descriptor for segment in segments}}
        self._sealed = [found[segment.descriptor] for segment in segments]

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt has ended `__init__`
            for descriptor in {segment.descriptor for segment in self._segments}:
                os.close(descriptor)

    @property
    def size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fills the views end to end with the bytes from `offset` on, as far as there are any.

        Returns the number of bytes; fewer than wanted at the end of the file, and once the owner
        has taken the memory away.
        """
        wanted = sum(map(len, views))
        at = bisect_right(self._ends, offset)
        is_in_one = at < len(self._ends) and offset + wanted <= self._ends[at]
        if is_in_one and len(views) <= IO_VECTORS:
            count = self._fill(at, offset, views)
            if count == wanted:
                return count
        done = 0
        for view in views:
            while len(view):
                at = bisect_right(self._ends, offset + done)
                if at == len(self._ends):
                    return done
                count = self._fill(at, offset + done, [view[: self._ends[at] - offset - done]])
                if count == 0:
                    return done
                done, view = done + count, view[count:]
        return done

    def view(self, offset: int, length: int) -> memoryview | None:
        """Returns bytes where they lie, if they are mapped; `is_intact` tells of them afterwards.

        None if they must be copied.
        """
        at = bisect_right(self._ends, offset)
        if at == len(self._ends) or offset + length > self._ends[at]:
            return None
        sealed = self._sealed[at]
        if sealed is None or sealed.memory is None:
            return None
        first = self._first(at, offset)
        return sealed.memory[first : first + length]

    def is_intact(self, offset: int) -> bool:
        """Whether bytes that a `view` has shown so far are those of the file."""
        sealed = self._sealed[bisect_right(self._ends, offset)]
        return sealed is not None and sealed.is_intact

    def _fill(self, at: int, offset: int, views: Sequence[memoryview]) -> int:
        first, sealed = self._first(at, offset), self._sealed[at]
        if sealed is None or sealed.memory is None:
            count = os.preadv(self._segments[at].descriptor, views, first)
        else:
            count = 0
            for view in views:
                start = first + count
                view[:] = sealed.memory[start : start + len(view)]
                count += len(view)
        return count if sealed is None or sealed.is_intact else 0

    def _first(self, at: int, offset: int) -> int:
        """Returns the place in a segment's descriptor of byte `offset` of the file."""
        segment = self._segments[at]
        return segment.offset + offset - (self._ends[at] - segment.nbytes)


def _map_sealed(descriptor: int) -> _SealedMemory | None:
    """Maps memory, if there is room; None if the memory could become shorter."""
    if not is_sealed(descriptor):
        return None
    try:
        memory = map_memory(descriptor, writable=False)
    except (OSError, ValueError):
        memory = None
    return _SealedMemory(descriptor, memory, _generation(descriptor))


def _generation(descriptor: int) -> bytes:
    return os.pread(descriptor, len(NO_DATA), GENERATION.start)
