"""Small writes gathered into large ones, for the writers of foreign formats.

Small buffers are copied, which costs a tenth of what a system call each would; large ones go out as
they are, together with what was gathered before them.
"""

from __future__ import annotations

from collections.abc import Iterable

from formats.storage import Buffer, FileWriter

GATHER_BYTES = 4 << 20
"""Copied bytes that make a write."""
LARGE_BYTES = 1 << 20
"""A buffer of at least this many bytes is not copied."""


class Gathered:
    """A `FileWriter` before another one, which has everything only after `flush`."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._memory = memoryview(bytearray(GATHER_BYTES))
        self._held = 0
        self.total = 0
        """Bytes appended so far."""

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Append the buffers in order. They may be reused as soon as this returns."""
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
        """Everything appended has been handed to the file when this returns."""
        if self._held:
            self._file.write([self._memory[: self._held]])
            self._held = 0

    def rewrite_start(self, data: Buffer) -> None:
        """Replace the first `len(data)` bytes, which have been written before."""
        self.flush()
        self._file.rewrite_start(data)
