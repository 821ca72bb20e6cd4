"""A zip of stored records, streamed: names and sizes first, checksums behind the data.

What zipfile does, without its price: it computes every checksum before it hands the bytes on, and
writes each record in six pieces. Here a large block's checksum is computed by a thread of its own
while the block is being written.

Rules (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5):

1. Records are stored as they are, flag bit 3 set: crc32 and sizes follow the data.
2. The data of a record begin at a multiple of its alignment; the extra field `FB`, which torch pads
   with too, makes up for the rest.
3. A record of `ZIP64_BYTES` or more has 64-bit sizes, and what lies behind 4 GiB a 64-bit place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack

from formats.gathered import LARGE_BYTES, Gathered
from formats.threads import Pool

ZIP64_BYTES = 1 << 30
"""Records this large get 64-bit sizes."""

_MAX_32 = 0xFFFFFFFF
_MAX_16 = 0xFFFF
_FLAGS = 0x08
_DATE = (1 << 5) | 1  # 1980-01-01, the first there is
_VERSION, _VERSION_64 = 20, 45
_UNIX = 3
_MODE = 0o600 << 16


@dataclass(frozen=True, slots=True)
class _Record:
    """What the directory says of one record."""

    name: bytes
    header: int
    nbytes: int
    checksum: int


class ZipWriter:
    """Appends records to a file and, in the end, their directory. Use it in a `with` block.

    A block that ends with an exception leaves the directory out.
    """

    def __init__(self, file: Gathered) -> None:
        self._file = file
        self._start = file.total
        self._records: list[_Record] = []
        self._thread: Pool | None = None

    def __enter__(self) -> ZipWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if kind is None:
            self._finish()

    def add(self, name: str, nbytes: int, blocks: Iterable[memoryview], align: int = 1) -> int:
        """One record of `nbytes` bytes; returns how many the blocks had.

        The zip is worthless when that is another number: the caller has to raise.
        """
        header = self._file.total - self._start
        wide = nbytes >= ZIP64_BYTES
        encoded = name.encode("ascii")
        # zip64: both sizes, unknown as yet
        extra = pack("<HHQQ", 1, 16, 0, 0) if wide else b""
        if align > 1:
            padding = -(header + 30 + len(encoded) + len(extra) + 4) % align
            extra += b"FB" + pack("<H", padding) + bytes(padding)
        size = _MAX_32 if wide else 0
        version = _VERSION_64 if wide else _VERSION
        fields = (version, _FLAGS, 0, 0, _DATE, 0, size, size, len(encoded), len(extra))
        self._file.write([b"PK\x03\x04" + pack("<5H3L2H", *fields) + encoded + extra])
        begin, checksum = self._file.total, 0
        for block in blocks:
            checksum = self._write(block, checksum)
        written = self._file.total - begin
        sizes = pack("<L2Q" if wide else "<3L", checksum, nbytes, nbytes)
        self._file.write([b"PK\x07\x08" + sizes])
        self._records.append(_Record(encoded, header, nbytes, checksum))
        return written

    def _write(self, block: memoryview, checksum: int) -> int:
        """Append a block; returns the checksum with it."""
        if block.nbytes < LARGE_BYTES:
            self._file.write([block])
            return zlib.crc32(block, checksum)
        if self._thread is None:
            self._thread = Pool(1, "ckpt-crc")
        following = self._thread.submit(zlib.crc32, block, checksum)
        try:
            self._file.write([block])
        finally:
            checksum = following.result()  # nobody may have the block when this returns
        return checksum

    def _finish(self) -> None:
        begin = self._file.total - self._start
        self._file.write(map(_entry, self._records))
        end = self._file.total - self._start
        count, size = len(self._records), end - begin
        tail = b""
        if count >= _MAX_16 or end >= _MAX_32:
            versions = (_VERSION_64, _VERSION_64, 0, 0)
            tail += b"PK\x06\x06" + pack("<Q2H2L4Q", 44, *versions, count, count, size, begin)
            tail += b"PK\x06\x07" + pack("<LQL", 0, end, 1)
        counts = (min(count, _MAX_16),) * 2
        places = (min(size, _MAX_32), min(begin, _MAX_32))
        tail += b"PK\x05\x06" + pack("<4H2LH", 0, 0, *counts, *places, 0)
        self._file.write([tail])


def _entry(record: _Record) -> bytes:
    """A record's entry in the directory."""
    wide = []
    nbytes, header = record.nbytes, record.header
    if nbytes >= ZIP64_BYTES:
        wide += [nbytes, nbytes]
        nbytes = _MAX_32
    if header >= _MAX_32:
        wide.append(header)
        header = _MAX_32
    extra = pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = _VERSION_64 if wide else _VERSION
    made_by = _UNIX << 8 | version
    fields = (made_by, version, _FLAGS, 0, 0, _DATE, record.checksum, nbytes, nbytes)
    lengths = (len(record.name), len(extra), 0, 0, 0, _MODE, header)
    return b"PK\x01\x02" + pack("<6H3L5H2L", *fields, *lengths) + record.name + extra
