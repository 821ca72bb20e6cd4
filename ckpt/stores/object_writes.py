"""Writes to an object store: files in parts or as one stream, and small files on a condition.

Rules of an upload:

1. A write copies bytes into a part. Threads send full parts while the next one is filled. The
   memory is `part_bytes` times `buffers`.
2. A part is sent once it is full. A file smaller than one part is sent in one request.
3. The first part of a rewritable file is kept and sent last: the numbers of parts decide their
   order.
4. Bytes of another file on the same server become parts there, without passing by this process,
   where they are long enough for a part, and so are the bytes before them.
5. Any exception ends the upload. No further part is sent, and the sent ones are deleted. A killed
   process leaves them (`Store.list_unfinished`).

[Note: streams]
A driver without uploads in parts has a stream:

1. No request is sent again: the bytes that a stream has sent are gone.
2. A rewritable file is first written to a temporary local file, and then sent as a whole.

[Note: conditions]
Small files are written on a condition: that there is none, or that it is as it was last seen.

1. A server may have carried out a request whose response was lost: before another try the store
   looks at the result (`_send`).
2. The store trusts only guarantees that a server has shown. The first commit of a process tests the
   server (`_put_absent`), and the result holds for all folders of that server.
3. A request that was given up may be carried out much later. A store that has read a file replaces
   and deletes it on condition of this state (its ETag), so that a late request finds another state
   and does nothing.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from queue import SimpleQueue
from typing import IO, Any, TypeVar

from ckpt.errors import ExistsError, ReplacedError, StoreError
from ckpt.stores.driver import MultipartDriver, PartLimits, StoreCapabilities, StreamDriver
from ckpt.stores.retries import ErrorClass, UnsupportedRequestError
from formats.storage import Buffer, FileWriter, Pool, Reader
from sharding.errors import without_secrets

PART_BYTES = 16 << 20
"""The size of a part, unless the memory budget is small or large."""
MOST_PART_BYTES = 128 << 20
"""A larger part would lose more with a broken connection, and later parts are larger still."""
LATER_FACTOR = 8
"""Parts in the second half of a server's largest number of parts are larger by this factor."""
MOST_BUFFERS = 8
COPIED_PART_BYTES = 256 << 20
"""The most bytes of a part that the server copies, so that its answer comes in time."""
LEAST_COPIED_BYTES = 5 << 20
"""The server copies longer runs than these: each is a part, and S3 has no smaller ones."""

Memory = mmap | bytes
"""The memory of a part: mapped, so that a small file does not touch all of a large part."""


@dataclass(frozen=True, slots=True)
class UploadRequests:
    """The requests of one upload, each with its retries."""

    put: Callable[[memoryview], None]
    create_multipart: Callable[[], str]
    upload_part: Callable[[str, int, memoryview], Any]
    complete_multipart: Callable[[str, Sequence[Any], int], None]
    """The last argument is the size of the whole file."""
    abort_multipart: Callable[[str], None]
    path_of: Callable[[Reader, str], str | None] = lambda reader, name: None
    """The path of a file of a reader that `copy_part` can copy; None for another one."""
    copy_part: Callable[[str, int, str, int, int], Any] | None = None


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The sizes of the parts of a file, and the number of parts in memory."""

    part_bytes: int
    later_bytes: int
    first_later: int
    """The number of the first larger part."""
    buffers: int
    least_bytes: int = 5 << 20
    """The smallest size of a part that is not the last."""

    @classmethod
    def within(cls, budget: int, limits: PartLimits) -> PartSizes:
        """Returns the sizes that a memory budget and a server allow.

        A budget for more than `MOST_BUFFERS` parts makes the parts larger, so the requests fewer.

        >>> PartSizes.within(64 << 20, PartLimits(5 << 20, 10_000)).buffers
        4
        >>> PartSizes.within(512 << 20, PartLimits(5 << 20, 10_000)).part_bytes >> 20
        64
        """
        usual = max(limits.least_bytes, min(PART_BYTES, budget // 4))
        part = max(usual, min(MOST_PART_BYTES, budget // MOST_BUFFERS))
        buffers = max(2, min(MOST_BUFFERS, budget // part))
        later, half = part * LATER_FACTOR, limits.most // 2
        return cls(part, later, half, buffers, limits.least_bytes)

    def part(self, number: int) -> int:
        """Returns the bytes of a part, numbered from 1."""
        return self.part_bytes if number < self.first_later else self.later_bytes


class Upload:
    """The upload of one file: one thread writes it, others send it."""

    def __init__(
        self,
        requests: UploadRequests,
        part_sizes: PartSizes,
        rewritable: bool,
        stopped: threading.Event,
    ) -> None:
        """`cancel` sets `stopped`, which ends the pauses between retries."""
        self._requests = requests
        self._part_sizes = part_sizes
        self._rewritable = rewritable
        self._stopped = stopped
        self._number = 1
        self._buffer: Memory = b""
        self._filled = 0
        self._total = 0
        self._first: memoryview | None = None
        """The first part of a rewritable file, once it is full."""
        self._upload_id: str | None = None
        self._made = 0
        self._free: SimpleQueue[Memory] = SimpleQueue()
        self._pool: Pool | None = None
        self._sent: dict[int, Future[Any]] = {}
        self._copied: tuple[str, int, int] | None = None
        """The path and the bytes of another file that are the next part, so far."""
        self._can_copy = requests.copy_part is not None and not rewritable
        self._has_copied = False

    def copy(self, reader: Reader, name: str, lo: int, hi: int) -> bool:
        """Appends bytes of another file on the server. Returns False if it did nothing (rule 4)."""
        path = self._requests.path_of(reader, name) if self._can_copy else None
        if path is None:
            return False
        if self._copied is not None:
            before, first, last = self._copied
            if (before, last) == (path, lo) and hi - first <= COPIED_PART_BYTES:
                self._copied = path, first, hi
                self._total += hi - lo
                return True
        least = self._part_sizes.least_bytes
        if hi - lo <= LEAST_COPIED_BYTES or 0 < self._filled < least:
            return False
        self._end_copied()
        if self._filled:
            self._send(self._number, memoryview(self._buffer)[: self._filled], self._buffer)
            self._number, self._buffer, self._filled = self._number + 1, b"", 0
        self._copied = path, lo, hi
        if not self._has_copied:
            try:
                self._end_copied().result()  # not every server can, or lets this user
            except OSError:
                self._can_copy = False
                self._number -= 1
                del self._sent[self._number]
                return False
            self._has_copied = True
        self._total += hi - lo
        return True

    def _end_copied(self) -> Future[Any]:
        """Begins the copy of the part that has been collected, if there is one."""
        if self._copied is None:
            return Future()
        (path, lo, hi), number, self._copied = self._copied, self._number, None
        self._number += 1
        copy_part, upload_id, pool = self._requests.copy_part, self._begun(), self._threads()
        assert copy_part is not None
        self._sent[number] = pool.submit(partial(copy_part, upload_id, number, path, lo, hi))
        return self._sent[number]

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers. Raises the error of an earlier part that failed."""
        self._end_copied()
        for buffer in buffers:
            data = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            if self._rewritable and not self._total and len(data):
                self._begin_part(max(len(data), self._part_sizes.part(1)))  # holds all of the start
            while len(data):
                if self._filled == len(self._buffer):
                    self._end_part()
                    self._begin_part(self._part_sizes.part(self._number))
                count = min(len(data), len(self._buffer) - self._filled)
                memoryview(self._buffer)[self._filled : self._filled + count] = data[:count]
                self._filled += count
                self._total += count
                data = data[count:]

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first bytes: at most those of the first buffer or the first part."""
        first = self._first
        if first is None and self._number == 1:
            first = memoryview(self._buffer)[: self._filled]
        if not self._rewritable or first is None:
            raise OSError(
                "bytes that were sent cannot be changed; create the file rewritable to change its "
                "start"
            )
        if len(data) > len(first):
            raise OSError(f"{len(data)} bytes are more than the {len(first)} in the first part")
        first[: len(data)] = data

    def finish(self) -> None:
        self._end_copied()
        last = memoryview(self._buffer)[: self._filled]
        if self._upload_id is None and self._first is None:
            self._requests.put(last)
            return
        if len(last):
            self._send(self._number, last, None)
        if self._first is not None:
            self._send(1, self._first, None)
        tags = [self._sent[number].result() for number in sorted(self._sent)]
        assert self._upload_id is not None
        self._requests.complete_multipart(self._upload_id, tags, self._total)
        self._shut_down()

    def cancel(self) -> None:
        """Ends the upload and deletes its parts, if the server can be reached."""
        self._stopped.set()
        self._shut_down()
        if self._upload_id is not None:
            self._requests.abort_multipart(self._upload_id)

    def _begin_part(self, nbytes: int) -> None:
        if self._made < self._part_sizes.buffers:
            self._made += 1
            self._buffer = mmap(-1, nbytes)
        else:
            self._buffer = self._free.get()
            for future in self._sent.values():
                if future.done():
                    future.result()
            if len(self._buffer) != nbytes:
                self._buffer = mmap(-1, nbytes)
        self._filled = 0

    def _end_part(self) -> None:
        if not self._filled:  # no part has begun
            return
        part = memoryview(self._buffer)
        if self._rewritable and self._number == 1:
            self._first = part
        else:
            self._send(self._number, part, self._buffer)
        self._number += 1

    def _send(self, number: int, part: memoryview, buffer: Memory | None) -> None:
        upload_id, pool = self._begun(), self._threads()

        def send() -> Any:
            try:
                return self._requests.upload_part(upload_id, number, part)
            finally:
                if buffer is not None:
                    self._free.put(buffer)

        self._sent[number] = pool.submit(send)

    def _begun(self) -> str:
        """Returns the id of the upload, which begins if it has not."""
        if self._upload_id is None:
            self._upload_id = self._requests.create_multipart()
        return self._upload_id

    def _threads(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self._part_sizes.buffers, "ckpt-upload")
        return self._pool

    def _shut_down(self) -> None:
        if self._pool is not None:
            wait([future for future in self._sent.values() if not future.cancel()])
            self._pool.shutdown()


COPY_BYTES = 8 << 20
Send = Callable[[Callable[[], Any]], Any]
"""Runs one call of a driver, and turns its errors into those of the store."""


@contextmanager
def open_writer(
    driver: StreamDriver, path: str, rewritable: bool, send: Send
) -> Iterator[FileWriter]:
    """Returns a writer of a file that is complete when the block ends without an exception."""
    if not rewritable:
        with _open_remote(driver, path, send) as remote:
            yield remote
        return
    with tempfile.TemporaryFile() as local:
        yield _Local(local)
        local.seek(0)
        with _open_remote(driver, path, send) as remote:
            while block := local.read(COPY_BYTES):
                remote.write([block])


@contextmanager
def _open_remote(driver: StreamDriver, path: str, send: Send) -> Iterator[FileWriter]:
    stream = driver.stream(path)
    remote = send(stream.__enter__)
    try:
        yield _Sent(remote, send)
    except BaseException:
        stream.__exit__(*sys.exc_info())
        raise
    send(lambda: stream.__exit__(None, None, None))


class _Sent:
    """Streams a file."""

    def __init__(self, stream: FileWriter, send: Send) -> None:
        self._stream = stream
        self._send = send
        self.rewrite_start = stream.rewrite_start

    def write(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self._send(partial(self._stream.write, [buffer]))


class _Local:
    """Writes a file to a local disk before its upload."""

    def __init__(self, local: IO[bytes]) -> None:
        self._local = local

    def write(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self._local.write(buffer)

    def rewrite_start(self, data: Buffer) -> None:
        """Replaces the first bytes of the file."""
        end = self._local.tell()
        self._local.seek(0)
        self._local.write(data)
        self._local.seek(end)


T = TypeVar("T")

_log = logging.getLogger("ckpt.stores")

NO_LIMIT = sys.maxsize
REPLACING = 10
"""The most tries to replace a file that other programs replace, too."""

_bare_tags: set[str] = set()
"""The servers whose conditions have tags without quotation marks."""
_without_tags: set[str] = set()
"""The servers that have refused conditions for the tags of files."""
_honours: dict[str, bool] = {}
"""Whether a server honours conditions, by its address, as commits of this process have shown."""


class ConditionalWrites:
    """The part of an object store that writes on conditions, as far as its server has them."""

    url: str
    exists: Callable[[str], bool]
    read_whole: Callable[[str, int], bytes]
    _driver: MultipartDriver | StreamDriver
    _tags: dict[str, str | None]
    """The tags of files as this store has last read or written them; None of absent ones."""
    _try: Callable[..., Any]
    _path: Callable[[str], str]

    @property
    def capabilities(self) -> StoreCapabilities:
        claimed = self._driver.capabilities
        if claimed.put_if_absent is False:
            return claimed
        return replace(claimed, put_if_absent=_honours.get(self._driver.server()))

    def _check_absent(self, name: str) -> None:
        if self.exists(name):
            raise ExistsError(f"{self.url}/{name} exists already")

    def _put_new(
        self, name: str, data: memoryview, check: Callable[[], object] | None = None
    ) -> None:
        """Writes a new file. Raises ExistsError if the file exists."""
        if self.capabilities.put_if_absent is not True:
            self._check_absent(name)
        self._put_absent(name, data, check)

    def _send(
        self,
        name: str,
        data: memoryview,
        request: Callable[[str, memoryview], str],
        check: Callable[[], object] | None,
    ) -> None:
        """Writes a file in one request, until it is answered ([Note: conditions]).

        Before a further try the file may have the bytes already: then the answer was lost. If it
        has not, others may have changed what `check` looks at.
        """
        path, tries = self._path(name), 0

        def send() -> Exception | None:
            nonlocal tries
            tries += 1
            if tries > 1 and self._has(name, data):
                return None
            try:
                if check is not None:
                    check()
            except Exception as error:  # not one of this request: no further try helps
                return error
            self._tags[name] = request(path, data)
            return None

        try:
            refusal = self._try("writing", name, send)
        except ExistsError:
            if tries == 1 or not self._try("reading", name, lambda: self._has(name, data)):
                raise
        else:
            if refusal is not None:
                raise refusal

    def _has(self, name: str, data: memoryview) -> bool:
        try:
            content, tag = self._driver.get(self._path(name), len(data))
        except Exception as error:
            if self._driver.error_class(error) is ErrorClass.MISSING:
                return False
            raise
        if content != bytes(data):
            return False
        self._tags[name] = tag
        return True

    def _put_absent(self, name: str, data: memoryview, check: Callable[[], object] | None) -> None:
        """Writes a new file on condition, and learns whether the server honours it."""
        path = self._path(name)
        try:
            self._send(name, data, self._driver.put_if_absent, check)
        except ExistsError:
            self._learn(True)
            raise
        except UnsupportedRequestError:
            self._learn(False)
            self._send(name, data, self._driver.put, check)
        else:
            if self.capabilities.put_if_absent is None:
                try:
                    self._try("writing again", name, lambda: self._driver.put_if_absent(path, data))
                except ExistsError:
                    self._learn(True)
                except StoreError:
                    # The first try has committed. Whether the server honours conditions stays
                    # unknown: the next commit tests it again.
                    pass
                else:
                    self._learn(False)

    def _replace(self, name: str, data: memoryview, check: Callable[[], object] | None) -> None:
        """Writes a file over the state that this store has seen ([Note: conditions]).

        Raises ReplacedError if another program has replaced or deleted it. Without a `check` a
        later state is replaced in turn, unless it may have replaced the result of the first try.
        """
        driver = self._driver
        for _ in range(REPLACING):
            tag, tries = self._tag(name), 0

            def put(path: str, data: memoryview, tag: str | None = tag) -> str:
                nonlocal tries
                tries += 1
                if tag is None:
                    return driver.put_if_absent(path, data)
                return driver.put(path, data, tag)

            try:
                self._send(name, data, put, check)
                return
            except (ExistsError, FileNotFoundError):
                with suppress(FileNotFoundError):
                    if self.read_whole(name, NO_LIMIT) == data:
                        return
                if tag and self._tag(name) == tag:
                    self._learn_tags(tag)
                elif tries > 1 or check is not None:
                    break
            except UnsupportedRequestError:
                self._learn_tags("")
        raise ReplacedError(
            f"{self.url}/{name}: another program replaced or deleted it while it was written: if "
            "it saves here too, let one of them save elsewhere"
        )

    def _tag(self, name: str) -> str | None:
        """Returns the tag of a file's last seen state; "" if it is unknown, None if absent."""
        tag, server = self._tags.get(name, ""), self._driver.server()
        if server in _without_tags:
            return ""
        return tag.strip('"') if tag and server in _bare_tags else tag

    def _learn_tags(self, tag: str) -> None:
        """Remembers that this server refuses a condition with the tag that it tells.

        Ceph's gateway compares the tag in a condition without its quotation marks.
        """
        server = self._driver.server()
        if tag.startswith('"'):
            _bare_tags.add(server)
            return
        _without_tags.add(server)
        _log.warning(
            "%s: the server refuses conditional requests for files that exist: a request that "
            "arrives late may replace or delete a later checkpoint",
            without_secrets(self.url),
        )

    def _learn(self, honours: bool) -> None:
        """Remembers whether this server honours conditions."""
        server = self._driver.server()
        if self._driver.capabilities.put_if_absent is None and server not in _honours:
            _honours[server] = honours
            if not honours:
                # A Python warning may be an exception, but the commit has succeeded.
                _log.warning(
                    "%s: this server ignores the condition that a file does not exist yet: if two "
                    "jobs save to one place at the same instant, both may report success",
                    self,
                )
