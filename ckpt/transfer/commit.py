"""The commit point: written files become a checkpoint, all of them or none.

Rules:

1. The manifest is written once the store shows every file that it names, with its size.
2. The manifest is written within `GRACE_SECONDS` of the start of the attempt, or never. An older
   file that no manifest names is therefore a left-over, and `ckpt.gc` may remove it.
3. A base that another checkpoint borrows from stays. An incremental save looks for its base after
   the commit, and withdraws its manifest if the base is gone. A delete looks for dependents after
   it has withdrawn the manifest, and restores it if it finds one; a removal of several steps leaves
   the files instead. The later of the two always sees the earlier.
4. A call that fails before the manifest has its name fails the save, and there is no new
   checkpoint. After that the checkpoint is complete: a failure is a warning, and what it leaves is
   for `ckpt.gc`. Until the manifest's name is durable the replaced checkpoint's files stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from warnings import warn

from ckpt.errors import ExistsError, LeftOverWarning, NotDurableWarning, ReplacedError, StoreError
from ckpt.stores.retries import UnflushedError
from ckpt.stores.store import Store, link_at, local_path, split_url
from ckpt.transfer.bases import (
    base_files_beside,
    check_unused,
    is_as_it_was,
    manifest_in,
    manifest_now,
)
from ckpt.transfer.facts import Beside, Listing, facts_of, note
from formats.detect import sign_of_another_format
from formats.errors import FormatError, GoneError
from formats.native.manifest import (
    MANIFEST,
    Manifest,
    ShardFile,
    dump,
    file_names,
    load,
    read_manifest,
)
from sharding.errors import format_names

GRACE_SECONDS = 24 * 3600.0
"""A save or conversion may take at most so long from its start to its commit."""
REPLACING = 10
"""The most tries to replace a manifest that other saves replace, too."""
LOOKED_SECONDS = 2.0
"""The most time from a look to the request that writes the manifest."""
SEEN_PAUSES_SECONDS = (0.1, 0.3, 1.0, 2.0)
"""Pauses between looks for missing files: a listing may be out of date for a moment."""


def now() -> float:
    """Returns seconds for `commit`'s `began`. The clock also runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def commit(
    store: Store,
    manifest: Manifest,
    began: float,
    overwrite: bool,
    base: tuple[str, str] | None = None,
    here: Sequence[ShardFile] | None = None,
    look: Callable[[float], Beside] | None = None,
) -> None:
    """Commits a checkpoint: it exists when this returns, and the one that it replaces is gone.

    `began` is the result of `now` before the first file was created. `base` is the URL of an
    incremental save's base, and the digest of its manifest. `here` has the files that this folder
    must have, if hosts have folders of their own; by default all files. `look` is called directly
    before the manifest gets its name, once all bytes are durable; its error forbids that. The
    listing that it returns is at most so many seconds old as its argument says.

    Raises:
        StoreError: files are missing or have other sizes, the attempt took too long, or the base is
            gone; there is no new checkpoint.
        ExistsError: a checkpoint of any format is there, and `overwrite` is False.
    """
    files = manifest.files if here is None else here
    data, tries, old, is_seen = dump(manifest), 0, None, False
    facts = facts_of(manifest) if local_path(store.url) is None else None
    # In a bucket one listing of all files of a run serves for the look and for the sizes.
    looks_first = look is not None and local_path(store.url) is None
    looked, listing = now(), look(0.0).listing if look is not None and looks_first else None
    names = _check_all_are_seen(store, files, listing)
    has_looked = listing is not None and now() - looked < LOOKED_SECONDS
    if not overwrite:
        check_no_other(store.url, names)
    if now() - began > GRACE_SECONDS:
        raise StoreError(
            f"{store.url}: writing took {(now() - began) / 3600:.1f} hours. After "
            f"{GRACE_SECONDS / 3600:g} hours its files count as left-overs; nothing was committed: "
            "save again"
        )

    def check() -> None:
        nonlocal tries
        tries += 1
        if tries > 1:  # the answer to a try was lost: meanwhile others may have changed all this
            _check_all_are_seen(store, files)
            if overwrite and manifest_in(store) != old:
                raise StoreError(
                    f"{store.url}/{MANIFEST}: the answer to its write was lost, and another "
                    "process has replaced or deleted it since; look which checkpoint is there, "
                    "and save again"
                )
        if look is not None and (tries > 1 or is_seen or not has_looked):
            look(0.0)

    is_durable = True
    for tries_left in reversed(range(REPLACING)):
        # The place of a new step of a run is empty, as the listing has shown.
        is_seen = overwrite and (
            MANIFEST in names or base is not None or tries_left < REPLACING - 1
        )
        old, tries = manifest_in(store) if is_seen else None, 0
        try:
            store.commit(MANIFEST, data, is_seen, check)
            break
        except UnflushedError as error:
            is_durable = False
            warn(NotDurableWarning(f"{error}; the checkpoint is complete"), stacklevel=2)
            break
        except ExistsError:
            if is_seen or not overwrite:
                raise
        except ReplacedError:
            # Another save has replaced `old` meanwhile, and the store refused to replace that one.
            # After a lost answer it may have replaced this save's manifest, and removed its files.
            if tries > 1 or not tries_left:
                raise
    wrong = "" if old is None else _wrong_with(store, data)
    if wrong:
        _take_back(store, old)
        raise StoreError(
            f"{store.url}/{MANIFEST}: {wrong}; the checkpoint that was there before is restored: "
            "save again, to another disk or bucket"
        )
    if base is not None and not _is_there(base, store, old):
        _take_back(store, old)
        raise StoreError(
            f"{store.url}: its base was deleted or replaced during the save; nothing was "
            "committed: save again"
        )
    if facts is not None:
        note(store, facts, len(data))
    if old is not None and is_durable:
        _remove_replaced(store, old)


def _remove_replaced(store: Store, old: bytes) -> None:
    """Deletes the files of a replaced checkpoint, or warns that they stay.

    The new checkpoint exists, so that an error is none of the save. Another save may have borrowed
    from the old checkpoint meanwhile.
    """
    staying: dict[str, Exception] = {}
    with suppress(FormatError):
        try:
            found, folder = base_files_beside(store.url, store.options)
        except OSError as error:
            staying["all of them"] = error
        else:
            for name in file_names(old):
                if not found.cover(folder, name):
                    try:
                        store.delete(name)
                    except OSError as error:
                        staying[name] = error
    for first in [*staying.values()][:1]:
        warn(
            LeftOverWarning(
                f"{store.url}: the checkpoint is complete, but files of the one that it replaces "
                f"stay ({format_names([*staying], 3)}), for `ckpt gc`: {first}"
            ),
            stacklevel=2,
        )


def check_no_other(url: str, names: Iterable[str]) -> None:
    """Raises ExistsError if the files of a folder are a checkpoint of another format."""
    name = sign_of_another_format(names)
    if name is not None:
        raise ExistsError(
            f"{url} is a checkpoint of another format ({name}), and a checkpoint of ckpt's own "
            "format in the same folder would hide it; choose another place, or pass "
            "overwrite=True to hide it"
        )


def check_no_link(url: str) -> None:
    """Raises ExistsError if the place of a checkpoint is a link: nothing is replaced through it."""
    link = link_at(url)
    if link is not None:
        raise ExistsError(
            f"{link} is a link to {os.path.realpath(link)}, whose checkpoint was not replaced; to "
            "replace that one, give its own path; to save here, remove the link"
        )


def is_not_there(store: Store, attempt: str, error: BaseException) -> bool:
    """Whether no manifest will ever name the files of an attempt, after an error of its commit.

    A server may still carry out a request that seemed to fail. Only a refusal is certain.
    """
    if local_path(store.url) is None and not isinstance(error, ExistsError):
        return False
    try:
        return attempt.encode() not in read_manifest(store)
    except FileNotFoundError:
        return True
    except (OSError, FormatError):
        return False


def withdraw(store: Store, data: bytes, look: Callable[[], object] | None = None) -> bool:
    """Deletes a manifest with these bytes durably, if no checkpoint borrows from its files.

    Returns False if another process has deleted it meanwhile: that one deletes the files as well,
    unless it puts the manifest back. `look` is called directly before the manifest is deleted; its
    error forbids that.

    Raises:
        InUseError: a checkpoint borrows from the files. The manifest is in its place.
        ReplacedError: another checkpoint is in the place now.
        StoreError: the store failed. The manifest is in its place, or the message says that it is
            gone and its files stay.
    """
    before = check_unused(store.url, store.options)
    now = manifest_now(store.url, store.options)
    if now != data and now is not None:
        raise ReplacedError(
            f"{store.url}: another process has replaced the checkpoint, and nothing was deleted; "
            "to delete the new one, call this again"
        )
    if look is not None:
        look()
    if now is None or not store.delete(MANIFEST):
        return False
    try:
        store.flush()
        check_unused(store.url, store.options, before=before)
    except (OSError, FormatError) as error:
        try:
            store.commit(MANIFEST, data, replace=False)
        except (ExistsError, UnflushedError):  # another save has committed, or it is there again
            pass
        except OSError as again:
            raise StoreError(
                f"{store.url}: the checkpoint is gone, and its files stay, for `ckpt gc`: {error}"
            ) from again
        raise
    return True


def _wrong_with(store: Store, data: bytes) -> str:
    """Returns why the manifest cannot be read back; "" if it has the written bytes.

    One of a later save is right too, and none. A store that fails now has confirmed the bytes.
    """
    try:
        committed = manifest_in(store)
    except GoneError:
        return ""
    except FormatError as error:
        return str(error)
    except OSError:
        return ""
    if committed is not None and committed != data:
        try:
            load(committed)
        except FormatError:
            return "the store returns other bytes than were written"
    return ""


def _is_there(base: tuple[str, str], store: Store, old: bytes | None) -> bool:
    """As `is_as_it_was`. If nobody can tell, takes the manifest back and raises the error."""
    try:
        return is_as_it_was(*base, store.options)
    except (OSError, FormatError):
        _take_back(store, old)
        raise


def _take_back(store: Store, old: bytes | None) -> None:
    if old is None:
        store.delete(MANIFEST)
        store.flush()
    else:
        with suppress(UnflushedError):
            store.commit(MANIFEST, old, replace=True)


def _check_all_are_seen(
    store: Store, files: Sequence[ShardFile], listing: Listing | None = None
) -> Iterable[str]:
    """Returns the names in the folder, by a listing, or by one of all files around it.

    Raises:
        StoreError: rank 0 does not see the files of all ranks, with their sizes.
    """
    if listing is None:
        seen = store.sizes()
    else:
        prefix = f"{split_url(store.url)[1]}/"
        inside = ((path.partition(prefix), entry) for path, entry in listing.items())
        seen = {
            name: entry.nbytes or 0 for (before, _, name), entry in inside if name and not before
        }
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
            f"{store.url}: rank 0 does not see the files of ranks {unseen[:8]}, {len(unseen)} of "
            f"{len(files)}: give all ranks the same URL (not one with the time or a process id in "
            "it), on a disk that they share; or another process has removed the files"
        )
    other = next(file for file in files if seen[file.name] != file.size)
    raise StoreError(
        f"{store.url}/{other.name}: rank {other.rank} wrote {other.size} bytes, and the file has "
        f"{seen[other.name]}; nothing was committed: save again"
    )
