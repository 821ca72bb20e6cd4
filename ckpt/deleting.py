"""Deletes a checkpoint: the manifest first, so that a half-deleted checkpoint is none."""

from __future__ import annotations

import os

from ckpt.errors import ArgumentError, NotACheckpointError
from ckpt.sources import is_of_another_format
from ckpt.stores.store import Options, Store, is_file, local_path, open_store
from ckpt.transfer.commit import withdraw
from formats.native.manifest import MANIFEST, read_manifest
from formats.native.manifest_loader import load

__all__ = ["delete"]


def delete(
    url: str | os.PathLike[str], *, missing_ok: bool = False, storage_options: Options = None
) -> None:
    """The checkpoint at `url`, of ckpt's own format, is gone when this returns.

    One process calls this. It removes the files that the manifest names, and the folder if nothing
    else is in it. A checkpoint that is being saved with this one as its base fails.

    Args:
        missing_ok: whether a place without a checkpoint is no error, as for a second delete after
            one that was interrupted. A file, or a checkpoint of another format, is an error still.
        storage_options: options of the fsspec driver.

    Raises:
        InUseError: checkpoints beside it borrow from it; they are named. Nothing was removed.
        NotACheckpointError: there is none of ckpt's own format at `url`.
        CorruptError: its manifest is damaged, so that nobody knows which files are its own.
        ArgumentError: `url` is a link to it on a disk.
        StoreError: the disk or object store failed.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     ckpt.delete(f"{folder}/step-1")
    ...     ckpt.delete(f"{folder}/step-1", missing_ok=True)
    ...     os.listdir(folder)
    []
    """
    was_deleted(url, missing_ok, storage_options)


def was_deleted(url: str | os.PathLike[str], missing_ok: bool, options: Options) -> bool:
    """Do what `delete` does; False where no checkpoint was there."""
    _check_no_link(url)
    with open_store(url, options) as store:
        try:
            data = read_manifest(store)
        except (FileNotFoundError, NotADirectoryError) as error:
            if missing_ok and _is_missing(url, store, options):
                return False
            raise NotACheckpointError(
                f"{store.url}: no checkpoint of ckpt's own format is here"
            ) from error
        files = [file.name for file in load(data, f"{store.url}/{MANIFEST}").files]
        withdraw(store, data)
        for name in files:
            store.delete(name)
        store.remove_if_empty()
    return True


def _is_missing(url: str | os.PathLike[str], store: Store, options: Options) -> bool:
    """Whether a place without a manifest is neither a file nor a checkpoint of another format."""
    return not is_file(url, options) and not any(map(is_of_another_format, store.names()))


def _check_no_link(url: str | os.PathLike[str]) -> None:
    """Raise ArgumentError where a path is a link: nothing is deleted through one."""
    path = local_path(url) or ""
    while path.endswith(("/", "/.")):  # as which a link is the folder that it points to
        path = path[:-1]
    if os.path.islink(path):
        raise ArgumentError(
            f"{path}: a link to {os.path.realpath(path)}, which was not deleted; to delete that, "
            "give its own path; to remove the link, use rm"
        )
