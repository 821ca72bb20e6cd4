"""A chain: the versions of a live state in a folder or bucket, most of them as deltas.

    full-00000100/       a checkpoint: a whole version
    version-00000100/    live-version.json; the delta of each shard file since version 99
    version-00000101/    live-version.json; the deltas since version 100

Rules (docs/format.md is normative):

1. A version is there once its `live-version.json` is. This names the whole version below, the
   version before, and the size and checksum of the delta of each shard file.
2. A delta file has the header and the chunk table of the shard file in its version, then the
   frames, then their index. A frame is the delta of `FRAME_BYTES` of all bytes before the chunk
   table, as `ckpt.transfer.live_deltas` makes it.
3. Versions with one whole version below have files of equal sizes, by the same ranks.
4. The newest `KEPT` whole versions stay, with all that is above them. Older versions go, and first
   their `live-version.json`.

`ckpt.live.stored_version` reads a version.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ckpt.errors import ExistsError
from ckpt.plan.save_plan import SavePlan
from ckpt.stores.store import (
    LIVE_VERSION,
    Options,
    Store,
    check_writable,
    join_url,
    open_store,
    place_elsewhere,
)
from ckpt.transfer.live_deltas import WIDTHS, Area, make_delta
from ckpt.transfer.write_job import STEP_BYTES, call_message, pack_summary, unpack_summary
from formats.errors import FormatError
from formats.limits import decode_object
from formats.native.manifest import MANIFEST, ShardFile, checked_body, load, with_digest
from formats.native.shard import ShardSummary
from formats.storage import in_place
from sharding.agreement.ranks import Ranks, result_or_error

if TYPE_CHECKING:  # the writer process imports this module, and no torch
    from ckpt.saving.writers import ArenaWriter

_log = logging.getLogger("ckpt.live")

FRAME_BYTES = 1 << 20
KEPT = 2
"""The whole versions that stay."""
VERSION, WHOLE, DELTA = "version-", "full-", ".delta"
FRAME = Struct("<IQ")
"""The entry of a frame in the index: its length, and its xxh3_64."""


class DeltaFile(NamedTuple):
    """The file with the delta of one shard file, under this file's name with `DELTA`."""

    size: int
    width: int
    """Bytes of an element."""
    digest: str
    """xxh3_128, in hex, of the index."""


class Link(NamedTuple):
    """One version of a chain, as its `live-version.json` has it."""

    number: int
    whole: int
    """The whole version below, or this one."""
    before: int | None
    """The version since which the deltas are; None without deltas."""
    deltas: Sequence[DeltaFile]
    """In the order of the shard files in the manifest."""
    manifest: str

    def dump(self) -> bytes:
        fields = {"format": "ckpt-live-version", "version": 1, **self._asdict()}
        return with_digest(json.dumps(fields, separators=(",", ":")).encode())

    @classmethod
    def load(cls, data: bytes, where: str) -> Link:
        """Returns the link in bytes. Raises FormatError, or CorruptError if they have changed."""
        match decode_object(checked_body(data, where), where):
            case {
                "format": "ckpt-live-version",
                "version": 1,
                "number": int(number),
                "whole": int(whole),
                "before": int() | None as before,
                "deltas": [*rows],
                "manifest": str(manifest),
            } if 0 <= whole <= number and (whole == number if before is None else before < number):
                deltas = [_delta_file(row, where) for row in rows]
                return cls(number, whole, before, deltas, manifest)
        raise FormatError(f"{where}: this is no version of a live state that this ckpt reads")


def _delta_file(row: object, where: str) -> DeltaFile:
    match row:
        case [int(size), 1 | 2 | 4 | 8 as width, str(digest)] if size >= 0:
            return DeltaFile(size, width, digest)
    raise FormatError(f"{where}: {row!r:.200} is no file with a delta")


def version_numbers(folders: Sequence[str], kind: str = VERSION) -> list[int]:
    """Returns the numbers of the versions with such folders, in ascending order."""
    names = [name.removeprefix(kind).rstrip("/") for name in folders if name.startswith(kind)]
    return sorted(int(name) for name in names if name.isdecimal())


def version_url(url: str, number: int, kind: str = VERSION) -> str:
    return join_url(url, f"{kind}{number:08d}")


def newest_version(
    url: str, store: Store, folders: Sequence[str], after: int
) -> tuple[int, str] | None:
    """Returns the number and the URL of the newest version above `after` that is there."""
    for number in reversed(version_numbers(folders)):
        place = version_url(url, number)
        if number <= after:
            break
        with open_store(place, store.options) as found:
            if found.exists(LIVE_VERSION):
                return number, place
    return None


def sizes_of(files: Sequence[ShardFile]) -> list[tuple[int, int, int, int]]:
    """Returns the ranks and sizes of files, which are equal above one whole version (rule 3)."""
    return [(file.rank, file.size, file.header_bytes, file.table_bytes) for file in files]


def frame_area(nbytes: int, width: int) -> Area:
    """Returns the elements of a frame; single bytes, if its end would cut an element."""
    width = width if nbytes % width == 0 else 1
    return Area(0, width, (nbytes // width,), (width,), False)


class Chain:
    """The chain that a publisher writes; all ranks have one."""

    def __init__(self, url: str, full_every: int, options: Options) -> None:
        self.url, self._every, self._options = url, full_every, dict(options or {})
        self._part: tuple[str, str] | None = None
        """The URL in memory of the version that was written last, and this rank's file of it."""
        self._last: tuple[Link, Sequence[ShardFile]] | None = None
        """That version; on rank 0."""

    def newest(self) -> int:
        """Returns the largest number in the folder, also of an unfinished version; or 0."""
        with open_store(self.url, self._options) as store:
            check_writable(store)
            folders = store.folders()
        return max([0, *version_numbers(folders), *version_numbers(folders, WHOLE)])

    def append(
        self,
        ranks: Ranks,
        version: tuple[int, str, str],
        part: tuple[str, ShardSummary] | None,
        plan: SavePlan,
        writer: ArenaWriter,
    ) -> None:
        """Writes a version, which readers of the live state have already. All ranks call this.

        `version` is its number, its URL in memory and, on rank 0, its manifest; `part` the name and
        the facts of this rank's shard file, if it has one. Communicates. Raises on all ranks if a
        rank fails; the next version is whole then.
        """
        (number, live, manifest), (last, self._last) = version, (self._last, None)
        files = load(manifest.encode(), live).files if manifest else ()
        before = last[0] if last and sizes_of(last[1]) == sizes_of(files) else None
        is_whole = before is None or number - before.whole >= self._every
        decision = ranks.broadcast(json.dumps([is_whole, before is not None]).encode())
        is_whole, follows = json.loads(decision)
        old, self._part = self._part if follows else None, part and (live, part[0])

        def write() -> ShardSummary | None:
            if part is None:
                return None
            elsewhere = place_elsewhere(self.url, self._options)
            url, options = elsewhere or (self.url, self._options)
            place = version_url(url, number)
            job = {
                "live": (live, part[0]),
                "before": old,
                "summary": part[1],
                "whole": version_url(url, number, WHOLE) if is_whole else None,
                "url": place,
                "options": options,
                "width": _width(plan),
            }
            if elsewhere is None:  # a store of this process
                return write_part(job, memoryview(b""), -1, lambda done: None)
            message = call_message(f"{__name__}:write_part", job)
            return writer.writer().call(message, writer.arena, place)

        written, error = result_or_error(write)
        records = ranks.gather("writing a version to a folder", pack_summary(written), error)

        def commit() -> None:
            if ranks.rank == 0:
                whole = number if is_whole or before is None else before.whole
                deltas = list[DeltaFile]()
                for file in files if before is not None else ():
                    fact = unpack_summary(records[file.rank])
                    deltas.append(DeltaFile(fact.size, fact.header_bytes, fact.digest))
                link = Link(number, whole, before and before.number, deltas, manifest)
                self._commit(link)
                self._last = link, files

        ranks.run_on_all("committing a version in a folder", commit)

    def _commit(self, link: Link) -> None:
        """Makes a version visible, and removes versions that no reader needs (rule 4)."""
        try:
            if link.whole == link.number:
                place = version_url(self.url, link.number, WHOLE)
                with open_store(place, self._options) as whole:
                    whole.commit(MANIFEST, link.manifest.encode(), replace=False)
            with open_store(version_url(self.url, link.number), self._options) as folder:
                folder.commit(LIVE_VERSION, link.dump(), replace=False)
        except ExistsError as error:
            raise ExistsError(
                f"{error}; another job publishes through this folder: give each its own"
            ) from error
        try:
            self._prune()
        except (OSError, FormatError) as error:  # the version is there; the next one tries again
            _log.warning("%s: old versions could not be removed: %s", self.url, error)

    def _prune(self) -> None:
        with open_store(self.url, self._options) as store:
            folders = store.folders()
        wholes = version_numbers(folders, WHOLE)
        if len(wholes) <= KEPT:
            return
        for kind, first in ((VERSION, LIVE_VERSION), (WHOLE, MANIFEST)):
            for number in version_numbers(folders, kind):
                if number < wholes[-KEPT]:
                    with open_store(version_url(self.url, number, kind), self._options) as old:
                        old.delete(first)
                        old.delete_all(old.names())
                        with suppress(OSError):
                            old.remove_if_empty()


def _width(plan: SavePlan) -> int:
    """Returns the bytes of the elements to which most bytes of a file belong."""
    sizes = Counter[int]()
    for item in plan.items:
        sizes[min(item.dtype.itemsize, WIDTHS[-1])] += item.nbytes
    return max(sizes, key=sizes.__getitem__, default=1)


def write_part(
    job: Mapping[str, Any], data: memoryview, arena: int, advance: Callable[[int], None]
) -> ShardSummary:
    """Writes a rank's files of a version, in the writer process.

    `job` has the URL and the file of the `live` version, those of the version `before` or None
    without a delta, the file's `summary`, the URLs of the `whole` version, if it is one, and of the
    version, the `options` of their store, and the `width` of most elements. Returns the size of the
    delta file, 0 without one, the width of its elements in the place of the header's bytes, and the
    digest of its index.
    """
    (url, shard), nbytes, digest = job["live"], 0, "-"
    with open_store(url) as live:
        if job["whole"] is not None:
            size = live.size(shard)
            with open_store(job["whole"], job["options"]) as whole, whole.create(shard) as file:
                for at in range(0, size, STEP_BYTES):
                    advance(at)
                    with _lent(live, shard, at, min(STEP_BYTES, size - at)) as block:
                        file.write([block])
        if job["before"] is not None:
            with open_store(job["url"], job["options"]) as folder:
                nbytes, digest = _write_delta(job, live, folder, advance)
    return ShardSummary(nbytes, job["width"], 0, digest)


def _write_delta(
    job: Mapping[str, Any], live: Store, folder: Store, advance: Callable[[int], None]
) -> tuple[int, str]:
    """Writes the delta file of a shard file; returns its size, and the digest of its index."""
    (_, shard), (url, old_shard), summary = job["live"], job["before"], job["summary"]
    end = summary.size - summary.table_bytes
    head = live.read(shard, 0, summary.header_bytes)
    table = live.read(shard, end, summary.table_bytes)
    entries, nbytes = list[bytes](), len(head) + len(table)
    with open_store(url) as before, folder.create(f"{shard}{DELTA}") as file:
        file.write([memoryview(head), memoryview(table)])
        for at in range(0, end, FRAME_BYTES):
            advance(at)
            count = min(FRAME_BYTES, end - at)
            area = frame_area(count, job["width"])
            with _lent(before, old_shard, at, count) as old, _lent(live, shard, at, count) as new:
                frame = make_delta([area], [area.of(old)], [area.of(new)])
            entries.append(FRAME.pack(len(frame), xxhash.xxh3_64_intdigest(frame)))
            nbytes += len(frame)
            file.write([memoryview(frame)])
        index = b"".join(entries)
        file.write([memoryview(index)])
    return nbytes + len(index), xxhash.xxh3_128_hexdigest(index)


@contextmanager
def _lent(store: Store, name: str, at: int, nbytes: int) -> Iterator[memoryview]:
    """Yields bytes of a file, where they lie if that is memory of this host."""
    lent = in_place(store, name, at, nbytes)
    if lent is None:
        yield memoryview(store.read(name, at, nbytes))
    else:
        with lent as found:
            yield found
