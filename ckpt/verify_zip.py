"""What can be checked in torch's own formats: the CRC-32 that zip keeps of each record.

A file of torch.save is one zip; a DCP folder has one small zip for each of its items. What stands
outside of the records (padding, DCP's `.metadata`) has no checksum. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial

from ckpt.report import Findings, Problem
from formats.catalog import Catalog, Extent
from formats.dcp_nest import METADATA
from formats.errors import FormatError
from formats.pickle_reader import load
from formats.pickle_records import Metadata
from formats.storage import Reader
from formats.zip_records import PICKLE, Archive, Window

BLOCK_BYTES = 8 << 20
"""Bytes of one read."""

Progress = Callable[[int], None]


def check_torch(reader: Reader, catalog: Catalog, progress: Progress | None = None) -> Findings:
    """What is wrong with a file of torch.save whose pickle could be read."""
    (file,) = catalog.files
    check = _Check(reader, progress)
    owners: dict[int, str] = {}
    for name, record in catalog.tensors.items():
        try:
            for stored in record.pieces:
                owners.setdefault(stored.extent.offset, name)
        except FormatError as error:
            check.problems.append(Problem.of(error, file.name, name))
    check.archive(file.name, 0, file.size, lambda extent: owners.get(extent.offset))
    return check.findings("structure, and the CRC-32 of every record")


def check_dcp(reader: Reader, catalog: Catalog, progress: Progress | None = None) -> Findings:
    """What is wrong with a DCP folder whose metadata could be read."""
    check = _Check(reader, progress)
    items = _items(reader)
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        check.archive(item.file, item.offset, item.nbytes, partial(_name_of, items[item]))
    check.ends(items)
    damaged = {problem.tensor for problem in check.problems}
    for name, record in catalog.tensors.items():
        if name in damaged:
            continue
        try:
            for _ in record.pieces:  # opens each item and compares it with the metadata
                pass
        except FormatError as error:
            check.problems.append(Problem.of(error, METADATA, name))
    return check.findings(
        f"structure, sizes, and the CRC-32 of every item; {METADATA} has no checksum"
    )


def _items(reader: Reader) -> dict[Extent, str]:
    """Where each item's zip lies, and its name. The catalog's reader has checked the ranges."""
    metadata = load(reader.read(METADATA, 0, reader.size(METADATA)), METADATA)
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise FormatError(f"{METADATA}: no table of items")
    items: dict[Extent, str] = {}
    for index, info in metadata.storage_data.items():
        file, offset, length = info.relative_path, info.offset, info.length
        items.setdefault(Extent(file, offset, length), str(index.fqn))
    return items


def _name_of(name: str, extent: Extent) -> str:
    """The owner of any record of an item's zip: the item."""
    return name


class _Check:
    """Collects the problems of one checkpoint's zips."""

    def __init__(self, reader: Reader, progress: Progress | None) -> None:
        self.problems: list[Problem] = []
        self._reader = reader
        self._progress = progress
        self._checked_bytes = 0
        self._unchecked_records = 0
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def archive(
        self, file: str, offset: int, length: int, owner: Callable[[Extent], str | None]
    ) -> None:
        """Check every record of a zip; `owner` says whose bytes the record at an extent has."""
        whole = Extent(file, offset, length)
        try:
            archive = Archive(self._reader, file, offset, length)
        except FormatError as error:
            self.problems.append(Problem.of(error, file, owner(whole)))
            return
        with zipfile.ZipFile(Window(self._reader, file, offset, length)) as listing:
            infos = listing.infolist()
        folder = next(
            info.filename for info in infos if info.filename.endswith("/" + PICKLE)
        ).removesuffix(PICKLE)
        for info in infos:
            if info.filename.startswith(folder):
                self._record(archive, info, info.filename.removeprefix(folder), owner, whole)

    def ends(self, items: Iterable[Extent]) -> None:
        """Check that each file ends with its last item."""
        ends: dict[str, int] = {}
        for item in items:
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
        for file, end in ends.items():
            size = self._reader.size(file)
            if size > end:
                message = (
                    f"{self._reader.url}/{file}: its last item ends at byte {end}, the file has "
                    f"{size} bytes: something was appended to it"
                )
                self.problems.append(Problem(file, message, None, end, size))

    def findings(self, checked: str) -> Findings:
        """What was found, in the form that all formats share."""
        unchecked = self._unchecked_records
        notes = (f"{unchecked} records were written without a checksum",) if unchecked else ()
        return Findings(checked, self._checked_bytes, tuple(self.problems), notes)

    def _record(
        self,
        archive: Archive,
        info: zipfile.ZipInfo,
        name: str,
        owner: Callable[[Extent], str | None],
        whole: Extent,
    ) -> None:
        try:
            extent = archive.extent(name)
            checksum = self._crc(extent)
        except FormatError as error:
            self.problems.append(Problem.of(error, whole.file, owner(whole)))
            return
        if checksum == info.CRC:
            self._checked_bytes += extent.nbytes
        elif info.CRC == 0:  # torch was told to compute none
            self._unchecked_records += 1
        else:
            tensor, lo, hi = owner(extent), extent.offset, extent.offset + extent.nbytes
            self.problems.append(
                Problem(
                    extent.file,
                    f"{self._reader.url}/{extent.file}: {tensor or info.filename}: bytes {lo}:{hi} "
                    f"have the CRC-32 {checksum:08x}, {info.CRC:08x} was written with them: they "
                    "were changed since; restore the file from another copy",
                    tensor,
                    lo,
                    hi,
                )
            )

    def _crc(self, extent: Extent) -> int:
        checksum = 0
        for at in range(extent.offset, extent.offset + extent.nbytes, BLOCK_BYTES):
            nbytes = min(BLOCK_BYTES, extent.offset + extent.nbytes - at)
            self._reader.read_into(extent.file, at, self._block[:nbytes])
            checksum = zlib.crc32(self._block[:nbytes], checksum)
            if self._progress is not None:
                self._progress(nbytes)
        return checksum
