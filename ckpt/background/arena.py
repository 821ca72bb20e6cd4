"""Shared memory in which a state waits for the process that writes it.

One arena serves all saves of a process, because the first touch of memory costs several times the
copy into it.

    progress (8 bytes) ... | from HEAD_BYTES on: the data section of the shard file

Rules:

1. One save at a time uses the arena, and keeps no view of it afterwards.
2. The arena grows to the bytes that a save needs. It shrinks if it is more than twice as large as
   each of the last `REMEMBERED` saves needed, to the largest of these needs.
3. The arena has no name: the system frees its memory when the last process that has it open ends
   in any way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ckpt.errors import StoreError
from formats.threads import Pool

HEAD_BYTES = 1 << 12
"""Bytes before the data: one page, so that the data begins at a page."""
TOUCH_BYTES = 16 << 20
"""The bytes that one thread touches at once."""
REMEMBERED = 4
"""The number of last saves whose needs the arena keeps."""


class Arena:
    """The arena's owner: the process that stages."""

    def __init__(self, before_remapping: Callable[[int], None] = lambda address: None) -> None:
        self.descriptor = shared_memory("ckpt-arena")
        self._before_remapping = before_remapping
        self._map: mmap.mmap | None = None
        self._needs: deque[int] = deque(maxlen=REMEMBERED)
        self.touched = 0
        """Bytes of data with mapped memory: a copy into them causes no page fault."""

    @property
    def size(self) -> int:
        """The bytes of data that fit."""
        return 0 if self._map is None else len(self._map) - HEAD_BYTES

    def reserve(self, nbytes: int) -> memoryview:
        """Returns memory for `nbytes` of data, with the bytes of the last save (rules 1 and 2)."""
        self._needs.append(nbytes)
        most = max(self._needs)
        if self._map is None or nbytes > self.size or self.size > 2 * most:
            self._remap(most)
        assert self._map is not None
        set_progress(self._map, 0)
        return memoryview(self._map)[HEAD_BYTES : HEAD_BYTES + nbytes]

    def fill(self, lo: int, address: int, nbytes: int) -> None:
        """Copies memory to byte `lo` of the data, also into pages that were never touched.

        Other threads can run meanwhile. Raises StoreError if the system has no memory left.
        """
        at = 0
        while at < nbytes:
            done = _pwrite(self.descriptor, address + at, nbytes - at, HEAD_BYTES + lo + at)
            if done < 0:
                number = ctypes.get_errno()
                raise StoreError(
                    number, f"{os.strerror(number)}, for {nbytes:,} bytes of shared memory"
                )
            at += done

    def touch(self, workers: int) -> None:
        """Lets the system allocate all pages of the arena, by `workers` threads; keeps the data.

        May run while the data is copied or read, but not during `reserve`.
        """
        if self._map is None or self.touched >= self.size:
            return
        whole = memoryview(self._map)
        address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(whole)), len(whole)
        with Pool(workers) as pool:
            failed = list(
                pool.map(
                    lambda lo: _madvise(
                        address + lo, min(TOUCH_BYTES, nbytes - lo), _MADV_POPULATE_WRITE
                    ),
                    range(0, nbytes, TOUCH_BYTES),
                )
            )
        if not any(failed):
            self.touched = nbytes - HEAD_BYTES

    def progress(self) -> int:
        """Returns the bytes that the writer process has written, by its own count."""
        return 0 if self._map is None else get_progress(self._map)

    def head(self) -> mmap.mmap:
        """The mapping for `set_progress`; valid after `reserve`."""
        assert self._map is not None
        return self._map

    def close(self) -> None:
        """Frees the memory, unless another process has it open."""
        self._unmap()
        os.close(self.descriptor)

    def discard(self) -> None:
        """Frees the memory, whoever has it open: they find it empty."""
        self._unmap()
        os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)

    def _remap(self, nbytes: int) -> None:
        self._unmap()
        self.touched = 0
        pages = -(-(HEAD_BYTES + nbytes) // mmap.PAGESIZE)
        os.ftruncate(self.descriptor, pages * mmap.PAGESIZE)
        self._map = mapped(self.descriptor)

    def _unmap(self) -> None:
        before, self._map = self._map, None  # first: an interrupt may come before the close
        if before is not None:
            self._before_remapping(ctypes.addressof(ctypes.c_char.from_buffer(before)) + HEAD_BYTES)
            with suppress(BufferError):  # a remaining view keeps the mapping alive
                before.close()


def mapped(descriptor: int) -> mmap.mmap:
    """Returns the mapping of the whole arena in a process that has it open."""
    found = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    with suppress(OSError, AttributeError):  # the system has no huge pages for shared memory
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_pwrite = ctypes.CDLL(None, use_errno=True).pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pwrite.restype = ctypes.c_ssize_t


def set_progress(head: mmap.mmap, nbytes: int) -> None:
    """Stores the progress for the other process."""
    head[:8] = nbytes.to_bytes(8, "little")


def get_progress(head: mmap.mmap) -> int:
    """Returns the progress of the other process, whose eight bytes change as one."""
    return int.from_bytes(head[:8], "little")


def shared_memory(name: str) -> int:
    """Returns a descriptor of new memory; `name` is shown in the system's lists of open files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
