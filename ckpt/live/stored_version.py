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
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import xxhash

from ckpt.live.chain import (
    DELTA,
    FRAME,
    FRAME_BYTES,
    WHOLE,
    Link,
    frame_area,
    sizes_of,
    version_url,
)
from ckpt.stores.served_store import ReadOnlyStore
from ckpt.stores.store import LIVE_VERSION, Store, kept_for, open_store, split_url
from ckpt.transfer.live_deltas import MOST_BYTES, Area, Delta
from formats.errors import CorruptError, FormatError, GoneError
from formats.limits import current
from formats.native.manifest import MANIFEST, load

if TYPE_CHECKING:
    from ckpt.transfer.live_deltas import Array

SPAN_BYTES = 4 << 20
"""The longest part of a file that is in memory for a box of elements."""


class _Opened:
    """A version whose files are read: the deltas of its shard files, frame by frame."""

    def __init__(self, store: Store) -> None:
        self.store = store
        where = f"{store.url}/{LIVE_VERSION}"
        self.link = Link.load(store.read_whole(LIVE_VERSION, current().manifest_bytes), where)
        self.files = load(self.link.manifest.encode(), where).files
        if self.link.before is not None and len(self.files) != len(self.link.deltas):
            raise FormatError(f"{where}: its deltas are not those of its shard files")
        self._frames: dict[int, list[tuple[int, int]]] = {}

    def end(self, at: int) -> int:
        """Returns the bytes of a shard file in front of its chunk table."""
        return self.files[at].size - self.files[at].table_bytes

    def name(self, at: int) -> str:
        """Returns the name of the delta file of a shard file."""
        return self.files[at].name + DELTA

    def frames_bytes(self, at: int, first: int, last: int) -> int:
        """Returns the bytes of frames `first` to `last`."""
        index = self._index(at)
        return index[last][0] - index[first][0]

    def frames(self, at: int, first: int, last: int) -> list[bytes]:
        """Returns frames `first` to `last`, in one read. Raises CorruptError for damage."""
        index, found = self._index(at)[first : last + 1], []
        lo = index[0][0]
        data = self.store.read(self.name(at), lo, index[-1][0] - lo)
        for (begin, digest), (end, _) in pairwise(index):
            found.append(data[begin - lo : end - lo])
            if xxhash.xxh3_64_intdigest(found[-1]) != digest:
                raise self._damage_error(at, begin, end)
        return found

    def _index(self, at: int) -> list[tuple[int, int]]:
        """Returns the first byte and the checksum of each frame, and the end of the last one."""
        found = self._frames.get(at)
        if found is None:
            name, delta = self.name(at), self.link.deltas[at]
            nbytes = FRAME.size * -(-self.end(at) // FRAME_BYTES)
            if not 0 < nbytes <= delta.size:
                raise FormatError(f"{self.store.url}/{name}: it is too short for its frames")
            data = self.store.read_end(name, delta.size, nbytes)
            if xxhash.xxh3_128_hexdigest(data) != delta.digest:
                raise self._damage_error(at, delta.size - nbytes, delta.size)
            lengths, sums = zip(*FRAME.iter_unpack(data), strict=True)
            shard = self.files[at]
            begins = [*accumulate(lengths, initial=shard.header_bytes + shard.table_bytes)]
            if begins[-1] != delta.size - nbytes:
                raise FormatError(f"{self.store.url}/{name}: its frames end elsewhere")
            found = self._frames[at] = [*zip(begins, (*sums, 0), strict=True)]
        return found

    def _damage_error(self, at: int, lo: int, hi: int) -> CorruptError:
        return CorruptError(
            f"{self.store.url}/{self.name(at)}: bytes {lo}:{hi} do not have the checksum they were "
            "written with: they were changed since; load another version"
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
        self.version, self._below, self._manifest = link.number, link.whole, link.manifest.encode()
        self._opened = {self.version: self._newest}
        self._parent = split_url(store.url)[0]
        self._places = {file.name: at for at, file in enumerate(self._newest.files)}
        kept = kept_for(store.url)
        self._sums = None if kept is None else kept.sums
        """Of what loads of a job that follows the chain have left in targets."""
        loaded = [number for number in sorted(self._sums or ()) if number < self.version]
        self.is_next = bool(loaded)
        """Whether the job has loaded a version before."""
        self._since = loaded[-1] if loaded else link.before
        """The version that targets are taken to have."""

    @property
    def read_bytes(self) -> int:
        """The best size of a read: that of the store below."""
        return self._newest.store.read_bytes

    def sizes(self) -> dict[str, int]:
        found = {file.name: file.size for file in self._newest.files}
        return {**found, MANIFEST: len(self._manifest)}

    def size(self, name: str) -> int:
        found = self.sizes().get(name)
        if found is None:
            raise FileNotFoundError(name)
        return found

    def modified(self, name: str) -> float:
        """Returns the time at which the version came."""
        self.size(name)
        return self._newest.store.modified(LIVE_VERSION)

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
        data = self._manifest[offset:end] if name == MANIFEST else b""
        found = memoryview(data or self._bytes(self._places[name], offset, end))
        for view in views:
            view[:], found = found[: len(view)], found[len(view) :]

    def delta(self, name: str, areas: Sequence[Area]) -> _StoredDelta | None:
        """Returns the delta of areas since the version that the target is taken to have.

        Raises CorruptError for a damaged one. None without it: the target has a later version, or
        the versions in between are gone, or have other tensors, or it is long.
        """
        at = self._places.get(name)
        if at is None or self._since is None:
            return None
        try:
            links = self._links(self._since)
        except (GoneError, FormatError):
            return None
        found = _StoredDelta(self, at, links, areas) if links else None
        return found if found is not None and found.nbytes <= MOST_BYTES else None

    def keep(self, name: str, areas: Sequence[tuple[Area, Array]]) -> None:
        """Keeps the checksums of areas that have the bytes of this version now, for the next.

        A version may be loaded into several targets, so those of the version before stay.
        """
        if self._sums is not None:
            for number in self._sums.keys() - {self.version, self._since}:
                self._sums.pop(number, None)
            sums = self._sums.setdefault(self.version, {})
            sums.update(((self._places[name], area), sum_of(found)) for area, found in areas)

    def is_known(self, at: int, area: Area, found: Array) -> bool | None:
        """Whether an area has the bytes that a load of the earlier version has left there.

        None if no job follows the chain.
        """
        if self._sums is None:
            return None
        return self._sums.get(self._since or 0, {}).get((at, area)) == sum_of(found)

    def close(self) -> None:
        """Closes the folders of other versions; that of this one is the opener's."""
        self._stack.close()

    def _open(self, number: int) -> _Opened:
        """Returns a version of the chain. Raises GoneError if it is not there any more."""
        if number not in self._opened:
            place = version_url(self._parent, number)
            store = self._stack.enter_context(open_store(place, self.options))
            try:
                found = _Opened(store)
            except FileNotFoundError as error:
                raise GoneError(f"{place}/{LIVE_VERSION}") from error
            if sizes_of(found.files) != sizes_of(self._newest.files):
                raise FormatError(f"{place}: its files have other sizes")
            self._opened.setdefault(number, found)
        return self._opened[number]

    @cached_property
    def _whole(self) -> Store:
        place = version_url(self._parent, self._below, WHOLE)
        return self._stack.enter_context(open_store(place, self.options))

    def _links(self, since: int) -> list[_Opened]:
        """Returns the versions after `since`, newest last. Raises FormatError without deltas."""
        found, number = list[_Opened](), self.version
        while number > since:
            found.insert(0, self._open(number))
            before = found[0].link.before
            number = -1 if before is None else before
        if number < since:
            raise FormatError(f"{self.url}: it has no deltas since version {since}")
        return found

    def _bytes(self, at: int, lo: int, hi: int) -> bytes | bytearray:
        """Returns bytes of a shard file (rule 1)."""
        newest, end = self._newest, self._newest.end(at)
        if lo < end < hi:
            return self._bytes(at, lo, end) + self._bytes(at, end, hi)
        header = newest.files[at].header_bytes
        if hi <= header or lo >= end:  # header and chunk table are in front of the frames
            first = lo if lo < end else lo - end + header
            return newest.store.read(newest.name(at), first, hi - lo)
        found, below = bytearray(hi - lo), self._open(self._below).files[at]
        self._whole.read_into(below.name, lo, memoryview(found))
        area = Area(lo, 1, (hi - lo,), (1,), False)
        for link in self._links(self._below):
            _StoredDelta(self, at, [link], [area]).apply(area, area.of(memoryview(found)))
        return found


def sum_of(array: Array) -> bytes:
    """Returns the checksum of elements, in their order."""
    return xxhash.xxh3_128_digest(array.tobytes())


class _StoredDelta:
    """Deltas of areas of a shard file since an earlier version (rule 2)."""

    def __init__(
        self, store: StoredVersion, at: int, links: Sequence[_Opened], areas: Sequence[Area]
    ) -> None:
        self._store, self._at, self._links = store, at, links
        self._first = min(area.offset for area in areas) // FRAME_BYTES
        self._last = -(-max(area.offset + area.span for area in areas) // FRAME_BYTES)
        self.nbytes = sum(link.frames_bytes(at, self._first, self._last) for link in links)

    @cached_property
    def _frames(self) -> list[list[bytes]]:
        return [link.frames(self._at, self._first, self._last) for link in self._links]

    def apply(self, area: Area, target: Array) -> bool | None:
        """Brings the elements of an area to the version.

        True for a whole chunk, which the caller compares. False, and nothing has changed, for a
        part of a chunk that is not as it was left, and None for one of which nobody knows.
        """
        is_known = self._store.is_known(self._at, area, target) if area.has_sums else True
        if is_known:
            self._apply(area, target)
        return is_known

    def _apply(self, area: Area, target: Array) -> None:
        if area.span > SPAN_BYTES and area.shape[0] > 1:
            middle = area.shape[0] // 2
            for lo, hi in ((0, middle), (middle, area.shape[0])):
                at = area.offset + lo * area.steps[0]
                part = area._replace(offset=at, shape=(hi - lo, *area.shape[1:]))
                self._apply(part, target[lo:hi])
            return
        first, last = area.offset // FRAME_BYTES, -(-(area.offset + area.span) // FRAME_BYTES)
        begin, end = first * FRAME_BYTES, self._links[0].end(self._at)
        found = memoryview(bytearray(min(last * FRAME_BYTES, end) - begin))
        inside = area.of(found[area.offset - begin :])
        inside[...] = target
        for link, frames in zip(self._links, self._frames, strict=True):
            width = link.link.deltas[self._at].width
            for at in range(first, last):
                memory = found[at * FRAME_BYTES - begin :]
                whole = frame_area(min(FRAME_BYTES, len(memory)), width)
                try:
                    Delta(frames[at - self._first], [whole]).apply(whole, whole.of(memory))
                except FormatError as error:
                    place = f"{link.store.url}/{link.name(self._at)}"
                    raise CorruptError(f"{place}: {error}") from error
        target[...] = inside
