"""The records of a torch.save zip, found without reading their data.

torch.save writes a zip whose records are stored, never compressed, below one folder: the pickle
`data.pkl` and a `data/<key>` for each storage. A record's true offset stands nowhere: its local
header, whose length differs from the one in the directory at the end, comes before it. So:

1. Opening reads the directory only, by way of the standard library's zipfile.
2. A record's local header is read when the record is asked for, once.
3. A record must be stored as it is and lie inside the zip, and no two share bytes. Nothing follows
   the directory.

A zip may be the whole of a file or a range of one, as each item of a DCP checkpoint is. A small
one is found and opened with two reads.
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

from formats.catalog import Extent
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import check
from formats.storage import Reader

PICKLE = "data.pkl"
"""The record that describes everything else."""

BLOCK_BYTES = 4096
"""What a short read fetches: the directory of a small zip, or its pickle and the headers after."""

_LOCAL_HEADER = Struct("<4s22xHH")
_END_BYTES = 22
"""Of the record that ends a zip without a comment."""


class Window:
    """A byte range of a file as zipfile wants it: a thing to seek in and read.

    Keeps the two blocks fetched last, which for a small zip are its end and its beginning.
    """

    def __init__(self, reader: Reader, file: str, offset: int, length: int) -> None:
        self.reader, self.file, self.offset, self.length = reader, file, offset, length
        self._at = 0
        self._blocks: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to `offset`, counted from the start, the place or the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"{-base - offset} bytes before the beginning are sought")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """The place in the range."""
        return self._at

    def seekable(self) -> bool:
        """True."""
        return True

    def read(self, nbytes: int = -1, /) -> bytes:
        """The next bytes, fewer at the end of the range."""
        rest = max(0, self.length - self._at)
        nbytes = rest if nbytes < 0 else min(nbytes, rest)
        check("zip_directory_bytes", nbytes, self.file)
        data = self.bytes_at(self._at, nbytes)
        self._at += len(data)
        return data

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        """These bytes of the range, which must lie inside it."""
        for start, block in self._blocks:
            if start <= at and at + nbytes <= start + len(block):
                return block[at - start : at - start + nbytes]
        # At the end of the range, the last whole block: zipfile goes backwards there.
        start = max(0, min(at - at % BLOCK_BYTES, self.length - BLOCK_BYTES))
        stop = min(self.length, max(at + nbytes, start + BLOCK_BYTES))
        block = self.reader.read(self.file, self.offset + start, stop - start)
        self._blocks = [*self._blocks[-1:], (start, block)]
        return block[at - start : at - start + nbytes]


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the zip's directory."""

    name: str
    header: int
    """Where its local header begins, in the zip."""
    nbytes: int
    checksum: int
    """crc32; 0 where torch was told to compute none."""
    stored: bool


class Archive:
    """The zip that torch.save wrote into a byte range of a file; the whole file by default.

    Raises:
        CorruptError: the directory at the end is missing or unreadable, as after a truncation.
        UnsupportedError: it was written on a big-endian machine, or is no file of torch.save.
        HostileError: two records have the same name, or the directory an absurd size.
    """

    def __init__(
        self, reader: Reader, file: str, offset: int = 0, length: int | None = None
    ) -> None:
        nbytes = reader.size(file) - offset if length is None else length
        self.file = file
        self.where = file if length is None else f"{file} at byte {offset}"
        self._window = Window(reader, file, offset, nbytes)
        self._records = self._directory()
        self._folder = self._find_folder()
        self._extents: dict[str, Extent] = {}
        if "version" in self:
            self.read("version")  # whichever it is: that it is what was written
        if "byteorder" in self and self.read("byteorder") != b"little":
            raise UnsupportedError(
                f"{self.where}: it was written on a big-endian machine; load it there or with "
                "torch.load and save it again"
            )

    def __contains__(self, name: str) -> bool:
        return self._folder + name in self._records

    @property
    def names(self) -> list[str]:
        """The records, without the folder, in the order of the directory."""
        folder = self._folder
        return [name[len(folder) :] for name in self._records if name.startswith(folder)]

    def record(self, name: str) -> Record:
        """The record of this name, without the folder; raises when the zip lacks it."""
        found = self._records.get(self._folder + name)
        if found is None:
            raise CorruptError(f"{self.where}: the zip lacks the record {self._folder}{name}")
        if not found.stored:
            raise UnsupportedError(
                f"{self.where}: the record {found.name} is compressed, which torch.save never "
                "does; unzip the file and zip it again with -0"
            )
        return found

    def extent(self, name: str) -> Extent:
        """Where the data of a record lie in the file. Reads its local header the first time."""
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

    def read(self, name: str) -> bytes:
        """The data of a record that is no tensor's, checked against its checksum."""
        record = self.record(name)
        check("pickle_bytes", record.nbytes, f"{self.where}: the record {record.name}")
        data = self._window.bytes_at(self._data(record), record.nbytes)
        if record.checksum not in (0, zlib.crc32(data)):
            raise self._wrong(record, zlib.crc32(data))
        return data

    def _data(self, record: Record) -> int:
        """Where the data of a record begin in the zip."""
        window, name = self._window, record.name.encode()
        ends = record.header + _LOCAL_HEADER.size + len(name)
        if record.header < 0 or ends + record.nbytes > window.length:
            raise self._outside(record)
        head = window.bytes_at(record.header, ends - record.header)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(head)
        if magic != b"PK\x03\x04" or name_bytes != len(name) or head[_LOCAL_HEADER.size :] != name:
            raise CorruptError(
                f"{self.where}: no header of the record {record.name} at byte {record.header}, "
                "where the directory says it is; restore the file from another copy"
            )
        if ends + extra_bytes + record.nbytes > window.length:
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
            f"{record.header} reaches beyond the {self._window.length} bytes of the zip"
        )

    def _directory(self) -> dict[str, Record]:
        records: dict[str, Record] = {}
        # Fetched here because zipfile takes an error of the store for a bad zip.
        self._window.bytes_at(max(0, self._window.length - 1), min(1, self._window.length))
        with self._reading_directory(), zipfile.ZipFile(self._window) as archive:
            for info in archive.infolist():
                stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
                if info.filename in records:
                    raise HostileError(f"{self.where}: two records are named {info.filename!r}")
                records[info.filename] = Record(
                    info.filename, info.header_offset, info.file_size, info.CRC, stored
                )
        self._check_end()
        self._check_apart(records)
        return records

    def _check_end(self) -> None:
        """Raise CorruptError where something follows the directory, which zipfile overlooks."""
        length = self._window.length
        end = self._window.bytes_at(length - _END_BYTES, _END_BYTES)
        if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":  # torch writes no comment
            raise CorruptError(
                f"{self.where}: the zip does not end with its directory: something was appended to "
                "it; restore the file from another copy"
            )

    def _check_apart(self, records: Mapping[str, Record]) -> None:
        """Raise HostileError where two records share bytes, as in a bomb that says all n times."""
        end, before = 0, "the beginning"
        stored = [record for record in records.values() if record.stored]
        for record in sorted(stored, key=attrgetter("header")):
            if record.header < end:
                raise HostileError(f"{self.where}: {before} and {record.name} overlap")
            end = record.header + _LOCAL_HEADER.size + len(record.name) + record.nbytes
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
        """The folder that all records lie in, with its slash: the one that has a data.pkl."""
        folders = [
            name.removesuffix(PICKLE)
            for name in self._records
            if name.endswith("/" + PICKLE) and name.count("/") == 1
        ]
        if len(folders) != 1:
            raise UnsupportedError(
                f"{self.where}: a zip with {len(folders)} records {PICKLE}, no file of torch.save"
            )
        if folders[0] + "constants.pkl" in self._records:
            raise UnsupportedError(
                f"{self.where}: a TorchScript program, not a checkpoint; save its state_dict() "
                "with torch.save"
            )
        return folders[0]
