"""The interface of drivers: single requests to a server, without retries.

A driver uses an fsspec file system, which has the addresses, credentials and connections. It has no
state of its own and classifies the errors of its server. `ckpt.stores.retries` decides about
retries. Paths have the form of the file system: the bucket first, no protocol.

The guarantees of a store, and its unfinished files, as values.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ckpt.stores.retries import ErrorClass
from formats.errors import CorruptError
from formats.storage import FileWriter
from sharding.errors import ArgumentError

T = TypeVar("T")

CONNECT_SECONDS = 20
ANSWER_SECONDS = 60
"""A request fails if no part of its response comes for so long."""
LONGEST_SECONDS = 300
"""A request fails after so long in any case, for example if the server reads no data."""
FREE_PAGES = 4
"""The pages of a listing of all files below a folder that are read in any case."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A file or folder in a listing."""

    name: str
    is_file: bool
    nbytes: int | None
    """None if the listing lacks it: a web server's page of links."""
    modified: float
    """Seconds since 1970 by the server's clock."""
    tag: str = ""
    """The server's mark of this content: other bytes of one name have another. Empty if unknown."""


@dataclass(slots=True)
class Below:
    """A listing of all files below a folder, page by page, and the sense of going on with it.

    A step of a run has two or more files, and a request to its folder costs as much as a page. So
    the listing ends where pages do not reach more folders than there are pages.
    """

    files: list[ObjectInfo] = field(default_factory=list)
    """Names are paths below the folder."""
    _pages: int = 0
    _folders: set[str] = field(default_factory=set)

    def add(self, page: Iterable[ObjectInfo]) -> bool:
        """Adds a page. Returns whether another is worth its request."""
        for one in page:
            self.files.append(one)
            self._folders.add(one.name.partition("/")[0])
        self._pages += 1
        return self._pages <= FREE_PAGES + len(self._folders)


@dataclass(frozen=True, slots=True)
class PartLimits:
    """The limits of a driver for the parts of a large file."""

    least_bytes: int
    """The smallest size of a part; the last one may be smaller."""
    most: int
    """The largest number of parts."""


class ShortAnswerError(CorruptError):
    """The response to a read has fewer bytes than it announced."""


class PastEndError(CorruptError):
    """The file ends before the requested bytes."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        super().__init__(f"the file ends at {size}")


class Driver(Protocol):
    """The requests of a driver. `error_class` classifies the errors that they raise.

    A `MultipartDriver` or a `StreamDriver` also writes large files.
    """

    capabilities: StoreCapabilities
    deletes_at_once: int
    """The most files of one `delete_all`."""
    holds_answers: bool
    """Whether a whole response is in memory before the driver fills the buffers."""

    def server(self) -> str:
        """Returns the identity of the server, to remember its guarantees; "" before a request."""
        ...

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists the files and folders directly in a folder; none if the folder does not exist."""
        ...

    def list_below(self, folder: str) -> list[ObjectInfo] | None:
        """Lists all files in a folder and in the folders below; their names are paths.

        Returns None if the server has no such listing, or if it takes too long (`Below`).
        """
        ...

    def head(self, path: str) -> ObjectInfo:
        """Returns the properties of one file."""
        ...

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        """Fills buffers end to end with the bytes from `offset` on.

        Returns the size of the file if it is known. Raises ShortAnswerError or PastEndError if
        there are fewer bytes.
        """
        ...

    def get_start(self, path: str, length: int) -> Start:
        """Reads the first bytes of a file in one request; fewer if it is shorter."""
        ...

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads all bytes of a file; returns its size if that is above `limit`.

        Also returns the tag of this state of the file; "" where there are no tags.
        """
        ...

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes a file in one request, and returns its tag.

        With a `tag` there is a condition: the file is in this state. Another state is an error of
        the class EXISTS, no file one of this class or of MISSING.
        """
        ...

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes a file as `put`, on the condition that it does not exist."""
        ...

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Deletes the parts of an upload."""
        ...

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Lists the uploads in a folder that are neither complete nor aborted."""
        ...

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        """Returns the bytes of the parts of an upload; 0 if the server does not tell."""
        ...

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes a file; with a `tag` on the condition of `put`."""
        ...

    def delete_all(self, paths: Mapping[str, str]) -> None:
        """Deletes up to `deletes_at_once` files of one bucket in one request.

        Each has a tag, for the condition of `put`, or "". Raises OSError if one of them stays.
        """
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder if it is empty, on servers with folders; never a bucket."""
        ...

    def error_class(self, error: BaseException) -> ErrorClass:
        """Returns the class of an error."""
        ...

    @property
    def session(self) -> object:
        """The connections and credentials in use."""
        ...

    def renew(self, session: object) -> None:
        """Makes the session anew from its sources, unless another thread has replaced this one."""
        ...


class MultipartDriver(Driver, Protocol):
    """A driver that writes large files in parts."""

    part_limits: PartLimits

    def create_multipart(self, path: str) -> str:
        """Begins an upload in parts and returns its id."""
        ...

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        """Uploads one part, numbered from 1. Returns its tag for `complete_multipart`."""
        ...

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        """Makes the file of its parts, in order."""
        ...


@runtime_checkable
class StreamDriver(Driver, Protocol):
    """A driver that streams large files."""

    def stream(self, path: str) -> AbstractContextManager[FileWriter]:
        """Returns a writer. The file is complete when the block ends without an exception."""
        ...


class Session:
    """The part of a driver that keeps the file system, and with it the credentials."""

    def __init__(self, file_system: Any) -> None:
        self._fs = file_system

    @property
    def session(self) -> object:
        """The file system in use."""
        return self._fs

    def renew(self, session: object) -> None:
        """Makes the file system anew, which reads its credentials again, and puts it into use.

        fsspec keeps file systems by their options. The new one takes the place of the old one.
        """
        with _RENEWING:
            old: Any = self._fs
            if self._fs is not session:
                return
            kind: Any = type(self._fs)
            known = kind._cache.get(old._fs_token)
            if known is not None and known is not old:  # by another driver's thread
                self._fs = known
                return
            kind._cache.pop(old._fs_token, None)
            self._fs = kind(*old.storage_args, **old.storage_options)


_RENEWING = threading.Lock()


def check_names(package: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ArgumentError for an option that is none of a package's: it would have no effect."""
    for name in given:
        if name not in known:
            near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, known, 1))
            raise ArgumentError(
                f"storage_options= has {name!r}, which is no option of {package}{near}"
            )


def in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Runs work in the event loop of another thread, within `LONGEST_SECONDS`; returns its result.

    An exception in this thread, such as an interrupt, cancels the work.
    """
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, LONGEST_SECONDS), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """The guarantees of one store; docs/stores.md has a table of them."""

    put_if_absent: bool | None
    """Whether exactly one of several simultaneous commits without `replace` succeeds. If False, a
    commit looks for the file just before the write, and two commits at one instant may both
    succeed. None is unknown: servers differ, and the first commit of a process finds out."""
    atomic_replace: bool
    """Whether a read during a replacing commit returns either the old content or the new."""
    hides_unfinished: bool
    """Whether a partly written file is invisible under its name."""
    durable: bool
    """Whether a created or committed file survives a loss of power."""


class Start(NamedTuple):
    """The first bytes of a file."""

    data: bytes
    size: int
    """Of the whole file."""
    tag: str
    """The store's mark of this content; empty in stores without one."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A file whose write has begun and neither finished nor been aborted."""

    name: str
    """The name of the complete file; in a bucket also `<folder>/<name>` for a folder below."""
    started: float
    """The start of the write, or the last write if only that is known: seconds since 1970 by the
    store's clock."""
    upload_id: str
    """The store's name of the upload."""
    nbytes: int = 0
    """The bytes that it takes; 0 if unknown."""
