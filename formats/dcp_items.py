"""Reads the items of a DCP checkpoint: small torch.save zips in byte ranges of larger files.

With `SerializationFormat.SAFETENSORS`, the tensors of a file are one safetensors file behind the
zips of the values, and `.metadata` has the first byte of this file as the place of each tensor.

Rules:

1. The table of items is checked at once: each range lies inside a file of the folder, and the
   ranges of a file lie end to end. `.metadata` has no checksum; these checks replace it.
2. The item of a tensor's chunk is opened when its piece is located, and only once. Its zip has the
   true place and strides of the data. Shape, dtype and size must agree with `.metadata`.
3. A file is of safetensors if its items do not tile it and all its tensors have one place. Then the
   header has the places of the tensors, and no item is a zip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from formats.catalog import Extent, PieceTable, StoredPiece, check_inside
from formats.dcp_alike import AlikeItems
from formats.dcp_nest import METADATA
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import applied, current
from formats.pickle_reader import load
from formats.pickle_records import MetadataIndex, StorageInfo, StoredTensor, check_index
from formats.safetensors_header import Entry, Header, read_header
from formats.storage import Reader
from formats.zip_records import PICKLE, ZIP_MAGIC, Archive
from sharding.layout import Box, Piece

READ_AHEAD_BYTES = 1 << 20
"""Bytes of one read while values are read, whose items lie side by side."""
KNOWN_PICKLES = 1 << 10
"""The largest number of pickles that are kept. A model has few shapes."""


class Items:
    """The byte range of each item, by name and offsets, checked against the size of its file."""

    def __init__(self, reader: Reader, storage_data: object) -> None:
        self.sizes: dict[str, int] = {}
        self.raw: dict[Extent, Entry] = {}
        """The tensors of safetensors files, by the range of their data (rule 3)."""
        self._reader = reader
        self._extents: dict[tuple[str, object], Extent] = {}
        if not isinstance(storage_data, dict):
            raise FormatError(f"{METADATA}: storage_data is a {type(storage_data).__name__}")
        for index, info in storage_data.items():
            if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
                raise FormatError(f"{METADATA}: storage_data is not a table of items")
            try:
                name, offset = check_index(index)  # again: a pickle may change a key later
            except FormatError as error:
                raise FormatError(f"{METADATA}: {error}") from None
            self._extents[name, offset] = self._extent(name, info)
        self._check_tiled(self._tails())

    def zips(self) -> Iterator[tuple[str, Extent]]:
        """Yields the name and the range of each item that is a zip; of tied names the first."""
        seen = set(self.raw)
        for (name, _), extent in self._extents.items():
            if extent not in seen:
                seen.add(extent)
                yield name, extent

    def find(self, name: str, offsets: object) -> Extent:
        """Returns the byte range of an item, a whole small zip."""
        found = self._extents.get((name, offsets))
        if found is None:
            place = "" if offsets is None else f" at {offsets}"
            raise CorruptError(f"{METADATA}: no item is listed for {name}{place}")
        return found

    def _tails(self) -> dict[str, int]:
        """Replaces the places of tensors in safetensors files. Returns the end of their zips."""
        starts: dict[str, set[int]] = {}
        for (_, offsets), extent in self._extents.items():
            if offsets is not None:
                starts.setdefault(extent.file, set()).add(extent.offset)
        found = {}
        for file, places in starts.items():
            at = min(places)
            if len(places) == 1 and self._is_safetensors(file, at):
                found[file] = at
        for file, at in found.items():
            header, _ = read_header(Tail(self._reader, file, at), file)
            for key, extent in self._extents.items():
                if extent.file == file and key[1] is not None:
                    self._extents[key] = self._entry(key[0], header, extent)
        return found

    def _is_safetensors(self, file: str, at: int) -> bool:
        """Whether the tensors of a file, which have one place, are a safetensors file there."""
        magic = self._reader.read(file, at, min(4, self.sizes[file] - at))
        return magic != ZIP_MAGIC and at < self.sizes[file]

    def _entry(self, name: str, header: Header, place: Extent) -> Extent:
        """Returns the range of a tensor's data in a safetensors file that begins at `place`."""
        entry = header.entries.get(name)
        if entry is None or entry.end - entry.begin != place.nbytes:
            found = "has no such tensor" if entry is None else f"has {entry.end - entry.begin}"
            raise CorruptError(
                f"{place.file}: {name} has {place.nbytes} bytes by {METADATA}, and its header "
                f"{found}; two chunks of one tensor in one file overwrite each other: save them "
                "without SerializationFormat.SAFETENSORS"
            )
        offset = place.offset + header.data_offset + entry.begin
        extent = Extent(place.file, offset, place.nbytes)
        self.raw[extent] = entry
        return extent

    def _check_tiled(self, tails: Mapping[str, int]) -> None:
        """Raises unless the items of each file lie end to end, as all writers of DCP write them.

        Tied tensors may share an item. An overlap is a HostileError, a gap a CorruptError. The
        header of a safetensors file has been checked for the bytes behind the zips.
        """
        ends = dict.fromkeys(self.sizes, 0)
        zips = set(self._extents.values()) - self.raw.keys()
        for file, lo, nbytes, *_ in sorted(zips, key=itemgetter(0, 1, 2)):
            if lo < ends[file]:
                raise HostileError(f"{METADATA}: two items of {file} overlap at byte {lo}")
            if lo > ends[file]:
                raise _without_item(file, ends[file], lo)
            ends[file] = lo + nbytes
        for file, end in ends.items():
            size = tails.get(file, self.sizes[file])
            if end < size:
                raise _without_item(file, end, size)
            if end > size:
                raise HostileError(f"{METADATA}: a value and the tensors of {file} overlap")

    def _extent(self, name: str, info: StorageInfo) -> Extent:
        file, offset, length = info.relative_path, info.offset, info.length
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise FormatError(f"{METADATA}: the item of {name} has no file, offset and length")
        if info.transform_descriptors:
            raise UnsupportedError(
                f"{METADATA}: the item of {name} went through a stream transform (compression or "
                "encryption); load it with torch and save it without extensions"
            )
        parts = file.replace("\\", "/").split("/")
        if not file.isprintable() or ".." in parts or "" in parts or set(":?#%") & set(file):
            raise HostileError(f"{METADATA}: {name} lies in {file!r}, outside of the checkpoint")
        if file not in self.sizes:
            try:
                self.sizes[file] = self._reader.size(file)
            except FileNotFoundError:
                raise CorruptError(
                    f"{file}: it holds {name} and is missing; restore it from another copy"
                ) from None
        extent = Extent(file, offset, length)
        check_inside(name, extent, self.sizes[file])
        return extent


def _without_item(file: str, lo: int, hi: int) -> CorruptError:
    """Returns the error for bytes that belong to no item."""
    return CorruptError(
        f"{file}: bytes {lo}:{hi} belong to no item that {METADATA} lists: one of the two files "
        "was changed since they were written; restore both from another copy"
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """The tensor of an item, and the extent of its storage."""

    extent: Extent
    tensor: StoredTensor


class KnownPickles:
    """The tensors of items by their pickles: those of equal chunks are equal."""

    def __init__(self) -> None:
        self.items = AlikeItems()
        self._tensors: dict[bytes, StoredTensor] = {}

    def tensor(self, archive: Archive) -> object:
        """Returns the content of an item's pickle."""
        pickled = archive.read(PICKLE)
        found: object = self._tensors.get(pickled)
        if found is None:
            found = load(pickled, archive.where)
            if isinstance(found, StoredTensor) and len(self._tensors) < KNOWN_PICKLES:
                self._tensors[pickled] = found
        return found


class ItemPieces:
    """The chunks of one tensor. `locate` opens their items (rule 2)."""

    def __init__(
        self,
        reader: Reader,
        name: str,
        dtype: DType,
        items: PieceTable,
        raw: Mapping[Extent, Entry],
        known: KnownPickles,
    ) -> None:
        self._reader, self._name, self._dtype, self._items = reader, name, dtype, items
        self._raw, self._known = raw, known
        self._opened: dict[Extent, _Opened] = {}
        self._limits = current()

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the chunks that overlap `box`, with their items opened."""
        return map(self._open, self._items.locate(box))

    def __iter__(self) -> Iterator[StoredPiece]:
        return map(self._open, self._items)

    def _open(self, item: StoredPiece) -> StoredPiece:
        box = item.piece.box
        if entry := self._raw.get(item.extent):
            return self._checked(item, entry)
        if item.extent not in self._opened:
            with applied(self._limits):
                self._opened[item.extent] = self._read(item.extent, box)
        opened = self._opened[item.extent]
        return StoredPiece(Piece(box, opened.tensor.at, opened.tensor.strides), opened.extent)

    def _checked(self, item: StoredPiece, entry: Entry) -> StoredPiece:
        """Returns a chunk in a safetensors file. Raises FormatError for another shape or dtype."""
        box = item.piece.box
        if entry.shape != box.shape or entry.dtype != self._dtype.name:
            raise FormatError(
                f"{item.extent.file}: {self._name} is {entry.dtype} of shape {entry.shape}, where "
                f"{METADATA} has {self._name} {box} of dtype {self._dtype}"
            )
        return item

    def _read(self, item: Extent, box: Box) -> _Opened:
        alike = self._known.items.find(self._reader, item)
        if alike is not None and (alike[1].shape, alike[1].dtype) == (box.shape, self._dtype):
            return _Opened(*alike)
        archive = Archive(self._reader, item.file, item.offset, item.nbytes)
        tensor = self._known.tensor(archive)
        if not isinstance(tensor, StoredTensor):
            raise FormatError(
                f"{archive.where}: no tensor, where {METADATA} has {self._name} {box}"
            )
        if tensor.shape != box.shape or tensor.dtype != self._dtype:
            raise FormatError(
                f"{archive.where}: a tensor of shape {tensor.shape} and dtype {tensor.dtype}, "
                f"where {METADATA} has {self._name} {box} of dtype {self._dtype}"
            )
        extent = archive.extent(f"data/{tensor.storage.key}")
        if extent.nbytes != tensor.storage.nbytes:
            raise CorruptError(
                f"{archive.where}: the storage of {self._name} {box} has {tensor.storage.nbytes} "
                f"bytes by its pickle, {extent.nbytes} by its zip"
            )
        self._known.items.add(item, archive, extent, tensor)
        return _Opened(extent, tensor)


class Tail:
    """A reader of one file from a byte on, as if the file began there."""

    def __init__(self, reader: Reader, file: str, at: int) -> None:
        self._reader, self._file, self._at = reader, file, at

    def size(self, name: str) -> int:
        """Returns the bytes from there to the end."""
        return self._reader.size(self._file) - self._at

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Reads exactly these bytes."""
        return self._reader.read(self._file, self._at + offset, length)


class ReadAhead:
    """A reader that reads a large block around each short read, and keeps the last block."""

    def __init__(self, reader: Reader) -> None:
        self.url = reader.url
        self.read_bytes = reader.read_bytes
        self._reader = reader
        # One attribute: no thread sees the place of one block with the bytes of another.
        self._block: tuple[str, int, bytes] = ("", 0, b"")

    def names(self) -> list[str]:
        """Returns the files of the folder."""
        return self._reader.names()

    def entries(self, folder: str = "") -> list[str]:
        """Returns the files and folders of a folder."""
        return self._reader.entries(folder)

    def size(self, name: str) -> int:
        """Returns the size of a file."""
        return self._reader.size(name)

    def read_whole(self, name: str, limit: int) -> bytes:
        """Reads all bytes of a small file, without the block."""
        return self._reader.read_whole(name, limit)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """Reads the last bytes of a file, without the block."""
        return self._reader.read_end(name, size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Reads exactly these bytes, from the block if it has them."""
        file, start, block = self._block
        if name != file or offset < start or offset + length > start + len(block):
            # The block begins before the range: an item is opened from its end.
            start = max(0, offset - READ_AHEAD_BYTES // 16)
            stop = min(self._reader.size(name), start + READ_AHEAD_BYTES)
            if stop < offset + length:
                return self._reader.read(name, offset, length)
            block = self._reader.read(name, start, stop - start)
            self._block = (name, start, block)
        return block[offset - start : offset - start + length]

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fills buffers from the file, without the block."""
        self._reader.read_into(name, offset, *targets)
