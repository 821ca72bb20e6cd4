"""The store of a folder on a local disk, by calls of the operating system.

Rules:

1. A file appears under its name once it is complete and flushed to the disk. Until then its name is
   `.<name>.<random>.part`.
2. A reader thus sees the old content or the new. Without `replace`, the first of several writers
   wins.
3. Reads are `pread`s of exact ranges into the caller's memory.
4. The disk starts to write while more data comes, so that the final flush is short.
5. Once a file has its name it is there, whatever the call that gave it, a close or the removal of
   its other name says. A folder that cannot be flushed afterwards is an UnflushedError.
6. An error of the operating system is a StoreError with path and remedy. For a path that is not
   there, a read raises Python's FileNotFoundError, and a listing has no files.
7. A file whose size or content was read stays the same file while `OpenFiles` keeps it open, even
   if another process replaces it: its size and its content always match.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from ckpt.errors import ExistsError, StoreError
from ckpt.stores.driver import Start, StoreCapabilities, Unfinished
from ckpt.stores.local_files import (
    IO_VECTORS,
    LocalFileWriter,
    OpenFiles,
    close_descriptor,
    disk_error,
    explained_on_disk,
    folder_start,
    plain,
)
from ckpt.stores.retries import UnflushedError
from formats.detect import is_shard
from formats.errors import CorruptError, SizeError, TooLargeError
from formats.native.manifest import MANIFEST
from formats.storage import LOCAL_READ_BYTES

PART_SUFFIX = ".part"
_PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part", re.DOTALL)
"""The name of a partly written file."""
NO_HARD_LINKS = (
    *(errno.EPERM, errno.EACCES, errno.EXDEV, errno.EINVAL, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
)
"""The errors of file systems that make no hard links. There the store renames the file: without
`replace` by a call of Linux that replaces nothing, or else it looks just before the rename."""

DISK_S_OWN = "lost+found"
"""The folder at the root of ext4, which only root may read."""


class LocalStore:
    """The store of a local folder. A write creates the folder if it does not exist."""

    refusal = ""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.url = os.fspath(folder)
        self.read_bytes = LOCAL_READ_BYTES
        self.options: Mapping[str, object] = {}
        self.capabilities = StoreCapabilities(
            put_if_absent=True, atomic_replace=True, hides_unfinished=True, durable=True
        )
        self._path = plain(os.path.join(os.getcwd(), self.url) if self.url[:1] != "/" else self.url)
        """The absolute path, which a later change of the working directory does not affect."""
        self._below = folder_start(self._path)
        """The start of the paths of files. A look at a run has many stores and reads small files:
        paths that are text take less time than those of `pathlib`."""
        self._files = OpenFiles(self._below, self.url)
        self._held: int | None = None

    @cached_property
    def _folder(self) -> Path:
        return Path(self._path)

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """Returns the files directly in the folder, sorted; none if the folder does not exist."""
        with self._scan() as entries:
            return sorted(entry.name for entry in entries if _says(entry.is_file))

    def entries(self, folder: str = "") -> list[str]:
        names = []
        with self._scan(folder) as entries:
            for entry in entries:
                if _says(entry.is_dir):  # first: a run's folder has many
                    if entry.name != DISK_S_OWN:
                        names.append(f"{entry.name}/")
                elif _says(entry.is_file):
                    names.append(entry.name)
        return sorted(names)

    def sizes(self) -> dict[str, int]:
        sizes = {}
        with self._scan() as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted since the listing
                    if _says(entry.is_file):
                        sizes[entry.name] = entry.stat().st_size
        return dict(sorted(sizes.items()))

    def folders(self) -> list[str]:
        with self._scan() as entries:
            found = sorted(entry.name for entry in entries if _says(entry.is_dir))
        return [name for name in found if name != DISK_S_OWN]

    def below(self) -> None:
        """Returns None: a disk lists folder by folder."""

    def exists(self, name: str) -> bool:
        with explained_on_disk("looking at", self._format_name(name)):
            try:
                return stat.S_ISREG(os.stat(f"{self._below}{name}").st_mode)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                return False
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return False

    def size(self, name: str) -> int:
        with self._files.reading(name) as descriptor:
            return os.fstat(descriptor).st_size

    def tag(self, name: str) -> str:
        """Returns "": a disk has no tags."""
        return ""

    def modified(self, name: str) -> float:
        """Returns the time of a file's last write, in seconds since 1970 by the disk's clock."""
        return self._status(name).st_mtime

    def arrivals(self) -> dict[str, float]:
        """Returns the last change of each file or its entry, by name; "" is the folder itself.

        A copy can set the time of the last write, but not the time of its entry.
        """
        found = {}
        for name in ("", *self.names()):
            with suppress(FileNotFoundError, NotADirectoryError):
                found[name] = _arrival_time(self._status(name))
        return found

    def list_unfinished(self) -> list[Unfinished]:
        """Returns the `.part` files in the folder (rule 1). A process may still write to one."""
        unfinished_files = []
        for part in self.names():
            matched = _PART.fullmatch(part)
            if matched:
                with suppress(FileNotFoundError):
                    status = self._status(part)
                    unfinished_files.append(
                        Unfinished(matched[1], _arrival_time(status), part, status.st_size)
                    )
        return unfinished_files

    def unfinished_bytes(self, unfinished: Unfinished) -> int:
        return unfinished.nbytes

    def abort(self, unfinished: Unfinished) -> None:
        self.delete(unfinished.upload_id)

    def read_whole(self, name: str, limit: int) -> bytes:
        with self._files.reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise TooLargeError(self._format_name(name), size, limit)
            return _read_range(descriptor, 0, size)

    def read_start(self, name: str, length: int) -> Start:
        """Reads the first bytes of one version of a file; fewer if it is shorter."""
        with self._files.reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            found = Start(_read_range(descriptor, 0, min(length, size)), size, "")
        self._files.forget(name)  # a look at many files keeps none of them open
        return found

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file. Raises SizeError unless it has `size` bytes."""
        with self._files.reading(name) as descriptor:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise SizeError(self._format_name(name), found, size)
            return _read_range(descriptor, size - length, size)

    def read(self, name: str, offset: int, length: int) -> bytes:
        with self._files.reading(name, is_known=True) as descriptor:
            data = os.pread(descriptor, length, offset)
            if len(data) == length:
                return data
        target = bytearray(length)
        self.read_into(name, offset, memoryview(target))
        return bytes(target)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
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
                            f"{self._format_name(name)}: bytes {offset}:{offset + length} are "
                            f"needed, the file ends at {os.fstat(descriptor).st_size}: it was "
                            "truncated"
                        )
                    at, view = at + count, view[count:]

    @contextmanager
    def create(
        self, name: str, rewritable: bool = False, replace: bool = True
    ) -> Iterator[LocalFileWriter]:
        """Returns a writer of a new file (rule 1). Local files are always rewritable.

        Raises ExistsError at the end of the block if the file exists then, unless `replace`.
        """
        part, descriptor = self._begin(name)
        try:
            try:
                yield LocalFileWriter(descriptor, self._format_name(name), str(part))
                with explained_on_disk("flushing", self._format_name(name)):
                    os.fsync(descriptor)
                    written = os.fstat(descriptor)
            finally:
                close_descriptor(descriptor)
            self._give_name(part, name, replace, written)
            if "/" in name:
                _flush(part.parent)
            self._files.forget(name)
        finally:
            with suppress(OSError):
                part.unlink()

    def commit(
        self, name: str, data: bytes, replace: bool, check: Callable[[], object] | None = None
    ) -> None:
        """Writes a small file atomically and flushes the folder (rule 2).

        `check` is called once all bytes are flushed, directly before the file gets its name.
        Raises ExistsError if the file exists, unless `replace`; UnflushedError if it has its name
        now and the folder cannot be flushed.
        """
        part, descriptor = self._begin(name)
        try:
            try:
                LocalFileWriter(descriptor, self._format_name(name), str(part)).write([data])
                with explained_on_disk("flushing", self._format_name(name)):
                    os.fsync(descriptor)
                    written = os.fstat(descriptor)
            finally:
                close_descriptor(descriptor)
            self.flush()  # the files that this one names must be durable first
            if check is not None:
                check()
            self._give_name(part, name, replace, written)
            self._files.forget(name)
        finally:
            with suppress(OSError):
                part.unlink()
        try:
            self.flush()
        except StoreError as error:
            raise UnflushedError(
                f"{self._format_name(name)} is written, but a loss of power may undo that: {error}"
            ) from error

    def hold(self) -> None:
        """Binds `delete` to the folder that is here now, whatever takes its place.

        Raises NotADirectoryError if that is a link or a file, FileNotFoundError without any.
        """
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
        with explained_on_disk("opening", self.url, or_missing=True):
            self._held = os.open(self._path, flags)

    def replace_link(self) -> None:
        """Replaces a link at the place of the folder by a real folder with the same checkpoint.

        Files are never changed in place, so hard links to the files behind the link are a copy.
        Where they cannot be made, for example on another disk, only the link is removed.
        """
        name = f".{self._folder.name}.{secrets.token_hex(4)}{PART_SUFFIX}"
        real = self._folder.with_name(name)
        with explained_on_disk("looking for a link at", self.url):
            if not self._folder.is_symlink():
                return
        with explained_on_disk("replacing the link by a folder at", self.url):
            behind = os.readlink(self._folder)
            try:
                real.mkdir()
                self._link_files(real)
                self._files.close()
                with suppress(FileNotFoundError):
                    self._folder.unlink()
                if real.exists():
                    real.rename(self._folder)
                _flush(self._folder.parent)
            except OSError:
                shutil.rmtree(real, ignore_errors=True)
                if not os.path.lexists(self._folder):
                    self._folder.symlink_to(behind)
                raise

    def _link_files(self, real: Path) -> None:
        """Links the files of the checkpoint into a folder, which it removes if it cannot."""
        try:
            for file in self.names():
                if file == MANIFEST or is_shard(file):
                    os.link(os.path.realpath(self._folder / file), real / file)
            _flush(real)
        except OSError:
            shutil.rmtree(real, ignore_errors=True)

    def delete(self, name: str) -> bool:
        """Removes a file; returns whether it existed. One of several processes removes it."""
        path = f"{self._below}{name}" if self._held is None else name
        try:
            os.unlink(path, dir_fd=self._held)
        except FileNotFoundError:
            return False
        except OSError as error:
            if self._is_there(path):  # else a network file system has done it without an answer
                raise disk_error("removing", self._format_name(name), error) from error
        finally:
            self._files.forget(name)
        return True

    def _is_there(self, path: str) -> bool:
        """Whether there is a file or link, or nobody can tell."""
        try:
            os.lstat(path, dir_fd=self._held)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def delete_all(self, names: Sequence[str], tags: Mapping[str, str] | None = None) -> None:
        for name in names:
            self.delete(name)

    def remove_if_empty(self) -> None:
        """Removes the folder durably if it is empty."""
        with suppress(OSError):
            self._folder.rmdir()
            _flush(self._folder.parent)

    def flush(self) -> None:
        """Makes the folder's entries durable."""
        _flush(self._folder)

    def close(self) -> None:
        """Closes the files that are open for reading."""
        self._files.close()
        lock, self._held = self._held, None
        if lock is not None:
            close_descriptor(lock)

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _format_name(self, name: str) -> str:
        """Returns the name of a file in messages, with the folder as the user gave it."""
        return self._files.format_name(name)

    @contextmanager
    def _scan(self, folder: str = "") -> Iterator[Iterator[os.DirEntry[str]]]:
        """Opens a listing of the folder, or of one in it. One that is not there has no entries."""
        with explained_on_disk("listing", self._format_name(folder)):
            try:
                entries = os.scandir(f"{self._below}{folder}")
            except (FileNotFoundError, NotADirectoryError):
                yield iter(())
                return
            with entries:
                yield entries

    def _status(self, name: str) -> os.stat_result:
        """Returns the facts of a file. Raises FileNotFoundError."""
        with explained_on_disk("looking at", self._format_name(name), or_missing=True):
            return os.stat(f"{self._below}{name}")

    def _begin(self, name: str) -> tuple[Path, int]:
        """Creates the `.part` file of a new file; returns its path and a descriptor."""
        self._make_folder()
        target = self._folder / name
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with explained_on_disk("creating", self._format_name(name)):
            if "/" in name:
                part.parent.mkdir(parents=True, exist_ok=True)
            try:
                return part, os.open(part, flags, 0o666)
            except FileNotFoundError:  # another process has just removed the empty folder
                self._make_folder()
                return part, os.open(part, flags, 0o666)

    def _give_name(self, part: Path, name: str, replace: bool, written: os.stat_result) -> None:
        """Gives a finished file its name; without `replace` only if the name is free (rule 2).

        `written` has the facts of the file. The `.part` name may stay. The caller removes it.
        """
        target = self._folder / name
        try:
            if replace:
                os.replace(part, target)
            else:
                _name_if_free(part, target)
        except OSError as error:
            # A network file system may refuse to do again what it did without an answer.
            with suppress(OSError):
                if os.path.samestat(os.lstat(target), written):
                    return
            if isinstance(error, FileExistsError) and not replace:
                raise ExistsError(f"{self._format_name(name)} exists already") from error
            raise disk_error("naming", self._format_name(name), error) from error

    def _make_folder(self) -> None:
        """Creates the folder, and makes its entries in the folders above durable."""
        made, folder = [], self._folder
        with explained_on_disk("creating the folder", self.url):
            while not folder.exists():
                made.append(folder)
                folder = folder.parent
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                places = (self._folder, *self._folder.parents)
                there = next(place for place in places if os.path.lexists(place))
                raise StoreError(
                    f"{there} is no folder, and a checkpoint is one; choose another place"
                ) from error
        for folder in made:
            _flush(folder.parent)


def _read_range(descriptor: int, lo: int, hi: int) -> bytes:
    """Returns bytes `[lo, hi)` of a file; fewer if the file has become shorter meanwhile."""
    data, more = b"", os.pread(descriptor, hi - lo, lo)
    while more:
        data += more
        more = os.pread(descriptor, hi - lo - len(data), lo + len(data))
    return data


def _says(is_one: Callable[[], bool]) -> bool:
    """Returns whether an entry is of a kind; False for a link in a circle."""
    try:
        return is_one()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _arrival_time(status: os.stat_result) -> float:
    return max(status.st_mtime, status.st_ctime)


def _flush(folder: Path) -> None:
    with explained_on_disk("flushing", str(folder)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            close_descriptor(descriptor)


def _name_if_free(part: Path, target: Path) -> None:
    """Gives a file a name. Raises FileExistsError if there is a file of the name."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if rename_with(RENAME_NOREPLACE, part, target):
            return
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
        os.replace(part, target)


RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # <linux/fs.h>
_AT_FDCWD = -100  # <fcntl.h>


def rename_with(flag: int, one: Path, other: Path) -> bool:
    """Renames in one atomic step, on Linux, if the file system can. Returns whether it did.

    With RENAME_NOREPLACE only if nothing has the name `other`; RENAME_EXCHANGE swaps two names.
    """
    if _renameat2 is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    while _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flag):
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True


_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
if _renameat2 is not None:
    _renameat2.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
        ctypes.c_uint,
    )
