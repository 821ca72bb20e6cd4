"""Verifies torch's own formats, and numpy's, by the CRC-32 that zip stores for each record.

A file of torch.save or numpy is one zip. A DCP folder has one small zip for each of its items.
Bytes outside of the records (padding, DCP's `.metadata`) have no checksum.
`ckpt.transfer.record_sums` compares the records, as for a load. No pickle is executed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from ckpt.checking.report import Findings, Problem
from ckpt.transfer.read import RangeReader
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import Catalog, Extent
from formats.dcp.nest import METADATA
from formats.dcp.reader import Items
from formats.errors import FormatError
from formats.limits import check
from formats.pickles.machine import load
from formats.pickles.records import Metadata
from formats.storage import Reader
from formats.zip_records import Archive, Compressed

Progress = Callable[[int], None]


def check_zip(reader: Reader, catalog: Catalog, progress: Progress | None = None) -> Findings:
    """Checks a file of torch.save, TorchScript or numpy that could be opened."""
    (file,) = catalog.files
    zips = _Check(reader, progress, is_torch=catalog.format != "npz")
    owners: dict[int, str] = {}
    for name, record in catalog.tensors.items():
        try:
            for stored in record.pieces:
                owners.setdefault(stored.extent.offset, name)
        except FormatError as error:
            zips.problems.append(Problem.of(error, file.name, name))
    starts = sorted(owners)

    def owner(extent: Extent) -> str | None:
        """Returns the tensor that begins in a record: in a .npz file behind a header."""
        at = bisect_left(starts, extent.offset)
        inside = at < len(starts) and starts[at] < extent.offset + max(1, extent.nbytes)
        return owners[starts[at]] if inside else None

    zips.archive(file.name, 0, file.size, owner)
    return zips.findings("structure, and the CRC-32 of every record")


def check_counts(catalog: Catalog) -> Findings:
    """Checks a file of torch.save before 1.6: the number of elements before each storage."""
    (file,) = catalog.files
    problems: dict[str, Problem] = {}
    for name, record in catalog.tensors.items():
        try:
            for _ in record.pieces:
                pass
        except FormatError as error:
            problems.setdefault(str(error), Problem.of(error, file.name, name))
    return Findings(
        "structure, sizes, and the number of elements before each storage: this format has no "
        "checksums",
        problems=tuple(problems.values()),
    )


def check_dcp(reader: Reader, catalog: Catalog, progress: Progress | None = None) -> Findings:
    """Checks a DCP folder whose metadata could be read."""
    check = _Check(reader, progress)
    items = _items(reader)
    zips = {extent: name for name, extent in items.zips()}
    for item in sorted(zips, key=lambda item: (item.file, item.offset)):
        check.archive(item.file, item.offset, item.nbytes, partial(_name_of, zips[item]))
    damaged = {problem.tensor for problem in check.problems}
    for name, record in catalog.tensors.items():
        if name in damaged:
            continue
        try:
            for _ in record.pieces:  # opens each item and compares it with the metadata
                pass
        except FormatError as error:
            check.problems.append(Problem.of(error, METADATA, name))
    without = "; tensors in safetensors have none" if items.raw else ""
    return check.findings(
        f"structure, sizes, and the CRC-32 of every item{without}; {METADATA} has no checksum"
    )


def _items(reader: Reader) -> Items:
    """Returns the table of items. The catalog's reader has checked that they tile their files."""
    metadata = load(reader.read(METADATA, 0, reader.size(METADATA)), METADATA)
    return Items(reader, metadata.storage_data if isinstance(metadata, Metadata) else None)


def _name_of(name: str, extent: Extent) -> str:
    """Returns the owner of a record in an item's zip: the item."""
    return name


class _Check:
    """Collects the problems of one checkpoint's zips."""

    def __init__(self, reader: Reader, progress: Progress | None, *, is_torch: bool = True) -> None:
        self._is_torch = is_torch
        self.problems: list[Problem] = []
        self._reader = reader
        self._progress = progress
        self._checked_bytes = 0
        self._unchecked_records = 0
        self._sums = RecordSums("all")
        self._engine = RangeReader(reader, self._sums)

    def archive(
        self, file: str, offset: int, length: int, owner: Callable[[Extent], str | None]
    ) -> None:
        """Checks each record of a zip. `owner` returns the tensor of the record at an extent."""
        whole = Extent(file, offset, length)
        try:
            archive = Archive(self._reader, file, offset, length, is_torch=self._is_torch)
        except FormatError as error:
            self.problems.append(Problem.of(error, file, owner(whole)))
            return
        for name in archive.names:
            self._record(archive, name, owner, whole)

    def findings(self, checked: str) -> Findings:
        """Returns the result, in the form that all formats share."""
        unchecked = self._unchecked_records
        notes = (f"{unchecked} records were written without a checksum",) if unchecked else ()
        return Findings(checked, self._checked_bytes, tuple(self.problems), notes)

    def _inflate(self, place: Compressed) -> None:
        """Decodes a compressed record, which compares its CRC-32."""
        check("chunk_bytes", place.raw_bytes, f"{place.file}: the compressed {place.name}")
        place.decoded(memoryview(place.read(place.offset, place.stored_bytes)))
        self._checked_bytes += place.stored_bytes
        if self._progress is not None:
            self._progress(place.stored_bytes)

    def _record(
        self, archive: Archive, name: str, owner: Callable[[Extent], str | None], whole: Extent
    ) -> None:
        try:
            extent = archive.place(name)
            if isinstance(extent, Compressed):
                self._inflate(extent)
                return
        except FormatError as error:
            self.problems.append(Problem.of(error, whole.file, owner(whole)))
            return
        if extent.crc32 is None and extent.nbytes:  # torch was set to compute no CRC-32
            self._unchecked_records += 1
            return
        tensor, lo, hi = owner(extent), extent.offset, extent.offset + extent.nbytes
        self._sums.open(tensor or name, extent)
        try:
            self._engine.finish(self._progress)
        except FormatError as error:
            self.problems.append(Problem(extent.file, str(error), tensor, lo, hi, kind=error.kind))
        else:
            self._checked_bytes += extent.nbytes
