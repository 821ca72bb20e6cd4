"""The interface of drivers: single requests to a server, without retries.

A driver uses an fsspec file system, which has the addresses, credentials and connections. It has no
state of its own and classifies the errors of its server. `ckpt.stores.retries` decides about
retries. Paths have the form of the file system: the bucket first, no protocol.

The guarantees of a store, and its unfinished files, as values.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ckpt.installation import __version__
from ckpt.stores.retries import ErrorClass
from formats.errors import CorruptError
from formats.storage import FileWriter
from sharding.agreement.call_events import Requests, count_requests
from sharding.errors import ArgumentError

T = TypeVar("T")
Clock = Callable[[], float]
Sleep = Callable[[float], object]

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
        for entry in page:
            self.files.append(entry)
            self._folders.add(entry.name.partition("/")[0])
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

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists the files and folders directly in a folder; none if the folder does not exist."""

    def list_below(self, folder: str) -> list[ObjectInfo] | None:
        """Lists all files in a folder and in the folders below; their names are paths.

        Returns None if the server has no such listing, or if it takes too long (`Below`).
        """

    def head(self, path: str) -> ObjectInfo:
        """Returns the properties of one file."""

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        """Fills buffers end to end with the bytes from `offset` on.

        Returns the size of the file if it is known. Raises ShortAnswerError or PastEndError if
        there are fewer bytes.
        """

    def get_start(self, path: str, length: int) -> Start:
        """Reads the first bytes of a file in one request; fewer if it is shorter."""

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads all bytes of a file; returns its size if that is above `limit`.

        Also returns the tag of this state of the file; "" where there are no tags.
        """

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes a file in one request, and returns its tag.

        With a `tag` there is a condition: the file is in this state. Another state is an error of
        the class EXISTS, no file one of this class or of MISSING.
        """

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes a file as `put`, on the condition that it does not exist."""

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Deletes the parts of an upload."""

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Lists the uploads in a folder that are neither complete nor aborted."""

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        """Returns the bytes of the parts of an upload; 0 if the server does not tell."""

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes a file; with a `tag` on the condition of `put`."""

    def delete_all(self, paths: Mapping[str, str]) -> None:
        """Deletes up to `deletes_at_once` files of one bucket in one request.

        Each has a tag, for the condition of `put`, or "". Raises OSError if one of them stays.
        """

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder if it is empty, on servers with folders; never a bucket."""

    def error_class(self, error: BaseException) -> ErrorClass:
        """Returns the class of an error."""

    @property
    def session(self) -> object:
        """The connections and credentials in use."""

    def renew(self, session: object) -> None:
        """Makes the session anew from its sources, unless another thread has replaced this one."""


class MultipartDriver(Driver, Protocol):
    """A driver that writes large files in parts."""

    part_limits: PartLimits

    def create_multipart(self, path: str) -> str:
        """Begins an upload in parts and returns its id."""

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        """Uploads one part, numbered from 1. Returns its tag for `complete_multipart`."""

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        """Makes the file of its parts, in order."""


@runtime_checkable
class CopyingDriver(MultipartDriver, Protocol):
    """A driver of a server that makes a part of the bytes of another file there."""

    def copy_part(
        self, path: str, upload_id: str, number: int, source: str, lo: int, hi: int
    ) -> Any:
        """Copies bytes `[lo, hi)` of the file at another path as `upload_part` uploads a part."""


@runtime_checkable
class StreamDriver(Driver, Protocol):
    """A driver that streams large files."""

    def stream(self, path: str) -> AbstractContextManager[FileWriter]:
        """Returns a writer. The file is complete when the block ends without an exception."""


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """The options in `storage_options` that ckpt takes itself, for every driver."""

    concurrency: int | None = None
    """The most requests of this process on their way at the same time."""
    max_bandwidth: float | None = None
    """The most bytes of files that this process sends and receives in a second."""
    user_agent: str = ""
    """A word that follows ckpt's own in the header of this name."""

    @property
    def header(self) -> str:
        """The words of ckpt in the header `User-Agent`."""
        return f"ckpt/{__version__} {self.user_agent}".rstrip()


NO_OPTIONS = OwnOptions()


def free_at(busy_until: float, now: float, nbytes: int, bandwidth: float) -> tuple[float, float]:
    """Returns when a line is free again after some bytes, and the pause before they may begin.

    >>> free_at(0.0, 100.0, 50, 10.0), free_at(105.0, 101.0, 20, 10.0)
    ((105.0, 0.0), (107.0, 4.0))
    """
    begin = max(busy_until, now)
    return begin + nbytes / bandwidth, begin - now


class Gate:
    """Lets as many requests and bytes pass as the options allow; for one process."""

    def __init__(self, own: OwnOptions, clock: Clock = time.monotonic, sleep: Sleep = time.sleep):
        self._own, self._clock, self._sleep = own, clock, sleep
        self._slots = None if own.concurrency is None else threading.Semaphore(own.concurrency)
        self._lock, self._busy_until = threading.Lock(), 0.0

    @contextmanager
    def passing(self, nbytes: int) -> Iterator[None]:
        """Holds a place for a request with so many bytes, once there is one."""
        self.account(nbytes)
        with self._slots or nullcontext():
            yield

    def account(self, nbytes: int) -> None:
        """Waits until the line is free, and keeps it busy for the time of so many bytes."""
        if self._own.max_bandwidth is None or not nbytes:
            return
        with self._lock:
            self._busy_until, pause = free_at(
                self._busy_until, self._clock(), nbytes, self._own.max_bandwidth
            )
        if pause > 0:
            self._sleep(pause)


@lru_cache(maxsize=64)
def gate_of(server: str, own: OwnOptions) -> Gate:
    """Returns the gate that all stores of this process with these options share."""
    return Gate(own)


os.register_at_fork(after_in_child=gate_of.cache_clear)


@contextmanager
def repeating() -> Iterator[None]:
    """Inside, requests count as repeated ones."""
    token = _is_repeated.set(True)
    try:
        yield
    finally:
        _is_repeated.reset(token)


_is_repeated: ContextVar[bool] = ContextVar("is_repeated", default=False)
"""Also known in the event loops of drivers: a call there takes the context along."""


def count_request(operation: str, nbytes: int = 0) -> None:
    """Counts a request for the events, with the bytes of a file in it."""
    count_requests(operation, Requests(1, int(_is_repeated.get()), nbytes))


def count_received(nbytes: int) -> None:
    """Counts bytes of a file in an answer."""
    count_requests("get", Requests(nbytes=nbytes))


class Session:
    """The part of a driver that keeps the file system, and with it the credentials."""

    def __init__(self, file_system: Any, own: OwnOptions = OwnOptions()) -> None:
        self._fs = file_system
        self._gate = gate_of(str(getattr(file_system, "_fs_token", "")), own)

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


def check_names(package: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ArgumentError for an option that is none of a package's: it would have no effect."""
    for name in names:
        if name not in known:
            near = "".join(
                f"; did you mean {match!r}?" for match in get_close_matches(name, known, 1)
            )
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
