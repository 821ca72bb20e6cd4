"""Files of a folder on a disk: kept open for reads, and written while more data comes.

One read at a time uses a descriptor. A file stays the same file while it is kept open, even if
another process replaces it. `OPEN_FILES` later files close the oldest. An error of the system
becomes one that says what failed, at which path, and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import AccessDeniedError, CkptError, StoreError
from formats.errors import CorruptError, GoneError, HostileError
from formats.storage import Buffer

OPEN_FILES = 64
"""The largest number of open files."""
BAD_SECTOR = (errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN)
"""The errors of a read whose bytes are lost, or have a wrong checksum of the file system."""
MISSING = (errno.ENOENT, errno.ENOTDIR)
GONE = (*MISSING, errno.ESTALE)
"""The errors for a file that is not there any more; ESTALE is that of a network file system."""


_ADVICE = (
    ((errno.ENOSPC, errno.EDQUOT), "free some space or raise the quota, or choose another disk"),
    (
        (errno.EFBIG,),
        "the disk or `ulimit -f` allows no file of this size: raise the limit, or save elsewhere",
    ),
    ((errno.EROFS,), "mount the disk for writing, or choose another place"),
    (
        (errno.EACCES, errno.EPERM),
        "look at the owner and the permissions of this path and of the folders above it",
    ),
    (
        (errno.EMFILE,),
        "this process has as many open files as it may have: raise `ulimit -n`, or close some",
    ),
    (
        (errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
        "the machine or a limit (`ulimit -a`) has no more: raise it, or end other programs",
    ),
    ((errno.ENAMETOOLONG,), "choose a shorter path"),
    (
        (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
        "look at this path: it has a file, folder or link in place of another one",
    ),
    (
        (errno.ENOENT, errno.ESTALE),
        "another program has moved or removed it, or its folder: look at this path, and try again",
    ),
    ((errno.EBUSY, errno.ETXTBSY), "another program uses it: end that program, and try again"),
    (
        (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG),
        "the disk fails: the system's log says more; choose another disk",
    ),
    (
        (errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.EREMCHG),
        "is the server of this disk up?",
    ),
)
"""The remedies of errors of the operating system."""


def disk_error(doing: str, place: str, error: OSError) -> StoreError:
    """Returns the error that says what failed, at which path, and what to do.

    `doing` is the call as a verb (`writing`). The error keeps the number of the system's error.
    """
    number = error.errno or 0
    reason = error.strerror or str(error)
    remedy = next((advice for numbers, advice in _ADVICE if number in numbers), "try again")
    denied = number in (errno.EACCES, errno.EPERM)
    explained = (AccessDeniedError if denied else StoreError)(
        f"{place}: {doing} it failed: {reason}; {remedy}"
    )
    explained.errno = number
    return explained


class explained_on_disk:  # noqa: N801 - as `contextlib.suppress`: it is called like a function
    """Raises StoreError (`disk_error`) in place of an error of the operating system.

    With `or_missing` the error for a path that is not there passes through. A class takes a third
    of the time of a generator, and a save enters some forty of these.
    """

    __slots__ = ("_doing", "_or_missing", "_place")

    def __init__(self, doing: str, place: str, or_missing: bool = False) -> None:
        self._doing, self._place, self._or_missing = doing, place, or_missing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, CkptError):
            return
        if not (self._or_missing and isinstance(error, FileNotFoundError | NotADirectoryError)):
            raise disk_error(self._doing, self._place, error) from error


def plain(path: str) -> str:
    """Returns `str(Path(path))`, in less time for a path that is plain already.

    >>> plain("/run/step-1"), plain("./run//step-1/"), plain("")
    ('/run/step-1', 'run/step-1', '.')
    """
    is_plain = path and "//" not in path and "/." not in path and path[0] != "." != path[-1]
    return path if is_plain and path[-1] != "/" else str(Path(path))


def folder_start(path: str) -> str:
    """Returns the start of the paths of files in the folder of a `plain` path.

    >>> folder_start("/run/step-1"), folder_start("/"), folder_start(".")
    ('/run/step-1/', '/', '')
    """
    return "" if path == "." else path if path[-1] == "/" else f"{path}/"


class OpenFiles:
    """Descriptors of the files in a folder, by name; threads share them."""

    def __init__(self, folder: str, shown: str) -> None:
        """`folder` is the start of the files' paths, and `shown` the folder in messages."""
        self._folder = folder
        self._shown = plain(shown)
        self._shown_folder = folder_start(self._shown)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0
        """Counts calls of `forget` and `close`: descriptors from before are not kept open."""
        self._lock = threading.Lock()

    def reading(self, name: str, is_known: bool = False) -> Reading:
        """Returns a descriptor for one read. If `is_known`, a missing file is a GoneError."""
        return Reading(self, name, is_known)

    def forget(self, name: str) -> None:
        """Closes a file, so that later reads open the file that has the name then."""
        with self._lock:
            self._forgotten += 1
            descriptor = self._open.pop(name, None)
        if descriptor is not None:
            close_descriptor(descriptor)

    def close(self) -> None:
        """Closes all files; those in use are closed after their read."""
        with self._lock:
            self._forgotten += 1
            while self._open:
                close_descriptor(self._open.popitem()[1])

    def __del__(self) -> None:
        # As Python's own files do, this closes the descriptors of a forgotten store.
        with suppress(AttributeError):  # an interrupt has ended `__init__`
            self.close()

    def format_name(self, name: str) -> str:
        return f"{self._shown_folder}{name}" if name else self._shown

    def take(self, name: str) -> tuple[int, int]:
        """Returns a descriptor that no other read has until `give_back`, and the present count."""
        with self._lock:
            descriptor = self._open.pop(name, None)
            forgotten = self._forgotten
        if descriptor is None:
            descriptor = _open(f"{self._folder}{name}", self.format_name(name))
        return descriptor, forgotten

    def give_back(self, name: str, descriptor: int, forgotten: int) -> None:
        """Keeps the descriptor unless the count has changed; closes the oldest of too many."""
        with self._lock:
            stale: int | None = descriptor
            if forgotten == self._forgotten:
                stale = self._open.pop(name, None)
                self._open[name] = descriptor
                if stale is None and len(self._open) > OPEN_FILES:
                    stale = self._open.popitem(last=False)[1]
        if stale is not None:
            close_descriptor(stale)


class Reading:
    """One read. No other read has its descriptor, so none closes it."""

    __slots__ = ("_descriptor", "_files", "_forgotten", "_is_known", "_name")

    def __init__(self, files: OpenFiles, name: str, is_known: bool) -> None:
        self._files = files
        self._name = name
        self._is_known = is_known

    def __enter__(self) -> int:
        try:
            self._descriptor, self._forgotten = self._files.take(self._name)
        except CkptError:
            raise
        except OSError as error:
            if error.errno in MISSING and not self._is_known:
                shown = self._files.format_name(self._name)
                raise FileNotFoundError(error.errno, error.strerror, shown) from error
            raise self._explain(error) from error
        return self._descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._files.give_back(self._name, self._descriptor, self._forgotten)
        if isinstance(error, OSError) and not isinstance(error, CkptError):
            raise self._explain(error) from error

    def _explain(self, error: OSError) -> Exception:
        """Returns the error of a failed call: the file is gone, or damaged, or the disk fails."""
        shown = self._files.format_name(self._name)
        if error.errno in GONE:
            return GoneError(shown)
        if error.errno in BAD_SECTOR:
            return CorruptError(
                f"{shown}: the disk cannot read all of it: {error.strerror}; restore the file from "
                "another copy"
            )
        return disk_error("reading", shown, error)


def _open(path: str, shown: str) -> int:
    """Opens a file for reads. Follows links, of which a cache of downloads consists.

    Raises HostileError unless it is a file: an open pipe would wait, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # no effect on files
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise HostileError(f"{shown}: a folder, pipe or device is in place of a file")


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
def join_file(path: str, shown: str) -> Iterator[LocalFileWriter]:
    """Returns a writer of a file that another process has begun; durable if the block succeeds."""
    with explained_on_disk("opening", shown):
        # Not for reads: a network file system would fill the rest of a page, and write all of it
        # over the bytes of other hosts.
        descriptor = os.open(path, os.O_WRONLY)
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
