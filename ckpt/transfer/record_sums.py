"""The CRC-32s of records, compared by whoever reads all of a record: in any order, by any thread.

torch.save keeps one checksum for each storage, and DCP one for each chunk of a tensor: of all its
bytes. Such a record is larger than what is read at once, tensors may share one, and several threads
read it. So the checksums of its parts are put together (`formats.crc32`), and compared once they
are those of all of it.

Rules:

1. A part is summed while the processor still has it in its cache. Numbers are kept, never bytes.
2. Bytes that are read twice, as those of views that overlap, count once.
3. A record of which only a part is read cannot be compared. With `verify="all"` its rest is read
   for the sake of the checksum; else `unverified` has the tensors that it was read for.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

from ckpt.plan.read_plan import NOWHERE, BoxCopy, ByteRange, ReadRequest
from formats.catalog import Extent
from formats.crc32 import combine
from formats.errors import CorruptError
from sharding.errors import ArgumentError
from sharding.layout import Box, Piece

Verify = bool | Literal["all"]
"""True compares every checksum of which all bytes are read, "all" reads what is lacking too."""

MOST_GAPS = 64
"""A record that was read with more gaps than these is read once more, and not gap by gap."""

SHOWN_NAMES = 3

_Range = tuple[int, int]
_Place = tuple[str, int, int]


def checked_verify(verify: Verify) -> Verify:
    """What a caller gave as `verify=`. Raises ArgumentError unless it is True, False or "all"."""
    if isinstance(verify, bool) or verify == "all":
        return verify
    raise ArgumentError(f"verify is True, False or 'all', not {verify!r}")


class RecordSums:
    """The records that one call has read of one checkpoint. Safe to use from several threads."""

    def __init__(self, verify: Verify = True) -> None:
        self.verify = checked_verify(verify)
        self._lock = threading.Lock()
        self._open: dict[_Place, _Record] = {}
        self._compared: set[_Place] = set()
        self._expected: dict[_Place, int] | None = None

    def expect(self, requests: Iterable[ReadRequest]) -> None:
        """These are all that will be read, so that no part is summed of what will not be whole."""
        if self.verify is not True:
            return
        self._expected = {}
        for request in requests:
            if request.extent.crc32 is not None:
                place = request.extent[:3]
                nbytes = request.box_copy.numel * request.itemsize
                self._expected[place] = self._expected.get(place, 0) + nbytes

    def open(self, name: str, extent: Extent) -> None:
        """Some of a record is read for the tensor `name`; of what has no CRC-32 nothing is kept."""
        if self.verify and extent.crc32 is not None:
            with self._lock:
                self._opened(name, extent)

    def part(self, request: ReadRequest, lo: int, hi: int) -> Part | None:
        """Bytes `[lo, hi)` of a file, about to be read; None where they are not to be summed."""
        extent = request.extent
        if extent.crc32 is None or not self.verify:
            return None
        with self._lock:
            record = self._opened(request.name, extent)
            if record is None:
                return None
            if hi - lo < extent.nbytes and not self._is_expected(extent):
                return None
            fresh = record.claim(lo - extent.offset, hi - extent.offset)
        return Part(record, fresh) if fresh else None

    def wrong(self, part: Part) -> int | None:
        """The CRC-32 of a record where this part was its last, and it is not what was written."""
        record = part.record
        extent = record.extent
        with self._lock:
            for (lo, hi), value in zip(part.ranges, part.values, strict=True):
                record.add(lo, hi, value)
            if record.summed[0][:2] != (0, extent.nbytes):
                return None
            value = record.summed[0][2]
            del self._open[extent[:3]]
            self._compared.add(extent[:3])
        return None if value == extent.crc32 else value

    def rest(self, most_bytes: int) -> list[ByteRange]:
        """What is still to be read, and placed nowhere, in the order of the files."""
        if self.verify != "all":
            return []
        found: list[ByteRange] = []
        with self._lock:
            records = list(self._open.values())
        for record in records:
            extent = record.extent
            if len(record.missing(0, extent.nbytes)) > MOST_GAPS:
                record.claimed, record.summed = [], []
            request = _bytes_of(extent, next(iter(record.names)))
            for start, stop in record.missing(0, extent.nbytes):
                for lo in range(extent.offset + start, extent.offset + stop, most_bytes):
                    hi = min(lo + most_bytes, extent.offset + stop)
                    found.append(ByteRange(extent.file, lo, hi, request, False, lo, -1, None))
        return sorted(found, key=lambda byte_range: byte_range[:2])

    @property
    def unverified(self) -> tuple[str, ...]:
        """The tensors for which a part of a record was read whose CRC-32 was not compared."""
        with self._lock:
            return tuple(dict.fromkeys(name for one in self._open.values() for name in one.names))

    def _is_expected(self, extent: Extent) -> bool:
        """Whether all of a record may come to be read, by what was said in advance."""
        return self._expected is None or self._expected.get(extent[:3], 0) >= extent.nbytes

    def _opened(self, name: str, extent: Extent) -> _Record | None:
        """What was read of a record so far; None where it was compared."""
        place = extent[:3]
        if place in self._compared:
            return None
        record = self._open.get(place)
        if record is None:
            record = self._open[place] = _Record(extent)
        record.names[name] = None
        return record


class Part:
    """Bytes of a record that one thread reads from first to last."""

    __slots__ = ("ranges", "record", "values")

    def __init__(self, record: _Record, ranges: list[_Range]) -> None:
        self.record = record
        self.ranges = ranges
        """Those that count, by bytes of the record."""
        self.values = [0] * len(ranges)

    @property
    def names(self) -> str:
        """The tensors that the record was read for, as text: the first of many."""
        names = list(self.record.names)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return ", ".join(names[:SHOWN_NAMES]) + more

    def take(self, at: int, data: memoryview) -> None:
        """These bytes lie at byte `at` of the file, behind those that were given before."""
        at -= self.record.extent.offset
        for number, (lo, hi) in enumerate(self.ranges):
            some = data[max(lo - at, 0) : max(hi - at, 0)]
            if some:
                self.values[number] = zlib.crc32(some, self.values[number])


class _Record:
    """What was read of one record, by bytes of the record."""

    __slots__ = ("claimed", "extent", "names", "summed")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.names: dict[str, None] = {}
        """The tensors that it was read for."""
        self.claimed: list[_Range] = []
        """What somebody reads or has read: in order, with gaps between."""
        self.summed: list[tuple[int, int, int]] = []
        """What was read, with its CRC-32: in order, with gaps between."""

    def claim(self, lo: int, hi: int) -> list[_Range]:
        """The parts of `[lo, hi)` that nobody had claimed; they are claimed now."""
        fresh, taken = self.missing(lo, hi), self.claimed
        first = self._first(lo)
        last = first
        while last < len(taken) and taken[last][0] <= hi:
            last += 1
        if first < last:
            lo, hi = min(lo, taken[first][0]), max(hi, taken[last - 1][1])
        taken[first:last] = [(lo, hi)]
        return fresh

    def missing(self, lo: int, hi: int) -> list[_Range]:
        """The parts of `[lo, hi)` that nobody has claimed."""
        found = []
        at = self._first(lo)
        while at < len(self.claimed) and self.claimed[at][0] < hi:
            start, stop = self.claimed[at]
            if lo < start:
                found.append((lo, start))
            lo, at = max(lo, stop), at + 1
        if lo < hi:
            found.append((lo, hi))
        return found

    def _first(self, lo: int) -> int:
        """The first range that ends at `lo` or later."""
        at = bisect_left(self.claimed, (lo, lo))
        return at - 1 if at and self.claimed[at - 1][1] >= lo else at

    def add(self, lo: int, hi: int, value: int) -> None:
        """`[lo, hi)`, of which nothing was read before, has this CRC-32."""
        at, sums = bisect_left(self.summed, (lo, 0, 0)), self.summed
        if at < len(sums) and sums[at][0] == hi:
            _, end, after = sums.pop(at)
            value, hi = combine(value, after, end - hi), end
        if at and sums[at - 1][1] == lo:
            at -= 1
            begin, _, before = sums.pop(at)
            value, lo = combine(before, value, hi - lo), begin
        sums.insert(at, (lo, hi, value))


def changed(url: str, extent: Extent, name: str, found: int) -> CorruptError:
    """The error for a record whose bytes have another CRC-32 than was written with them."""
    return CorruptError(
        f"{url}/{extent.file}: {name}: bytes {extent.offset}:{extent.offset + extent.nbytes} have "
        f"the CRC-32 {found:08x}, {extent.crc32:08x} was written with them: they were changed "
        "since; restore the file from another copy"
    )


def _bytes_of(extent: Extent, name: str) -> ReadRequest:
    """The request for what belongs nowhere."""
    whole = Piece.packed(Box((0,), (extent.nbytes,)))
    return ReadRequest(name, 1, BoxCopy.of(whole, whole), extent, NOWHERE)
