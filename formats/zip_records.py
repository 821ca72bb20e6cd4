"""The records of a torch.save zip, found without reading their data.

torch.save writes a zip of uncompressed records below one folder: the pickle `data.pkl`, and a
`data/<key>` for each storage. The directory does not have the offset of a record's data, which
follows a local header of unknown length. Rules:

1. `Archive` reads only the directory, by the standard library's zipfile.
2. A record's local header is read once, on the first request for the record.
3. A record must be uncompressed and lie inside the zip, and no two records share bytes. Nothing
   follows the directory.

A zip may be a whole file or a range of one, such as an item of a DCP checkpoint. Two reads open a
small one.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from struct import Struct
from struct import error as StructError

from formats.catalog import DecodedChunks, Extent
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import check
from formats.storage import Buffer, Reader, read_again

ZIP_MAGIC = b"PK\x03\x04"
"""The first bytes of a zip."""

DATA_PICKLE = "data.pkl"
"""The record that describes all others."""

BLOCK_BYTES = 4096
"""Bytes of a short read: the directory of a small zip, or its pickle and the next headers."""

_LOCAL_HEADER = Struct("<4s22xHH")
_ENTRY = Struct("<4s2x3H4x3L4H6xL")
"""An entry of the directory: magic, version, flags, method, CRC-32, two sizes, the lengths of name,
extra field and comment, disk, and the place of the header."""
_END = Struct("<4s4H2LH")
_END_64 = Struct("<4sQ4x2L4Q4sLQL")
_PLAIN_FLAGS = 1 << 3 | 1 << 11
"""The flags of a record whose CRC-32 follows its data, and of a name in UTF-8."""
_PLAIN_VERSION = 45
_MAX_32 = 0xFFFFFFFF
PLAIN_RECORDS = 1 << 10
"""A zip with fewer records may be small."""


class Window:
    """A byte range of a file as a seekable file for zipfile.

    Keeps the last two blocks: the end and the beginning of a small zip.
    """

    def __init__(self, reader: Reader, file: str, offset: int, length: int) -> None:
        self.reader, self.file, self.offset, self.length = reader, file, offset, length
        self._at = 0
        self._blocks: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to `offset`, counted from the start, the present place or the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"a seek to {-base - offset} bytes before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, nbytes: int = -1, /) -> bytes:
        """Reads the next bytes; fewer at the end of the range."""
        rest = max(0, self.length - self._at)
        nbytes = rest if nbytes < 0 else min(nbytes, rest)
        check("zip_directory_bytes", nbytes, self.file)
        data = self.bytes_at(self._at, nbytes)
        self._at += len(data)
        return data

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        """Reads bytes that must lie inside the range."""
        for start, block in self._blocks:
            if start <= at and at + nbytes <= start + len(block):
                return block[at - start : at - start + nbytes]
        # At the end of the range this reads the last whole block: zipfile goes backwards there.
        start = max(0, min(at - at % BLOCK_BYTES, self.length - BLOCK_BYTES))
        stop = min(self.length, max(at + nbytes, start + BLOCK_BYTES))
        block = self.reader.read(self.file, self.offset + start, stop - start)
        self._blocks = [*self._blocks[-1:], (start, block)]
        return block[at - start : at - start + nbytes]

    def read_again(self, at: int, first: bytes, checksum: int) -> bytes | None:
        """Returns bytes with a wrong CRC-32 if they are right in the store; None if not."""
        lo, target = self.offset + at, bytearray(len(first))

        def read() -> bytes:
            self.reader.read_into(self.file, lo, memoryview(target))  # no reader keeps these
            return bytes(target)

        self._blocks = []
        place = self.file, lo, lo + len(first)
        return read_again(
            self.reader, place, first, read, lambda found: zlib.crc32(found) == checksum
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the zip's directory."""

    name: str
    header: int
    """The first byte of its local header in the zip."""
    nbytes: int
    checksum: int
    """The CRC-32; 0 if torch was set to compute none."""
    stored: bool
    stored_bytes: int = 0
    """Bytes in the zip, if the record is compressed by deflate; otherwise 0."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """A record that is compressed by deflate."""

    name: str
    file: str
    offset: int
    """The first stored byte in the file."""
    stored_bytes: int
    raw_bytes: int
    checksum: int
    reader: Reader

    def extent(self) -> Extent:
        """Returns the extent, of one chunk, that is decoded as a whole."""
        check("chunk_bytes", self.raw_bytes, f"{self.file}: the compressed {self.name}")

        def fill(at: int, stored: memoryview, target: memoryview) -> None:
            target[:] = self.decode(stored)

        size = self.raw_bytes
        chunks = DecodedChunks(self.offset, self.stored_bytes, size, size, fill)
        return Extent(self.file, self.offset, size, chunks)

    def beginning(self, nbytes: int) -> bytes:
        """Returns the first decoded bytes, at most so many."""
        stored = self.reader.read(self.file, self.offset, min(self.stored_bytes, 2 * nbytes))
        try:
            return self._inflate(stored, nbytes)
        except zlib.error as error:
            raise CorruptError(
                f"{self.file}: the record {self.name}: {error}; restore the file from another copy"
            ) from None

    def decode(self, stored: memoryview) -> bytes:
        """Returns all decoded bytes. Raises CorruptError unless length and CRC-32 are right."""
        data = self._decode_checked(stored)
        if data is None:
            place = self.file, self.offset, self.offset + self.stored_bytes
            again = read_again(self.reader, place, bytes(stored), self._read_stored, self._is_right)
            data = None if again is None else self._decode_checked(again)
        if data is None:
            raise CorruptError(
                f"{self.file}: the record {self.name} does not decode to the bytes that were "
                "written; restore the file from another copy"
            )
        return data

    def _read_stored(self) -> bytes:
        return self.reader.read(self.file, self.offset, self.stored_bytes)

    def _is_right(self, stored: bytes) -> bool:
        return self._decode_checked(stored) is not None

    def _decode_checked(self, stored: Buffer) -> bytes | None:
        """Returns all decoded bytes; None if their length or CRC-32 is wrong."""
        try:
            data = self._inflate(stored, self.raw_bytes)
        except zlib.error:
            return None
        is_right = len(data) == self.raw_bytes and zlib.crc32(data) == self.checksum
        return data if is_right else None

    def _inflate(self, stored: Buffer, nbytes: int) -> bytes:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, max(1, nbytes))


class Archive:
    """A zip of torch.save in a byte range of a file; by default in the whole file.

    With `is_torch=False` it is any zip whose records are read, and names have their folders.

    Raises:
        CorruptError: the directory at the end is missing or unreadable, as after a truncation.
        UnsupportedError: a big-endian machine wrote the zip, or it is not one of torch.save.
        HostileError: two records have one name, or the directory has an absurd size.
    """

    storages = "data/"
    """The folder of the storages."""

    def __init__(
        self,
        reader: Reader,
        file: str,
        offset: int = 0,
        length: int | None = None,
        *,
        is_torch: bool = True,
    ) -> None:
        nbytes = reader.size(file) - offset if length is None else length
        self.file = file
        self.where = file if length is None else f"{file} at byte {offset}"
        self._window = Window(reader, file, offset, nbytes)
        self._records = self._directory()
        self._extents: dict[str, Extent] = {}
        self._folder = ""
        if is_torch:
            self.enter()

    def enter(self) -> None:
        """Reads names below the folder of a zip of torch.save from now on. Raises as the class."""
        self._folder = self._find_folder()
        if "version" in self:
            self.read("version")  # compares its checksum; any version is accepted
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise UnsupportedError(
                f"{self.where}: it was written on a big-endian machine; load it there or with "
                "torch.load and save it again"
            )

    def __contains__(self, name: str) -> bool:
        return self._folder + name in self._records

    @property
    def names(self) -> list[str]:
        """The names of the records, without the folder, in the order of the directory."""
        folder = self._folder
        return [name[len(folder) :] for name in self._records if name.startswith(folder)]

    def record(self, name: str) -> Record:
        """Returns the record of a name without the folder. Raises CorruptError if it is missing."""
        record = self._records.get(self._folder + name)
        if record is None:
            raise CorruptError(
                f"{self.where}: the zip lacks the record {self._folder}{name}; restore the file "
                "from another copy"
            )
        if not record.stored:
            raise UnsupportedError(
                f"{self.where}: the record {record.name} is compressed, so that no range of the "
                "file has its bytes; unzip the file and zip it again with -0"
            )
        return record

    def nbytes_of(self, key: str) -> int:
        """Returns the bytes of the storage with this key. Raises CorruptError if it is missing."""
        return self.record(self.storages + key).nbytes

    def extent_of(self, key: str) -> Extent:
        return self.extent(self.storages + key)

    def extent(self, name: str) -> Extent:
        """Returns the extent of a record's data. Reads its local header the first time."""
        if name not in self._extents:
            record = self.record(name)
            if record.checksum and not record.nbytes:
                raise self._wrong(record, 0)
            self._extents[name] = Extent(
                self.file,
                self._window.offset + self._data(record),
                record.nbytes,
                crc32=record.checksum or None,
            )
        return self._extents[name]

    def place(self, name: str) -> Extent | Compressed:
        """Returns the extent of a record, or its place if it is compressed by deflate."""
        record = self._records.get(self._folder + name)
        if record is None or record.stored or not record.stored_bytes:
            return self.extent(name)
        at = self._window.offset + self._data(record, record.stored_bytes)
        sizes = record.stored_bytes, record.nbytes, record.checksum
        return Compressed(name, self.file, at, *sizes, self._window.reader)

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """Reads bytes of the file that lie inside the zip."""
        return self._window.bytes_at(offset - self._window.offset, nbytes)

    def read(self, name: str) -> bytes:
        """Reads the data of a small record, and compares its checksum."""
        record = self.record(name)
        check("pickle_bytes", record.nbytes, f"{self.where}: the record {record.name}")
        at = self._data(record)
        data = self._window.bytes_at(at, record.nbytes)
        if record.checksum not in (0, zlib.crc32(data)):
            right = self._window.read_again(at, data, record.checksum)
            if right is None:
                raise self._wrong(record, zlib.crc32(data))
            return right
        return data

    def _data(self, record: Record, stored_bytes: int | None = None) -> int:
        """Returns the first byte of a record's data in the zip."""
        window, name = self._window, record.name.encode()
        nbytes = record.nbytes if stored_bytes is None else stored_bytes
        ends = record.header + _LOCAL_HEADER.size + len(name)
        if record.header < 0 or ends + nbytes > window.length:
            raise self._outside(record)
        head = window.bytes_at(record.header, ends - record.header)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(head)
        if magic != b"PK\x03\x04" or name_bytes != len(name) or head[_LOCAL_HEADER.size :] != name:
            raise CorruptError(
                f"{self.where}: the record {record.name} has no header at byte {record.header}, "
                "its place in the directory; restore the file from another copy"
            )
        if ends + extra_bytes + nbytes > window.length:
            raise self._outside(record)
        return ends + int(extra_bytes)

    def _wrong(self, record: Record, checksum: int) -> CorruptError:
        return CorruptError(
            f"{self.where}: the record {record.name} has the checksum {checksum:08x}, the "
            f"directory says {record.checksum:08x}; restore the file from another copy"
        )

    def _outside(self, record: Record) -> CorruptError:
        return CorruptError(
            f"{self.where}: the record {record.name} of {record.nbytes} bytes at byte "
            f"{record.header} reaches beyond the {self._window.length} bytes of the zip; restore "
            "the file from another copy"
        )

    def _directory(self) -> dict[str, Record]:
        records = self._plain_directory()
        if records is not None:
            self._check_apart(records)
            return records
        records = {}
        # This read comes first, because zipfile takes an error of the store for a bad zip.
        self._window.bytes_at(max(0, self._window.length - 1), min(1, self._window.length))
        with self._reading_directory(), zipfile.ZipFile(self._window) as archive:
            for info in archive.infolist():
                stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
                deflated = info.compress_type == zipfile.ZIP_DEFLATED and not info.flag_bits & 1
                if info.filename in records:
                    raise HostileError(f"{self.where}: two records are named {info.filename!r}")
                records[info.filename] = Record(
                    info.filename,
                    info.header_offset,
                    info.file_size,
                    info.CRC,
                    stored,
                    info.compress_size if deflated else 0,
                )
        self._check_end()
        self._check_apart(records)
        return records

    def _plain_directory(self) -> dict[str, Record] | None:
        """Returns the records of a small zip with nothing unusual; None leaves it to zipfile.

        A DCP checkpoint has a zip for each tensor, and zipfile takes six times as long.
        """
        length = self._window.length
        if length < _END.size:
            return None
        end = _END.unpack(self._window.bytes_at(length - _END.size, _END.size))
        magic, disk, _, here, count, size, begin, comment_bytes = end
        is_plain = magic == b"PK\x05\x06" and not disk and here == count < PLAIN_RECORDS
        after = length - _END.size - begin - size
        if not is_plain or comment_bytes or after not in (0, _END_64.size):
            return None
        check("zip_directory_bytes", size, self.file)
        data, at = self._window.bytes_at(begin, size + after), 0
        if after:  # torch adds 64-bit fields to each zip
            found = _END_64.unpack_from(data, size)
            fields = (b"PK\x06\x06", 44, 0, 0, count, count, size, begin, b"PK\x06\x07", 0)
            if found != (*fields, begin + size, 1):
                return None
        records: dict[str, Record] = {}
        for _ in range(count):
            if at + _ENTRY.size > size:
                return None
            entry = _ENTRY.unpack_from(data, at)
            magic, version, flags, method, crc, stored, nbytes, chars, *more, header = entry
            at += _ENTRY.size + chars
            name = data[at - chars : at]
            is_plain = magic == b"PK\x01\x02" and not flags & ~_PLAIN_FLAGS and not method
            if not is_plain or version > _PLAIN_VERSION or any(more) or stored != nbytes:
                return None
            if not name.isascii() or b"\0" in name or _MAX_32 in (nbytes, header):
                return None
            records[name.decode()] = Record(name.decode(), header, nbytes, crc, True)
        return records if at == size and len(records) == count else None

    def _check_end(self) -> None:
        """Raises CorruptError if bytes follow the directory, which zipfile overlooks."""
        length = self._window.length
        end = self._window.bytes_at(length - _END.size, _END.size)
        if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":  # torch writes no comment
            raise CorruptError(
                f"{self.where}: the zip does not end with its directory: bytes were appended to "
                "it; restore the file from another copy"
            )

    def _check_apart(self, records: Mapping[str, Record]) -> None:
        """Raises HostileError if two records share bytes, as in a zip bomb."""
        end, before = 0, "the beginning"
        stored = [record for record in records.values() if record.stored or record.stored_bytes]
        for record in sorted(stored, key=attrgetter("header")):
            if record.header < end:
                raise HostileError(f"{self.where}: {before} and {record.name} overlap")
            nbytes = record.nbytes if record.stored else record.stored_bytes
            end = record.header + _LOCAL_HEADER.size + len(record.name) + nbytes
            before = record.name

    @contextmanager
    def _reading_directory(self) -> Iterator[None]:
        try:
            yield
        except FormatError:
            raise
        except (
            zipfile.BadZipFile,
            ValueError,
            OverflowError,
            StructError,
            NotImplementedError,  # caught, not raised: zipfile's for zip versions it cannot read
        ) as error:
            raise CorruptError(
                f"{self.where}: the zip directory at its end cannot be read ({error}): the file "
                "was truncated or is not of torch.save; restore it from another copy"
            ) from None

    def _find_folder(self) -> str:
        """Returns the folder of all records, with its slash: the one with a data.pkl."""
        folders = [
            name.removesuffix(DATA_PICKLE)
            for name in self._records
            if name.endswith("/" + DATA_PICKLE) and name.count("/") == 1
        ]
        if len(folders) != 1:
            raise UnsupportedError(
                f"{self.where}: a zip with {len(folders)} records {DATA_PICKLE}, not one of "
                "torch.save"
            )
        return folders[0]
