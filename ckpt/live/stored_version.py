"""A version of a chain (`ckpt.live.chain`), read like a folder with a manifest and shard files.

Rules:

1. A read takes the bytes of the whole version below, and applies the deltas since.
2. A target that has an earlier version gets the deltas since that. A chunk that it has wholly is
   compared with the chunk table. A part of a chunk is compared before: it must have the bytes that
   the last load of this process has left there, which `ckpt.follow` keeps checksums of. Every frame
   of a delta is compared with its checksum.
3. Any other part, and one that is not right, is read as by rule 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import xxhash

from ckpt.live.chain import FRAME, FRAME_BYTES, WHOLE, Link, frame_area, version_url
from ckpt.stores.served_store import ReadOnlyStore
from ckpt.stores.store import LIVE_VERSION, Store, absolute, open_store, split_url
from ckpt.transfer.live_deltas import MOST_BYTES, Area, Delta
from formats.errors import CorruptError, FormatError, GoneError
from formats.limits import current
from formats.native.manifest import MANIFEST, ShardFile, load

if TYPE_CHECKING:
    from ckpt.transfer.live_deltas import Array

SPAN_BYTES = 4 << 20
"""The longest part of a file that is in memory for a box of elements."""


class KeptSums:
    """The checksums of what loads from one chain have left in targets.

    A version may be loaded into several targets, so those of the version before stay.
    """

    def __init__(self) -> None:
        self.sums: dict[int, dict[tuple[int, Area], bytes]] = {}
        """By the version, then by the shard file's rank and the area."""

    def before(self, number: int) -> int | None:
        """Returns the last version before `number` that was loaded; None without one."""
        return max((version for version in self.sums if version < number), default=None)

    def of(self, number: int) -> dict[tuple[int, Area], bytes]:
        """Returns the checksums of a version, to be filled by its loads."""
        if number not in self.sums:
            before = self.before(number)
            self.sums = {version: sums for version, sums in self.sums.items() if version == before}
        return self.sums.setdefault(number, {})


_KEPT: WeakValueDictionary[str, KeptSums] = WeakValueDictionary()


def keep_sums(url: str) -> KeptSums:
    """Returns an object; as long as it lives, loads from this chain keep checksums in it."""
    return _KEPT.setdefault(absolute(url).rstrip("/"), KeptSums())


class _Opened:
    """A version whose files are read: the deltas of its shard files, frame by frame."""

    def __init__(self, store: Store) -> None:
        self.store = store
        where = f"{store.url}/{LIVE_VERSION}"
        self.link = Link.load(store.read_whole(LIVE_VERSION, current().manifest_bytes), where)
        manifest = load(self.link.manifest.encode(), where)
        self.files: dict[int, ShardFile] = {file.rank: file for file in manifest.files}
        self.deltas = {delta.rank: delta for delta in self.link.deltas}
        if self.link.before is not None and self.files.keys() != self.deltas.keys():
            raise FormatError(f"{where}: its deltas are not those of its shard files")
        self._frames: dict[int, list[tuple[int, int]]] = {}

    def data_bytes(self, rank: int) -> int:
        """Returns the bytes of the data of a shard file."""
        file = self.files[rank]
        return file.size - file.header_bytes - file.table_bytes

    def frames_bytes(self, rank: int, first: int, last: int) -> int:
        """Returns the bytes of frames `first` to `last`."""
        index = self._index(rank)
        return index[last][0] - index[first][0]

    def frames(self, rank: int, first: int, last: int) -> list[bytes]:
        """Returns frames `first` to `last`, in one read. Raises CorruptError for damage."""
        index = self._index(rank)
        lo, hi = index[first][0], index[last][0]
        data = self.store.read(self.deltas[rank].name, lo, hi - lo) if lo < hi else b""
        found = []
        for at in range(first, last):
            begin, end = index[at][0], index[at + 1][0]
            found.append(data[begin - lo : end - lo])
            if xxhash.xxh3_64_intdigest(found[-1]) != index[at][1]:
                raise self._damage_error(rank, begin, end)
        return found

    def _index(self, rank: int) -> list[tuple[int, int]]:
        """Returns the first byte and the checksum of each frame, and the end of the last one."""
        found = self._frames.get(rank)
        if found is None:
            delta, shard = self.deltas[rank], self.files[rank]
            nbytes = FRAME.size * -(-self.data_bytes(rank) // FRAME_BYTES)
            end = delta.size - nbytes
            if end < 0:
                raise FormatError(f"{self.store.url}/{delta.name}: it is too short for its frames")
            data = self.store.read_end(delta.name, delta.size, nbytes)
            if xxhash.xxh3_128_hexdigest(data) != delta.digest:
                raise self._damage_error(rank, end, delta.size)
            lengths, sums = zip(*FRAME.iter_unpack(data), strict=True) if data else ((), ())
            begins = [*accumulate(lengths, initial=shard.header_bytes + shard.table_bytes)]
            if begins[-1] != end:
                raise FormatError(f"{self.store.url}/{delta.name}: its frames end elsewhere")
            found = self._frames[rank] = [*zip(begins, (*sums, 0), strict=True)]
        return found

    def _damage_error(self, rank: int, lo: int, hi: int) -> CorruptError:
        return CorruptError(
            f"{self.store.url}/{self.deltas[rank].name}: bytes {lo}:{hi} do not have the "
            "checksum they were written with: they were changed since; load another version"
        )


class StoredVersion(ReadOnlyStore):
    """A version of a chain as a folder. Safe to use from several threads.

    Made of the opened folder of the version. Raises FormatError or CorruptError if it is none.
    """

    delta_range_bytes = SPAN_BYTES
    refusal = "this is a version of a live state, which ckpt.publish writes; it is only read"

    def __init__(self, store: Store) -> None:
        self.url, self.options = store.url, store.options
        self._stack = ExitStack()
        self._newest = _Opened(store)
        link = self._newest.link
        self.version, self._below = link.number, link.whole
        self._opened = {self.version: self._newest}
        self._parent = split_url(store.url)[0]
        self._ranks = {file.name: rank for rank, file in self._newest.files.items()}
        self._kept = _KEPT.get(absolute(self._parent).rstrip("/"))
        self.keeps = self.has_parts = self._kept is not None
        """Whether a job follows the chain, so that checksums are kept."""
        kept = None if self._kept is None else self._kept.before(self.version)
        self.is_next = kept is not None
        """Whether the job has loaded a version before."""
        self._since = link.before if kept is None else kept
        """The version that targets are taken to have."""

    @property
    def read_bytes(self) -> int:
        """The best size of a read: that of the store below."""
        return self._newest.store.read_bytes

    def sizes(self) -> dict[str, int]:
        found = {name: self._newest.files[rank].size for name, rank in self._ranks.items()}
        return {**found, MANIFEST: len(self._newest.link.manifest.encode())}

    def size(self, name: str) -> int:
        found = self.sizes().get(name)
        if found is None:
            raise FileNotFoundError(name)
        return found

    def modified(self, name: str) -> float:
        """Returns the time at which the version came."""
        self.size(name)
        return self._newest.store.modified(LIVE_VERSION)

    def read_whole(self, name: str, limit: int) -> bytes:
        """Reads all bytes of a file; the manifest's as long as the version is there."""
        if name == MANIFEST and not self._newest.store.exists(LIVE_VERSION):
            raise FileNotFoundError(name)
        return super().read_whole(name, limit)

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        views = [target.cast("B") for target in targets if target.nbytes]
        end, size = offset + sum(map(len, views)), self.sizes().get(name)
        if size is None:
            raise GoneError(f"{self.url}/{name}")
        if end > size:
            raise self.truncation_error(name, offset, end, size)
        if name != MANIFEST and self._below == self.version:
            self._whole.read_into(name, offset, *views)
            return
        data = self._newest.link.manifest.encode()[offset:end] if name == MANIFEST else b""
        found = memoryview(data or self._bytes(self._ranks[name], offset, end))
        for view in views:
            view[:], found = found[: len(view)], found[len(view) :]

    def delta(self, name: str, areas: Sequence[Area]) -> _StoredDelta | None:
        """Returns the delta of areas since the version that the target is taken to have.

        Raises CorruptError for a damaged one. None without it: the target has a later version, or
        the versions in between are gone, or have other tensors, or it is long.
        """
        rank = self._ranks.get(name)
        if rank is None or self._since is None:
            return None
        try:
            links = self.links(self._since, rank)
        except (GoneError, FormatError):
            return None
        found = _StoredDelta(self, rank, links, areas) if links else None
        return found if found is not None and found.nbytes <= MOST_BYTES else None

    def keep(self, name: str, areas: Sequence[tuple[Area, Array]]) -> None:
        """Keeps the checksums of areas that have the bytes of this version now, for the next."""
        if self._kept is not None:
            sums = self._kept.of(self.version)
            sums.update(((self._ranks[name], area), sum_of(found)) for area, found in areas)

    def is_known(self, rank: int, area: Area, found: Array) -> bool:
        """Whether an area has the bytes that a load of the earlier version has left there."""
        if self._kept is None or self._since is None:
            return False
        kept = self._kept.sums.get(self._since, {}).get((rank, area))
        return kept is not None and kept == sum_of(found)

    def close(self) -> None:
        """Closes the folders of other versions; that of this one is the opener's."""
        self._stack.close()

    def _open(self, number: int) -> _Opened:
        """Returns a version of the chain. Raises GoneError if it is not there any more."""
        if number not in self._opened:
            place = version_url(self._parent, number)
            store = self._stack.enter_context(open_store(place, self.options))
            try:
                self._opened.setdefault(number, _Opened(store))
            except FileNotFoundError as error:
                raise GoneError(f"{place}/{LIVE_VERSION}") from error
        return self._opened[number]

    @cached_property
    def _whole(self) -> Store:
        place = version_url(self._parent, self._below, WHOLE)
        return self._stack.enter_context(open_store(place, self.options))

    def links(self, since: int, rank: int) -> list[_Opened]:
        """Returns the versions after `since`, newest last. Raises FormatError without deltas."""
        found, at = list[_Opened](), self.version
        while at > since:
            link = self._open(at)
            if link.data_bytes(rank) != self._newest.data_bytes(rank):
                raise FormatError(f"{link.store.url}: its files have other sizes")
            found.insert(0, link)
            at = -1 if link.link.before is None else link.link.before
        if at < since:
            raise FormatError(f"{self.url}: it has no deltas since version {since}")
        return found

    def _bytes(self, rank: int, lo: int, hi: int) -> bytes | bytearray:
        """Returns bytes of a shard file (rule 1)."""
        shard, store = self._newest.files[rank], self._newest.store
        begin, end = shard.header_bytes, shard.size - shard.table_bytes
        for border in (begin, end):
            if lo < border < hi:
                return self._bytes(rank, lo, border) + self._bytes(rank, border, hi)
        if not begin <= lo < end:  # header and chunk table are in front of the frames
            at = lo if lo < begin else lo - end + begin
            return store.read(self._newest.deltas[rank].name, at, hi - lo)
        found, below = bytearray(hi - lo), self._open(self._below).files[rank]
        self._whole.read_into(below.name, below.header_bytes + lo - begin, memoryview(found))
        area = Area(lo, 1, (hi - lo,), (1,), False)
        for link in self.links(self._below, rank):
            _StoredDelta(self, rank, [link], [area]).apply(area, area.of(memoryview(found)))
        return found


def sum_of(array: Array) -> bytes:
    """Returns the checksum of elements, in their order."""
    return xxhash.xxh3_128_digest(array.tobytes())


class _StoredDelta:
    """Deltas of areas of a shard file since an earlier version (rule 2)."""

    def __init__(
        self, store: StoredVersion, rank: int, links: Sequence[_Opened], areas: Sequence[Area]
    ) -> None:
        self._store, self._rank, self._links = store, rank, links
        self._begin = links[-1].files[rank].header_bytes
        self._data_bytes = links[-1].data_bytes(rank)
        first = min(area.offset for area in areas) - self._begin
        end = max(area.offset + area.span for area in areas) - self._begin
        self._first, self._last = first // FRAME_BYTES, -(-end // FRAME_BYTES)
        self.nbytes = sum(link.frames_bytes(rank, self._first, self._last) for link in links)

    @cached_property
    def _frames(self) -> list[list[bytes]]:
        return [link.frames(self._rank, self._first, self._last) for link in self._links]

    def apply(self, area: Area, target: Array) -> bool:
        """Brings the elements of an area to the version.

        False, and nothing has changed, for a part of a chunk that is not as it was left. True for a
        whole chunk, which the caller compares.
        """
        if area.has_sums and not self._store.is_known(self._rank, area, target):
            return False
        self._apply(area, target)
        return True

    def _apply(self, area: Area, target: Array) -> None:
        if area.span > SPAN_BYTES and area.shape[0] > 1:
            middle = area.shape[0] // 2
            for lo, hi in ((0, middle), (middle, area.shape[0])):
                at = area.offset + lo * area.steps[0]
                part = area._replace(offset=at, shape=(hi - lo, *area.shape[1:]))
                self._apply(part, target[lo:hi])
            return
        lo = area.offset - self._begin
        first, last = lo // FRAME_BYTES, -(-(lo + area.span) // FRAME_BYTES)
        begin = first * FRAME_BYTES
        found = memoryview(bytearray(min(last * FRAME_BYTES, self._data_bytes) - begin))
        inside = area.of(found[lo - begin :])
        inside[...] = target
        for link, frames in zip(self._links, self._frames, strict=True):
            delta = link.deltas[self._rank]
            for at in range(first, last):
                memory, frame = found[at * FRAME_BYTES - begin :], frames[at - self._first]
                if frame:
                    whole = frame_area(min(FRAME_BYTES, len(memory)), delta.width)
                    try:
                        Delta(frame, [whole]).apply(whole, whole.of(memory))
                    except FormatError as error:
                        raise CorruptError(f"{link.store.url}/{delta.name}: {error}") from error
        target[...] = inside
