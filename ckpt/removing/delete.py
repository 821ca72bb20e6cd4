"""Deletes a checkpoint: the manifest first, so that no half-deleted checkpoint can be opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckpt.errors import InUseError, NotACheckpointError, StoreError
from ckpt.opening.sources import advice_at
from ckpt.removing.gc import remove_old
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import (
    Options,
    Store,
    absolute,
    check_no_link,
    check_writable,
    is_file,
    join_url,
    link_at,
    one_spelling,
    open_store,
    split_url,
)
from ckpt.transfer.bases import borrowers, borrowing, check_unused
from ckpt.transfer.commit import withdraw
from ckpt.transfer.facts import pins_in, step_of
from formats.detect import is_shard, sign_of_another_format
from formats.native.manifest import MANIFEST, file_names, read_manifest

__all__ = ["delete"]


def delete(
    url: str | os.PathLike[str], *, missing_ok: bool = False, storage_options: Options = None
) -> None:
    """Deletes the checkpoint of ckpt's own format at `url`. It is gone when this returns.

    One process calls this. It removes the files that the manifest names, those that unfinished
    saves have left there more than 25 hours ago, and the folder if it is then empty. A save in
    progress with this checkpoint as its base fails.

    Args:
        missing_ok: accepts a place without a checkpoint, for example in a second delete after an
            interrupted one. A file, or a checkpoint of another format, is still an error.
        storage_options: options of the fsspec driver.

    Raises:
        InUseError: checkpoints beside this one borrow from it, or its run has pinned it; the
            message names them. Nothing was removed.
        NotACheckpointError: no checkpoint of ckpt's own format is at `url`.
        CorruptError: the manifest is damaged, so that the checkpoint's files are unknown.
        ArgumentError: `url` is a link on a disk.
        StoreError: the disk or object store failed; or the place is only read, as a live state is.
            The checkpoint is there, or the message says that files of it stay.

    >>> import ckpt, os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     ckpt.delete(f"{folder}/step-1")
    ...     ckpt.delete(f"{folder}/step-1", missing_ok=True)
    ...     os.listdir(folder)
    []
    """
    was_deleted(url, missing_ok, storage_options)


def was_deleted(
    url: str | os.PathLike[str],
    missing_ok: bool,
    options: Options,
    gone: set[str] | None = None,
    look: Callable[[], object] | None = None,
) -> bool:
    """Deletes a checkpoint as `delete` does. Returns False if there was none. `look`: `withdraw`.

    With `gone` this is a dry run, which only checks all that a delete checks: as if the checkpoints
    at the places in this set were deleted. Adds the place.
    """
    check_no_link(url)
    with open_store(url, options) as store:
        check_writable(store)
        if isinstance(store, LocalStore):
            with suppress(FileNotFoundError, NotADirectoryError):  # told of below
                store.hold()
        place = one_spelling(url)
        if gone is not None and place in gone:
            if missing_ok:
                return False
            raise NotACheckpointError(
                f"{store.url}: an earlier argument deletes the checkpoint here; give it once"
            )
        try:
            data = read_manifest(store)
        except (FileNotFoundError, NotADirectoryError) as error:
            entries = store.entries()
            if missing_ok and not is_file(url, options) and sign_of_another_format(entries) is None:
                return False
            advice = advice_at(store, entries)
            if any(map(is_shard, entries)):
                advice = ", but files of an unfinished save, or of one under way: see `ckpt gc`"
            raise NotACheckpointError(
                f"{store.url}: no checkpoint of ckpt's own format is here{advice}"
            ) from error
        files = file_names(data, f"{store.url}/{MANIFEST}")
        _check_unpinned(store.url, store.options)
        if gone is not None:
            parent, _ = split_url(place)
            names = {split_url(other)[1] for other in gone}
            beside = {name for name in names if join_url(parent, name) in gone}
            check_unused(store.url, options, beside)
            gone.add(place)
            return True
        if withdraw(store, data, look):
            _remove_all(store, files)
    return True


def _remove_all(store: Store, files: Sequence[str]) -> None:
    """Removes the files of a checkpoint without a manifest, and the folder if it is then empty.

    Raises StoreError if some stay.
    """
    staying: dict[str, OSError] = {}
    try:
        store.delete_all(files)
    except OSError:
        for name in files:
            try:
                store.delete(name)
            except OSError as error:
                staying[name] = error
    with suppress(OSError):  # the checkpoint is deleted
        if store.names():
            remove_old(store)
    store.remove_if_empty()
    for first in staying.values():
        raise StoreError(
            f"{store.url}: the checkpoint is deleted, and {len(staying)} of its {len(files)} files "
            f"stay, for `ckpt gc`: {first}",
            names=[*staying],
        ) from first


def _check_unpinned(url: str, options: Options) -> None:
    """Raises InUseError if a run has pinned its step here."""
    above, name = split_url(absolute(url))
    step = step_of(name)
    if step is None:
        return
    with open_store(above, options) as run:
        pins = pins_in(run.names()).get(step, ())
    for pin in pins[:1]:
        raise InUseError(
            f"{url}: it is pinned as {pin!r}, so that nothing removes it: remove the pin first, by "
            f"`ckpt pin --remove {join_url(above, name)} {pin}` or Checkpointer.unpin"
        )


def delete_step(
    place: str,
    missing_ok: bool,
    options: Options,
    gone: set[str] | None = None,
    look: Callable[[], object] | None = None,
) -> None:
    """Deletes a checkpoint of a run, as `was_deleted`; of a link to one, the link alone.

    Raises InUseError if it is pinned, or a checkpoint beside it borrows from it by this name.
    """
    link = link_at(place)
    if link is None:
        was_deleted(place, missing_ok, options, gone, look)
        return
    parent, name = split_url(absolute(link))
    users = [
        borrower
        for borrower in borrowers(parent, name, None)
        if join_url(parent, borrower) not in (gone or ())
    ]
    _check_unpinned(link, None)
    if users:
        raise InUseError(
            f"{link}: {borrowing(users)} and cannot be read without it; delete that first"
        )
    if gone is not None:
        gone.add(join_url(parent, name))
    else:
        if look is not None:
            look()
        with suppress(FileNotFoundError):
            os.unlink(link)
