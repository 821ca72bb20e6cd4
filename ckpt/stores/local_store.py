"""A folder on a disk of this machine, through the operating system's own calls.

Rules:

1. A file appears under its name only when it is complete and flushed to the disk: it is written as
   `.<name>.<random>.part`, and gets its own name after that.
2. So readers see the old content or the new, and without `replace` exactly one of several writers
   wins: what came first stays.
3. Reads are `pread`s of exact ranges into the caller's memory.
4. The disk starts on what was written while more is being written, so that the flush which ends a
   file has little left to wait for.
5. A file that one store has asked the size of, or read from, is the same file until it is pushed
   out of the `OpenFiles`, even when another process replaces it: size and content fit together.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import ExistsError
from ckpt.stores.capabilities import StoreCapabilities, Unfinished
from ckpt.stores.local_writer import IO_VECTORS, LocalFileWriter
from ckpt.stores.open_files import OpenFiles
from formats.errors import CorruptError, SizeError, TooLargeError
from formats.storage import LOCAL_READ_BYTES

PART_SUFFIX = ".part"
_PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part", re.DOTALL)
"""The name of a file that is being written."""
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What a file system without hard links says: there, absence is checked before the rename."""

DISK_S_OWN = "lost+found"
"""The folder that ext4 has at its root: no checkpoint's, and only root may look into it."""


class LocalStore:
    """The store for a local folder, which need not exist until something is written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.url = os.fspath(folder)
        self.read_bytes = LOCAL_READ_BYTES
        self.options: Mapping[str, object] = {}
        self.capabilities = StoreCapabilities(
            put_if_absent=True, atomic_replace=True, hides_unfinished=True, durable=True
        )
        self._folder = Path(folder).absolute()
        """Where that was when it was opened, whatever folder the process is in later."""
        self._files = OpenFiles(self._folder, self.url)

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """The files directly in the folder, sorted; none when there is no such folder."""
        try:
            with os.scandir(self._folder) as entries:
                return sorted(entry.name for entry in entries if _says(entry.is_file))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self) -> dict[str, int]:
        """The bytes of the files directly in the folder, by name, in one listing."""
        found = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # gone since it was listed
                        if _says(entry.is_file):
                            found[entry.name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return dict(sorted(found.items()))

    def folders(self) -> list[str]:
        """The folders directly in the folder, sorted."""
        try:
            with os.scandir(self._folder) as entries:
                found = sorted(entry.name for entry in entries if _says(entry.is_dir))
                return [name for name in found if name != DISK_S_OWN]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, name: str) -> bool:
        """True when the folder has this file."""
        return (self._folder / name).is_file()

    def size(self, name: str) -> int:
        """Bytes in a file."""
        with self._files.reading(name) as descriptor:
            return os.fstat(descriptor).st_size

    def modified(self, name: str) -> float:
        """When a file was last written, in seconds since 1970 by the disk's clock."""
        return (self._folder / name).stat().st_mtime

    def arrivals(self) -> dict[str, float]:
        """When files, or their entries, last changed: what copies can set only the first of these.

        By name, with "" for the folder itself.
        """
        found = {}
        for name in ("", *self.names()):
            with suppress(FileNotFoundError):
                found[name] = _arrived((self._folder / name).stat())
        return found

    def unfinished(self) -> list[Unfinished]:
        """The `.part` files in the folder, some of which may be being written (rule 1)."""
        found = []
        for part in self.names():
            matched = _PART.fullmatch(part)
            if matched:
                with suppress(FileNotFoundError):
                    status = (self._folder / part).stat()
                    found.append(Unfinished(matched[1], _arrived(status), part, status.st_size))
        return found

    def abort(self, unfinished: Unfinished) -> None:
        """Remove one; whoever still writes it fails. No error when it is gone already."""
        with suppress(FileNotFoundError):
            (self._folder / unfinished.upload_id).unlink()

    def read_whole(self, name: str, limit: int) -> bytes:
        """All bytes of a file, as they were at one moment."""
        with self._files.reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise TooLargeError(self._shown(name), size, limit)
            return _read_range(descriptor, 0, size)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """The last bytes of a file that should have `size` bytes."""
        with self._files.reading(name) as descriptor:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise SizeError(self._shown(name), found, size)
            return _read_range(descriptor, size - length, size)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file."""
        with self._files.reading(name, is_known=True) as descriptor:
            data = os.pread(descriptor, length, offset)
            if len(data) == length:
                return data
        target = bytearray(length)
        self.read_into(name, offset, memoryview(target))
        return bytes(target)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fill the buffers, end to end, from `offset` on."""
        length = sum([target.nbytes for target in targets])
        with self._files.reading(name, is_known=True) as descriptor:
            if len(targets) <= IO_VECTORS and os.preadv(descriptor, targets, offset) == length:
                return
            at = offset
            for target in targets:
                view = target.cast("B") if target.nbytes else memoryview(b"")
                while len(view):
                    count = os.preadv(descriptor, [view], at)
                    if count == 0:
                        raise CorruptError(
                            f"{self._shown(name)}: bytes {offset}:{offset + length} are wanted, "
                            f"the file ends at {os.fstat(descriptor).st_size}: it was truncated"
                        )
                    at, view = at + count, view[count:]

    @contextmanager
    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> Iterator[LocalFileWriter]:
        """A new file (rule 1). `rewritable` costs nothing here: a local file always is.

        Raises ExistsError at the end, without `replace`, when something has the name by then.
        """
        part, descriptor = self._begin(name)
        try:
            try:
                yield LocalFileWriter(descriptor, self._shown(name))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._give_name(part, name, replace)
            self._files.forget(name)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()

    def commit(self, name: str, data: bytes, replace: bool) -> None:
        """Write a small file atomically and flush the folder (rule 2).

        Raises ExistsError, without `replace`, when the file is there already.
        """
        part, descriptor = self._begin(name)
        try:
            try:
                LocalFileWriter(descriptor, self._shown(name)).write([data])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.flush()  # the files this one speaks of must be durable before it is
            self._give_name(part, name, replace)
            self._files.forget(name)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        self.flush()

    def delete(self, name: str) -> None:
        """Remove a file; no error when it is gone already."""
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()
        self._files.forget(name)

    def remove_if_empty(self) -> None:
        """Remove the folder, durably, if nothing is in it."""
        with suppress(OSError):
            self._folder.rmdir()
            _flush(self._folder.parent)

    def flush(self) -> None:
        """Make the folder's entries durable."""
        _flush(self._folder)

    def close(self) -> None:
        """Close the files kept open for reading."""
        self._files.close()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _shown(self, name: str) -> str:
        """What messages call a file: by the folder as the user gave it."""
        return self._files.shown(name)

    def _begin(self, name: str) -> tuple[Path, int]:
        """The file that a new one is written as, and a descriptor of it."""
        self._make_folder()
        part = self._folder / f".{name}.{secrets.token_hex(4)}{PART_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return part, os.open(part, flags, 0o666)
        except FileNotFoundError:  # somebody has removed the folder just now, which was empty
            self._make_folder()
            return part, os.open(part, flags, 0o666)

    def _give_name(self, part: Path, name: str, replace: bool) -> None:
        """A finished file gets its name; without `replace` only where nothing has it (rule 2).

        The name that it was written under may stay: the caller removes it.
        """
        target = self._folder / name
        if replace:
            os.replace(part, target)
            return
        try:
            os.link(part, target)
        except FileExistsError as error:
            raise ExistsError(f"{self._shown(name)} exists already") from error
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            if os.path.lexists(target):
                raise ExistsError(f"{self._shown(name)} exists already") from error
            os.replace(part, target)

    def _make_folder(self) -> None:
        """The folder exists, and the folders above it durably know of it."""
        made, folder = [], self._folder
        while not folder.exists():
            made.append(folder)
            folder = folder.parent
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in made:
            _flush(folder.parent)


def _read_range(descriptor: int, lo: int, hi: int) -> bytes:
    """Bytes `[lo, hi)` of a file, fewer where it has become shorter meanwhile."""
    data, more = b"", os.pread(descriptor, hi - lo, lo)
    while more:
        data += more
        more = os.pread(descriptor, hi - lo - len(data), lo + len(data))
    return data


def _says(is_one: Callable[[], bool]) -> bool:
    """What an entry says of its kind; a link that leads around in a circle is of none."""
    try:
        return is_one()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _arrived(status: os.stat_result) -> float:
    return max(status.st_mtime, status.st_ctime)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
