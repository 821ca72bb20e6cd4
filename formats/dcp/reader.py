"""Reads the folders of torch.distributed.checkpoint (DCP) without torch and without unpickling.

`.metadata` is a pickle with the shape, dtype and chunks (boxes) of each tensor, and the file and
byte range of each chunk's item. An item is a small torch.save zip with one tensor or one other
value. With `SerializationFormat.SAFETENSORS`, the tensors of a file are one safetensors file behind
the zips of the values, and `.metadata` has the first byte of this file as the place of each tensor.
Rules:

1. `read` reads `.metadata` and the items of values. The item of a tensor's chunk is opened when its
   piece is located, and only once. Its zip has the true place and strides of the data; shape, dtype
   and size must agree with `.metadata`.
2. `.metadata` has no checksum, so redundant parts of it must agree: the chunks tile their tensor,
   each range lies inside a file of the folder, the ranges of a file lie end to end, and each name
   has its key path.
3. A name is DCP's: the key path joined by dots. `planner_data` has the key paths, from which the
   nest is rebuilt (`formats.dcp.nest`). Without it the tree is flat.
4. A file is of safetensors if its items do not tile it and all its tensors have one place. Then the
   header has the places of the tensors, and no item is a zip.
5. The zips of chunks with one shape and dtype differ in the data, in a random identifier, and in
   the checksums of both. The first such zip is parsed. The next ones are compared with it, byte by
   byte, and only the checksum of the data is taken from them. An item with any other difference is
   parsed as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import cast

from formats.catalog import (
    Catalog,
    Extent,
    FileRecord,
    PieceTable,
    StoredPiece,
    TensorRecord,
    Tree,
    check_inside,
    check_tiling,
)
from formats.dcp.nest import METADATA, key_path, unflatten
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import DIMENSIONS, ELEMENTS, Limits, apply_limits, check, current
from formats.pickles.machine import load
from formats.pickles.records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StoredTensor,
    TensorProperties,
    TensorStorageMetadata,
    check_index,
    is_shape,
)
from formats.pickles.tree import Nest, format_path
from formats.safetensors.file import Entry, Header, read_header
from formats.storage import LOCAL_READ_BYTES, Reader
from formats.zip_records import DATA_PICKLE, ZIP_MAGIC, Archive
from sharding.layout import Box, Piece


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a DCP folder (rule 1).

    Raises:
        FileNotFoundError: the folder has no `.metadata`.
        HostileError: a pickle names a class that no checkpoint needs. Nothing was executed.
        UnsupportedError: items went through a transform, or have values that cannot be read.
        CorruptError: a file is missing or too short.
        FormatError: chunks overlap or leave holes, or the metadata is invalid in another way.
    """
    metadata = _metadata(reader)
    items = Items(reader, metadata.storage_data)
    entries = _mapping(metadata.state_dict_metadata, "state_dict_metadata")
    known_paths = _mapping(metadata.planner_data or {}, "planner_data")
    if known_paths and (lost := [name for name in entries if name not in known_paths]):
        raise FormatError(
            f"{METADATA}: planner_data has no key path for {format_path(tuple(lost[:1]))}"
        )
    paths = {name: key_path(name, known_paths) for name in entries}
    sizes = {METADATA: reader.size(METADATA)}
    nest, alike = Nest(METADATA, sizes[METADATA]), AlikeItems()
    leaves: dict[str, Tree] = {}
    values: dict[str, Extent] = {}
    for name, entry in entries.items():
        leaves[name] = None  # keeps the order: values are read in the order of their bytes
        if isinstance(entry, TensorStorageMetadata):
            record, view = _tensor(reader, nest.claim(paths[name]), entry, items, alike)
            leaves[name] = nest.place(view, record)
        elif isinstance(entry, BytesStorageMetadata):
            values[name] = items.find(name, None)
        else:
            raise FormatError(f"{METADATA}: {name} is a {type(entry).__name__}")
    if len(set(values.values())) < len(values):
        raise HostileError(f"{METADATA}: two values lie in the same bytes")
    ahead = cast("Reader", ReadAhead(reader))
    for name, item in sorted(values.items(), key=lambda each: (each[1].file, each[1].offset)):
        archive = Archive(ahead, item.file, item.offset, item.nbytes)
        pickled = archive.read(DATA_PICKLE)
        nest.grow(len(pickled))
        leaves[name] = nest.tree(load(pickled, archive.where), paths[name], archive)
    sizes.update(items.sizes)
    return Catalog(
        format="dcp",
        tensors=nest.tensors,
        tree=unflatten({paths[name]: leaf for name, leaf in leaves.items()}),
        files=tuple(FileRecord(name, size) for name, size in sorted(sizes.items())),
        aliases=nest.aliases,
        metadata={"version": metadata.version} if isinstance(metadata.version, str) else {},
    )


def _metadata(reader: Reader) -> Metadata:
    try:
        size = reader.size(METADATA)
    except FileNotFoundError:
        if "__0" + METADATA in reader.names():
            raise UnsupportedError(
                f"{reader.url}: each rank saved a checkpoint of its own (__0.metadata, ...); save "
                "with a process group or with no_dist=True"
            ) from None
        raise
    check("pickle_bytes", size, METADATA)
    loaded = load(reader.read(METADATA, 0, size), METADATA)
    if not isinstance(loaded, Metadata):
        raise FormatError(
            f"{METADATA}: it holds a {type(loaded).__name__}, not the metadata of DCP"
        )
    return loaded


def _tensor(
    reader: Reader, name: str, entry: TensorStorageMetadata, items: Items, alike: AlikeItems
) -> tuple[TensorRecord, object]:
    """Returns the record of a tensor, and a key that only tensors with equal items share."""
    properties, shape, chunks = entry.properties, _shape(name, entry.size), entry.chunks
    dtype = properties.dtype if isinstance(properties, TensorProperties) else None
    if prod(size or 1 for size in shape) >= ELEMENTS:
        raise HostileError(f"{METADATA}: {name} has more elements than torch can count")
    if not isinstance(dtype, DType) or not isinstance(chunks, list):
        raise FormatError(f"{METADATA}: {name} has no dtype and chunks")
    pieces = []
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise FormatError(f"{METADATA}: a chunk of {name} is a {type(chunk).__name__}")
        lo, sizes = _shape(name, chunk.offsets), _shape(name, chunk.sizes)
        if len(lo) != len(shape) or len(sizes) != len(shape):
            raise FormatError(
                f"{METADATA}: a chunk of {name} does not have {len(shape)} dimensions"
            )
        box = Box(lo, tuple(start + size for start, size in zip(lo, sizes, strict=True)))
        if box:  # ranks beyond the last row have empty chunks
            pieces.append(StoredPiece(Piece.packed(box), items.find(name, lo)))
    check_tiling(f"{METADATA}: {name}", shape, [stored.piece.box for stored in pieces])
    if len({stored.extent for stored in pieces}) < len(pieces):
        raise FormatError(f"{METADATA}: two chunks of {name} lie in the same bytes")
    view = (dtype, shape, tuple(pieces)) if pieces else name
    table = ItemPieces(reader, name, dtype, PieceTable(pieces), items.raw, alike)
    return TensorRecord(name, shape, dtype, table), view


def _shape(name: str, value: object) -> tuple[int, ...]:
    if not is_shape(value):
        raise FormatError(
            f"{METADATA}: a shape of {name} is not a tuple of whole numbers from 0 up, at most "
            f"{DIMENSIONS}"
        )
    return value


def _mapping(value: object, what: str) -> dict[str, object]:
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return value
    raise FormatError(f"{METADATA}: {what} is not a table of names")


READ_AHEAD_BYTES = 1 << 20
"""Bytes of one read while values are read, whose items lie side by side."""


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
        extent = self._extents.get((name, offsets))
        if extent is None:
            place = "" if offsets is None else f" at {offsets}"
            raise CorruptError(
                f"{METADATA}: no item is listed for {name}{place}; restore it from another copy"
            )
        return extent

    def _tails(self) -> dict[str, int]:
        """Replaces the places of tensors in safetensors files. Returns the end of their zips."""
        starts: dict[str, set[int]] = {}
        for (_, offsets), extent in self._extents.items():
            if offsets is not None:
                starts.setdefault(extent.file, set()).add(extent.offset)
        tails = {}
        for file, places in starts.items():
            at = min(places)
            if len(places) == 1 and self._is_safetensors(file, at):
                tails[file] = at
        for file, at in tails.items():
            header = read_header(self._reader, file, at)
            for key, extent in self._extents.items():
                if extent.file == file and key[1] is not None:
                    self._extents[key] = self._entry(key[0], header, extent)
        return tails

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


@dataclass(frozen=True, slots=True, eq=False)
class ItemPieces:
    """The chunks of one tensor. `locate` opens their items (rule 2)."""

    reader: Reader
    name: str
    dtype: DType
    items: PieceTable
    raw: Mapping[Extent, Entry]
    alike: AlikeItems
    opened: dict[Extent, StoredPiece] = field(default_factory=dict)
    limits: Limits = field(default_factory=current)

    def locate(self, box: Box) -> Iterator[StoredPiece]:
        """Yields the chunks that overlap `box`, with their items opened."""
        return map(self._open, self.items.locate(box))

    def __iter__(self) -> Iterator[StoredPiece]:
        return map(self._open, self.items)

    def _open(self, item: StoredPiece) -> StoredPiece:
        if entry := self.raw.get(item.extent):
            return self._check(item, entry)
        if item.extent not in self.opened:
            box = item.piece.box
            with apply_limits(self.limits):
                extent, tensor = self._read(item.extent, box)
            opened = StoredPiece(Piece(box, tensor.at, tensor.strides), extent)
            self.opened[item.extent] = opened
        return self.opened[item.extent]

    def _check(self, item: StoredPiece, entry: Entry) -> StoredPiece:
        """Returns a chunk in a safetensors file. Raises FormatError for another shape or dtype."""
        box = item.piece.box
        if entry.shape != box.shape or entry.dtype != self.dtype.name:
            raise FormatError(
                f"{item.extent.file}: {self.name} is {entry.dtype} of shape {entry.shape}, where "
                f"{METADATA} has {self.name} {box} of dtype {self.dtype}"
            )
        return item

    def _read(self, item: Extent, box: Box) -> tuple[Extent, StoredTensor]:
        alike = self.alike.find(self.reader, item)
        if alike is not None and (alike[1].shape, alike[1].dtype) == (box.shape, self.dtype):
            return alike
        archive = Archive(self.reader, item.file, item.offset, item.nbytes)
        tensor = load(archive.read(DATA_PICKLE), archive.where)
        if not isinstance(tensor, StoredTensor):
            raise FormatError(f"{archive.where}: no tensor, where {METADATA} has {self.name} {box}")
        if tensor.shape != box.shape or tensor.dtype != self.dtype:
            raise FormatError(
                f"{archive.where}: a tensor of shape {tensor.shape} and dtype {tensor.dtype}, "
                f"where {METADATA} has {self.name} {box} of dtype {self.dtype}"
            )
        extent = archive.extent(f"data/{tensor.storage.key}")
        if extent.nbytes != tensor.storage.nbytes:
            raise CorruptError(
                f"{archive.where}: the storage of {self.name} {box} has {tensor.storage.nbytes} "
                f"bytes by its pickle, {extent.nbytes} by its zip; restore it from another copy"
            )
        self.alike.add(item, archive, extent, tensor)
        return extent, tensor


class ReadAhead:
    """Reads a large block around each short read, and keeps the last. All else is the reader's."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        # One attribute: no thread sees the place of one block with the bytes of another.
        self._block: tuple[str, int, bytes] = ("", 0, b"")

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

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


IDENTIFIER = ".data/serialization_id"
MOST_BYTES = 64 << 10
"""The largest number of bytes around the data of an item that are compared."""
KNOWN_ITEMS = 1 << 10
"""The largest number of items that are kept. A model has few shapes."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A parsed item: the bytes before and after its data."""

    head: bytes
    tail: bytes
    """With zeros in the place of the bytes that differ."""
    differing: tuple[slice, ...]
    """The places in the tail of the checksums and the identifier."""
    checksum_at: int
    """The place in the tail of the data's CRC-32."""
    data_bytes: int
    tensor: StoredTensor


class AlikeItems:
    """Parsed items by their sizes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._parsed: dict[int, _Parsed] = {}

    def find(self, reader: Reader, item: Extent) -> tuple[Extent, StoredTensor] | None:
        """Returns the data and the tensor of an item; None if no parsed one is like it."""
        known = self._parsed.get(item.nbytes)
        if known is None or reader.read_bytes > LOCAL_READ_BYTES:  # each read is a request
            return None
        after = item.offset + item.nbytes - len(known.tail)
        tail = reader.read(item.file, after, len(known.tail))
        if (
            blank(tail, known.differing) != known.tail
            or reader.read(item.file, item.offset, len(known.head)) != known.head
        ):
            return None
        checksum = int.from_bytes(tail[known.checksum_at : known.checksum_at + 4], "little")
        at = item.offset + len(known.head)
        return Extent(item.file, at, known.data_bytes, crc32=checksum or None), known.tensor

    def add(self, item: Extent, archive: Archive, data: Extent, tensor: StoredTensor) -> None:
        """Keeps a parsed item for those that are like it."""
        if len(self._parsed) >= KNOWN_ITEMS or item.nbytes - data.nbytes > MOST_BYTES:
            return
        head = archive.bytes_at(item.offset, data.offset - item.offset)
        end = data.offset + data.nbytes
        tail = archive.bytes_at(end, item.offset + item.nbytes - end)
        own = data.crc32.to_bytes(4, "little") if data.crc32 else b""
        if not own or own not in tail:
            return
        differing = _places(tail, own)
        if IDENTIFIER in archive:
            found = archive.extent(IDENTIFIER)
            if not end <= found.offset <= item.offset + item.nbytes - found.nbytes:
                return
            differing.append(slice(found.offset - end, found.offset - end + found.nbytes))
            differing += _places(tail, (found.crc32 or 0).to_bytes(4, "little"))
        places = tuple(differing)
        self._parsed[item.nbytes] = _Parsed(
            head, blank(tail, places), places, tail.rindex(own), data.nbytes, tensor
        )


def blank(data: bytes, places: tuple[slice, ...]) -> bytes:
    r"""Returns data with zeros at some places.

    >>> blank(b"abcdef", (slice(1, 3),))
    b'a\x00\x00def'
    """
    found = bytearray(data)
    for place in places:
        found[place] = bytes(place.stop - place.start)
    return bytes(found)


def _places(data: bytes, wanted: bytes) -> list[slice]:
    """Returns the places of all occurrences of some bytes."""
    places, at = [], data.find(wanted)
    while at >= 0:
        places.append(slice(at, at + len(wanted)))
        at = data.find(wanted, at + len(wanted))
    return places
