"""The interfaces of formats: a folder whose files are read by ranges, and one that is written.

`ckpt.stores.store` implements both for local disks and object stores. A format opens no store
itself. Paths are relative, with forward slashes. A single-file checkpoint is a folder with one
file. A reader also finds files in a folder beside its own, under `../<folder>/<name>`, because a
checkpoint may borrow from another. Formats check names before they form such a path.

`Pool` reads with several threads, and in the caller's thread if no thread can start. From Python
3.12 on, no thread starts while the interpreter exits, when a background save may still write files.
A system may also refuse a thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from formats.errors import CorruptError

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview

LOCAL_READ_BYTES = 512 << 10
"""Small enough to stay in the processor's cache until it is verified and copied."""
REMOTE_READ_BYTES = 24 << 20
"""Large enough that the fixed cost of a request does not matter."""
COPIED_READ_BYTES = 8 << 20
"""The same for drivers that hold a whole response in memory before they fill buffers."""


LOOKS = 5
"""Bytes with a wrong checksum are read again at most so many times."""

BESIDE = "../"
"""The beginning of a file's name in a folder beside this one."""


class Reader(Protocol):
    """A folder of files, read by exact ranges."""

    url: str
    """The user's name of the folder, for messages."""

    @property
    def read_bytes(self) -> int:
        """The best size of a read: `LOCAL_READ_BYTES`, or a larger one for servers."""

    def names(self) -> list[str]:
        """Returns the files directly in the folder, sorted."""

    def entries(self, folder: str = "") -> list[str]:
        """Returns the files and, with a slash at the end, the folders directly in the folder.

        `folder` is a sub-folder, by its relative path. Sorted; one listing; none if it is missing.
        """

    def size(self, name: str) -> int:
        """Returns the size of a file. Raises FileNotFoundError with its name."""

    def read_whole(self, name: str, limit: int) -> bytes:
        """Reads all bytes of one version of a small file, in one request.

        Raises FileNotFoundError with its name, or TooLargeError if it has more than `limit` bytes.
        """

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last `length` bytes of a file of `size` bytes, in one request.

        Raises FileNotFoundError with its name, or SizeError if the file has another size.
        """

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Reads exactly these bytes of a file that exists.

        Raises CorruptError if the file ends before, or GoneError if it is missing.
        """

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills writable buffers end to end with the bytes from `offset` on. Raises as `read`."""


def in_place(
    reader: Reader, name: str, offset: int, length: int
) -> AbstractContextManager[memoryview] | None:
    """Returns bytes of a file that can be read where they lie; None if `read_into` must copy them.

    They are valid in the block of a `with`. Its end raises, as `read_into` does, if other bytes
    have taken their place.
    """
    lends: Lends | None = getattr(reader, "in_place", None)
    return None if lends is None else lends(name, offset, length)


def memory_name(reader: Reader) -> str:
    """Returns the name of the memory in which all files of a reader lie; empty if they do not.

    Readers with memory of one name see the same bytes.
    """
    return str(getattr(reader, "memory_name", ""))


def read_again(
    reader: Reader,
    place: tuple[str, int, int],
    first: T,
    read: Callable[[], T],
    is_right: Callable[[T], bool],
) -> T | None:
    """Returns the bytes of a place, if only the way to them has changed them; None if damaged.

    Called for bytes whose checksum is wrong. `place` has the file and its bytes `[lo, hi)`. `read`
    reads them again, and returns them or their checksum, as `first` is of the first read. Twice the
    same wrong bytes are damage in the store. A reader without a network has nothing to try.

    Raises CorruptError if each read returns other bytes, and none of them are right.
    """
    tell: Callable[[str, int, int], None] | None = getattr(reader, "count_reread", None)
    if tell is None:
        return None
    forget: Callable[[str, int, int], None] | None = getattr(reader, "forget", None)
    seen = [first]
    for _ in range(LOOKS):
        if forget is not None:  # a reader that keeps bytes for later calls
            forget(*place)
        again = read()
        if is_right(again):
            tell(*place)
            return again
        if again in seen:
            return None
        seen.append(again)
    file, lo, hi = place
    raise CorruptError(
        f"{reader.url}/{file}: bytes {lo}:{hi} were read {len(seen)} times, each time with another "
        "wrong checksum: the network, a proxy or this machine's memory changes bytes; read from "
        "another machine"
    )


Lends = Callable[[str, int, int], "AbstractContextManager[memoryview] | None"]
"""The method of a reader whose files lie in memory."""


class MadeFiles:
    """A reader, and beside its files some that lie nowhere: their bytes are made as they are read.

    The name of such a file begins with a slash, unlike those of the reader.
    """

    in_place = server_path = None
    """Nothing of it lies in a place."""

    def __init__(self, reader: Reader, make: Callable[[str, int, memoryview], None]) -> None:
        """`make` fills memory with the bytes of a file from a place on."""
        self._reader, self._make = reader, make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """As `Reader.read_into`."""
        if not name.startswith("/"):
            self._reader.read_into(name, offset, *targets)
            return
        for target in targets:
            self._make(name, offset, target)
            offset += len(target)


class FileWriter(Protocol):
    """The writer of one file, which is invisible or harmless until it is complete."""

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers in order. They may be reused as soon as this returns."""

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first `len(data)` bytes, which must be written before."""


@runtime_checkable
class CopyingFileWriter(Protocol):
    """The writer of a file that may take bytes of another one without moving them here."""

    def copy(self, reader: Reader, name: str, lo: int, hi: int) -> bool:
        """Appends bytes `[lo, hi)` of a file of a reader. Returns False if it did nothing.

        Nobody compares checksums then: the bytes do not pass by this process.
        """


@runtime_checkable
class PlacedFileWriter(Protocol):
    """The writer of a file that takes bytes at any place, from several threads."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes the bytes at this place. No byte may be left out in the end."""


class Writer(Protocol):
    """A folder into which files are streamed."""

    url: str

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """Returns a writer of a new file: durable if the block succeeds, removed otherwise."""


P = ParamSpec("P")
R = TypeVar("R")


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` runs the work itself if no thread can start."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Returns the Future of a call, which runs once: in a thread, or before this returns."""
        future: Future[R] = Future()
        taken = Lock()
        """Makes the call run once: the executor queues it before it fails to start a thread."""

        def run() -> None:
            if not taken.acquire(blocking=False) or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            super().submit(run)
        except RuntimeError:
            run()
        return future
