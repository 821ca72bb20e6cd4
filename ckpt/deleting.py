"""Deleting a checkpoint: the manifest first, so that what is left half-deleted is no checkpoint."""

from __future__ import annotations

import os

from ckpt.errors import NotACheckpointError
from ckpt.stores.store import Options, local_path, open_store
from ckpt.transfer.commit import withdraw
from formats.native.manifest import MANIFEST, load, read_manifest
from sharding.errors import ArgumentError


def delete(url: str | os.PathLike[str], *, storage_options: Options = None) -> None:
    """The checkpoint at `url`, of ckpt's own format, is gone when this returns.

    To be called by one process. Only files that its manifest names are removed, and the folder if
    nothing else is in it. A checkpoint that is being saved with this one as its base fails.
    `storage_options` are the fsspec driver's.

    Raises:
        InUseError: checkpoints beside it borrow from it; they are named. Nothing was removed.
        NotACheckpointError: there is none of ckpt's own format at `url`.
        CorruptError: its manifest is damaged, so that nobody knows which files are its own.
        ArgumentError: `url` is a link to it on a disk.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     ckpt.delete(f"{folder}/step-1")
    ...     os.listdir(folder)
    []
    """
    _check_no_link(url)
    with open_store(url, storage_options) as store:
        try:
            data = read_manifest(store)
        except FileNotFoundError as error:
            raise NotACheckpointError(
                f"{store.url}: no checkpoint of ckpt's own format is here"
            ) from error
        files = [file.name for file in load(data, f"{store.url}/{MANIFEST}").files]
        withdraw(store, data)
        for name in files:
            store.delete(name)
        store.remove_if_empty()


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
