"""What a conversion has written takes its place: at one moment, over nothing that is to stay.

Rules:

1. Without `overwrite` what is at the place stays, also what has come since the conversion began. On
   a disk nothing can come in between; a server that knows conditions sees to it for files that go
   in one request, and others are looked for just before (docs/stores.md).
2. A folder of a format other than ckpt's is written under another name beside its place, and
   renamed when it is complete. On an object store nothing can be renamed: there the folder has to
   be empty, and is written as it is.
3. What was replaced is removed after that, and a link is removed as a link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ckpt.errors import ExistsError
from ckpt.stores.local_store import PART_SUFFIX
from ckpt.stores.store import Options, Store, local_path, open_store
from ckpt.targets import check_replaceable, folder_path
from formats.storage import FileWriter, Writer

_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""What the rename of a folder fails with where there is anything but an empty folder."""


class NewFiles:
    """A store in which no file is replaced (rule 1)."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """A new file. Raises ExistsError where it has come to be meanwhile."""
        return self._store.create(name, replace=False)


@contextmanager
def file_writer(target: str, store: Store, overwrite: bool) -> Iterator[Writer]:
    """What writes one file that becomes `target` (rule 1). Raises ExistsError as it ends."""
    if overwrite:
        yield store
        return
    with _told_of(target):
        yield NewFiles(store)


@contextmanager
def folder_writer(target: str, options: Options, overwrite: bool) -> Iterator[Writer]:
    """What writes into a folder that becomes `target` when the block ends well (rule 2).

    Raises ExistsError where something is in the way then.
    """
    path = local_path(target)
    if path is None:
        with open_store(target, options) as store, _told_of(target):
            yield NewFiles(store)
        return
    local = folder_path(path)
    local.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    fresh = local.parent / f".{local.name}.{mark}{PART_SUFFIX}"
    old = local.parent / f".{local.name}.{mark}.old"
    try:
        with open_store(str(fresh)) as store:
            yield store
            fresh.mkdir(exist_ok=True)  # nothing to write is an empty folder
            store.flush()
        if not _take_place(fresh, local):
            if not overwrite:
                raise ExistsError(_has_come(target))
            check_replaceable(target, options, overwrite)
            _replace(fresh, local, old)
        with open_store(str(local.parent)) as parent:
            parent.flush()
        for rest in (fresh, old):
            _remove(rest)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(local):
            old.rename(local)
        _remove(fresh)
        raise


@contextmanager
def _told_of(target: str) -> Iterator[None]:
    """An ExistsError of a file becomes one that speaks of the conversion."""
    try:
        yield
    except ExistsError as error:
        raise ExistsError(_has_come(target)) from error


def _has_come(target: str) -> str:
    return (
        f"{target}: something has come there since the conversion began, and was left as it "
        "is: convert to another place, or pass overwrite=True to replace it"
    )


def _take_place(fresh: Path, local: Path) -> bool:
    """True when the folder has got the name: nothing had it, or an empty folder."""
    try:
        fresh.rename(local)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        return False
    return True


def _replace(fresh: Path, local: Path, old: Path) -> None:
    """The folder gets a name that another has, which is then called `fresh` or `old`."""
    if not _exchange(fresh, local):
        local.rename(old)
        fresh.rename(local)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """True when two folders have got one another's names, at one moment; Linux can.

    Two renames would leave a moment in which there is nothing under the name.
    """
    if _renameat2 is None:
        return False
    here, names = -100, (os.fsencode(one), os.fsencode(other))  # AT_FDCWD, <fcntl.h>
    return bool(_renameat2(here, names[0], here, names[1], 2) == 0)  # RENAME_EXCHANGE, <linux/fs.h>


_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
if _renameat2 is not None:
    _renameat2.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
        ctypes.c_uint,
    )
