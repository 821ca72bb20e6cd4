"""Shared memory in which a state waits for the process that writes it.

One arena serves all saves of a process, because the first touch of memory costs several times the
copy into it.

    progress (8 bytes) ... | from HEAD_BYTES on: the data section of the shard file

Rules:

1. One save at a time uses it, and keeps no view of it afterwards.
2. It grows to what a save needs. It shrinks when it is more than twice as large as each of the last
   `REMEMBERED` saves needed: then to the largest of them.
3. It has no name: its memory is gone with the last process that has it open, however that ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress

HEAD_BYTES = 1 << 12
"""Bytes before the data: a page, so that the data begins on one."""
REMEMBERED = 4
"""Saves whose needs count before memory is given back."""


class Arena:
    """The arena's owner: the process that stages."""

    def __init__(self, before_remapping: Callable[[], None] = lambda: None) -> None:
        self.descriptor = _shared_memory()
        self._before_remapping = before_remapping
        self._map: mmap.mmap | None = None
        self._needs: deque[int] = deque(maxlen=REMEMBERED)
        self.touched = 0
        """Bytes of data whose memory there is already; what lies behind them is new."""

    @property
    def size(self) -> int:
        """Bytes there is room for."""
        return 0 if self._map is None else len(self._map) - HEAD_BYTES

    def reserve(self, nbytes: int) -> memoryview:
        """The memory for `nbytes` of data, as the last save left it (rules 1 and 2)."""
        self.touched = max(self.touched, *self._needs, 0)
        self._needs.append(nbytes)
        most = max(self._needs)
        if self._map is None or nbytes > self.size or self.size > 2 * most:
            self._remap(most)
        assert self._map is not None
        set_progress(self._map, 0)
        return memoryview(self._map)[HEAD_BYTES : HEAD_BYTES + nbytes]

    def progress(self) -> int:
        """Bytes that the writer says it has written."""
        return 0 if self._map is None else get_progress(self._map)

    def head(self) -> mmap.mmap:
        """The mapping, for `set_progress`; only after `reserve`."""
        assert self._map is not None
        return self._map

    def close(self) -> None:
        """Give the memory back."""
        self._unmap()
        os.close(self.descriptor)

    def _remap(self, nbytes: int) -> None:
        self._unmap()
        self.touched = 0
        pages = -(-(HEAD_BYTES + nbytes) // mmap.PAGESIZE)
        os.ftruncate(self.descriptor, pages * mmap.PAGESIZE)
        self._map = mapped(self.descriptor)

    def _unmap(self) -> None:
        self._before_remapping()
        before, self._map = self._map, None  # first: an interrupt may come before the other
        if before is not None:
            with suppress(BufferError):  # a view that is still somewhere keeps the mapping alive
                before.close()


def mapped(descriptor: int) -> mmap.mmap:
    """The whole arena, as any process that has it open sees it."""
    found = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    with suppress(OSError, AttributeError):  # where the system has huge pages for shared memory
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def populate(address: int, nbytes: int) -> None:
    """Let the system find the memory for a range at once, which it does sooner than page by page.

    A hint; other threads can run meanwhile.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, address + nbytes - start, _MADV_POPULATE_WRITE)


_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def set_progress(head: mmap.mmap, nbytes: int) -> None:
    """Let the other process know."""
    head[:8] = nbytes.to_bytes(8, "little")


def get_progress(head: mmap.mmap) -> int:
    """What the other process has set; eight bytes change as one."""
    return int.from_bytes(head[:8], "little")


def _shared_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckpt-arena", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
