"""What saves and conversions that did not end have left behind: listed, and removed on request.

Rules:

1. Only what has a name that `ckpt` gives: shard files, files that are being written, uploads that
   are not complete, folders that are being converted to. A file that is converted to may have any
   name; so what is being written under a strange one counts where it begins as such a file does.
2. Never what a manifest names: the one in the folder, or one beside it that borrows. Where a
   manifest is damaged, nobody knows what it names: nothing that it could mean is a left-over.
3. Never what a live save may still commit: younger things are listed and stay. A save commits
   within `GRACE_SECONDS` of its beginning or never (`ckpt.transfer.commit`), and clocks may differ
   by `CLOCKS_SECONDS`. Nor what a copy of a checkpoint that is under way has brought.
4. To list changes nothing. What is to be removed is looked at again just before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt.stores.store import (
    Options,
    Store,
    join_url,
    local_path,
    one_spelling,
    open_store,
    split_url,
)
from ckpt.transfer.bases import Loans, loans, loans_beside
from ckpt.transfer.commit import GRACE_SECONDS
from formats.errors import FormatError
from formats.limits import current
from formats.native.manifest import MANIFEST
from formats.native.manifest_loader import load
from formats.threads import Pool

__all__ = ["LeftOver", "gc"]

WORKERS = 8
"""Left-overs that are removed at once: a server takes time to answer."""
CLOCKS_SECONDS = 3600.0
"""By how much the clocks of a store and of the ranks may differ, and a commit be on its way."""
SHARD, PART, UPLOAD, FOLDER = "shard", "part", "upload", "folder"
_SHARD = re.compile(r"[0-9a-f]{16}-[0-9]{5,}\.safetensors")
_WRITTEN = re.compile(
    r"manifest\.json|.+\.(safetensors|safetensors\.index\.json|pt|pth|bin)"
    r"|\.metadata|__[0-9]+_[0-9]+\.distcp",
    re.DOTALL,
)
"""The files that saves and conversions write, as long as nobody names them otherwise."""
_ZIP = b"PK\x03\x04"
"""How a file of torch.save begins."""
_FOLDER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(part|old)", re.DOTALL)
"""A folder that a conversion fills, or the one that it has replaced."""


def now() -> float:
    """Seconds since 1970: what ages are counted up to."""
    return time.time()


@dataclass(frozen=True, slots=True)
class LeftOver:
    """One thing that is part of no checkpoint."""

    folder: str
    """The path or URL of the folder it is in."""
    name: str
    kind: str
    """`shard`; `part`, a file that was being written; `upload`, one to a bucket; `folder`, one that
    was being converted to."""
    nbytes: int
    age_seconds: float
    """Since it was last written or put there or, where only that is known, begun; by the store's
    clock."""
    is_old: bool
    """Whether no live save can need it any more."""
    was_removed: bool = False


def gc(
    url: str | os.PathLike[str],
    *,
    delete: bool = False,
    older_than: float | None = None,
    storage_options: Options = None,
) -> list[LeftOver]:
    """The left-overs at `url`, a checkpoint or a folder of checkpoints; with `delete`, removed.

    To be called by one process. What is part of a checkpoint, or borrowed by one, is never among
    them. What a save that is under way may have written is listed, and stays. Where there is no
    folder, there are none.

    Args:
        delete: remove those that are old enough.
        older_than: the seconds after which a left-over is old; by default 25 hours, when no save
            can need it any more. With less, a save that is under way and loses a file raises an
            error and commits nothing.
        storage_options: the fsspec driver's.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     os.remove(f"{folder}/step-1/manifest.json")
    ...     [found.kind for found in ckpt.gc(folder)]
    ['shard']
    """
    age = GRACE_SECONDS + CLOCKS_SECONDS if older_than is None else older_than
    place = _folder(url)

    def look_up() -> Loans:
        return loans_beside(place, storage_options)[0]

    with open_store(place, storage_options) as store:
        # A bucket does not list a folder in which nothing is but an upload that has not ended.
        begun = {one.name.split("/")[0] for one in store.unfinished() if "/" in one.name}
        inside = [join_url(place, name) for name in sorted({*store.folders(), *begun})]
        found = _collected([place], look_up, age, delete, storage_options)
        return found + _collected(inside, lambda: loans(store), age, delete, storage_options)


def is_folder(url: str | os.PathLike[str], storage_options: Options = None) -> bool:
    """Whether a folder is there; in a bucket, one with something in it, as there are no others."""
    path = local_path(url)
    if path is not None:
        return os.path.isdir(path)
    with open_store(_folder(url), storage_options) as store:
        return bool(store.sizes() or store.folders() or store.unfinished())


def _folder(url: str | os.PathLike[str]) -> str:
    """The path or URL without the slashes at its end, which are no part of a name."""
    text = os.fspath(url)
    above = text.rstrip("/")
    return text if not above or above.endswith(":") else above


def _collected(
    places: Sequence[str],
    look_up: Callable[[], Loans],
    age: float,
    delete: bool,
    options: Options,
) -> list[LeftOver]:
    """The left-overs in folders side by side; `look_up` says what is borrowed among these."""
    found: list[LeftOver] = []
    for place in places:
        with open_store(place, options) as store:
            found += _left_overs(store, place, places, age)
    # What is borrowed is looked up after what is named: whoever borrows later finds its base
    # without the file, and commits nothing.
    if any(one.kind == SHARD for one in found):
        lent = look_up()
        found = [one for one in found if not lent.cover(_name(one.folder), one.name)]
    if not delete:
        return found
    removed: set[LeftOver] = set()
    for place in dict.fromkeys(one.folder for one in found if one.is_old):
        with open_store(place, options) as store, Pool(WORKERS, "ckpt-gc") as pool:
            again = {_key(one) for one in _left_overs(store, place, places, age) if one.is_old}
            chosen = [one for one in found if one.folder == place and _key(one) in again]
            list(pool.map(partial(_remove, store, age), chosen))
            removed |= {*chosen}
            store.remove_if_empty()
    return [replace(one, was_removed=one in removed) for one in found]


def _left_overs(store: Store, place: str, places: Sequence[str], age: float) -> Iterator[LeftOver]:
    """What no manifest in this folder names, in the order of names; some may be borrowed."""
    # What is there before what is committed: a save that ends in between leaves nothing over.
    sizes, unfinished, moment = store.sizes(), store.unfinished(), now()
    converted = _FOLDER.fullmatch(_name(place))
    if converted:
        yield from _converted(store, place, sizes, converted, places, age)
        return
    for begun in unfinished:
        is_file = begun.upload_id in sizes
        is_ours = _WRITTEN.fullmatch(begun.name) or (is_file and _begins(store, begun.upload_id))
        if "/" not in begun.name and is_ours:
            name, kind = (begun.upload_id, PART) if is_file else (begun.name, UPLOAD)
            old = moment - begun.started
            yield LeftOver(place, name, kind, begun.nbytes, old, old >= age)
    shards = [name for name in sizes if _SHARD.fullmatch(name)]
    named = _named(store) if shards else set()
    over = [name for name in shards if named is not None and name not in named]
    arrivals = store.arrivals() if over else {}
    for name in over:
        if name in arrivals:  # or its save has failed meanwhile
            old = moment - arrivals[name]
            yield LeftOver(place, name, SHARD, sizes[name], old, old >= age)


def _begins(store: Store, name: str) -> bool:
    """Whether a file begins as a safetensors file or one of torch.save does, or is empty."""
    try:
        head = store.read(name, 0, min(9, store.size(name)))
    except (FormatError, OSError):  # it is gone, or replaced, or nobody may look
        return False
    has_header = int.from_bytes(head[:8], "little") <= current().header_bytes and head[8:] == b"{"
    return not head or head.startswith(_ZIP) or has_header


def _named(store: Store) -> set[str] | None:
    """The files of the checkpoint in a folder; None where its manifest does not tell."""
    try:
        data = store.read_whole(MANIFEST, current().manifest_bytes)
        return {file.name for file in load(data, f"{store.url}/{MANIFEST}").files}
    except FileNotFoundError:
        return set()
    except FormatError:
        return None


def _converted(
    store: Store,
    place: str,
    sizes: Mapping[str, int],
    name: re.Match[str],
    places: Sequence[str],
    age: float,
) -> Iterator[LeftOver]:
    """The folder itself, if nothing else is in it than a conversion puts there.

    What a conversion has moved away is the only copy until the new one is in its place.
    """
    is_needed = name[2] == "old" and not any(_name(other) == name[1] for other in places)
    if not is_needed and all(_is_written(file) for file in sizes) and not store.folders():
        arrivals = store.arrivals()
        if "" in arrivals:  # or it is gone
            old = now() - max(arrivals.values())
            yield LeftOver(place, "", FOLDER, sum(sizes.values()), old, old >= age)


def _is_written(name: str) -> bool:
    """Whether saves and conversions write such a file."""
    part = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.part", name, re.DOTALL)
    return _WRITTEN.fullmatch(part[1] if part else name) is not None


def _remove(store: Store, age: float, one: LeftOver) -> None:
    if one.kind == FOLDER:
        for name in store.names():
            store.delete(name)
    elif one.kind == UPLOAD:
        for begun in store.unfinished():
            if begun.name == one.name and now() - begun.started >= age:
                store.abort(begun)
    else:
        store.delete(one.name)


def _key(one: LeftOver) -> tuple[str, str]:
    return one.name, one.kind


def _name(place: str) -> str:
    """The name of a folder in the one that it lies in."""
    return split_url(one_spelling(place))[1]
