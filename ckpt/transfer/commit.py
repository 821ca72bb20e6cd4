"""The commit point: files that are written become a checkpoint, all of them or none.

Rules:

1. A manifest is written when every file that it names is seen, with its size.
2. It is written within `GRACE_SECONDS` of the beginning of the attempt, or never. So what is older
   and named by no manifest is a left-over, which `ckpt.gc` may remove.
3. What another checkpoint borrows from stays. Who borrows looks, after its commit, whether the base
   is still there, and takes its manifest back if not; who removes a base looks for borrowers after
   it has withdrawn the manifest, and puts it back if there are any. The second of the two always
   sees the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckpt.errors import ExistsError, InUseError, StoreError
from ckpt.sources import is_of_another_format
from ckpt.stores.store import Store
from ckpt.transfer.bases import check_unused, is_as_it_was, loans_beside
from formats.errors import FormatError
from formats.limits import current
from formats.native.manifest import MANIFEST, Manifest, ShardFile, dump
from formats.native.manifest_loader import load

GRACE_SECONDS = 24 * 3600.0
"""The longest that a save or a conversion may take from its beginning to its commit."""
SEEN_PAUSES_SECONDS = (0.1, 0.3, 1.0, 2.0)
"""Between looks for files that are not seen: a listing may be out of date for a moment."""


def now() -> float:
    """Seconds that also pass while the machine sleeps, for `commit`'s `began`."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def commit(
    store: Store,
    manifest: Manifest,
    began: float,
    overwrite: bool,
    base: tuple[str, str] | None = None,
    here: Sequence[ShardFile] | None = None,
) -> None:
    """The checkpoint exists when this returns, and the one that it replaces is gone.

    `began` is what `now` said before the first file was begun. `base` is the URL and the mark of
    the checkpoint that was borrowed from, where one was. `here` are the files that this folder
    has to have, where hosts have folders of their own; by default all.

    Raises:
        StoreError: files are missing or not as they were written, the attempt took too long, or the
            base has gone; there is no new checkpoint.
        ExistsError: there is a checkpoint, of whatever format, and `overwrite` is False.
    """
    names = _check_all_are_seen(store, manifest.files if here is None else here)
    if not overwrite:
        check_no_other(store.url, names)
    old = _committed(store) if overwrite else None
    if now() - began > GRACE_SECONDS:
        raise StoreError(
            f"{store.url}: {(now() - began) / 3600:.1f} hours after it began, and a save has "
            f"{GRACE_SECONDS / 3600:g} until its files count as left-overs; nothing was committed: "
            "save again"
        )
    data = dump(manifest)
    store.commit(MANIFEST, data, replace=overwrite)
    if old is not None and not _can_be_read(store, data):
        _take_back(store, old)
        raise StoreError(
            f"{store.url}/{MANIFEST}: what the store holds is not what was written; what was there "
            "before is there again: save again, to another disk or bucket"
        )
    if base is not None and not is_as_it_was(*base, store.options):
        _take_back(store, old)
        raise StoreError(
            f"{store.url}: its base was deleted or replaced while it was saved; nothing was "
            "committed: save again"
        )
    if old is not None:
        # The new checkpoint is there, whatever happens; left-overs only take space. Somebody may
        # have borrowed from the old one since it was decided to replace it.
        with suppress(OSError, FormatError):
            found, folder = loans_beside(store.url, store.options)
            for file in load(old).files:
                if not found.cover(folder, file.name):
                    store.delete(file.name)


def check_no_other(url: str, names: Iterable[str]) -> None:
    """Raise ExistsError where the files of a folder are a checkpoint of another format."""
    for name in names:
        if is_of_another_format(name):
            raise ExistsError(
                f"{url} is a checkpoint of another format ({name}), which nobody would see any "
                "more beside one of ckpt's own; choose another place, or pass overwrite=True to "
                "put the new one before it"
            )


def withdraw(store: Store, data: bytes) -> None:
    """The manifest, of which `data` are the bytes, is gone durably, and nobody needs its files.

    Raises InUseError when somebody borrows from them; then it is there, or there again.
    """
    check_unused(store.url, store.options)
    store.delete(MANIFEST)
    store.flush()
    try:
        check_unused(store.url, store.options)
    except InUseError:
        with suppress(ExistsError):  # of a save that has come meanwhile
            store.commit(MANIFEST, data, replace=False)
        raise


def _committed(store: Store) -> bytes | None:
    try:
        return store.read_whole(MANIFEST, current().manifest_bytes)
    except FileNotFoundError:
        return None


def _can_be_read(store: Store, data: bytes) -> bool:
    """Whether the manifest is what was written, or a whole one of somebody else, come since."""
    found = _committed(store)
    try:
        return found is None or found == data or bool(load(found))
    except FormatError:
        return False


def _take_back(store: Store, old: bytes | None) -> None:
    if old is None:
        store.delete(MANIFEST)
        store.flush()
    else:
        store.commit(MANIFEST, old, replace=True)


def _check_all_are_seen(store: Store, files: Sequence[ShardFile]) -> Iterable[str]:
    """The names in the folder, first listed.

    Raises StoreError when rank 0 does not see what the ranks wrote, as they wrote it.
    """
    seen = store.sizes()
    names = (*seen,)
    for pause in (*SEEN_PAUSES_SECONDS, 0.0):
        for file in files:
            if seen.get(file.name) != file.size:
                with suppress(FileNotFoundError):
                    seen[file.name] = store.size(file.name)
        if all(seen.get(file.name) == file.size for file in files):
            return names
        time.sleep(pause)
    unseen = [file.rank for file in files if file.name not in seen]
    if unseen:
        raise StoreError(
            f"{store.url}: rank 0 does not see what ranks {unseen[:8]} wrote, "
            f"{len(unseen)} of {len(files)} files: give all ranks the same URL (one made of the "
            "time or a process's number is not), on a disk that they share; or somebody has "
            "removed them"
        )
    other = next(file for file in files if seen[file.name] != file.size)
    raise StoreError(
        f"{store.url}/{other.name}: rank {other.rank} wrote {other.size} bytes, and the file has "
        f"{seen[other.name]}; nothing was committed: save again"
    )
