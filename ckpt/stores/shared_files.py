"""Files in the memory of other processes on this host, read by their descriptors.

A server sends the descriptors of a file over its Unix socket. The file is read by `pread`, never
mapped: the owner may take the memory away, which shortens a read, and would kill a process with a
mapping.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from ckpt.live.protocol import Segment
from ckpt.stores.local_writer import IO_VECTORS


class SharedFile:
    """A file that consists of segments of open descriptors, which it owns.

    Threads share it. The last reference to it closes the descriptors, so no read loses its own.
    """

    def __init__(self, segments: Sequence[Segment], holder: object) -> None:
        """`holder` lives as long as this file: its end tells the owner that nobody reads it."""
        self._segments = segments
        self._holder = holder
        self._ends = list(accumulate(one.nbytes for one in segments))

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt has ended `__init__`
            for descriptor in {one.descriptor for one in self._segments}:
                os.close(descriptor)

    @property
    def size(self) -> int:
        """The bytes of the file."""
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
            count = self._pread(at, offset, views)
            if count == wanted:
                return count
        done = 0
        for view in views:
            while len(view):
                at = bisect_right(self._ends, offset + done)
                if at == len(self._ends):
                    return done
                count = self._pread(at, offset + done, [view[: self._ends[at] - offset - done]])
                if count == 0:
                    return done
                done, view = done + count, view[count:]
        return done

    def _pread(self, at: int, offset: int, views: Sequence[memoryview]) -> int:
        segment = self._segments[at]
        before = self._ends[at] - segment.nbytes
        return os.preadv(segment.descriptor, views, segment.offset + offset - before)
