"""Streams a zip of uncompressed records: names and sizes first, checksums behind the data.

zipfile would compute each checksum before it writes the bytes, and write each record in six pieces.
Here another thread computes the checksum of a large block while the block is written.

Rules (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5):

1. Records are uncompressed, with flag bit 3: CRC-32 and sizes follow the data.
2. The data of a record begins at a multiple of its alignment. The extra field `FB`, which torch
   uses too, is the padding.
3. A record of `ZIP64_BYTES` or more has 64-bit sizes. A record behind 4 GiB has a 64-bit offset.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack

from formats.gathered import LARGE_BYTES, Gathered
from formats.threads import Pool

ZIP64_BYTES = 1 << 30
"""Records of so many bytes get 64-bit sizes."""

_MAX_32 = 0xFFFFFFFF
_MAX_16 = 0xFFFF
_FLAGS = 0x08
_DATE = (1 << 5) | 1  # 1980-01-01, the first date of the format
_VERSION, _VERSION_64 = 20, 45
_UNIX = 3
_MODE = 0o600 << 16


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of one record in the directory."""

    name: bytes
    header: int
    nbytes: int
    checksum: int


class ZipWriter:
    """Appends records to a file, and their directory at the end of the `with` block.

    After an exception it leaves the directory out.
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
        """Appends a record of `nbytes` bytes; returns the number of bytes in the blocks.

        The caller must raise an error if the two differ: the zip is then invalid.
        """
        header = self._file.total - self._start
        wide = nbytes >= ZIP64_BYTES
        encoded = name.encode("ascii")
        # zip64: both sizes, which are unknown here
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
        """Appends a block; returns the checksum including it."""
        if block.nbytes < LARGE_BYTES:
            self._file.write([block])
            return zlib.crc32(block, checksum)
        if self._thread is None:
            self._thread = Pool(1, "ckpt-crc")
        following = self._thread.submit(zlib.crc32, block, checksum)
        try:
            self._file.write([block])
        finally:
            checksum = following.result()  # the caller reuses the block after this
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
    """Returns a record's entry in the directory."""
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
