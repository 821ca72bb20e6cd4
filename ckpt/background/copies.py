"""Copies host memory into the arena, by one thread or by several.

Rules:

1. One thread copies in pieces of `PIECE_BYTES` and keeps the interpreter's lock. A thread that
   releases the lock waits up to 5 ms for another thread that computes, after every piece. Pieces
   of less than 1 MiB are a tenth slower if the memory has pages of 4 KiB.
2. Several threads copy runs of `RUN_BYTES` and release the lock.
3. The system writes memory that was never touched (`Arena.fill`), which spares a page fault for
   every page.
4. When a call that waits for all copies has ended in any way, no thread copies any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ckpt.background.arena import Arena
from ckpt.background.slots import Slot

PIECE_BYTES = 4 << 20
RUN_BYTES = 16 << 20
WORTH_THREADS_BYTES = 64 << 20
"""One thread copies fewer bytes in about the time that other threads need to start."""

Run = tuple[Slot, int, int]
"""Bytes `[lo, hi)` of a slot."""

_locked_memmove = ctypes.PyDLL(None).memmove
"""`memmove` with the interpreter's lock kept."""
_locked_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_locked_memmove.restype = ctypes.c_void_p


def runs(found: Sequence[Slot]) -> Iterator[Run]:
    """Yields the bytes of slots, in runs that can be copied one by one."""
    for slot in found:
        nbytes = slot.item.nbytes
        for lo in range(0, nbytes, RUN_BYTES):
            yield slot, lo, min(lo + RUN_BYTES, nbytes)


class Copies:
    """Runs that are copied once each. Any thread may help, and a waiting thread does."""

    def __init__(self, found: Sequence[Slot], data: memoryview, arena: Arena) -> None:
        self._runs = list(runs(found))
        self._data = data
        """The view that keeps the memory mapped."""
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(data)) if self._runs else 0
        self._arena = arena
        self._todo = deque(range(len(self._runs)))
        """Numbers of the runs that no thread has begun."""
        self._copied: set[int] = set()
        self._helping: list[threading.Lock] = []
        """Locks, each held by a thread while it copies runs."""

    def help(self) -> None:
        """Copies the runs that no thread has begun. `finish` repeats runs that fail here."""
        mine = threading.Lock()
        self._helping.append(mine)
        with mine, suppress(IndexError):  # no run is left
            while True:
                number = self._todo.popleft()
                with suppress(Exception):
                    self._copy(*self._runs[number])
                    self._copied.add(number)

    def finish(self) -> None:
        """Returns once everything is copied; called once."""
        self.help()
        self._wait_for_helpers()
        for number, run in enumerate(self._runs):
            if number not in self._copied:  # the thread that began it failed, or was interrupted
                self._copy(*run)

    def drop(self) -> None:
        """Drops the runs that are left, and all references to memory."""
        self._todo.clear()
        self._runs = []

    def share(self, helpers: int) -> None:
        """Returns once this thread and so many others have copied everything."""
        try:
            for _ in range(helpers):
                with suppress(RuntimeError):  # no thread can be started
                    threading.Thread(target=self.help, name="ckpt-copy", daemon=True).start()
            self.finish()
        finally:
            self.drop()
            self._wait_for_helpers()

    def _wait_for_helpers(self) -> None:
        for helping in list(self._helping):
            with helping:
                pass

    def _copy(self, slot: Slot, lo: int, hi: int) -> None:
        source, target = slot.address() + lo, slot.item.offset + lo
        if slot.item.offset + hi > self._arena.touched:
            self._arena.fill(target, source, hi - lo)
        else:
            ctypes.memmove(self._base + target, source, hi - lo)


def copy_all(found: Sequence[Slot], data: memoryview, arena: Arena, workers: int) -> None:
    """Returns once this thread and `workers` - 1 others have copied all slots."""
    nbytes = sum(slot.item.nbytes for slot in found)
    end = max((slot.item.offset + slot.item.nbytes for slot in found), default=0)
    if workers > 1 and nbytes >= WORTH_THREADS_BYTES:
        Copies(found, data, arena).share(workers - 1)
    elif end > arena.touched:
        Copies(found, data, arena).finish()
    elif found:
        _copy_in_pieces(found, ctypes.addressof(ctypes.c_char.from_buffer(data)))


def _copy_in_pieces(found: Sequence[Slot], base: int) -> None:
    copy = _locked_memmove
    for (_, _, dtype, lo, hi, _, offset), leaf in found:
        itemsize = dtype.itemsize
        # The call has just checked that the tensor has all of its memory.
        source, target = leaf.local.data_ptr() + lo * itemsize, base + offset
        nbytes = (hi - lo) * itemsize
        for at in range(0, nbytes, PIECE_BYTES):
            copy(target + at, source + at, min(PIECE_BYTES, nbytes - at))
