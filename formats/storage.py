"""The two ends a format needs: a folder to read ranges from and a folder to write files into.

`ckpt.stores.store` implements both for local disks and object stores; formats never open anything
themselves. Paths are relative, with forward slashes. A single-file checkpoint is a folder with one
file in it. A reader also finds the files of a folder beside its own, under `../<folder>/<name>`:
one checkpoint may borrow from another. Names are checked before they are put together so.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

Buffer = bytes | bytearray | memoryview

LOCAL_READ_BYTES = 256 << 10
"""Little enough to be in the processor's cache still when it is verified or copied on."""
REMOTE_READ_BYTES = 24 << 20
"""So much that what a request takes by itself does not matter, even if many cannot be as long."""
COPIED_READ_BYTES = 8 << 20
"""The same where a driver holds all of an answer in memory before it is put where it belongs."""


BESIDE = "../"
"""What the name of a file in a folder beside this one begins with."""


class Reader(Protocol):
    """A folder of files, read by exact ranges."""

    url: str
    """What the user called it, for messages."""
    read_bytes: int
    """What one read is best made of: `LOCAL_READ_BYTES`, or as much as suits a server."""

    def names(self) -> list[str]:
        """The files directly in the folder, sorted."""
        ...

    def size(self, name: str) -> int:
        """Bytes in a file. Raises FileNotFoundError naming it."""
        ...

    def read_whole(self, name: str, limit: int) -> bytes:
        """All bytes of a small file, as they were at one moment, in one request.

        Raises FileNotFoundError naming it, and TooLargeError where it has more than `limit` bytes.
        """
        ...

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """The last `length` bytes of a file that should have `size` bytes, in one request.

        Raises FileNotFoundError naming it, and SizeError where it has another size.
        """
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file that is known to be there.

        Raises formats.errors.CorruptError where the file ends before, or is gone: `GoneError`.
        """
        ...

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fill writable buffers of bytes, end to end, from `offset` on; raises as `read` does."""
        ...


class FileWriter(Protocol):
    """One file being written, invisible or harmless until it is finished."""

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Append the buffers in order. They may be reused as soon as this returns."""
        ...

    def rewrite_start(self, data: Buffer) -> None:
        """Replace the first `len(data)` bytes, which have been written before."""
        ...


class Writer(Protocol):
    """A folder that files are streamed into."""

    url: str

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """A new file: durable when the block ends well, removed when it ends with an exception."""
        ...
