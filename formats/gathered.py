"""Gathers small writes into large ones, for the writers of other formats.

Small buffers are copied, at a tenth of the cost of a system call for each. Large buffers are
written directly, in one call with the bytes that were gathered before.
"""

from __future__ import annotations

from collections.abc import Iterable

from formats.storage import Buffer, FileWriter

GATHER_BYTES = 4 << 20
"""A write happens after so many copied bytes."""
LARGE_BYTES = 1 << 20
"""A buffer of at least so many bytes is not copied."""


class Gathered:
    """A `FileWriter` in front of another one, which has all bytes only after `flush`."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._memory = memoryview(bytearray(GATHER_BYTES))
        self._held = 0
        self.total = 0
        """Bytes appended so far."""

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers in order. They may be reused as soon as this returns."""
        for buffer in buffers:
            data = memoryview(buffer).cast("B")
            self.total += len(data)
            if len(data) >= LARGE_BYTES:
                self._file.write([self._memory[: self._held], data])
                self._held = 0
                continue
            if self._held + len(data) > GATHER_BYTES:
                self.flush()
            self._memory[self._held : self._held + len(data)] = data
            self._held += len(data)

    def flush(self) -> None:
        """Writes all appended bytes to the file."""
        if self._held:
            self._file.write([self._memory[: self._held]])
            self._held = 0

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first `len(data)` bytes, which must be written before."""
        self.flush()
        self._file.rewrite_start(data)
