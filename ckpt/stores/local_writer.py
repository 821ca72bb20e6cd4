"""Appends to a file on a local disk, which starts to write while more data comes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ckpt.stores.request_errors import explained_on_disk
from formats.storage import Buffer

IO_VECTORS = 1024
"""The largest number of buffers of one call: the kernel's limit."""
EARLY_BYTES = 8 << 20
"""The disk starts to write after so many bytes, so that the final flush is short."""


class LocalFileWriter:
    """Appends to one open file."""

    def __init__(self, descriptor: int, shown: str, path: str) -> None:
        self.path = path
        """The absolute path of the file while it is written."""
        self._descriptor = descriptor
        self._shown = shown
        self._written = 0
        self._started = 0
        """Bytes that the disk has started to write."""

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers, many in one call."""
        waiting = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        with explained_on_disk("writing", self._shown):
            for first in range(0, len(waiting), IO_VECTORS):
                self._written += _write_all(self._descriptor, waiting[first : first + IO_VECTORS])
        if self._written - self._started >= EARLY_BYTES:
            _start_write_back(self._descriptor, self._started, self._written - self._started)
            self._started = self._written

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes the bytes at this place; several threads may do so at the same time."""
        view, at = memoryview(data).cast("B"), offset
        with explained_on_disk("writing", self._shown):
            while len(view):
                count = os.pwrite(self._descriptor, view, at)
                at, view = at + count, view[count:]
        begun = offset // EARLY_BYTES * EARLY_BYTES
        if at >= begun + EARLY_BYTES:  # the flush writes bytes that come later
            _start_write_back(self._descriptor, begun, EARLY_BYTES)

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first bytes of the file."""
        view, done = memoryview(data).cast("B"), 0
        with explained_on_disk("writing", self._shown):
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], done)


@contextmanager
def joined_file(path: str, shown: str) -> Iterator[LocalFileWriter]:
    """Returns a writer of a file that another process has begun; durable if the block succeeds."""
    with explained_on_disk("opening", shown):
        descriptor = os.open(path, os.O_RDWR)
    try:
        yield LocalFileWriter(descriptor, shown, path)
        with explained_on_disk("flushing", shown):
            os.fsync(descriptor)
    finally:
        close_descriptor(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Closes a descriptor. A failure loses nothing that `fsync` has made durable."""
    with suppress(OSError):
        os.close(descriptor)


def _write_all(descriptor: int, buffers: list[memoryview]) -> int:
    """Writes all of the buffers; returns their bytes."""
    total = 0
    while buffers:
        count = os.writev(descriptor, buffers)
        total += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return total


def _start_write_back(descriptor: int, offset: int, length: int) -> None:
    """Asks the disk to write a range, without a wait. A hint that only Linux has."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
