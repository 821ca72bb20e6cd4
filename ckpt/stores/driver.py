"""What a store of objects asks of a driver: single requests, each done once or failing once.

A driver sits on an fsspec file system, which brings addresses, credentials and connections. It
holds no state of its own, and knows what its server's errors mean; whether something is tried again
is not its business (`ckpt.stores.retries`). Paths are as that file system writes them: the bucket
first, no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from ckpt.stores.capabilities import StoreCapabilities, Unfinished
from ckpt.stores.retries import ErrorClass
from formats.errors import CorruptError
from formats.storage import FileWriter

T = TypeVar("T")

CONNECT_SECONDS = 20
ANSWER_SECONDS = 60
"""A request has failed when nothing of its answer comes for so long."""
LONGEST_SECONDS = 300
"""A request has failed after so long in any case, as where nobody takes what is sent."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A file, or a folder, as a listing shows it."""

    name: str
    is_file: bool
    nbytes: int | None
    """None where it does not say: a web server's page of links."""
    modified: float
    """Seconds since 1970 by the server's clock."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """How a driver takes a large file."""

    least_bytes: int
    """Every part but the last has so many."""
    most: int
    """The number of parts."""


class ShortAnswerError(CorruptError):
    """The answer to a read ended before what it promised."""


class PastEndError(CorruptError):
    """The file ends before the bytes that are wanted."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        super().__init__(f"the file ends at {size}")


class Driver(Protocol):
    """The requests. What they raise is the driver's own; `trouble` says what it means.

    How a large file is written is a `MultipartDriver`'s or a `StreamDriver`'s.
    """

    capabilities: StoreCapabilities
    holds_answers: bool
    """Whether it has all of an answer in memory before it fills the buffers."""

    def server(self) -> str:
        """Which server answers, as far as its promises go; "" before the first request."""
        ...

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """What is directly in a folder; nothing where there is none."""
        ...

    def head(self, path: str) -> ObjectInfo:
        """One file."""
        ...

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        """Fill buffers of bytes, end to end, from `offset` on; gives the size of the file if known.

        Raises ShortAnswerError or PastEndError where there is less.
        """
        ...

    def get(self, path: str, limit: int) -> bytes | int:
        """All bytes of a file; its size where that is above `limit`."""
        ...

    def put(self, path: str, data: memoryview) -> None:
        """A file in one request."""
        ...

    def put_if_absent(self, path: str, data: memoryview) -> None:
        """A file in one request, on condition that there is none."""
        ...

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """The parts are gone."""
        ...

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """What has begun in a folder and neither been finished nor aborted."""
        ...

    def delete(self, path: str) -> None:
        """The file is gone."""
        ...

    def delete_folder(self, folder: str) -> None:
        """The folder is gone if it was one and empty."""
        ...

    def error_class(self, error: BaseException) -> ErrorClass:
        """What an error means."""
        ...


class MultipartDriver(Driver, Protocol):
    """One that writes large files in parts."""

    part_limits: PartLimits

    def create_multipart(self, path: str) -> str:
        """A file in parts begins; gives its mark."""
        ...

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        """One part, numbered from 1; gives what `finish` needs of it."""
        ...

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        """The parts, in order, become the file."""
        ...


@runtime_checkable
class StreamDriver(Driver, Protocol):
    """One whose file system streams large files."""

    def stream(self, path: str) -> AbstractContextManager[FileWriter]:
        """A file, whole when the block ends well."""
        ...


def in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What work in a loop that another thread runs comes to, within `LONGEST_SECONDS`.

    An exception in this thread, as when a user interrupts it, ends the work.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, LONGEST_SECONDS), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
