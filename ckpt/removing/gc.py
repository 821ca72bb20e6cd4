"""Lists the left-overs of unfinished saves and conversions, and removes them on request.

Rules:

1. A left-over has a name that `ckpt` gives: a shard file, a partly written file, an incomplete
   upload, the temporary folder of a conversion, or in a bucket a manifest that a late request has
   brought back: none of its files is there. The target file of a conversion may have any name.
   A partly written file with another name therefore counts if it begins like such a file.
2. A file that a manifest names is never a left-over: neither the manifest in its folder nor that of
   a borrower beside it. If a manifest is damaged, no shard file beside it is a left-over.
3. A file that a live save may still commit is listed and stays. A save commits within
   `GRACE_SECONDS` of its start or never (`ckpt.transfer.commit`), and clocks may differ by
   `CLOCKS_SECONDS`. The files of a checkpoint that is being copied stay too.
4. Links in the place are not followed: the files behind them belong to another place.
5. Listing changes nothing. Each left-over is checked again just before its removal.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast
from warnings import warn

from ckpt.errors import UnreadableWarning
from ckpt.mapping.model_files import ADAPTER, CONFIG
from ckpt.stores.driver import Unfinished
from ckpt.stores.store import (
    Options,
    Store,
    check_no_link,
    check_writable,
    join_url,
    link_at,
    local_path,
    one_spelling,
    open_store,
    split_url,
)
from ckpt.transfer.bases import BaseFiles, base_files, base_files_beside
from ckpt.transfer.commit import GRACE_SECONDS
from ckpt.transfer.facts import Facts, checkpoints_in, concerns_one_file
from formats.detect import SHARD as SHARD_NAME
from formats.detect import WRITTEN
from formats.errors import FormatError
from formats.limits import current
from formats.native.manifest import MANIFEST, file_names, read_manifest
from formats.storage import Pool

if TYPE_CHECKING:
    from ckpt.stores.driver import ObjectInfo

__all__ = ["LeftOver", "gc"]

WORKERS = 8
"""Left-overs that are removed at the same time: a server takes time to answer."""
CLOCKS_SECONDS = 3600.0
"""Time for differences between the clocks of a store and of the ranks, and for a commit."""
OLD_SECONDS = GRACE_SECONDS + CLOCKS_SECONDS
"""The age at which no save can need a file any more."""
LeftOverKind = Literal["shard", "part", "upload", "folder", "manifest"]
SHARD: LeftOverKind = "shard"
PART: LeftOverKind = "part"
UPLOAD: LeftOverKind = "upload"
FOLDER: LeftOverKind = "folder"
BARE: LeftOverKind = "manifest"
_WRITTEN = re.compile(
    rf"manifest\.json|owner-[0-9]+\.json|.+({'|'.join(map(re.escape, WRITTEN))})"
    r"|.+\.safetensors\.index\.json|\.metadata|__[0-9]+_[0-9]+\.distcp",
    re.DOTALL,
)
"""The files that saves and conversions write under names of their own choice."""
_MAGIC = (b"PK\x03\x04", b"GGUF")
"""The first bytes of files of torch.save and numpy, and of GGUF."""
_FOLDER = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(part|old)", re.DOTALL)
"""A folder that a conversion fills, or the folder that it has replaced."""


def now() -> float:
    """Returns the present time in seconds since 1970, for ages."""
    return time.time()


@dataclass(frozen=True, slots=True)
class LeftOver:
    """One file, upload or folder that belongs to no checkpoint."""

    folder: str
    """The path or URL of its folder."""
    name: str
    kind: LeftOverKind
    """A shard file, a partly written file, an incomplete upload to a bucket, the temporary folder
    of a conversion, or a manifest without its files."""
    nbytes: int
    age_seconds: float
    """By the store's clock, since the last write; since the start if only that is known."""
    is_old: bool
    """Whether it is so old that no live save can need it."""
    was_removed: bool = False


def gc(
    url: str | os.PathLike[str],
    *,
    delete: bool = False,
    older_than: float | None = None,
    storage_options: Options = None,
) -> list[LeftOver]:
    """Returns the left-overs at `url`, a checkpoint or a folder of checkpoints.

    One process calls this. A file that belongs to a checkpoint, or that one borrows from, is never
    a left-over. The files of a save in progress are listed and stay. A missing folder has none.

    Args:
        delete: removes the left-overs that are old enough.
        older_than: the age in seconds at which a left-over is old. The default is 25 hours, when no
            save can need it any more. With a smaller value, a save in progress that loses a file
            raises an error and commits nothing.
        storage_options: options of the fsspec driver.

    Raises:
        ArgumentError: `url` is a link on a disk, and `delete` is given.
        StoreError: the disk or object store failed; or the place is only read, as a live state is.
        OSError: this process may not read the folder `url`, or remove a file. A folder in it that
            cannot be read is left out, with an UnreadableWarning.

    >>> import ckpt, os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     os.remove(f"{folder}/step-1/manifest.json")
    ...     [found.kind for found in ckpt.gc(folder)]
    ['shard']
    """
    age = OLD_SECONDS if older_than is None else older_than
    place = _folder(url)

    def look_up() -> BaseFiles:
        return base_files_beside(place, storage_options)[0]

    if delete:
        check_no_link(url)
    with open_store(place, storage_options) as store:
        check_writable(store)
        # A bucket does not list a folder that holds only an incomplete upload.
        begun = store.list_unfinished()
        seen = _Listing.of(store, begun)
        above = {entry.name.split("/")[0] for entry in begun if "/" in entry.name}
        folders = store.folders() if seen is None else seen.folders
        inside = [join_url(place, name) for name in sorted({*folders, *above})]
        inside = [entry for entry in inside if link_at(entry) is None]
        found = _collect([place], look_up, age, delete, storage_options, seen, is_inside=False)
        return found + _collect(
            inside, lambda: base_files(store), age, delete, storage_options, seen
        )


def remove_marked(url: str, mark: str) -> None:
    """Removes left-overs of any age in the folders of `url`, if their names begin with `mark`.

    `mark` is the begin of a shard file's name. A partly written manifest that names such files is
    removed too. Raises OSError.
    """
    with open_store(url) as above:
        inside = [join_url(url, name) for name in above.folders()]
    inside = [place for place in inside if link_at(place) is None]
    for place in inside:
        with open_store(place) as store:
            for left_over in [*_find_left_overs(store, place, inside, 0.0)]:
                is_manifest = left_over.kind == PART and left_over.name.startswith(f".{MANIFEST}.")
                if left_over.name.removeprefix(".").startswith(mark) or (
                    is_manifest
                    and mark.encode() in store.read_whole(left_over.name, left_over.nbytes)
                ):
                    _remove(store, 0.0, left_over)
                    store.remove_if_empty()


def remove_old(store: Store) -> None:
    """Removes old left-overs from the folder of a checkpoint that was deleted just now.

    A store that fails leaves them to `gc`.
    """
    with suppress(OSError, FormatError):
        left_overs = [
            left_over
            for left_over in _find_left_overs(store, store.url, (), OLD_SECONDS)
            if left_over.is_old
        ]
        needed, folder = base_files_beside(store.url, store.options) if left_overs else (None, "")
        for rest in left_overs:
            if needed is None or not needed.cover(folder, rest.name):
                _remove(store, OLD_SECONDS, rest)


def old_versions(url: str | os.PathLike[str], storage_options: Options = None) -> tuple[int, int]:
    """Returns the number and the bytes of old versions that a bucket keeps of a folder's files.

    Replaced and deleted files are among them. Zeros for a place without versions.
    """
    with open_store(url, storage_options) as store:
        look: Callable[[], tuple[int, int]] | None = getattr(store, "old_versions", None)
        return (0, 0) if look is None else look()


def is_folder(url: str | os.PathLike[str], storage_options: Options = None) -> bool:
    """Whether a folder exists. In a bucket a folder exists if it holds a file or an upload."""
    path = local_path(url)
    if path is not None:
        return os.path.isdir(path)
    with open_store(_folder(url), storage_options) as store:
        return bool(store.sizes() or store.folders() or store.list_unfinished())


def _folder(url: str | os.PathLike[str]) -> str:
    """Returns the path or URL without the slashes at its end."""
    text = os.fspath(url)
    above = text.rstrip("/")
    return text if not above or above.endswith(":") else above


def _collect(
    places: Sequence[str],
    look_up: Callable[[], BaseFiles],
    age: float,
    delete: bool,
    options: Options,
    seen: _Listing | None = None,
    is_inside: bool = True,
) -> list[LeftOver]:
    """Returns the left-overs of folders side by side. `look_up` returns the borrowed files.

    `seen` is a listing of the folder around them, or without `is_inside` of the only one.
    """
    left_overs: list[LeftOver] = []
    for place in places:
        name = _name(place) if is_inside else ""
        if seen is not None and seen.is_clean(name):
            continue
        with open_store(place, options) as store:
            listed = store if seen is None else cast("Store", _Seen(store, seen, name))
            try:
                left_overs += _find_left_overs(listed, place, places, age)
            except OSError as error:
                if not is_inside or not concerns_one_file(error):
                    raise
                warn(UnreadableWarning(f"{place} was left out: {error}"), stacklevel=3)
    # The borrowed files are looked up after the named ones: a save that borrows later finds its
    # base without the file and commits nothing.
    if any(file.kind == SHARD for file in left_overs):
        needed = look_up()
        moment = now()
        left_overs = [
            file
            for file in left_overs
            if not needed.cover(_name(file.folder), file.name, moment - file.age_seconds)
        ]
    if not delete:
        return left_overs
    removed: set[LeftOver] = set()
    for place in dict.fromkeys(file.folder for file in left_overs if file.is_old):
        with open_store(place, options) as store, Pool(WORKERS, "ckpt-gc") as pool:
            again = {
                _key(left_over)
                for left_over in _find_left_overs(store, place, places, age)
                if left_over.is_old
            }
            chosen = [file for file in left_overs if file.folder == place and _key(file) in again]
            list(pool.map(partial(_remove, store, age), chosen))
            removed |= {*chosen}
            store.remove_if_empty()
    return [replace(file, was_removed=file in removed) for file in left_overs]


@dataclass(frozen=True, slots=True)
class _Listing:
    """All files and incomplete uploads in a folder of a bucket and below it."""

    files: Mapping[str, Mapping[str, ObjectInfo]]
    """By folder, "" for the folder itself, and name."""
    facts: Mapping[str, Facts]
    begun: Sequence[Unfinished]

    @classmethod
    def of(cls, store: Store, begun: Sequence[Unfinished]) -> _Listing | None:
        """Returns the listing of a folder; None if the store lists folder by folder."""
        if local_path(store.url) is not None:
            return None
        checkpoints = checkpoints_in(store)
        return (
            None if checkpoints.files is None else cls(checkpoints.files, checkpoints.facts, begun)
        )

    @property
    def folders(self) -> set[str]:
        """The names of the folders directly in the folder."""
        return {path.split("/")[0] for path in self.files if path}

    def begun_in(self, folder: str) -> list[Unfinished]:
        """Returns the uploads directly to a folder, by the names of their files."""
        pairs = [(upload.name.rpartition("/"), upload) for upload in self.begun]
        return [replace(upload, name=parts[2]) for parts, upload in pairs if parts[0] == folder]

    def is_clean(self, folder: str) -> bool:
        """Whether a folder surely has no left-over: a checkpoint with all and only its files."""
        facts, files = self.facts.get(folder), self.files.get(folder, {})
        own = None if facts is None else facts.files_among(files)
        shards = {name for name in files if SHARD_NAME.fullmatch(name)}
        return own is not None and shards == {*own} and not self.begun_in(folder)


class _Seen:
    """A folder as a listing of the folder around it has shown it. All else is its store's."""

    def __init__(self, store: Store, listing: _Listing, folder: str) -> None:
        self._store, self._listing, self._folder = store, listing, folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def sizes(self) -> dict[str, int]:
        files = self._listing.files.get(self._folder, {})
        return {name: file.nbytes or 0 for name, file in files.items()}

    def arrivals(self) -> dict[str, float]:
        """Returns the times of the last writes, by name."""
        files = self._listing.files.get(self._folder, {})
        return {name: file.modified for name, file in files.items()}

    def folders(self) -> list[str]:
        above = f"{self._folder}/" if self._folder else ""
        inside = (path for path in self._listing.files if path and path.startswith(above))
        return sorted({path.removeprefix(above).split("/")[0] for path in inside})

    def list_unfinished(self) -> list[Unfinished]:
        """Returns the incomplete uploads to the folder."""
        return self._listing.begun_in(self._folder)


def _find_left_overs(
    store: Store, place: str, places: Sequence[str], age: float
) -> Iterator[LeftOver]:
    """Yields files that no manifest in this folder names, by name. Others may borrow from them."""
    # The listing comes before the manifest: a save that commits in between leaves nothing over.
    sizes, unfinished, moment = store.sizes(), store.list_unfinished(), now()
    converted = _FOLDER.fullmatch(_name(place))
    if converted:
        yield from _find_converted(store, place, sizes, converted, places, age)
        return
    for begun in unfinished:
        is_file = begun.upload_id in sizes
        is_ours = _WRITTEN.fullmatch(begun.name) or (is_file and _begins(store, begun.upload_id))
        if "/" not in begun.name and is_ours:
            name, kind = (begun.upload_id, PART) if is_file else (begun.name, UPLOAD)
            old = moment - begun.started
            yield LeftOver(place, name, kind, store.unfinished_bytes(begun), old, old >= age)
    shards = [name for name in sizes if SHARD_NAME.fullmatch(name)]
    # A late request brings a manifest back to a bucket only: a disk may be a copy that goes on.
    may_be_bare = not shards and MANIFEST in sizes and local_path(store.url) is None
    named = _files_of(store) if shards or may_be_bare else set()
    if may_be_bare and named:
        old = moment - store.arrivals().get(MANIFEST, moment)
        yield LeftOver(place, MANIFEST, BARE, sizes[MANIFEST], old, old >= age)
    over = [name for name in shards if named is not None and name not in named]
    arrivals = store.arrivals() if over else {}
    for name in over:
        if name in arrivals:  # a file that a failed save has removed meanwhile is not
            old = moment - arrivals[name]
            yield LeftOver(place, name, SHARD, sizes[name], old, old >= age)


def _begins(store: Store, name: str) -> bool:
    """Whether a file is empty or begins like one that a conversion writes."""
    try:
        head = store.read(name, 0, min(9, store.size(name)))
    except (FormatError, OSError):  # the file is gone, or replaced, or unreadable
        return False
    has_header = int.from_bytes(head[:8], "little") <= current().header_bytes and head[8:] == b"{"
    return not head or head.startswith(_MAGIC) or has_header


def _files_of(store: Store) -> set[str] | None:
    """Returns the files of the checkpoint in a folder; None if its manifest is damaged."""
    try:
        data = read_manifest(store)
        return set(file_names(data, f"{store.url}/{MANIFEST}"))
    except FileNotFoundError:
        return set()
    except FormatError:
        return None


def _find_converted(
    store: Store,
    place: str,
    sizes: Mapping[str, int],
    name: re.Match[str],
    places: Sequence[str],
    age: float,
) -> Iterator[LeftOver]:
    """Yields the folder itself if it has only files that a conversion writes.

    A folder that a conversion has moved away is the only copy until the new one is in its place.
    """
    is_needed = name[2] == "old" and not any(_name(other) == name[1] for other in places)
    if not is_needed and all(_is_written(file) for file in sizes) and not store.folders():
        arrivals = store.arrivals()
        if "" in arrivals:  # a folder that is gone has no time
            old = now() - max(arrivals.values())
            yield LeftOver(place, "", FOLDER, sum(sizes.values()), old, old >= age)


_MODEL_FILES = (
    *(CONFIG, ADAPTER, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Small files that a conversion copies. It may copy others, whose left-overs nobody can tell from
those of another program."""


def _is_written(name: str) -> bool:
    """Whether saves and conversions write files of this name."""
    part = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.part", name, re.DOTALL)
    complete = part[1] if part else name
    return complete in _MODEL_FILES or _WRITTEN.fullmatch(complete) is not None


def _remove(store: Store, age: float, entry: LeftOver) -> None:
    if entry.kind == FOLDER:
        for name in store.names():
            store.delete(name)
    elif entry.kind == UPLOAD:
        for begun in store.list_unfinished():
            if begun.name == entry.name and now() - begun.started >= age:
                store.abort(begun)
    else:
        store.delete(entry.name)


def _key(entry: LeftOver) -> tuple[str, str]:
    return entry.name, entry.kind


def _name(place: str) -> str:
    return split_url(one_spelling(place))[1]
