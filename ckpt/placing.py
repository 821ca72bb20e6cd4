"""Puts the result of a conversion at its target, in one atomic step.

Rules:

1. Without `overwrite` a file or folder at the target stays, also if it appears during the
   conversion. A disk guarantees this. A server with conditional requests guarantees it for files of
   one request; for other files the conversion looks just before it writes (docs/stores.md).
2. A folder of a format other than ckpt's is written under another name beside the target, and
   renamed when it is complete. An object store cannot rename: there the target must be empty, and
   the conversion writes into it directly.
3. The replaced file or folder is removed last. A link is removed as a link.
4. Once the result is at its place, a failure is a warning.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from warnings import warn

from ckpt.errors import ExistsError, NotDurableWarning, StoreError
from ckpt.stores.local_store import PART_SUFFIX, RENAME_EXCHANGE, rename_with
from ckpt.stores.request_errors import explained_on_disk
from ckpt.stores.store import Options, Store, local_path, open_store
from ckpt.targets import check_replaceable, folder_path
from formats.storage import FileWriter, Writer

_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""The errors of a rename onto a path that is not an empty folder."""


class NewFiles:
    """A store that creates files and replaces none (rule 1)."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    def create(self, name: str) -> AbstractContextManager[FileWriter]:
        """Creates a new file. Raises ExistsError if the file exists."""
        return self._store.create(name, replace=False)


@contextmanager
def file_writer(target: str, store: Store, overwrite: bool) -> Iterator[Writer]:
    """Returns a writer for one file, `target` (rule 1).

    Raises:
        ExistsError: without `overwrite`, the file has appeared meanwhile.
    """
    if overwrite:
        yield store
    else:
        with _told_of(target):
            yield NewFiles(store)
    _is_durable(store, target)


def _is_durable(store: Store, target: str) -> bool:
    """Makes the names in a folder durable. Returns whether it could, or warns of a result there."""
    try:
        store.flush()
    except StoreError as error:
        told = f"{target} is complete, and may be gone after a loss of power: {error}"
        warn(NotDurableWarning(told), stacklevel=3)
        return False
    return True


@contextmanager
def folder_writer(
    target: str, options: Options, overwrite: bool, kept: bool = False
) -> Iterator[Writer]:
    """Returns a writer for a folder that becomes `target` if the block succeeds (rule 2).

    With `kept`, the folder has a fixed name until then, and stays if the block fails. Only a folder
    on a disk can be kept.

    Raises:
        ExistsError: a file or folder has appeared at `target` meanwhile that may not be replaced.
    """
    path = local_path(target)
    if path is None:
        with open_store(target, options) as store, _told_of(target):
            yield NewFiles(store)
        return
    local = folder_path(path)
    with explained_on_disk("creating the folder for", target):
        local.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept_folder(path) if kept else _beside(local, secrets.token_hex(4))
    old = fresh.with_suffix(".old")
    try:
        with open_store(str(fresh)) as store:
            yield store
            with explained_on_disk("creating", target):
                fresh.mkdir(exist_ok=True)  # without any file the result is an empty folder
            store.flush()
        with explained_on_disk("naming", target):
            if not _take_place(fresh, local):
                if not overwrite:
                    raise ExistsError(_has_come(target))
                check_replaceable(target, options, overwrite)
                _replace(fresh, local, old)
        with open_store(str(local.parent)) as parent:
            if _is_durable(parent, target):
                for rest in (fresh, old):
                    with suppress(OSError):  # left-overs, for `ckpt gc`
                        remove(rest)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(local):
            old.rename(local)
        if not kept:
            with suppress(OSError):  # the first error tells more
                remove(fresh)
        raise


def kept_folder(path: str) -> Path:
    """Returns the folder with a fixed name, whose files `folder_writer` keeps for a later call."""
    return _beside(folder_path(path), "resumed")


def _beside(local: Path, attempt: str) -> Path:
    return local.parent / f".{local.name}.{attempt}{PART_SUFFIX}"


@contextmanager
def _told_of(target: str) -> Iterator[None]:
    """Turns the ExistsError of a file into that of the conversion."""
    try:
        yield
    except ExistsError as error:
        raise ExistsError(_has_come(target)) from error


def _has_come(target: str) -> str:
    return (
        f"{target}: a file or folder has appeared there since the conversion began, and was not "
        "replaced: convert to another place, or pass overwrite=True to replace it"
    )


def _take_place(fresh: Path, local: Path) -> bool:
    """Renames a folder. Returns whether the name was free, or that of an empty folder."""
    written = fresh.stat()
    try:
        fresh.rename(local)
    except OSError as error:
        with suppress(OSError):  # a network file system may have done it without an answer
            if os.path.samestat(local.lstat(), written):
                return True
        if error.errno not in _IN_THE_WAY:
            raise
        return False
    return True


def _replace(fresh: Path, local: Path, old: Path) -> None:
    """Renames a folder to an existing name. The replaced one is then called `fresh` or `old`."""
    # Two renames leave a moment without a folder of the name.
    if not rename_with(RENAME_EXCHANGE, fresh, local):
        local.rename(old)
        fresh.rename(local)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
