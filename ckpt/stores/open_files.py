"""The files of a folder that are kept open for reading, each used by one read at a time.

A file that was asked for once is the same file until it is pushed out by `OPEN_FILES` others, even
when another process replaces it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from formats.errors import CorruptError, GoneError, HostileError

OPEN_FILES = 64
"""How many are kept."""
BAD_SECTOR = (errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN)
"""What a read says where the bytes are lost, or not what the file system's own checksum says."""


class OpenFiles:
    """Descriptors of the files in a folder, by name; threads share them."""

    def __init__(self, folder: Path, shown: str) -> None:
        self._folder = folder
        self._shown = shown
        """What messages call the folder."""
        self._open: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0
        """Counts what was replaced, deleted or closed: a read begun before is not kept open."""
        self._lock = threading.Lock()

    def reading(self, name: str, is_known: bool = False) -> Reading:
        """A descriptor for one read; a file that is known to be there and is not is damage."""
        return Reading(self, name, is_known)

    def forget(self, name: str) -> None:
        """What is read of a file from here on is of the one that has the name by then."""
        with self._lock:
            self._forgotten += 1
            descriptor = self._open.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close those that are kept; files that are read just now are closed after that."""
        with self._lock:
            self._forgotten += 1
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        # As Python's own files do: whoever forgot keeps no descriptors.
        with suppress(AttributeError):  # an interrupt came while it was made
            self.close()

    def shown(self, name: str) -> str:
        """What messages call a file."""
        return str(Path(self._shown, name))

    def take(self, name: str) -> tuple[int, int]:
        """A descriptor of a file, which is nobody else's until it is given back; when that was."""
        with self._lock:
            descriptor = self._open.pop(name, None)
            forgotten = self._forgotten
        if descriptor is None:
            descriptor = _opened(self._folder / name, self.shown(name))
        return descriptor, forgotten

    def give_back(self, name: str, descriptor: int, forgotten: int) -> None:
        """The descriptor is kept if nothing was forgotten since, and one too many is closed."""
        with self._lock:
            stale: int | None = descriptor
            if forgotten == self._forgotten:
                stale = self._open.pop(name, None)
                self._open[name] = descriptor
                if stale is None and len(self._open) > OPEN_FILES:
                    stale = self._open.popitem(last=False)[1]
        if stale is not None:
            os.close(stale)


class Reading:
    """One read: the descriptor is nobody else's meanwhile, so that nobody closes it."""

    __slots__ = ("_descriptor", "_files", "_forgotten", "_is_known", "_name")

    def __init__(self, files: OpenFiles, name: str, is_known: bool) -> None:
        self._files = files
        self._name = name
        self._is_known = is_known

    def __enter__(self) -> int:
        try:
            self._descriptor, self._forgotten = self._files.take(self._name)
        except FileNotFoundError as error:
            if self._is_known:
                raise GoneError(self._files.shown(self._name)) from error
            raise
        return self._descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._files.give_back(self._name, self._descriptor, self._forgotten)
        if isinstance(error, OSError) and error.errno in BAD_SECTOR:
            raise CorruptError(
                f"{self._files.shown(self._name)}: the disk cannot read all of it: "
                f"{error.strerror}; restore the file from another copy"
            ) from error


def _opened(path: Path, shown: str) -> int:
    """A descriptor of a file to read; links are followed, as a cache of downloads is made of them.

    Raises HostileError for what is no file: a pipe would be waited for, a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which files do not mind
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise HostileError(f"{shown}: a folder, pipe or device is in the place of a file")
