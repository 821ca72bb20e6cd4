"""Opens a checkpoint of any format as a catalog. Files and their content decide the format.

A place without a checkpoint is an error that names the checkpoints near it. Rules of that search:

1. The search is bounded: it looks into the last `LOOKS` folders by name, and into `DEEPER_LOOKS`
   folders of each. It compares names only on a disk: the listing of a bucket may be long.
2. A search that fails finds nothing, so that the caller's error stays the message.

[Note: replaced]
The store of an open checkpoint distinguishes a replaced or deleted one from a damaged one. A
checkpoint never changes in place. An overwriting save commits a new manifest and then deletes the
old files. If a file that the manifest names is missing, the guard reads the manifest again. If the
manifest is unchanged, the file is lost. If it is another one, or gone, the checkpoint was replaced
or deleted, and the reader may begin again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt.errors import NotACheckpointError, ReplacedError
from ckpt.opening import in_flight
from ckpt.stores.store import (
    LIVE_VERSION,
    Options,
    Store,
    absolute,
    is_file,
    join_url,
    local_path,
    natural,
    open_store,
    split_url,
    stored_version,
)
from formats.catalog import Catalog
from formats.detect import (
    COREML,
    DCP_METADATA,
    EMPTY,
    HEAD_BYTES,
    JSON,
    OF_WEIGHTS,
    SAFETENSORS,
    TEXT,
    files_of_weights,
    folder_format,
    is_shard,
    kind_of,
)
from formats.errors import CorruptError, ForeignFileError, FormatError, GoneError, TooLargeError
from formats.limits import check, current
from formats.native.manifest import MANIFEST
from sharding.errors import format_names, without_secrets

SHOWN_NAMES = 8
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """An opened checkpoint."""

    url: str
    store: Store
    """Guarded: a native checkpoint that is replaced during the read is not reported as damaged."""
    catalog: Catalog
    parts: Sequence[Source] = ()
    """The checkpoints that it is made of, if it is none that is stored (`ckpt.merge`)."""
    check: Callable[[Catalog], None] = lambda catalog: None
    """Raises if the tensors of a part of the catalog, perhaps under other names, are not there."""

    @property
    def fingerprint(self) -> int:
        """A number that only this native checkpoint has; 0 for another format."""
        described = self.catalog.files[0] if self.catalog.format == "ckpt" else None
        return int(described.digest[:15], 16) if described is not None else 0

    @property
    def attempt(self) -> int:
        """The number of the save that made a native checkpoint; equal in all of its folders."""
        name = self.catalog.files[1].name if len(self.catalog.files) > 1 else ""
        return int(name[:15], 16) if is_shard(name) else self.fingerprint


@contextmanager
def open_source(
    url: str | os.PathLike[str], options: Options = None, *, with_advice: bool = True
) -> Iterator[Source]:
    """Opens the checkpoint at a path or URL, of any format, until the block ends.

    Waits for a save of this process to the same place that is in the background.

    Raises:
        NotACheckpointError: no checkpoint of a known format is there. The message lists the place
            and, `with_advice`, names a checkpoint near it, which costs a few looks.
        HostileError: the checkpoint claims more than `formats.limits` allows.
        CorruptError, FormatError: the description is damaged.
        UnsupportedError: this version cannot read the checkpoint.
    """
    text = os.fspath(url)
    current()  # raises for wrong limits before it reads the checkpoint
    in_flight.saves.before_loading(text)
    with open_store(text, options) as opened:
        store = guard(opened)
        # The most likely format comes first: each look at a server is a request.
        catalog = _read_native(store)
        if catalog is not None or not is_file(text, options):
            try:
                with name_folder(store.url):
                    described = _read_folder(store, with_advice) if catalog is None else catalog
            except _LiveVersionError:
                with stored_version(opened) as version:
                    guarded = guard(version)
                    described = _credible(text, _read_manifest(guarded))
                    yield Source(text, guarded, described)
                return
            except _SnapshotError as inner:
                with open_source(join_url(text, str(inner)), options) as source:
                    yield source
                return
            yield Source(text, store, _credible(text, described))
            return
    folder, name = split_url(text)
    with open_store(folder, options) as opened:
        store = guard(opened)
        with name_folder(store.url, name):
            described = _read_file(store, name)
        yield Source(text, store, _credible(text, described))


@contextmanager
def name_folder(folder: str, file: str | None = None) -> Iterator[None]:
    """Puts the folder before the message of an error, if a reader names only a file in the folder.

    The error of a single `file` then begins with the file's path.
    """
    try:
        yield
    except FormatError as error:
        text, place = str(error), without_secrets(folder)
        if not text.startswith(place):
            message = f"{place}: {text}"
            if file is not None and text.startswith(file):
                message = join_url(place, file) + text.removeprefix(file)
            error.args = (message, *error.args[1:])
        raise


def _read_native(store: Store) -> Catalog | None:
    try:
        return _read_manifest(store)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_manifest(store: Store) -> Catalog:
    from formats.native import reader

    return reader.read(store)


def _credible(url: str, catalog: Catalog) -> Catalog:
    """Returns the catalog, if its tensors are not too large for the size of its files."""
    nbytes, stored_bytes = catalog.nbytes, sum(file.size for file in catalog.files)
    check(
        "expansion",
        nbytes // max(1, stored_bytes),
        f"{url}: tensors of {nbytes} bytes in files of {stored_bytes}",
    )
    return catalog


def _read_file(store: Store, name: str) -> Catalog:
    if name == MANIFEST:
        return _read_manifest(store)
    kind = kind_of(store.read(name, 0, min(HEAD_BYTES, store.size(name))), name)
    if name.endswith(".safetensors") and kind in (None, EMPTY, JSON, TEXT):
        kind = SAFETENSORS  # its reader says what is damaged
    if kind is None:
        raise NotACheckpointError(
            f"{store.url}/{name}: its first bytes are of no known format; if it is a checkpoint, "
            "it is damaged, or of a library that ckpt does not know"
        )
    if kind is EMPTY:
        raise CorruptError(f"{store.url}/{name}: the file is empty; {kind.advice}")
    if not kind.reader:
        raise ForeignFileError(f"{store.url}/{name}", kind.name, kind.advice)
    return kind.read(store, name)


class _LiveVersionError(Exception):
    """The folder is a version of a live state."""


class _SnapshotError(Exception):
    """The folder is the cache of a repository of Hugging Face: the path of its snapshot."""


def _snapshot_in(store: Store) -> str:
    """Returns the snapshot of the main branch in a cache of Hugging Face, or the only one."""
    commits = [name.rstrip("/") for name in store.entries("snapshots")]
    main = store.read_whole("refs/main", 1000) if "main" in store.entries("refs") else b""
    wanted = main.decode(errors="replace").strip()
    if wanted not in commits and len(commits) != 1:
        raise NotACheckpointError(
            f"{store.url}: refs/main names no snapshot of this cache; give one of its "
            f"{len(commits)} snapshots: {store.url}/snapshots/{commits[-1] if commits else ''}"
        )
    return f"snapshots/{wanted if wanted in commits else commits[0]}"


def _of_no_format(store: Store, entries: Sequence[str], with_advice: bool) -> Catalog:
    """Returns the catalog of a folder with one file of weights, or of adapters in sub-folders.

    Raises NotACheckpointError, ForeignFileError, or _SnapshotError for a cache of Hugging Face.
    """
    if {"snapshots/", "blobs/"} <= {*entries}:
        raise _SnapshotError(_snapshot_in(store))
    if {"Manifest.json", "Data/"} <= {*entries}:
        raise ForeignFileError(store.url, COREML.name, COREML.advice)
    files = files_of_weights(entries)
    if len(files) == 1:
        return _read_file(store, files[0])
    ordered = sorted(entries, key=lambda name: name.endswith("/"))
    named = f"there are {format_names(ordered, SHOWN_NAMES)}"
    text = f"{store.url}: no checkpoint here ({named if entries else nothing_at(store.url)})"
    if files:
        one = shlex.quote(join_url(store.url, files[0]))
        raise NotACheckpointError(f"{text}; give one of its {len(files)} files: ckpt inspect {one}")
    folders = [name[:-1] for name in entries if name.endswith("/")][:LOOKS]
    with suppress(OSError):
        adapters = [one for one in folders if ADAPTER in store.entries(one)]
        if adapters:
            from formats.joined import join_folders

            return join_folders("peft", store, adapters)
    raise NotACheckpointError(text + (advice_at(store, entries) if with_advice else ""))


def _read_folder(store: Store, with_advice: bool = False) -> Catalog:
    try:
        return _catalog_of(store, with_advice)
    except NotACheckpointError:
        raise
    except FileNotFoundError as error:
        raise NotACheckpointError(
            f"{store.url}: the checkpoint was deleted or replaced while it was opened: {error}"
        ) from error


def _catalog_of(store: Store, with_advice: bool) -> Catalog:
    entries = store.entries()
    if MANIFEST in entries:
        return _read_manifest(store)
    if LIVE_VERSION in entries:
        raise _LiveVersionError
    kind = folder_format(entries)
    if DCP_METADATA not in entries and any(
        name.endswith(".safetensors") and is_shard(name) for name in entries
    ):
        raise NotACheckpointError(
            f"{store.url}: no checkpoint here, but shards without a {MANIFEST}, of an unfinished "
            "save or of one under way: see `ckpt gc`"
        )
    return kind.read(store) if kind is not None else _of_no_format(store, entries, with_advice)


LOOKS, DEEPER_LOOKS = 8, 2
COMPARED = 2000
"""A name is compared with at most so many others: more would take a noticeable time."""


def nothing_at(url: str | os.PathLike[str]) -> str:
    """Returns the state of a place where no file and no folder was found."""
    path = local_path(url)
    is_there = path is not None and os.path.isdir(path)
    return "the folder is empty" if is_there else "nothing is there"


def advice_at(store: Store, entries: Sequence[str]) -> str:
    """Returns a similar path, or the checkpoints below a folder with these entries; empty without.

    It begins with a semicolon, for the end of a message.
    """
    if not entries:
        return similar_path(store.url)
    below = checkpoints_below(store, entries)
    return f"; {below.advice(store.url)}" if below is not None else ""


def similar_path(url: str | os.PathLike[str]) -> str:
    """Returns a question that names an existing path similar to a missing one; empty without one.

    The path is a folder, or a file with an ending of weights: no script is meant as a checkpoint.
    It begins with a semicolon, for the end of a message.
    """
    path = local_path(url)
    if path is None or os.path.lexists(path):
        return ""
    missing, rest = Path(os.path.normpath(path)), Path()
    while not os.path.lexists(missing.parent):
        missing, rest = missing.parent, Path(missing.name, rest)
    with suppress(OSError), os.scandir(missing.parent) as entries:
        names = [
            entry.name
            for entry in islice(entries, COMPARED)
            if entry.name.endswith(OF_WEIGHTS) or entry.is_dir()
        ]
        for near in get_close_matches(missing.name, names, 1):
            similar = missing.parent / near
            return f"; did you mean {similar / rest if (similar / rest).exists() else similar}?"
    return ""


@dataclass(frozen=True, slots=True)
class Below:
    """A folder of checkpoints, found in a search."""

    folder: str
    """The path or URL of the folder."""
    checkpoint: str
    """The path or URL of one of its checkpoints: the last by name among those of a search."""
    is_native: bool
    """Whether the checkpoint is of ckpt's own format."""

    def is_in(self, folder: str) -> bool:
        """Whether the checkpoint lies directly in this folder."""
        return self.folder.rstrip("/") == folder.rstrip("/")

    def advice(self, url: str) -> str:
        """Returns a remedy for a user who gave the folder `given` in the place of a checkpoint."""
        verb, effect = ("latest", "prints the newest") if self.is_native else ("ls", "lists them")
        command = f"`ckpt {verb} {shlex.quote(self.folder)}` {effect}"
        if self.is_in(url):
            return f"give one of these folders, such as {self.checkpoint} ({command})"
        return f"{self.folder} is a folder of checkpoints: {command}"


def checkpoints_below(
    store: Store, entries: Iterable[str], only_native: bool = False
) -> Below | None:
    """Returns the folder itself, with these entries, or one in it, if checkpoints lie in it."""
    with suppress(OSError):
        inside = {name: store.entries(name) for name in _last(entries, LOOKS)}
        deeper = (
            (f"{name}/{folder}", store.entries(f"{name}/{folder}"))
            for name, names in inside.items()
            for folder in _last(names, DEEPER_LOOKS)
        )
        for name, names in chain(inside.items(), deeper):
            is_native = not {MANIFEST, LIVE_VERSION}.isdisjoint(names)
            if is_native or (folder_format(names) is not None and not only_native):
                place = join_url(store.url, name)
                return Below(split_url(place)[0], place, is_native)
    return None


def _last(entries: Iterable[str], most: int) -> list[str]:
    """Returns the last folders among these entries by name, without the slashes at their ends."""
    folders = (name[:-1] for name in entries if name.endswith("/"))
    return sorted(folders, key=natural, reverse=True)[:most]


T = TypeVar("T")

TRIES = 10
"""The largest number of reads of a checkpoint that is replaced each time."""
MANIFEST_HEAD_BYTES = 64
"""The first bytes of a manifest. They contain its digest, which no two checkpoints share."""


def guard(store: Store) -> Store:
    """Returns a store that raises ReplacedError for files that went with a replaced checkpoint.

    The first manifest that is read through this store defines the checkpoint. Without one the guard
    does nothing.
    """
    return cast("Store", _ReplacementGuard(store))


def unless_replaced(action: Callable[[], T]) -> T:
    """Returns the result of an action, which begins again after a ReplacedError."""
    for _ in range(TRIES - 1):
        try:
            return action()
        except ReplacedError:
            pass
    return action()


def head_now(url: str, store: Store) -> bytes:
    """Reads the first bytes of the present manifest; none without a manifest.

    `url` is absolute. The store itself may still have the old manifest open.
    """
    with open_store(url, store.options) as fresh:
        most = current().manifest_bytes
        try:
            if fresh.exists(LIVE_VERSION):
                return stored_version(fresh).read_whole(MANIFEST, most)[:MANIFEST_HEAD_BYTES]
            return fresh.read_whole(MANIFEST, most)[:MANIFEST_HEAD_BYTES]
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except TooLargeError as error:
            return str(error).encode()  # no manifest begins like this


def replaced_error(url: str, name: str, now: bytes) -> ReplacedError:
    """Returns the error for a missing file; `now` is the result of `head_now`."""
    happened = "replaced by another one" if now else "deleted"
    return ReplacedError(
        f"{url}: the checkpoint was {happened} while it was read, and {name} went with it; "
        "nothing is damaged: read it again"
    )


class _ReplacementGuard:
    """See `guard`. Attributes that are not here are the store's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._where = absolute(store.url)
        self._head: bytes | None = None

    def __str__(self) -> str:
        return str(self._store)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def size(self, name: str) -> int:
        return self._watch(name, self._store.size, name)

    def read_whole(self, name: str, limit: int) -> bytes:
        """Reads all bytes of a small file. Raises ReplacedError for another manifest."""
        data = self._watch(name, self._store.read_whole, name, limit)
        if name == MANIFEST:
            head = data[:MANIFEST_HEAD_BYTES]
            if self._head is not None and self._head != head:
                raise replaced_error(self._store.url, name, head)
            self._head = head
        return data

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file. Raises SizeError unless it has `size` bytes."""
        return self._watch(name, self._store.read_end, name, size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._watch(name, self._store.read, name, offset, length)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        self._watch(name, self._store.read_into, name, offset, *targets)

    def _watch(self, name: str, read: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a read. Raises ReplacedError if the checkpoint went with `name`."""
        try:
            return read(*arguments)
        except (GoneError, FileNotFoundError) as error:
            self._look(name, error)
            raise

    def _look(self, name: str, error: Exception) -> None:
        """Raises ReplacedError if the manifest is no longer the one that was read first."""
        if self._head is not None:
            now = head_now(self._where, self._store)
            if now != self._head:
                raise replaced_error(self._store.url, name, now) from error
