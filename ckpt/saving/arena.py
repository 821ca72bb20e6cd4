"""Shared memory in which a state waits for the process that writes it.

One arena serves all saves of a process, because the first touch of memory costs several times the
copy into it.

    progress (8 bytes) | generation (8 bytes) ... | from HEAD_BYTES on: the data of the shard file

Rules:

1. One save at a time uses the arena, and keeps no view of it afterwards.
2. The arena grows to the bytes that a save needs. It shrinks if it is more than twice as large as
   each of the last `REMEMBERED` saves needed, to the largest of these needs.
3. The arena has no name: the system frees its memory when the last process that has it open ends
   in any way.
4. The size of a sealed arena never shrinks, so that other processes can map it and read without
   danger. Each save gives the arena a new generation, a random number, before any byte changes. A
   reader that finds the same generation before and after a copy has the bytes of one save.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable

from ckpt.errors import StoreError
from ckpt.stores.local_files import explained_on_disk
from ckpt.stores.shared_memory import (
    GENERATION,
    NO_DATA,
    address_of,
    map_memory,
    new_memory,
    populate,
    remove,
    take_huge_pages,
)
from formats.storage import Pool

HEAD_BYTES = 1 << 12
"""Bytes before the data: one page, so that the data begins at a page."""
TOUCH_BYTES = 16 << 20
"""The bytes that one thread touches at once."""
REMEMBERED = 4
"""The number of last saves whose needs the arena keeps."""


class Arena:
    """The arena's owner: the process that stages."""

    def __init__(
        self,
        before_remapping: Callable[[int], None] = lambda address: None,
        is_sealed: bool = False,
    ) -> None:
        """`is_sealed` makes an arena that others may map (rule 4)."""
        self._is_sealed = is_sealed
        self.descriptor = new_memory("ckpt-arena", is_sealed)
        self._before_remapping = before_remapping
        self._map: memoryview | None = None
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
        self._map[GENERATION] = (secrets.randbits(63) | 1).to_bytes(8, "little")
        return self._map[HEAD_BYTES : HEAD_BYTES + nbytes]

    def fill(self, lo: int, address: int, nbytes: int) -> None:
        """Copies memory to byte `lo` of the data, also into pages that were never touched.

        Other threads can run meanwhile. Raises StoreError if the system has no memory left.
        """
        at = 0
        while at < nbytes:
            done = _pwrite(self.descriptor, address + at, nbytes - at, HEAD_BYTES + lo + at)
            if done < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:  # Python repeats only calls of its own
                    continue
                raise StoreError(
                    number,
                    f"{os.strerror(number)}, for {nbytes:,} bytes of shared memory; give the "
                    "machine or container more of it (/dev/shm), or save with blocking=True",
                )
            at += done

    def touch(self, workers: int) -> None:
        """Lets the system allocate all pages of the arena, by `workers` threads; keeps the data.

        May run while the data is copied or read, but not during `reserve`.
        """
        if self._map is None or self.touched >= self.size:
            return
        memory, nbytes = self._map, len(self._map)
        if self._is_sealed:  # readers gain too, in each version
            take_huge_pages(memory, is_patient=True)
        with Pool(workers) as pool:
            done = list(
                pool.map(
                    lambda lo: populate(memory, lo, min(lo + TOUCH_BYTES, nbytes)),
                    range(0, nbytes, TOUCH_BYTES),
                )
            )
        if all(done):
            self.touched = nbytes - HEAD_BYTES

    def progress(self) -> int:
        """Returns the bytes that the writer process has written, by its own count."""
        return 0 if self._map is None else get_progress(self._map)

    def head(self) -> memoryview:
        """The mapping for `set_progress`; valid after `reserve`."""
        assert self._map is not None
        return self._map

    def close(self) -> None:
        """Frees the memory, unless another process has it open."""
        self._unmap()
        os.close(self.descriptor)

    def discard(self) -> None:
        """Frees the memory, whoever has it open or mapped: they find it without a generation."""
        if self._map is not None:
            self._map[GENERATION] = NO_DATA  # first: no reader takes the zeros for data
            remove(self._map)
        self.close()

    def _remap(self, nbytes: int) -> None:
        if self._is_sealed and nbytes < self.size:
            fresh = new_memory("ckpt-arena", is_sealed=True)
            self.discard()
            self.descriptor = fresh
        self._unmap()
        self.touched = 0
        pages = -(-(HEAD_BYTES + nbytes) // mmap.PAGESIZE)
        with explained_on_disk("taking", f"{nbytes:,} bytes of shared memory"):
            os.ftruncate(self.descriptor, pages * mmap.PAGESIZE)
        self._map = map_memory(self.descriptor)
        self.touched = max(0, take_huge_pages(self._map) - HEAD_BYTES)

    def _unmap(self) -> None:
        """Ends the mapping, unless a view of it remains."""
        before, self._map = self._map, None
        if before is not None:
            self._before_remapping(address_of(before) + HEAD_BYTES)


_pwrite = ctypes.CDLL(None, use_errno=True).pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pwrite.restype = ctypes.c_ssize_t


def set_progress(head: memoryview, nbytes: int) -> None:
    """Stores the progress for the other process."""
    head[:8] = nbytes.to_bytes(8, "little")


def get_progress(head: memoryview) -> int:
    """Returns the progress of the other process, whose eight bytes change as one."""
    return int.from_bytes(head[:8], "little")
