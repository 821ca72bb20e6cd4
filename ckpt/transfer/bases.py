"""Checkpoints of one run that borrow from one another, in folders side by side.

Rules:

1. A base lies beside its dependents, the checkpoints that borrow from it: the folders move together
   or not at all.
2. A checkpoint with dependents is neither deleted nor overwritten. Only the dependents' manifests
   name their bases, and are searched each time, so that no list can be out of date.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt.errors import InUseError, NotACheckpointError, StoreError
from ckpt.stores.store import Options, Store, one_spelling, open_store, split_url
from formats.errors import CorruptError, FormatError
from formats.native.borrowed import kept
from formats.native.manifest import MANIFEST, Base, load, read_manifest
from formats.native.reader import Lender
from sharding.errors import ArgumentError, listed
from sharding.url_secrets import without_secrets

SHOWN_NAMES = 5
HEAD_BYTES = 128
"""The bytes of a manifest that show its version; version 1 borrows no chunks."""


def folder_beside(url: str | os.PathLike[str], base: str | os.PathLike[str]) -> str:
    """Returns the name of the folder of `base`, which lies in the same folder as `url`.

    Raises ArgumentError if `base` lies elsewhere, or is `url` itself.

    >>> folder_beside("s3://bucket/run/step-2", "s3://bucket/run/step-1/")
    'step-1'
    """
    own, other = one_spelling(url), one_spelling(base)
    parent, name = split_url(other)
    if parent != split_url(own)[0] or own == other or not name:
        raise ArgumentError(
            without_secrets(
                f"base={os.fspath(base)!r} does not lie beside {os.fspath(url)!r}: a checkpoint "
                "must be in the same folder as its base"
            )
        )
    return name


@contextmanager
def opened_base(
    url: str | os.PathLike[str], base: str | os.PathLike[str], options: Options = None
) -> Iterator[Lender]:
    """Yields the base of a checkpoint at `url`, open for the time of the block.

    Raises as `folder_beside` does, and NotACheckpointError if the base does not exist.
    """
    folder = folder_beside(url, base)
    with open_store(base, options) as store:
        digest = None
        try:
            found = Lender(store, folder)
            digest = found.manifest_digest
            yield found
        except CorruptError as error:
            if digest is None or is_as_it_was(os.fspath(base), digest, options):
                raise
            raise StoreError(
                f"{store.url}: the base was deleted or replaced while it was being borrowed from; "
                "nothing was committed: save again"
            ) from error
        except FileNotFoundError as error:
            raise NotACheckpointError(
                f"{store.url}: cannot be the base: no checkpoint of ckpt's own format is there"
            ) from error


def bases_used(
    url: str | os.PathLike[str],
    base: str | os.PathLike[str],
    used: Mapping[str, int],
    options: Options = None,
) -> tuple[Base | None, ...]:
    """Returns the bases for the manifest of a checkpoint at `url`.

    `used` has a bit for the number of each base that lent chunks, by the digest of the base's
    manifest at that time. Raises StoreError if the manifest is another one now.
    """
    if not used:
        return ()
    with opened_base(url, base, options) as found:
        if set(used) != {found.manifest_digest}:
            raise StoreError(
                f"{os.fspath(base)}: the base was replaced while it was being borrowed from; "
                "nothing was committed: save again"
            )
        return kept(found.bases, used[found.manifest_digest])


def is_as_it_was(base: str, digest: str, options: Options = None) -> bool:
    """Returns whether the manifest of a base still has this digest."""
    return (manifest_now(base, options) or b"")[11:43] == digest.encode()


def manifest_now(url: str, options: Options = None) -> bytes | None:
    """Reads the present manifest of a checkpoint; None without one. An open store has the old."""
    with open_store(url, options) as store:
        try:
            return read_manifest(store)
        except FileNotFoundError:
            return None


def check_unused(url: str | os.PathLike[str], options: Options = None) -> None:
    """Raises InUseError if a checkpoint beside this one borrows from it."""
    found = dependents(url, options)
    if found:
        raise InUseError(
            f"{os.fspath(url)}: {borrowing(found)} and cannot be read without it: first delete "
            "each checkpoint that borrows, or make it whole with `ckpt convert`"
        )


def borrowing(names: Sequence[str]) -> str:
    """Returns the statement that checkpoints with these names borrow from the one beside them.

    >>> borrowing(["step-2"]), borrowing(["step-2", "step-3"])
    ('step-2 beside it borrows from it', 'step-2, step-3 beside it borrow from it')
    """
    verb = "borrows" if len(names) == 1 else "borrow"
    return f"{listed(names, SHOWN_NAMES)} beside it {verb} from it"


def dependents(url: str | os.PathLike[str], options: Options = None) -> list[str]:
    """Returns the names of the folders beside a checkpoint that borrow from it, sorted."""
    parent, name = split_url(one_spelling(url))
    return borrowers(parent, name, options)


def borrowers(parent: str, name: str, options: Options) -> list[str]:
    """Returns the names of the folders in `parent` that borrow from the one of a name, sorted."""
    with open_store(parent, options) as store:
        return [folder for folder in store.folders() if _borrows(store, folder, name)]


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The files that checkpoints in one folder need from one another."""

    files: frozenset[tuple[str, str]]
    """The needed files: folder and name."""
    damaged: tuple[bytes, ...]
    """Manifests that cannot be read: all files of folders that they seem to name are needed."""

    def cover(self, folder: str, file: str) -> bool:
        """Returns whether a checkpoint needs this file."""
        named = _quoted(folder)
        return (folder, file) in self.files or any(named in data for data in self.damaged)


def base_files(parent: Store) -> BaseFiles:
    """Returns the files that checkpoints in folders directly below `parent` borrow from."""
    files: set[tuple[str, str]] = set()
    damaged = []
    for folder in parent.folders():
        found = _bases_of(parent, folder)
        if isinstance(found, bytes):
            damaged.append(found)
        else:
            files |= {(base.folder, file.name) for base in found for file in base.files}
    return BaseFiles(frozenset(files), tuple(damaged))


def base_files_beside(
    url: str | os.PathLike[str], options: Options = None
) -> tuple[BaseFiles, str]:
    """As `base_files`, for the folder around a checkpoint; also returns the checkpoint's name."""
    parent, name = split_url(one_spelling(url))
    with open_store(parent, options) as store:
        return base_files(store), name


def _borrows(store: Store, folder: str, name: str) -> bool:
    found = () if folder == name else _bases_of(store, folder)
    if isinstance(found, bytes):  # a damaged manifest counts as borrowing if it has the name
        return _quoted(name) in found
    return any(base.folder == name for base in found)


def _bases_of(store: Store, folder: str) -> tuple[Base, ...] | bytes:
    """Returns the bases of the checkpoint in a folder; its whole manifest if that is damaged."""
    manifest = f"{folder}/{MANIFEST}"
    try:
        with suppress(CorruptError):  # a shorter manifest is read whole
            if b'"version":1,' in store.read(manifest, 0, HEAD_BYTES):
                return ()
        data = read_manifest(store, manifest)
    except FileNotFoundError:
        return ()
    try:
        return tuple(base for base in load(data, f"{store.url}/{manifest}").bases if base)
    except FormatError:
        return data


def _quoted(folder: str) -> bytes:
    """Returns the name of a folder as manifests write it."""
    return json.dumps(folder).encode()
