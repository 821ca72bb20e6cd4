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
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt.errors import InUseError, NotACheckpointError, StoreError
from ckpt.stores.store import Options, Store, one_spelling, open_store, split_url
from ckpt.transfer.facts import Checkpoints, Facts, checkpoints_in
from formats.errors import CorruptError
from formats.native.borrowed import keep_used
from formats.native.manifest import Base, read_manifest
from formats.native.reader import Lender
from sharding.errors import ArgumentError, format_names, without_secrets

SHOWN_NAMES = 5
_STEP = re.compile(r"step-(\d{1,18})")


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
def open_base(
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
    with open_base(url, base, options) as found:
        if set(used) != {found.manifest_digest}:
            raise StoreError(
                f"{os.fspath(base)}: the base was replaced while it was being borrowed from; "
                "nothing was committed: save again"
            )
        return keep_used(found.bases, used[found.manifest_digest])


def is_as_it_was(base: str, digest: str, options: Options = None) -> bool:
    return (manifest_now(base, options) or b"")[11:43] == digest.encode()


def manifest_now(url: str, options: Options = None) -> bytes | None:
    """Reads the present manifest of a checkpoint; None without one. An open store has the old."""
    with open_store(url, options) as store:
        return manifest_in(store)


def manifest_in(store: Store) -> bytes | None:
    """Returns the manifest in a folder; None without one."""
    try:
        return read_manifest(store)
    except FileNotFoundError:
        return None


def check_unused(
    url: str | os.PathLike[str],
    options: Options = None,
    gone: Collection[str] = (),
    before: Checkpoints | None = None,
) -> Checkpoints:
    """Returns the checkpoints beside this one, of which none borrows from it. Raises InUseError.

    Those named in `gone` do not count. One that cannot be read counts if it may borrow
    (`_may_need`), unless it was there at an earlier look, `before`.
    """
    parent, name = split_url(one_spelling(url))
    with open_store(parent, options) as store:
        checkpoints = checkpoints_in(store)
        users = [folder for folder in borrowers_among(checkpoints, name) if folder not in gone]
        if users:
            raise InUseError(
                f"{os.fspath(url)}: {borrowing(users)} and cannot be read without it: first delete "
                "each checkpoint that borrows, or make it whole with `ckpt convert`"
            )
        check_readable(checkpoints, store, url, name, gone if before is None else {*before.unclear})
    return checkpoints


def check_readable(
    found: Checkpoints, store: Store, url: str | os.PathLike[str], name: str, gone: Collection[str]
) -> None:
    """Raises InUseError if a checkpoint that cannot be read may borrow from this one."""
    for other, reason in found.unclear.items():
        if (
            other != name
            and other not in gone
            and _may_need(
                other, found.written_at(store, other), name, found.written_at(store, name)
            )
        ):
            raise InUseError(
                f"{os.fspath(url)}: {other} beside it cannot be read, and may borrow from it "
                f"({reason}): make that one readable, or delete it, first"
            )


def _may_need(other: str, other_written: float | None, name: str, written: float | None) -> bool:
    """Whether a checkpoint that cannot be read may borrow from another, by steps or times.

    A base is an earlier step than its borrowers. Of other checkpoints it was written before them.
    A copy changes times, also one that moves an object to another class of storage.
    """
    steps = [_STEP.fullmatch(folder) for folder in (other, name)]
    if steps[0] is not None and steps[1] is not None:
        return int(steps[0][1]) > int(steps[1][1])
    return written is None or other_written is None or other_written >= written


def borrowing(names: Sequence[str]) -> str:
    """Returns the statement that checkpoints with these names borrow from the one beside them.

    >>> borrowing(["step-2"]), borrowing(["step-2", "step-3"])
    ('step-2 beside it borrows from it', 'step-2, step-3 beside it borrow from it')
    """
    verb = "borrows" if len(names) == 1 else "borrow"
    return f"{format_names(names, SHOWN_NAMES)} beside it {verb} from it"


def borrowers(parent: str, name: str, options: Options) -> list[str]:
    """Returns the names of the folders in `parent` that borrow from the one of a name, sorted."""
    with open_store(parent, options) as store:
        return borrowers_among(checkpoints_in(store), name)


def borrowers_among(found: Checkpoints, name: str) -> list[str]:
    """Returns the names of the checkpoints that borrow from the one of a name, sorted."""
    facts = found.facts.items()
    return [folder for folder, known in facts if folder != name and _borrows(known, name)]


def _borrows(facts: Facts, name: str) -> bool:
    if facts.damaged:  # a damaged manifest counts as borrowing if it has the name
        return _quote(name) in facts.damaged
    return any(base.folder == name for base in facts.bases or ())


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The files that checkpoints in one folder need from one another."""

    files: frozenset[tuple[str, str]]
    """The needed files: folder and name."""
    damaged: tuple[bytes, ...]
    """Manifests that are damaged: all files of folders that they seem to name are needed."""
    unreadable: Mapping[str, float | None]
    """When the checkpoints that cannot be read were written at the latest: older files may be
    needed by them."""

    def cover(self, folder: str, file: str, written: float | None = None) -> bool:
        """Returns whether a checkpoint needs this file, which was last written at this time."""
        named = _quote(folder)
        return (
            (folder, file) in self.files
            or any(named in data for data in self.damaged)
            or any(
                _may_need(name, time, folder, written)
                for name, time in self.unreadable.items()
                if name != folder
            )
        )


def base_files(parent: Store, found: Checkpoints | None = None) -> BaseFiles:
    """Returns the files that checkpoints in folders directly below `parent` borrow from.

    `found` are these checkpoints, if they are known.
    """
    found = checkpoints_in(parent) if found is None else found
    files = {
        (base.folder, file.name)
        for facts in found.facts.values()
        for base in facts.bases or ()
        for file in base.files
    }
    damaged = tuple(facts.damaged for facts in found.facts.values() if facts.damaged)
    unreadable = {name: found.written_at(parent, name) for name in found.unclear}
    return BaseFiles(frozenset(files), damaged, unreadable)


def base_files_beside(
    url: str | os.PathLike[str], options: Options = None
) -> tuple[BaseFiles, str]:
    """As `base_files`, for the folder around a checkpoint; also returns the checkpoint's name."""
    parent, name = split_url(one_spelling(url))
    with open_store(parent, options) as store:
        return base_files(store), name


def _quote(folder: str) -> bytes:
    """Returns the name of a folder as manifests write it."""
    return json.dumps(folder).encode()
