"""Checkpoints that borrow from one another: those of one run, in folders side by side.

Rules:

1. A base lies beside what borrows from it: the folders move together or not at all.
2. A checkpoint that another borrows from is neither deleted nor overwritten. Who borrows stands in
   the borrowers' manifests alone, and they are looked through each time: no list is out of date.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckpt.errors import InUseError, NotACheckpointError, StoreError
from ckpt.store import Options, Store, open_store, split_url
from formats.errors import FormatError
from formats.native.borrowed import kept
from formats.native.lending import Lender
from formats.native.manifest import MANIFEST, Base, load

SHOWN_NAMES = 5
HEAD_BYTES = 128
"""Of a manifest: digest, format and version come first, and version 1 borrows nothing."""


def folder_beside(url: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """The name of the folder of `base`, which lies in the folder that `url` lies in.

    Raises ValueError where it lies elsewhere, or is `url` itself.

    >>> folder_beside("s3://bucket/run/step-2", "s3://bucket/run/step-1/")
    'step-1'
    """
    own, other = _whole(url), _whole(base)
    parent, name = split_url(other)
    if parent != split_url(own)[0] or own == other or not name:
        raise ValueError(
            f"base={os.fspath(base)!r} does not lie beside {os.fspath(url)!r}: what borrows from a "
            "checkpoint must be in the same folder as that"
        )
    return name


@contextmanager
def lender(
    url: str | os.PathLike[str], base: str | os.PathLike[str], options: Options = None
) -> Iterator[Lender]:
    """The base of a checkpoint at `url`, opened for the time of the block.

    Raises as `folder_beside` does, and NotACheckpointError where there is no base.
    """
    folder = folder_beside(url, base)
    with open_store(base, options) as store:
        try:
            yield Lender(store, folder)
        except FileNotFoundError as error:
            raise NotACheckpointError(
                f"{store.url}: cannot be the base: no checkpoint of ckpt's own format is there"
            ) from error


def borrowed_from(
    url: str | os.PathLike[str],
    base: str | os.PathLike[str],
    used: Mapping[str, int],
    options: Options = None,
) -> tuple[Base | None, ...]:
    """The bases for the manifest of a checkpoint at `url`.

    `used` has a bit for every number of a base that something was borrowed from, by the digest of
    the base's manifest as whoever borrowed saw it. Raises StoreError where it is another one now.
    """
    if not used:
        return ()
    with lender(url, base, options) as found:
        if set(used) != {found.mark}:
            raise StoreError(
                f"{os.fspath(base)}: the base was replaced while it was being borrowed from; "
                "nothing was committed: save again"
            )
        return kept(found.bases, used[found.mark])


def check_unused(url: str | os.PathLike[str], options: Options = None) -> None:
    """Raise InUseError when a checkpoint beside this one borrows from it."""
    found = borrowers(url, options)
    if found:
        more = f" and {len(found) - SHOWN_NAMES} more" if len(found) > SHOWN_NAMES else ""
        raise InUseError(
            f"{os.fspath(url)}: {', '.join(found[:SHOWN_NAMES])}{more} beside it borrow from it "
            "and cannot be read without it: delete those first, or make each whole with "
            "`ckpt convert`"
        )


def borrowers(url: str | os.PathLike[str], options: Options = None) -> list[str]:
    """The folders beside a checkpoint whose manifests say that they borrow from it, sorted."""
    parent, name = split_url(_whole(url))
    with open_store(parent, options) as store:
        return [folder for folder in store.folders() if _borrows(store, folder, name)]


def _borrows(store: Store, folder: str, name: str) -> bool:
    manifest = f"{folder}/{MANIFEST}"
    if folder == name or not store.exists(manifest):
        return False
    size = store.size(manifest)
    if b'"version":1,' in store.read(manifest, 0, min(size, HEAD_BYTES)):
        return False
    data = store.read(manifest, 0, size)
    try:
        bases = load(data, f"{store.url}/{manifest}").bases
    except FormatError:  # damaged: it is taken at its word
        return json.dumps(name).encode() in data
    return any(base is not None and base.folder == name for base in bases)


def _whole(url: str | os.PathLike[str]) -> str:
    """A path without links and dots, or a URL as it is; without a slash at the end."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file://"):
        return text.rstrip("/")
    return os.path.realpath(text.removeprefix("file://"))
