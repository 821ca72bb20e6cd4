"""Plans a zip of uncompressed records whose checksums stand behind their data.

Rules (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5):

1. Records are uncompressed, with flag bit 3: CRC-32 and sizes follow the data. All places are thus
   known before the first checksum. Names are UTF-8.
2. The data of a record begins at a multiple of its alignment. The extra field `FB`, which torch
   uses too, is the padding.
3. A record of `ZIP64_BYTES` or more has 64-bit sizes. A record behind 4 GiB has a 64-bit offset.

The CRC-32 of a whole is computed from those of its parts, without its bytes. A CRC-32 is the
remainder of a polynomial over GF(2), divided by the polynomial of RFC 1952, section
8. Each following byte multiplies it by x^8. Numbers are reflected, as in zlib: the highest bit is
   the coefficient of x^0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import pack, unpack_from

from formats.catalog import Late, OutgoingTensor, Part, length_of

ZIP64_BYTES = 1 << 30
"""Records of so many bytes get 64-bit sizes."""

_MAX_32 = 0xFFFFFFFF
_MAX_16 = 0xFFFF
_FLAGS, _UTF8 = 0x08, 0x800
_DATE = (1 << 5) | 1  # 1980-01-01, the first date of the format
_VERSION, _VERSION_64 = 20, 45
_UNIX = 3
_MODE = 0o600 << 16


@dataclass(frozen=True, slots=True)
class Member:
    """One record of a zip."""

    name: str
    data: bytes | OutgoingTensor
    align: int = 1
    head: bytes = b""
    """Bytes of the record before its data."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The fields of a record in the directory."""

    name: bytes
    header: int
    nbytes: int
    checksum: int
    """The CRC-32; for a tensor, its number in the file."""
    is_late: bool
    head: bytes

    @property
    def flags(self) -> int:
        """The flags, which tell readers how the name is encoded."""
        return _FLAGS if self.name.isascii() else _FLAGS | _UTF8

    def sum_of(self, records: bytes) -> int:
        """Returns the CRC-32, by those of the file's tensors."""
        found = self.checksum
        if self.is_late:
            (found,) = unpack_from("<L", records, 4 * self.checksum)
        return combine(crc32(self.head), found, self.nbytes - len(self.head))


def zip_parts(members: Iterable[Member], tensors_before: int = 0) -> list[Part]:
    """Returns the parts of a zip with these records, in a file with so many tensors before it."""
    parts: list[Part] = []
    entries: list[_Entry] = []
    at, number = 0, tensors_before
    for member in members:
        nbytes = len(member.head) + length_of(member.data)
        is_late = not isinstance(member.data, bytes)
        checksum = crc32(member.data) if isinstance(member.data, bytes) else number
        entry = _Entry(member.name.encode(), at, nbytes, checksum, is_late, member.head)
        number += is_late
        header = _header(entry, member.align) + member.head
        added: tuple[Part, ...] = header, member.data, _descriptor(entry)
        at += sum(map(length_of, added))
        entries.append(entry)
        parts += added
    return _join_literals([*parts, _directory(entries, at)])


def _header(entry: _Entry, align: int) -> bytes:
    """Returns the local header of a record, padded so that its data is aligned (rule 2)."""
    wide = entry.nbytes >= ZIP64_BYTES
    # zip64: both sizes, which follow the data
    extra = pack("<HHQQ", 1, 16, 0, 0) if wide else b""
    if align > 1:
        padding = -(entry.header + 30 + len(entry.name) + len(extra) + 4) % align
        extra += b"FB" + pack("<H", padding) + bytes(padding)
    size = _MAX_32 if wide else 0
    version = _VERSION_64 if wide else _VERSION
    fields = (version, entry.flags, 0, 0, _DATE, 0, size, size, len(entry.name), len(extra))
    return b"PK\x03\x04" + pack("<5H3L2H", *fields) + entry.name + extra


def _descriptor(entry: _Entry) -> Part:
    """Returns the checksum and the sizes, which follow a record's data."""
    wide = entry.nbytes >= ZIP64_BYTES

    def make(records: bytes) -> bytes:
        sizes = (entry.sum_of(records), entry.nbytes, entry.nbytes)
        return b"PK\x07\x08" + pack("<L2Q" if wide else "<3L", *sizes)

    return Late(24 if wide else 16, make) if entry.is_late else make(b"")


def _directory(entries: Sequence[_Entry], begin: int) -> Part:
    """Returns the directory, which begins at byte `begin` of the zip, and its end."""

    def make(records: bytes) -> bytes:
        found = b"".join([_directory_entry(entry, entry.sum_of(records)) for entry in entries])
        return found + _end(len(entries), begin, len(found))

    if not any(entry.is_late for entry in entries):
        return make(b"")
    size = sum([len(_directory_entry(entry, 0)) for entry in entries])
    return Late(size + len(_end(len(entries), begin, size)), make)


def _end(count: int, begin: int, size: int) -> bytes:
    """Returns the records behind a directory of `count` entries in `size` bytes."""
    end, tail = begin + size, b""
    if count >= _MAX_16 or end >= _MAX_32:
        versions = (_VERSION_64, _VERSION_64, 0, 0)
        tail += b"PK\x06\x06" + pack("<Q2H2L4Q", 44, *versions, count, count, size, begin)
        tail += b"PK\x06\x07" + pack("<LQL", 0, end, 1)
    counts = (min(count, _MAX_16),) * 2
    places = (min(size, _MAX_32), min(begin, _MAX_32))
    return tail + b"PK\x05\x06" + pack("<4H2LH", 0, 0, *counts, *places, 0)


def _directory_entry(entry: _Entry, checksum: int) -> bytes:
    wide = []
    nbytes, header = entry.nbytes, entry.header
    if nbytes >= ZIP64_BYTES:
        wide += [nbytes, nbytes]
        nbytes = _MAX_32
    if header >= _MAX_32:
        wide.append(header)
        header = _MAX_32
    extra = pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = _VERSION_64 if wide else _VERSION
    made_by = _UNIX << 8 | version
    fields = (made_by, version, entry.flags, 0, 0, _DATE, checksum, nbytes, nbytes)
    lengths = (len(entry.name), len(extra), 0, 0, 0, _MODE, header)
    return b"PK\x01\x02" + pack("<6H3L5H2L", *fields, *lengths) + entry.name + extra


def _join_literals(parts: Iterable[Part]) -> list[Part]:
    """Returns the parts with adjacent literal bytes as one part."""
    joined: list[Part] = []
    literal: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            literal.append(part)
            continue
        if literal:
            joined.append(b"".join(literal))
        literal = []
        joined.append(part)
    return [*joined, b"".join(literal)] if literal else joined


try:
    from zlib_ng.zlib_ng import crc32, crc32_combine  # twelve times as fast as zlib's
except ImportError:  # a platform without a wheel
    from zlib import crc32

    crc32_combine = None  # type: ignore[assignment]

__all__ = ["SummedRanges", "combine", "combine_in_python", "crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def combine_in_python(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two adjacent runs of bytes, by both CRC-32s and the second's length.

    >>> from zlib import crc32
    >>> combine(crc32(b"check"), crc32(b"point"), 5) == crc32(b"checkpoint")
    True
    """
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials modulo the polynomial of RFC 1952."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """Returns x^8 to the power of `nbytes`. The cache helps: most runs have one of few lengths."""
    found, at = _ONE, 0
    while nbytes:
        if nbytes & 1:
            found = _times(_square(at), found)
        nbytes, at = nbytes >> 1, at + 1
    return found


@lru_cache(maxsize=64)
def _square(at: int) -> int:
    """Returns x^8, squared `at` times."""
    return _X8 if at == 0 else _times(_square(at - 1), _square(at - 1))


combine = combine_in_python if crc32_combine is None else crc32_combine


class SummedRanges:
    """The CRC-32s of ranges of a record, in any order; adjacent ranges become one."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        """Ranges with their CRC-32, in order, with gaps between."""

    def add(self, lo: int, hi: int, value: int) -> None:
        """Adds the CRC-32 of `[lo, hi)`. No part of the range was added before."""
        at, sums = bisect_left(self._ranges, (lo, 0, 0)), self._ranges
        if at < len(sums) and sums[at][0] == hi:
            _, end, after = sums.pop(at)
            value, hi = combine(value, after, end - hi), end
        if at and sums[at - 1][1] == lo:
            at -= 1
            begin, _, before = sums.pop(at)
            value, lo = combine(before, value, hi - lo), begin
        sums.insert(at, (lo, hi, value))

    def whole(self, nbytes: int) -> int | None:
        """Returns the CRC-32 of `[0, nbytes)`; None unless all of it was added."""
        if not nbytes:
            return 0
        lo, hi, value = self._ranges[0] if self._ranges else (0, 0, 0)
        return value if (lo, hi) == (0, nbytes) else None
