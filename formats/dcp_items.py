"""The items of a DCP checkpoint: each a small torch.save zip in a byte range of a larger file.

Rules:

1. The table of items is checked when it is read: every range lies inside a file of the folder, and
   those of a file lie end to end. `.metadata` has no checksum: such checks stand for it.
2. The item of a tensor's chunk is opened when the piece is located, once: its zip says where the
   data truly lie and with which strides. Shape, dtype and size must be what `.metadata` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from formats.catalog import Extent, PieceTable, StoredPiece, check_inside
from formats.dcp_nest import METADATA
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import applied, current
from formats.pickle_reader import load
from formats.pickle_records import MetadataIndex, StorageInfo, StoredTensor, check_index
from formats.storage import Reader
from formats.zip_records import PICKLE, Archive
from sharding.layout import Box, Piece

READ_AHEAD_BYTES = 1 << 20
"""What is fetched at a time while the items of values are read, which lie side by side."""


class Items:
    """Where each item lies, by name and offsets; every range checked against its file's size."""

    def __init__(self, reader: Reader, storage_data: object) -> None:
        self.sizes: dict[str, int] = {}
        self._reader = reader
        self._extents: dict[tuple[str, object], Extent] = {}
        if not isinstance(storage_data, dict):
            raise FormatError(f"{METADATA}: storage_data is a {type(storage_data).__name__}")
        for index, info in storage_data.items():
            if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
                raise FormatError(f"{METADATA}: storage_data is no table of items")
            try:
                name, offset = check_index(index)  # once more: a pickle may change what is a key
            except FormatError as error:
                raise FormatError(f"{METADATA}: {error}") from None
            self._extents[name, offset] = self._extent(name, info)
        self._check_tiled()

    def find(self, name: str, offsets: object) -> Extent:
        """The byte range of an item: a whole small zip."""
        found = self._extents.get((name, offsets))
        if found is None:
            place = "" if offsets is None else f" at {offsets}"
            raise CorruptError(f"{METADATA}: no item is listed for {name}{place}")
        return found

    def _check_tiled(self) -> None:
        """Raise unless the items of each file lie end to end in it, as every writer of DCP does.

        Tied tensors may share one. HostileError where two overlap, CorruptError for a gap.
        """
        ends = dict.fromkeys(self.sizes, 0)
        for file, lo, nbytes, *_ in sorted(set(self._extents.values()), key=itemgetter(0, 1, 2)):
            if lo < ends[file]:
                raise HostileError(f"{METADATA}: two items of {file} overlap at byte {lo}")
            if lo > ends[file]:
                raise _without_item(file, ends[file], lo)
            ends[file] = lo + nbytes
        for file, end in ends.items():
            if end < self.sizes[file]:
                raise _without_item(file, end, self.sizes[file])

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
    """The error for bytes that no item has, where items lie end to end."""
    return CorruptError(
        f"{file}: bytes {lo}:{hi} belong to no item that {METADATA} lists: one of the two files "
        "was changed since they were written; restore both from another copy"
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """An item's tensor: where its storage lies and how it lies there."""

    extent: Extent
    tensor: StoredTensor


class ItemPieces:
    """The chunks of one tensor. Their items are opened when they are located (rule 2)."""

    def __init__(self, reader: Reader, name: str, dtype: DType, items: PieceTable) -> None:
        self._reader, self._name, self._dtype, self._items = reader, name, dtype, items
        self._opened: dict[Extent, _Opened] = {}
        self._limits = current()

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """The chunks that hold some of `box`, their items opened."""
        return map(self._open, self._items.locate(box))

    def __iter__(self) -> Iterator[StoredPiece]:
        return map(self._open, self._items)

    def _open(self, item: StoredPiece) -> StoredPiece:
        box = item.piece.box
        if item.extent not in self._opened:
            with applied(self._limits):
                self._opened[item.extent] = self._read(item.extent, box)
        opened = self._opened[item.extent]
        return StoredPiece(Piece(box, opened.tensor.at, opened.tensor.strides), opened.extent)

    def _read(self, item: Extent, box: Box) -> _Opened:
        archive = Archive(self._reader, item.file, item.offset, item.nbytes)
        tensor = load(archive.read(PICKLE), archive.where)
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
        return _Opened(extent, tensor)


class ReadAhead:
    """A reader that fetches a large block around each short read and keeps the last one."""

    def __init__(self, reader: Reader) -> None:
        self.url = reader.url
        self.read_bytes = reader.read_bytes
        self._reader = reader
        # One attribute, so that no thread sees the place of one block and the bytes of another.
        self._block: tuple[str, int, bytes] = ("", 0, b"")

    def names(self) -> list[str]:
        """The files of the folder."""
        return self._reader.names()

    def size(self, name: str) -> int:
        """Bytes in a file."""
        return self._reader.size(name)

    def read_whole(self, name: str, limit: int) -> bytes:
        """All bytes of a small file, past the block."""
        return self._reader.read_whole(name, limit)

    def read_end(self, name: str, size: int, length: int) -> bytes:
        """The last bytes of a file, past the block."""
        return self._reader.read_end(name, size, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes, from the block where it has them."""
        file, start, block = self._block
        if name != file or offset < start or offset + length > start + len(block):
            # From before the range: an item is opened at its end first.
            start = max(0, offset - READ_AHEAD_BYTES // 16)
            stop = min(self._reader.size(name), start + READ_AHEAD_BYTES)
            if stop < offset + length:
                return self._reader.read(name, offset, length)
            block = self._reader.read(name, start, stop - start)
            self._block = (name, start, block)
        return block[offset - start : offset - start + length]

    def read_into(self, name: str, offset: int, *targets: memoryview) -> None:
        """Fill buffers from the file, past the block."""
        self._reader.read_into(name, offset, *targets)
