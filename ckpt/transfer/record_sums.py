"""Compares the CRC-32s of records that are read in parts, in any order and by any thread.

torch.save stores one checksum for each storage, and DCP one for each chunk of a tensor. Such a
record is larger than one read, tensors may share a record, and several threads read it.
`RecordSums` therefore combines the checksums of the parts (`formats.zip_plan`), and compares the
result once it covers the whole record.

Rules:

1. A part is summed while the processor has it in its cache. `RecordSums` keeps numbers, no bytes.
2. Bytes that are read twice, such as those of overlapping views, count once.
3. If the way to a record has changed bytes of it, the call that has read all of the record reads it
   again. Where several calls have read it, `run_twice` does all of their work once more.
4. A record that is read in part cannot be compared. With `verify="all"` the rest is read for the
   checksum. Otherwise `unverified` names the tensors for which the record was read.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from ckpt.plan.read_plan import NOWHERE, BoxCopy, ByteRange, ReadRequest
from formats.catalog import Extent
from formats.errors import CorruptError
from formats.storage import LOOKS
from formats.zip_plan import SummedRanges, crc32
from sharding.errors import ArgumentError, format_names
from sharding.layout import Box, Piece

Verify = bool | Literal["all"]
"""True compares each checksum whose bytes are all read; "all" also reads the missing bytes."""

MOST_GAPS = 64
"""A record with more gaps than these is read again as a whole, not gap by gap."""

SHOWN_NAMES = 3
T = TypeVar("T")

_Range = tuple[int, int]
_Place = tuple[str, int, int]


def check_verify(verify: Verify) -> Verify:
    """Returns a caller's `verify=`. Raises ArgumentError unless it is True, False or "all"."""
    if isinstance(verify, bool) or verify == "all":
        return verify
    raise ArgumentError(f"verify is {verify!r}; give True, False or 'all'")


class RecordSums:
    """The records of one checkpoint that one call reads. Safe to use from several threads."""

    def __init__(self, verify: Verify = True) -> None:
        self.verify = check_verify(verify)
        self._lock = threading.Lock()
        self._open: dict[_Place, _Record] = {}
        self._compared: set[_Place] = set()
        self._expected: dict[_Place, int] | None = None

    def expect(self, requests: Iterable[ReadRequest]) -> None:
        """Announces all reads. A record that they do not cover is then not summed."""
        if self.verify is not True:
            return
        self._expected = {}
        for request in requests:
            if request.extent.crc32 is not None:
                place = request.extent[:3]
                nbytes = request.box_copy.numel * request.itemsize
                self._expected[place] = self._expected.get(place, 0) + nbytes

    def open(self, name: str, extent: Extent) -> None:
        """Notes that part of a record is read for the tensor `name`, if the record has a CRC-32."""
        if self.verify and extent.crc32 is not None:
            with self._lock:
                self._begin(name, extent)

    def part(self, request: ReadRequest, lo: int, hi: int, call: object = None) -> Part | None:
        """Returns the part for bytes `[lo, hi)` of a file, before a read; None if not summed.

        The extent has a CRC-32. `call` stands for the call of `RangeReader.read` that reads them.
        """
        extent = request.extent
        if not self.verify:
            return None
        with self._lock:
            record = self._begin(request.name, extent)
            if record is None:
                return None
            record.calls.add(call)
            if hi - lo < extent.nbytes and not self._is_expected(extent):
                return None
            fresh = record.claim(lo - extent.offset, hi - extent.offset)
        return Part(record, fresh) if fresh else None

    def wrong(self, part: Part) -> int | None:
        """Adds a part that was read. Returns the record's CRC-32 if it is complete and wrong."""
        record = part.record
        extent = record.extent
        with self._lock:
            for (lo, hi), value in zip(part.ranges, part.values, strict=True):
                record.summed.add(lo, hi, value)
            computed = record.summed.whole(extent.nbytes)
            if computed is None:
                return None
            del self._open[extent[:3]]
            self._compared.add(extent[:3])
        return None if computed == extent.crc32 else computed

    def rest(self, most_bytes: int) -> list[ByteRange]:
        """Returns the byte ranges that only checksums need, in the order of the files."""
        if self.verify != "all":
            return []
        ranges: list[ByteRange] = []
        with self._lock:
            records = list(self._open.values())
        for record in records:
            extent = record.extent
            if len(record.missing(0, extent.nbytes)) > MOST_GAPS:
                record.claimed, record.summed = [], SummedRanges()
            request = _bytes_of(extent, next(iter(record.names)))
            for start, stop in record.missing(0, extent.nbytes):
                for lo in range(extent.offset + start, extent.offset + stop, most_bytes):
                    hi = min(lo + most_bytes, extent.offset + stop)
                    ranges.append(ByteRange(extent.file, lo, hi, request, False, lo, -1, None))
        return sorted(ranges, key=lambda byte_range: byte_range[:2])

    @property
    def unverified(self) -> tuple[str, ...]:
        """The tensors that were read from records whose CRC-32 was not compared."""
        with self._lock:
            return tuple(
                dict.fromkeys(name for record in self._open.values() for name in record.names)
            )

    @property
    def has_open(self) -> bool:
        """Whether part of a record was read, and not the rest."""
        with self._lock:
            return bool(self._open)

    def restart(self) -> None:
        """Forgets all records, before the same reads begin again."""
        with self._lock:
            self._open.clear()
            self._compared.clear()

    def _is_expected(self, extent: Extent) -> bool:
        """Whether the announced reads may cover the whole record."""
        return self._expected is None or self._expected.get(extent[:3], 0) >= extent.nbytes

    def _begin(self, name: str, extent: Extent) -> _Record | None:
        """Returns the state of a record; None if it was compared."""
        place = extent[:3]
        if place in self._compared:
            return None
        record = self._open.get(place)
        if record is None:
            record = self._open[place] = _Record(extent)
        record.names[name] = None
        return record


class ChangedOnTheWayError(CorruptError):
    """Bytes that several calls have read were changed on the way; they are right in the store."""


def run_twice(work: Callable[[], T], *sums: RecordSums) -> T:
    """Does work that begins with no record open, again if the way to records has changed bytes."""
    for _ in range(LOOKS - 1):
        try:
            return work()
        except ChangedOnTheWayError:
            for record_sum in sums:
                record_sum.restart()
    return work()


class Part:
    """Bytes of a record that one thread reads from first to last."""

    __slots__ = ("ranges", "record", "values")

    def __init__(self, record: _Record, ranges: list[_Range]) -> None:
        self.record = record
        self.ranges = ranges
        """The ranges that count, in bytes of the record."""
        self.values = [0] * len(ranges)

    @property
    def is_of_one_call(self) -> bool:
        """Whether one call has read all bytes of the record that were read so far."""
        return len(self.record.calls) == 1

    @property
    def names(self) -> str:
        """The tensors for which the record was read, as text; only the first ones of many."""
        return format_names(list(self.record.names), SHOWN_NAMES)

    def take(self, at: int, data: memoryview) -> None:
        """Sums the bytes at byte `at` of the file, which follow the bytes of the last call."""
        at -= self.record.extent.offset
        for number, (lo, hi) in enumerate(self.ranges):
            some = data[max(lo - at, 0) : max(hi - at, 0)]
            if some:
                self.values[number] = crc32(some, self.values[number])


class _Record:
    """The ranges of one record that were read, in bytes of the record."""

    __slots__ = ("calls", "claimed", "extent", "names", "summed")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.names: dict[str, None] = {}
        """The tensors for which the record was read."""
        self.calls: set[object] = set()
        """The calls that have read bytes of it."""
        self.claimed: list[_Range] = []
        """Ranges that a thread reads or has read, in order, with gaps between."""
        self.summed = SummedRanges()
        """Ranges that were read."""

    def claim(self, lo: int, hi: int) -> list[_Range]:
        """Claims `[lo, hi)`. Returns the parts that were not claimed before."""
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
        """Returns the parts of `[lo, hi)` that are not claimed."""
        gaps = []
        at = self._first(lo)
        while at < len(self.claimed) and self.claimed[at][0] < hi:
            start, stop = self.claimed[at]
            if lo < start:
                gaps.append((lo, start))
            lo, at = max(lo, stop), at + 1
        if lo < hi:
            gaps.append((lo, hi))
        return gaps

    def _first(self, lo: int) -> int:
        """Returns the index of the first claimed range that ends at `lo` or later."""
        at = bisect_left(self.claimed, (lo, lo))
        return at - 1 if at and self.claimed[at - 1][1] >= lo else at


def changed_error(url: str, extent: Extent, name: str, found: int) -> CorruptError:
    """Returns the error for a record whose CRC-32 differs from the stored one."""
    return CorruptError(
        f"{url}/{extent.file}: {name}: bytes {extent.offset}:{extent.offset + extent.nbytes} have "
        f"the CRC-32 {found:08x}, {extent.crc32:08x} was written with them: they were changed "
        "since; restore the file from another copy"
    )


def _bytes_of(extent: Extent, name: str) -> ReadRequest:
    """Returns a request for bytes that only a checksum needs."""
    whole = Piece.packed(Box((0,), (extent.nbytes,)))
    return ReadRequest(name, 1, BoxCopy.of(whole, whole), extent, NOWHERE)
