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

[Note: huge pages]
A copy from shared memory in pages of 4 KiB takes up to three times as long as one from memory in
huge pages, and the first touch of such a page costs more than the copy of its bytes. Systems give
huge pages to shared memory by `MADV_COLLAPSE` (Linux 6.1), whatever
`/sys/kernel/mm/transparent_hugepage/shmem_enabled` says, unless it says `deny`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from time import perf_counter

from ckpt.errors import StoreError
from ckpt.stores.local_files import explained_on_disk
from formats.storage import Pool

GENERATION = slice(8, 16)
"""In sealed memory: the place of the random number that each save gives it."""
NO_DATA = bytes(8)
"""The generation of memory without data."""
STEP_BYTES = 16 << 20
"""The memory that one request for huge pages covers."""
SLACK_SECONDS = 0.02
SECONDS_PER_BYTE = 0.5 / (1 << 30)
"""The time that pages of 4 KiB take to get. Huge pages that take longer are not asked for."""


def new_memory(name: str, is_sealed: bool = False) -> int:
    """Returns a descriptor of new memory; `name` is shown in the system's lists of open files.

    Memory that is sealed never becomes shorter, so that processes that map it read without danger.
    A system without sealed memory gives other memory, which `is_sealed` tells.
    """
    with explained_on_disk("making", "shared memory"):
        if not hasattr(os, "memfd_create"):
            with tempfile.TemporaryFile() as file:
                return os.dup(file.fileno())
        if not is_sealed:
            return os.memfd_create(name, os.MFD_CLOEXEC)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether the memory never becomes shorter."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except (OSError, AttributeError):  # not shared memory, or not Linux
        return False


def map_memory(descriptor: int, writable: bool = True) -> memoryview:
    """Returns a mapping of the whole of shared memory, at an address that can have huge pages.

    The mapping ends with the last view of it. Raises StoreError if there is no room for it.
    """
    nbytes, huge = os.fstat(descriptor).st_size, _huge_bytes()
    if not huge or nbytes < huge:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with explained_on_disk("mapping", f"{nbytes:,} bytes of shared memory"):
            return memoryview(mmap.mmap(descriptor, nbytes, prot=protection))
    found = _map_aligned(descriptor, nbytes, huge, writable)
    _madvise(ctypes.addressof(found), nbytes, mmap.MADV_HUGEPAGE)  # a refusal changes nothing
    view = memoryview(found).cast("B")
    return view if writable else view.toreadonly()


def address_of(memory: memoryview) -> int:
    """Returns the address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def take_huge_pages(memory: memoryview, is_patient: bool = False) -> int:
    """Gives a mapping huge pages; returns the bytes, from its first on, that have them.

    The bytes keep their values, and other processes may use them meanwhile. Stops where the system
    refuses, and once it takes longer than pages of 4 KiB do: the system moves other memory to make
    room, or gets it from a host of virtual machines. If `is_patient`, goes on in both cases.
    """
    address, huge = address_of(memory), _huge_bytes()
    end = len(memory) // huge * huge if huge and not address % huge else 0
    start, taken = perf_counter(), 0
    for lo in range(0, end, STEP_BYTES):
        if not is_patient and perf_counter() - start > SLACK_SECONDS + lo * SECONDS_PER_BYTE:
            break
        hi = min(lo + STEP_BYTES, end)
        for at in range(lo, hi, huge):  # the system collapses pages, of which there must be one
            _madvise(address + at, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        if _madvise(address + lo, hi - lo, _MADV_COLLAPSE) == 0:
            taken = hi if taken == lo else taken
        elif not is_patient:
            break
    return taken


def populate(memory: memoryview, lo: int, hi: int) -> bool:
    """Lets the system allocate all pages of a range; returns whether it has done so.

    The bytes keep their values, and other processes may use them meanwhile.
    """
    return not _madvise(address_of(memory) + lo, hi - lo, _MADV_POPULATE_WRITE)


def remove(memory: memoryview) -> None:
    """Frees the memory of a mapping, for all processes: they find zeros."""
    _madvise(address_of(memory), len(memory), mmap.MADV_REMOVE)


_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14
_MADV_COLLAPSE = 25  # the same, since Linux 6.1
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@cache
def _huge_bytes() -> int:
    """The size of a huge page; 0 if mappings cannot have them."""
    if sys.platform != "linux":
        return 0
    with suppress(OSError, ValueError):
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") as file:
            found = int(file.read())
        return found if found <= STEP_BYTES else 0
    return 0


def _map_aligned(
    descriptor: int, nbytes: int, huge: int, writable: bool
) -> ctypes.Array[ctypes.c_char]:
    """Maps memory at a multiple of `huge`, in the middle of a larger mapping without memory."""
    room = nbytes + huge
    start = _mmap_or_raise(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // huge) * huge
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap_or_raise(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, _munmap, start, room).atexit = False
    except BaseException:
        _munmap(start, room)
        raise
    return memory


def _mmap_or_raise(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int
) -> int:
    found: int = _mmap(address, nbytes, protection, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise StoreError(number, f"{os.strerror(number)}, for a mapping of {nbytes:,} bytes")
    return found


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


_pwrite = _libc.pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pwrite.restype = ctypes.c_ssize_t


def set_progress(head: memoryview, nbytes: int) -> None:
    """Stores the progress for the other process."""
    head[:8] = nbytes.to_bytes(8, "little")


def get_progress(head: memoryview) -> int:
    """Returns the progress of the other process, whose eight bytes change as one."""
    return int.from_bytes(head[:8], "little")
