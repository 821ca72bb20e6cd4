"""The saves and conversions under way at a place, as their files show them.

Rules:

1. Only names, sizes and headers are read. Nothing is written, and no process is asked.
2. On a disk a file under way is a `.part` file (`ckpt.stores.local_store`). An uncompressed shard
   file, and every safetensors file of a conversion, begins with its header, which has its size.
3. Several ranks of a conversion write into one file, each into its own place. The bytes of a file
   are therefore the space that it takes, if the space is smaller than the size.
4. A bucket shows complete files and begun uploads, but no bytes of an upload.
5. A killed save leaves the same files as a live one. Only the time of the last write tells them
   apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.stores.driver import Unfinished
from ckpt.stores.store import (
    Options,
    Store,
    absolute,
    join_url,
    local_path,
    natural,
    open_store,
    split_url,
)
from formats.detect import SHARD
from formats.errors import FormatError
from formats.limits import current
from formats.native.manifest import MANIFEST
from formats.safetensors.file import PREFIX_BYTES

RECENT, FAR_RECENT = 32, 4
"""The most folders in a place that are looked into: on a disk, and in a bucket, where each costs a
request. An upload in parts is seen in any folder of S3."""
END_BYTES = 1 << 16
"""The most bytes of a header that are read: its last entry tells where the file ends."""
Phase = Literal["writing", "flushing", "written", "uploading"]
_SMALL = re.compile(r"manifest\.json|owner-[0-9]+\.json")
"""The manifest, and the file of a run's owner."""
_OFFSETS = re.compile(rb'"data_offsets":\[\d{1,18},(\d{1,18})\]')
_FOLDER = re.compile(r"\.(.+)\.(?:[0-9a-f]{8}|resumed)\.part", re.DOTALL)
"""The name of a folder that a conversion fills."""


@dataclass(frozen=True, slots=True)
class FileUnderWay:
    """A file of a save or conversion that is not committed."""

    name: str
    """Its name once it is complete."""
    rank: int | None
    """The rank that writes it; None for a file of a conversion to another format."""
    phase: Phase
    """Whether bytes are still missing, or the disk flushes them, or the file is complete. In a
    bucket: whether it is being uploaded."""
    nbytes: int | None
    """The bytes written so far; None in a bucket."""
    planned_bytes: int | None
    """The bytes of the complete file; None if its header does not tell yet."""
    changed: float | None
    """The time of the last write, or of an upload's begin, by the store's clock; None for a
    complete file of a bucket."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A checkpoint or a conversion's result that is not committed."""

    name: str
    """The name of its folder or file."""
    attempt: str
    """The 16 hex digits that begin the names of its files; empty for another format."""
    files: tuple[FileUnderWay, ...]
    """By rank, or by name."""
    is_committing: bool
    """Whether the manifest is being written."""

    @property
    def changed(self) -> float:
        """The time of the last write that is known."""
        return max((file.changed or 0.0 for file in self.files), default=0.0)


class Watch:
    """Looks at a place again and again. Headers of files under way are read once."""

    def __init__(self, url: str | os.PathLike[str], options: Options = None) -> None:
        self.url = absolute(url)
        self._options = options
        self._planned: dict[tuple[str, str], int] = {}

    def look(self) -> list[UnderWay]:
        """Returns what is under way in the place, in its folders and beside it, latest write first.

        The place may be a folder of checkpoints, a checkpoint, or the target of a conversion. A
        folder in it that this process may not read is left out. Raises OSError if the place cannot
        be listed.
        """
        above, name = split_url(self.url.rstrip("/") or "/")
        saves = [*self._inside(self.url, name)]
        if name and local_path(self.url) is not None:
            with suppress(PermissionError), open_store(above) as store:
                saves += self._find_conversions(above, store, store.list_unfinished(), name)
        return sorted(saves, key=lambda save: -save.changed)

    def _inside(self, url: str, name: str) -> Iterator[UnderWay]:
        """Yields what is under way in a folder and in the folders that changed last in it."""
        with open_store(url, self._options) as store:
            begun = store.list_unfinished()
            directly = [unfinished for unfinished in begun if "/" not in unfinished.name]
            yield from self._attempts(url, name, store, directly)
            yield from self._find_conversions(url, store, directly)
            below = _recent(store)
        inside = _by_folder(begun)  # of a bucket
        for folder in dict.fromkeys([*below, *sorted(inside)]):
            place = join_url(url, folder)
            with suppress(PermissionError), open_store(place, self._options) as store:
                is_local = local_path(place) is not None
                parts = store.list_unfinished() if is_local else inside.get(folder, [])
                yield from self._attempts(place, folder, store, parts)

    def _attempts(
        self, url: str, name: str, store: Store, begun: Sequence[Unfinished]
    ) -> Iterator[UnderWay]:
        """Yields the attempts in the folder of a checkpoint without a manifest that names them."""
        files: dict[str, dict[int, FileUnderWay]] = {}
        for unfinished in begun:
            if matched := SHARD.fullmatch(unfinished.name):
                rank = int(matched[2])
                files.setdefault(matched[1], {})[rank] = self._part(url, store, unfinished, rank)
        sizes = store.sizes()
        for file_name, size in sizes.items():
            matched = SHARD.fullmatch(file_name)
            if matched and (matched[1] in files or MANIFEST not in sizes):
                rank = int(matched[2])
                files.setdefault(matched[1], {})[rank] = _complete(store, file_name, size, rank)
        is_committing = any(unfinished.name == MANIFEST for unfinished in begun)
        for attempt, found in files.items():
            yield UnderWay(
                name, attempt, tuple(found[rank] for rank in sorted(found)), is_committing
            )

    def _find_conversions(
        self, url: str, store: Store, begun: Sequence[Unfinished], wanted: str | None = None
    ) -> Iterator[UnderWay]:
        """Yields conversions to other formats in a folder; only to the target `wanted` if given."""
        for unfinished in begun:
            is_native = SHARD.fullmatch(unfinished.name) or _SMALL.fullmatch(unfinished.name)
            if not is_native and wanted in (None, unfinished.name):
                file = self._part(url, store, unfinished, None)
                yield UnderWay(unfinished.name, "", (file,), is_committing=False)
        for folder in store.folders():
            matched = _FOLDER.fullmatch(folder)
            if matched and wanted in (None, matched[1]):
                files = self._files(join_url(url, folder))
                yield UnderWay(matched[1], "", files, is_committing=False)

    def _files(self, url: str) -> tuple[FileUnderWay, ...]:
        """Returns the files in the folder that a conversion fills."""
        with open_store(url, self._options) as store:
            parts = {upload.upload_id: upload for upload in store.list_unfinished()}
            found = [self._part(url, store, part, None) for part in parts.values()]
            for name, size in store.sizes().items():
                if name not in parts:
                    found.append(_complete(store, name, size, None))
        return tuple(sorted(found, key=lambda file: natural(file.name)))

    def _part(self, url: str, store: Store, save: Unfinished, rank: int | None) -> FileUnderWay:
        path = local_path(url)
        if path is None:
            return FileUnderWay(save.name, rank, "uploading", None, None, save.started)
        key = url, save.upload_id
        if key not in self._planned:
            planned = _total_bytes(store, save)
            if planned is not None:
                self._planned[key] = planned
        total = self._planned.get(key)
        nbytes = min(save.nbytes, _space(os.path.join(path, save.upload_id), save.nbytes))
        phase: Phase = "flushing" if total is not None and nbytes >= total else "writing"
        return FileUnderWay(save.name, rank, phase, nbytes, total, save.started)


def _by_folder(begun: Sequence[Unfinished]) -> dict[str, list[Unfinished]]:
    """Returns uploads to files of folders, by the folder, with the names of the files alone."""
    by_folder: dict[str, list[Unfinished]] = {}
    for unfinished in begun:
        folder, _, name = unfinished.name.partition("/")
        if name and "/" not in name:
            by_folder.setdefault(folder, []).append(replace(unfinished, name=name))
    return by_folder


def _recent(store: Store) -> list[str]:
    """Returns the folders that changed last; in a bucket those with the largest numbers."""
    folders = [name for name in store.folders() if not _FOLDER.fullmatch(name)]
    if local_path(store.url) is None:
        return sorted(folders, key=natural)[-FAR_RECENT:]
    times = {name: _local_mtime(store, name) or 0.0 for name in folders}
    return sorted(folders, key=times.__getitem__)[-RECENT:]


def _local_mtime(store: Store, name: str) -> float | None:
    if local_path(store.url) is not None:
        with suppress(FileNotFoundError):
            return store.modified(name)
    return None


def _complete(store: Store, name: str, size: int, rank: int | None) -> FileUnderWay:
    return FileUnderWay(name, rank, "written", size, size, _local_mtime(store, name))


def _total_bytes(store: Store, save: Unfinished) -> int | None:
    """Returns the size that the header of a file under way tells; None if it does not."""
    if not save.name.endswith(".safetensors"):
        return None
    try:
        length = int.from_bytes(store.read(save.upload_id, 0, PREFIX_BYTES), "little")
        if not 0 < length <= current().header_bytes:
            return None
        lo = max(0, length - END_BYTES)
        end = store.read(save.upload_id, PREFIX_BYTES + lo, length - lo)
    except (OSError, FormatError):  # the header is not there yet, or the file is complete now
        return None
    ends = [int(digits) for digits in _OFFSETS.findall(end)]
    return PREFIX_BYTES + length + max(ends) if ends else None


def _space(path: str, otherwise: int) -> int:
    """Returns the bytes that a file takes on its disk."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:  # it is complete, or gone
        return otherwise


def rates(
    earlier: Sequence[UnderWay], later: Sequence[UnderWay], seconds: float
) -> dict[tuple[str, str, str], float]:
    """Returns the bytes per second of each file that both looks have, by its `key`."""
    before = {key(save, file): file.nbytes for save in earlier for file in save.files}
    rates_by_key = {}
    for save in later:
        for file in save.files:
            nbytes_before = before.get(key(save, file))
            if nbytes_before is not None and file.nbytes is not None and seconds > 0:
                rates_by_key[key(save, file)] = max(0, file.nbytes - nbytes_before) / seconds
    return rates_by_key


def key(save: UnderWay, file: FileUnderWay) -> tuple[str, str, str]:
    """Returns the names by which two looks know a file."""
    return save.name, save.attempt, file.name


def seconds_left(file: FileUnderWay, rate: float | None) -> float | None:
    """Returns the time until a file has all bytes at this rate; None if it cannot be told.

    >>> seconds_left(FileUnderWay("f", 0, "writing", 100, 400, 0.0), 50.0)
    6.0
    """
    if file.nbytes is None or file.planned_bytes is None:
        return None
    missing = file.planned_bytes - file.nbytes
    if missing <= 0:
        return 0.0
    return missing / rate if rate else None
